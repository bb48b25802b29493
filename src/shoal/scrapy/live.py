"""Objects that stay in memory while their request is queued: lambdas, loaders, shared dicts.

Only a crawl whose frontier is in the memory of this process can keep them. An entry belongs to one request. It is
dropped some time after the request was handled, because a request whose lease was lost may be handled again.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shoal.scrapy.shared_types import Function, Values

_KEPT = 1000
"""How many entries of handled requests are kept."""


class LiveParts(NamedTuple):
    """The parts of a request that stay in memory and are not stored."""

    callback: Function | str | None
    errback: Function | str | None
    meta: Values | None
    cb_kwargs: Values | None


class LiveObjects:
    """The live parts of the queued requests, by number."""

    def __init__(self) -> None:
        self._entries: dict[int, LiveParts] = {}
        self._numbers: dict[bytes, int] = {}
        """By fingerprint, for requests that the frontier filters: a duplicate does not get an entry of its own."""
        self._handled: deque[int] = deque()
        self._last = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, parts: LiveParts, fingerprint: bytes | None) -> int:
        """Keep the parts of a request, and return their number. ``fingerprint``: None if the frontier does
        not drop duplicates of the request."""
        if fingerprint is not None and (known := self._numbers.get(fingerprint)) is not None:
            return known
        self._last += 1
        self._entries[self._last] = parts
        if fingerprint is not None:
            self._numbers[fingerprint] = self._last
        return self._last

    def get(self, number: int) -> LiveParts | None:
        return self._entries.get(number)

    def handled(self, number: int) -> None:
        """Report that the request of an entry was handled."""
        self._handled.append(number)
        if len(self._handled) > _KEPT:
            self._entries.pop(self._handled.popleft(), None)
