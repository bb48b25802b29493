"""A run's roles and its item log, in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from msgspec import Struct

from shoal.frontier.rules import check_cursor, is_fenced
from shoal.ports import Claim, Holder, LoggedItem, RoleState


class _Role(Struct):
    token: int = 0
    until: float = 0.0
    cursor: bytes = b""
    finished: bool = False
    holder: Holder | None = None


class Roles:
    """Who may do what for the run, until when, and how far it is."""

    def __init__(self) -> None:
        self._roles: dict[str, _Role] = {}

    def claim(self, role: str, now: float, ttl: float, holder: Holder | None, token: int) -> Claim | None:
        held = self._roles.setdefault(role, _Role())
        if held.finished or (held.until > now and held.token != token):
            return None
        held.token, held.until, held.holder = token, now + ttl, holder
        return Claim(role, held.token, held.cursor)

    def holds(self, claim: Claim) -> bool:
        held = self._roles.get(claim.role)
        return held is not None and held.token == claim.token

    def check(self, claim: Claim, cursor: bytes) -> None:
        """StoreRewoundError unless this claim may move its cursor to this one."""
        check_cursor(claim, self._roles[claim.role].cursor, cursor)

    def save(self, role: str, cursor: bytes) -> None:
        self._roles[role].cursor = cursor

    def advance(self, claim: Claim, cursor: bytes, until: float) -> bool:
        if not self.holds(claim):
            return False
        held = self._roles[claim.role]
        check_cursor(claim, held.cursor, cursor)
        held.cursor, held.until = cursor, until
        return True

    def relinquish(self, claim: Claim, *, finished: bool) -> bool:
        if not self.holds(claim):
            return False
        held = self._roles[claim.role]
        if finished:
            check_cursor(claim, held.cursor, claim.cursor)
        held.token, held.until, held.holder, held.finished = 0, 0.0, None, finished
        return True

    def fence(self, slot: str, epoch: int) -> None:
        """Free what the slot holds under earlier epochs."""
        for held in self._roles.values():
            if is_fenced(held.holder, slot, epoch):
                held.token, held.until, held.holder = 0, 0.0, None

    def states(self, now: float) -> list[RoleState]:
        return [
            RoleState(role=role, cursor=held.cursor, held=held.until > now, finished=held.finished)
            for role, held in self._roles.items()
        ]

    def is_finished(self, role: str) -> bool:
        held = self._roles.get(role)
        return held is not None and held.finished


class ItemLog:
    """Items in the order in which their pages were done."""

    def __init__(self) -> None:
        self.count = 0
        self._items: deque[LoggedItem] = deque()

    def append(self, fingerprint: bytes, payloads: Sequence[bytes], before: int) -> int:
        """Behind the ``before`` items that this request has already; how many it has now."""
        for index, payload in enumerate(payloads, before):
            self.count += 1
            self._items.append(LoggedItem(self.count, fingerprint, index, payload))
        return before + len(payloads)

    def read(self, after: int, limit: int) -> list[LoggedItem]:
        if not self._items:
            return []
        skip = max(0, after + 1 - self._items[0].seq)
        return list(islice(self._items, skip, skip + limit))

    def trim(self, through: int) -> None:
        while self._items and self._items[0].seq <= through:
            self._items.popleft()
