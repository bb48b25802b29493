"""The item log of a run in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from shoal.frontier.memory.roles import MemoryRoles
from shoal.ports import LoggedItem


class MemoryItemLog:
    """Items in the order in which their pages were completed. See `shoal.ports.ItemLog`.

    Nothing can rewind it, so it does not check ``last``.
    """

    def __init__(self, roles: MemoryRoles) -> None:
        self._roles = roles
        self.count = 0
        """Items that were ever appended."""
        self._items: deque[LoggedItem] = deque()

    async def read_items(self, after: int, limit: int, *, last: LoggedItem | None = None) -> list[LoggedItem]:
        if not self._items:
            return []
        skip = max(0, after + 1 - self._items[0].seq)
        return list(islice(self._items, skip, skip + limit))

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        if not self._roles.have_cursors(cursors or {}):
            return
        while self._items and self._items[0].seq <= through:
            self._items.popleft()

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
            self._items.append(LoggedItem(self.count, fingerprint, index, payload))
        return before + len(payloads)
