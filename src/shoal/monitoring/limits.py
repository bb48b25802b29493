"""Runs that stopped at a limit before everything was fetched. The fact is stored with the run."""

from __future__ import annotations

import time

from shoal.config import ScopeSettings
from shoal.crawling.stats import Counters
from shoal.crawling.stats import LimitReached as LimitReached
from shoal.ports import Documents, Run, Stats
from shoal.stores.documents import StoredValue


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


def passed_limit(scope: ScopeSettings, counters: Counters, items: int) -> LimitReached | None:
    """The limit that a process has reached with these counts. ``items``: of the whole run. Times are not checked."""
    for setting, limit, count in (
        ("scope.max_items", scope.max_items, items),
        ("scope.max_bytes", scope.max_bytes, counters.bytes),
    ):
        if limit is not None and count >= limit:
            return LimitReached(setting=setting, value=limit, at=time.time())
    return None


async def announce_end(documents: Documents, run_id: str, limit: LimitReached | None) -> None:
    """Let all processes of a run end it, or no longer."""
    await _announced(documents, run_id).change(lambda earlier: limit if limit is None else earlier or limit)


async def announced_end(documents: Documents, run_id: str) -> LimitReached | None:
    """Why the processes of a run shall end it; None: they shall not."""
    return await _announced(documents, run_id).read()


def _announced(documents: Documents, run_id: str) -> StoredValue[LimitReached]:
    return StoredValue(documents, f"run/{run_id}/end", LimitReached)


def _stored(documents: Documents, run_id: str) -> StoredValue[LimitReached]:
    return StoredValue(documents, f"run/{run_id}/limit", LimitReached)
