"""The roles of a run in memory, and the fences of cluster slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from shoal.frontier.rules import (
    check_cursor,
    check_fence,
    claim_epoch,
    claim_token,
    is_claimable,
    is_fenced,
    new_nonce,
)
from shoal.ports import Claim, Holder, LoggedItem, RoleState


class _Role(Struct):
    token: int = 0
    until: float = 0.0
    cursor: bytes = b""
    finished: bool = False
    holder: Holder | None = None
    """Who claimed it last. It stays when the role is free."""
    epoch: int = 0
    """The epoch of the last claim."""

    def free(self) -> None:
        self.token, self.until = 0, 0.0


class MemoryRoles:
    """The roles of a run: the holder, expiry and cursor of each. See `shoal.ports.Roles`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._roles: dict[str, _Role] = {}
        self._epochs: dict[str, int] = {}
        """The earliest epoch of each slot that may still get leases and roles."""

    async def claim(
        self, role: str, ttl: float, holder: Holder | None = None, *, nonce: bytes = b"", above: int = 0
    ) -> Claim | None:
        self.check_holder(holder)
        token, now = claim_token(nonce or new_nonce()), self._clock()
        known = self._roles.setdefault(role, _Role())
        if not is_claimable(finished=known.finished, until=known.until, now=now, held_token=known.token, token=token):
            return None
        if token != known.token:
            known.epoch = claim_epoch(now=now, last=known.epoch, above=above)
        known.token, known.until, known.holder = token, now + ttl, holder
        return Claim(role, token, known.cursor, known.epoch)

    async def forget(self, role: str) -> bool:
        known = self._roles.get(role)
        if known is None or known.until > self._clock():
            return False
        del self._roles[role]
        return True

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        if not self.is_held(claim):
            return False
        role = self._roles[claim.role]
        check_cursor(claim, role.cursor, cursor)
        role.cursor, role.until = cursor, self._clock() + ttl
        return True

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        if not self.is_held(claim):
            return False
        role = self._roles[claim.role]
        if finished:
            check_cursor(claim, role.cursor, claim.cursor)
        role.free()
        role.finished = finished
        return True

    async def roles(self) -> list[RoleState]:
        now = self._clock()
        return [
            RoleState(
                role=name,
                cursor=role.cursor,
                held=role.until > now,
                finished=role.finished,
                holder=role.holder.slot if role.holder else "",
            )
            for name, role in self._roles.items()
        ]

    def is_held(self, claim: Claim) -> bool:
        """Whether the claim still holds its role."""
        role = self._roles.get(claim.role)
        return role is not None and role.token == claim.token

    def check_cursor(self, claim: Claim, cursor: bytes) -> None:
        """StoreRewoundError unless this claim, which is held, may move its cursor to ``cursor``."""
        check_cursor(claim, self._roles[claim.role].cursor, cursor)

    def have_cursors(self, cursors: Mapping[str, bytes]) -> bool:
        """Whether these roles have these cursors."""
        return all(name in self._roles and self._roles[name].cursor == cursor for name, cursor in cursors.items())

    def save_cursor(self, role: str, cursor: bytes) -> None:
        self._roles[role].cursor = cursor

    def is_finished(self, role: str) -> bool:
        known = self._roles.get(role)
        return known is not None and known.finished

    def check_holder(self, holder: Holder | None) -> None:
        """FencedError for a holder whose slot was fenced under a later epoch."""
        if holder is not None:
            check_fence(holder.slot, holder.epoch, self._epochs.get(holder.slot))

    def fence(self, slot: str, epoch: int) -> None:
        """Fence a slot under this epoch, and free the roles that it holds under earlier ones. FencedError if it is
        fenced under a later epoch."""
        self.check_holder(Holder(slot, epoch))
        self._epochs[slot] = epoch
        for role in self._roles.values():
            if is_fenced(role.holder, slot, epoch):
                role.free()
