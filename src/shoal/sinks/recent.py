"""The items that were handed over last, for outputs that can't take anything back."""

from __future__ import annotations

from collections import deque

from shoal.ports import LoggedItem

_LIMIT = 100_000


class Recent:
    """Recognizes items that come again: after an error, or because the store was rewound and pages are crawled again.

    It remembers the last 100,000. Numbers in the log would not do: a rewound store has other items under them.
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
        """The last ones were taken back."""
        for _ in range(min(count, len(self._order))):
            self._keys.discard(self._order.pop())


def _key(item: LoggedItem) -> bytes:
    return item.fingerprint + b"-%d" % item.index
