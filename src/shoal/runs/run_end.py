"""How a run ended: its outcome and its limit, which are stored with the run, and the end that a process announces."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import TypeVar, cast

import msgspec

from shoal.config import OutcomeSettings, ScopeSettings
from shoal.crawling.outcome import Outcome, RunFacts, decide
from shoal.crawling.stats import Counters
from shoal.crawling.stats import LimitReached as LimitReached
from shoal.errors import DECODING_ERRORS, FrontierError
from shoal.frontier.rules import UNREADABLE
from shoal.ports import Documents, Frontier, ItemSource, Run, Stats
from shoal.ports.documents import StoredValue
from shoal.sinks.drainer import COLLECTORS, PREFIX, read_cursor
from shoal.system import clock

_MAX_READ = 1000
"""Failed requests that are read to group failed callbacks by their exception."""

T = TypeVar("T")


class _SinkState(msgspec.Struct):
    """What the states of all sinks have in common."""

    rejected: int = 0


_decode_state = msgspec.msgpack.Decoder(_SinkState).decode


async def read_facts(frontier: ItemSource, *, expects_items: bool = False) -> RunFacts:
    """The facts in the store. ``expects_items``: whatever outputs the store knows of."""
    stats = await frontier.stats()
    kinds = await frontier.dead_kinds() if stats.dead else {}
    if (unknown := stats.dead - sum(kinds.values())) > 0:  # another program changed the store
        kinds[UNREADABLE] = kinds.get(UNREADABLE, 0) + unknown
    cursors = [
        role.cursor
        for role in await frontier.roles()
        if role.role.startswith(PREFIX) and not role.role.startswith(COLLECTORS)
    ]
    return RunFacts(
        stats=stats,
        dead_kinds=kinds,
        causes=await _read_causes(frontier) if kinds.get("callback") else {},
        expects_items=expects_items or bool(cursors),
        rejected=sum(_rejected(cursor) for cursor in cursors),
        lost=_lost(cursors),
    )


async def _read_causes(frontier: ItemSource) -> Counter[str]:
    """Failed callbacks by exception and method, as their reasons begin: ``ValueError in parse: ...``."""
    causes: Counter[str] = Counter()
    left = _MAX_READ
    async with closing(frontier.dead()) as dead:
        async for history in dead:
            left -= 1
            if history.kind == "callback":
                causes[history.reason.partition(":")[0]] += 1
            if not left:
                break
    return causes


def _rejected(cursor: bytes) -> int:
    state = read_cursor(cursor).state
    try:
        return _decode_state(state).rejected if state else 0
    except DECODING_ERRORS:  # of a plugin
        return 0


def _lost(cursors: Iterable[bytes]) -> int:
    """How many items the log lacked when they were to be written. Each output that needed them names the same ones."""
    gaps = {gap for cursor in cursors for gap in read_cursor(cursor).lost}
    lost, end = 0, 0
    for first, last in sorted(gaps):
        lost += max(0, last - max(first, end + 1) + 1)
        end = max(end, last)
    return lost


# -- kept with the run


def _stored(documents: Documents, run_id: str) -> StoredValue[Outcome]:
    return StoredValue(documents, f"run/{run_id}/outcome", Outcome)


async def store_outcome(documents: Documents, run_id: str, outcome: Outcome) -> None:
    """Keep the outcome of a run. Call it before the run moves to ``finished``. Hooks that failed in another process
    stay failed."""
    await _stored(documents, run_id).change(
        lambda stored: outcome if stored is None else outcome.with_failed_hooks(stored.failed_hooks)
    )


async def forget_outcome(documents: Documents, run_id: str) -> None:
    """The run goes on: its next end has an outcome of its own."""
    await _stored(documents, run_id).change(lambda _: None)


async def read_outcome(
    documents: Documents, run: Run, frontier: ItemSource, settings: OutcomeSettings = OutcomeSettings()
) -> Outcome | None:
    """The outcome of a run; None unless it is finished. For a run of an earlier version it is decided now, without the
    spider's rule."""
    if run.state != "finished":
        return None
    return await _stored(documents, run.run_id).read() or decide(await read_facts(frontier), settings.max_failed)


def closing(iterator: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close an iterator at the end of a block, also if not all of it was read. Those of frontiers are generators."""
    return aclosing(cast("AsyncGenerator[T, None]", iterator))


# Reads the figures for the summary of a run. It does not wait for a store that does not answer.


_MAX_FAILED = 100
"""Failed requests that are read to find one for the summary."""


async def last_stats(frontier: Frontier, deadline: float | None) -> tuple[Stats, dict[str, int]]:
    """Counters and kinds of dead requests for a summary. Empty ones if the store does not answer until ``deadline``, on
    the clock of the event loop."""
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout_at(deadline):
            return await frontier.stats(), await frontier.dead_kinds()
    return Stats(seeding=True), {}


async def failed_url(frontier: Frontier, deadline: float | None) -> str:
    """The URL of a failed request, if possible of one that robots.txt allows. Empty if the store does not answer."""
    url = ""
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout_at(deadline):
            left = _MAX_FAILED
            async for history in frontier.dead():
                url = url or history.url
                left -= 1
                if not history.reason.startswith("robots.txt"):
                    return history.url
                if not left:
                    break
    return url


# Runs that stopped at a limit before everything was fetched. The fact is stored with the run.


async def limit_of(documents: Documents, run: Run) -> LimitReached | None:
    """The limit at which a run stopped. None if it has not ended, or has fetched everything."""
    return await _stored_limit(documents, run.run_id).read() if run.state == "finished" else None


async def store_limit(documents: Documents, run_id: str, limit: LimitReached | None) -> None:
    """Store at which limit a run stops, or that it stops at none. Call it before the run becomes finished: nobody then
    sees a finished run without its limit. While the run is not finished, `limit_of` ignores what is stored."""
    await _stored_limit(documents, run_id).change(lambda _: limit)


def page_limit(max_pages: int | None, stats: Stats) -> LimitReached | None:
    """The limit of a run that ends with these counters. None if nothing is left."""
    if stats.finished or max_pages is None:
        return None
    return LimitReached(setting="scope.max_pages", value=max_pages, left=stats.remaining, at=clock.time())


def passed_limit(scope: ScopeSettings, counters: Counters, items: int) -> LimitReached | None:
    """The limit that a process has reached with these counts. ``items``: of the whole run. Times are not checked."""
    for setting, limit, count in (
        ("scope.max_items", scope.max_items, items),
        ("scope.max_bytes", scope.max_bytes, counters.bytes),
    ):
        if limit is not None and count >= limit:
            return LimitReached(setting=setting, value=limit, at=clock.time())
    return None


async def announce_end(documents: Documents, run_id: str, limit: LimitReached | None) -> None:
    """Let all processes of a run end it, or no longer."""
    await _announced(documents, run_id).change(lambda earlier: limit if limit is None else earlier or limit)


async def announced_end(documents: Documents, run_id: str) -> LimitReached | None:
    """Why the processes of a run shall end it; None: they shall not."""
    return await _announced(documents, run_id).read()


def _announced(documents: Documents, run_id: str) -> StoredValue[LimitReached]:
    return StoredValue(documents, f"run/{run_id}/end", LimitReached)


def _stored_limit(documents: Documents, run_id: str) -> StoredValue[LimitReached]:
    return StoredValue(documents, f"run/{run_id}/limit", LimitReached)
