"""A cache for values that many readers share for a short time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

_LIMIT = 300


class TimedCache:
    """Keeps each value for some seconds. Concurrent readers of a key share one call of ``make``."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[float, Any]] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Awaitable[T]]) -> T:
        """The value of a key, from ``make`` if it is older than ``seconds``. Errors of ``make`` are not cached."""
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
