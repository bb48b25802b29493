"""Runs that stopped at a limit before everything was fetched. The fact is stored with the run."""

from __future__ import annotations

import time

from msgspec import Struct

from shoal.ports import Documents, Run, Stats
from shoal.stores.documents import StoredValue


class LimitReached(Struct, frozen=True, kw_only=True):
    """The limit at which a run stopped."""

    setting: str
    """Such as ``scope.max_pages``."""
    value: int
    left: int
    """Requests that were in the queue then."""
    at: float

    def __str__(self) -> str:
        left = "1 request" if self.left == 1 else f"{self.left} requests"
        return f"stopped at the limit {self.setting}={self.value} with {left} left"


async def limit_of(documents: Documents, run: Run) -> LimitReached | None:
    """The limit at which a run stopped. None if it has not ended, or has fetched everything."""
    return await _stored(documents, run.run_id).read() if run.state == "finished" else None


async def store_limit(documents: Documents, run_id: str, limit: LimitReached | None) -> None:
    """Store at which limit a run stops, or that it stops at none. Call it before the run becomes finished: nobody then
    sees a finished run without its limit. While the run is not finished, `limit_of` ignores what is stored."""
    await _stored(documents, run_id).change(lambda _: limit)


def page_limit(max_pages: int | None, stats: Stats) -> LimitReached | None:
    """The limit of a run that ends with these counters. None if nothing is left."""
    if stats.finished or max_pages is None:
        return None
    return LimitReached(setting="scope.max_pages", value=max_pages, left=stats.remaining, at=time.time())


def _stored(documents: Documents, run_id: str) -> StoredValue[LimitReached]:
    return StoredValue(documents, f"run/{run_id}/limit", LimitReached)
