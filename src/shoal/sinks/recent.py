"""The latest items, for outputs that can't undo a write."""

from __future__ import annotations

from collections import deque

from shoal.ports import LoggedItem

_LIMIT = 100_000


class Recent:
    """Recognizes items that come again: after an error, or from pages that are crawled again after a rewind.

    It remembers the last 100,000 items by page and index. A rewound store reuses numbers in the log for other items.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._order: deque[bytes] = deque()
        self._keys: set[bytes] = set()

    def __contains__(self, item: LoggedItem) -> bool:
        return _key(item) in self._keys

    def add(self, item: LoggedItem) -> None:
        key = _key(item)
        self._keys.add(key)
        self._order.append(key)
        if len(self._order) > self._limit:
            self._keys.discard(self._order.popleft())

    def forget_last(self, count: int) -> None:
        """Forget the last items, because they were removed from the output."""
        for _ in range(min(count, len(self._order))):
            self._keys.discard(self._order.pop())


def _key(item: LoggedItem) -> bytes:
    return item.fingerprint + b"-%d" % item.index
