"""Reads the facts for the outcome of a run, and keeps the outcome with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import TypeVar, cast

import msgspec

from shoal.config import OutcomeSettings
from shoal.crawling.outcome import Outcome, RunFacts, decide
from shoal.errors import DECODING_ERRORS
from shoal.frontier.rules import UNREADABLE
from shoal.ports import Documents, ItemSource, Run
from shoal.sinks.drainer import COLLECTORS, PREFIX, read_cursor
from shoal.stores.documents import StoredValue

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
