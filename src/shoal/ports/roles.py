"""Roles of a run: work that one process at a time does, such as seeding or writing an output."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from shoal.errors import StoreError
from shoal.ports.items import LoggedItem

_MAX_DIGITS = 18


class Claim(Struct, frozen=True):
    """The right to one role of a run (``seed``, or the drainer of one sink), with the stored cursor.

    Moving the cursor is a compare-and-set on ``cursor``. After a successful move, continue with ``moved_to``.
    """

    role: str
    token: int
    cursor: bytes
    epoch: int = 0
    """Larger than the epochs of all earlier claims of this role. Outputs refuse writers with an older one."""

    def moved_to(self, cursor: bytes) -> Claim:
        """The same claim after its cursor was moved."""
        return Claim(self.role, self.token, cursor, self.epoch)

    @property
    def position(self) -> int:
        """The cursor as a number; 0 if there is none. StoreError if another program wrote it."""
        if not self.cursor:
            return 0
        if not self.cursor.isdigit() or len(self.cursor) > _MAX_DIGITS:
            shown = self.cursor[:_MAX_DIGITS]
            raise StoreError(f"the cursor of role {self.role} is {shown!r}, no number: another program has changed it")
        return int(self.cursor)


class RoleState(Struct, frozen=True, kw_only=True):
    """A role of a run. ``held``: a process holds it, and its time has not run out."""

    role: str
    cursor: bytes
    held: bool
    finished: bool
    holder: str = ""
    """The worker or slot that claimed it last. Empty if it has no name."""


class Roles(Protocol):
    """Roles of a run, each with a cursor that says how far its work is."""

    async def claim(self, role: str, ttl: float, *, nonce: bytes = b"", above: int = 0) -> Claim | None:
        """Take a role. None while another process holds it, or if it is finished. A repeat with the same ``nonce`` (8
        to 32 random bytes) returns the claim that the first call took, if that is still valid.

        The epoch of the claim is the store's time in microseconds, or the last epoch of the role plus one, or ``above``
        plus one, whichever is largest."""
        ...

    async def forget(self, role: str) -> bool:
        """Remove a role with its cursor. False if a process holds it, or there is no such role."""
        ...

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        """Move the cursor and keep the role. False if the role was lost.

        This is a compare-and-set: the stored cursor must be ``claim.cursor``, or already ``cursor`` (a repeat). Another
        cursor under a valid token means that the store was rewound: StoreRewoundError, and nothing was changed. The
        same holds if the item log no longer has ``last``, the last item that the cursor covers: see ``read_items``."""
        ...

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        """Release a role, for good if ``finished``. False if it was lost. A run whose ``seed`` role is not finished is
        not finished. ``finished`` requires the stored cursor to be ``claim.cursor``; otherwise StoreRewoundError."""
        ...

    async def roles(self) -> list[RoleState]:
        """All roles that were ever claimed in this run."""
        ...
