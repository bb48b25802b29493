"""The roles and the item log of a run in memory. With a limit, items that exceed it are on disk."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf
from tempfile import TemporaryFile

from msgspec import Struct

from shoal.frontier import rules
from shoal.ports import Claim, Holder, LoggedItem, RoleState

# The roles of a run in memory, and the fences of cluster slots.


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
        token, now = rules.claim_token(nonce or rules.new_nonce()), self._clock()
        stored = self._roles.setdefault(role, _Role())
        if not rules.is_claimable(
            finished=stored.finished, until=stored.until, now=now, held_token=stored.token, token=token
        ):
            return None
        if token != stored.token:
            stored.epoch = rules.claim_epoch(now=now, last=stored.epoch, above=above)
        stored.token, stored.until, stored.holder = token, now + ttl, holder
        return Claim(role, token, stored.cursor, stored.epoch)

    async def forget(self, role: str) -> bool:
        stored = self._roles.get(role)
        if stored is None or stored.until > self._clock():
            return False
        del self._roles[role]
        return True

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        if not self.is_held(claim):
            return False
        role = self._roles[claim.role]
        rules.check_cursor(claim, role.cursor, cursor)
        role.cursor, role.until = cursor, self._clock() + ttl
        return True

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        if not self.is_held(claim):
            return False
        role = self._roles[claim.role]
        if finished:
            rules.check_cursor(claim, role.cursor, claim.cursor)
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
        rules.check_cursor(claim, self._roles[claim.role].cursor, cursor)

    def have_cursors(self, cursors: Mapping[str, bytes]) -> bool:
        """Whether these roles have these cursors."""
        return all(name in self._roles and self._roles[name].cursor == cursor for name, cursor in cursors.items())

    def save_cursor(self, role: str, cursor: bytes) -> None:
        self._roles[role].cursor = cursor

    def is_finished(self, role: str) -> bool:
        stored = self._roles.get(role)
        return stored is not None and stored.finished

    def check_holder(self, holder: Holder | None) -> None:
        """FencedError for a holder whose slot was fenced under a later epoch."""
        if holder is not None:
            rules.check_fence(holder.slot, holder.epoch, self._epochs.get(holder.slot))

    def fence(self, slot: str, epoch: int) -> None:
        """Fence a slot under this epoch, and free the roles that it holds under earlier ones. FencedError if it is
        fenced under a later epoch."""
        self.check_holder(Holder(slot, epoch))
        self._epochs[slot] = epoch
        for role in self._roles.values():
            if rules.is_fenced(role.holder, slot, epoch):
                role.free()


log = logging.getLogger("shoal.frontier")

_FILE_BYTES = 64 << 20


class _File:
    """A temporary file without a name, for this user only. It ends with the last item in it."""

    def __init__(self) -> None:
        self.file = TemporaryFile(buffering=0)  # noqa: SIM115
        self.size = 0
        self.items = 0


class _ItemOnDisk(Struct, frozen=True):
    """An item whose payload is in a file."""

    seq: int
    fingerprint: bytes
    index: int
    file: _File
    start: int
    size: int

    def read(self) -> LoggedItem:
        payload = os.pread(self.file.file.fileno(), self.size, self.start)
        return LoggedItem(self.seq, self.fingerprint, self.index, payload)


class ItemSpace:
    """Bytes of items that all logs of a store hold in memory. What exceeds ``limit`` is written to files."""

    def __init__(self) -> None:
        self.limit = inf
        """Set it before the first item is added. Without a limit, nothing is counted."""
        self.held = 0
        self._file: _File | None = None
        self._is_refused = False

    def add(self, item: LoggedItem) -> LoggedItem | _ItemOnDisk:
        """The item as it is kept. If the disk is full, it stays in memory."""
        size = len(item.payload)
        if self.held + size > self.limit:
            try:
                return self._write(item)
            except OSError as exc:
                if not self._is_refused:
                    log.warning("results stay in memory: cannot write a temporary file: %s", exc.strerror)
                self._is_refused = True
        self.held += size
        return item

    def _write(self, item: LoggedItem) -> _ItemOnDisk:
        if self._file is None or self._file.size > _FILE_BYTES:
            self._file = _File()
        file, payload = self._file, memoryview(item.payload)
        start = file.size
        while payload:
            count = os.pwrite(file.file.fileno(), payload, start + len(item.payload) - len(payload))
            payload = payload[count:]
        file.size += len(item.payload)
        file.items += 1
        return _ItemOnDisk(item.seq, item.fingerprint, item.index, file, start, len(item.payload))

    def remove(self, item: LoggedItem | _ItemOnDisk) -> None:
        if isinstance(item, LoggedItem):
            self.held -= len(item.payload)
            return
        item.file.items -= 1
        if not item.file.items:
            item.file.file.close()
            if item.file is self._file:
                self._file = None


class MemoryItemLog:
    """Items in the order in which their pages were completed. See `shoal.ports.ItemLog`.

    Nothing can rewind it, so it does not check ``last``.
    """

    def __init__(self, roles: MemoryRoles, space: ItemSpace) -> None:
        self._roles = roles
        self._space = space
        self.count = 0
        """Items that were ever appended."""
        self._items: deque[LoggedItem | _ItemOnDisk] = deque()

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        if not self._items:
            return []
        skip = max(0, after + 1 - self._items[0].seq)
        items = list(islice(self._items, skip, skip + limit))
        if max_bytes is not None:
            sizes = [len(item.payload) if isinstance(item, LoggedItem) else item.size for item in items]
            del items[rules.count_fitting(sizes, max_bytes) :]
        return [item if isinstance(item, LoggedItem) else item.read() for item in items]

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        if self._roles.have_cursors(cursors or {}):
            self._drop(through)

    def _drop(self, through: float) -> None:
        while self._items and self._items[0].seq <= through:
            item = self._items.popleft()
            if self._space.limit != inf:
                self._space.remove(item)

    def clear(self) -> None:
        """Drop all items: the run was deleted."""
        self._drop(inf)

    @property
    def trimmed(self) -> int:
        """Items that were deleted."""
        return self._items[0].seq - 1 if self._items else self.count

    def missing(self) -> int:
        """How many items the log lacks."""
        return self.count + 1 - self._items[0].seq - len(self._items) if self._items else 0

    def append(self, fingerprint: bytes, payloads: Sequence[bytes], before: int) -> int:
        """Add items of a request that has ``before`` items already. Returns how many it has then."""
        for index, payload in enumerate(payloads, before):
            self.count += 1
            item = LoggedItem(self.count, fingerprint, index, payload)
            self._items.append(item if self._space.limit == inf else self._space.add(item))
        return before + len(payloads)
