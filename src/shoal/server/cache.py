"""Values that many readers share for a short time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_LIMIT = 300


class TimedCache:
    """Keeps each value for some seconds. Readers that come at the same time wait for one of them to make it."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[float, Any]] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Awaitable[T]]) -> T:
        """The value of a key, made anew if it is older than this. What ``make`` raises is raised, and not kept."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            made_at, value = self._values.get(key, (-seconds, None))
            if time.monotonic() - made_at >= seconds or key not in self._values:
                value = await make()
                self._values.pop(key, None)
                self._values[key] = (time.monotonic(), value)
                self._limit()
            found: T = value
            return found

    def _limit(self) -> None:
        while len(self._values) > _LIMIT:
            oldest = next(iter(self._values))
            del self._values[oldest]
            if oldest in self._locks and not self._locks[oldest].locked():
                del self._locks[oldest]
