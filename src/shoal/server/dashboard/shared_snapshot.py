"""One snapshot of the store for all readers of the dashboard."""

from __future__ import annotations

import asyncio
import time

from msgspec.structs import replace

from shoal.errors import ShoalError
from shoal.monitoring.snapshot import SnapshotTaker, StoreSnapshot

_FRESH = 1.0  # seconds
_TIMEOUT = 5.0


class SharedSnapshot:
    """Takes a snapshot on request, if the last one is old. It never fails: if the store is unavailable, the snapshot
    says why."""

    def __init__(self, taker: SnapshotTaker) -> None:
        self._taker = taker
        self._last = StoreSnapshot(at=0.0)
        self._taken_at = -_FRESH
        self._lock = asyncio.Lock()

    async def get(self) -> StoreSnapshot:
        async with self._lock:
            if time.monotonic() - self._taken_at >= _FRESH:
                try:
                    async with asyncio.timeout(_TIMEOUT):
                        self._last = await self._taker.take()
                except TimeoutError:
                    self._last = self._outdated(f"the store did not answer within {_TIMEOUT:g} s")
                except ShoalError as exc:
                    self._last = self._outdated(str(exc))
                self._taken_at = time.monotonic()
            return self._last

    def _outdated(self, reason: str) -> StoreSnapshot:
        at = self._last.at
        return replace(self._last, away=reason, age=max(0.0, time.time() - at) if at else 0.0)
