"""The list of runs, and the form that starts one."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request

from shoal.batch.spider import BatchSpider
from shoal.crawling.outcome import Outcome
from shoal.errors import RunError, ShoalError
from shoal.monitoring.limits import LimitReached, limit_of
from shoal.ports import Run, RunState, Stats
from shoal.runs.outcome import read_outcome
from shoal.runs.queries import matching_runs
from shoal.server.dashboard.ledger import ledger_bar
from shoal.server.dashboard.pages import add_screen
from shoal.server.state import Server

router = APIRouter()

STATES: tuple[RunState, ...] = ("queued", "running", "paused", "finished", "cancelled")
_PAGE = 50
_MAX_SEARCHED = 5000
_KEPT_SECONDS = 30.0
"""Seconds for which the counters of an ended run are cached. A retry of failed pages makes it active again."""


async def load(server: Server, request: Request) -> dict[str, object]:
    query = request.query_params
    state, text = query.get("state", ""), query.get("q", "")[:200].strip()
    before = query.get("before", "")[:200]
    states = [each for each in STATES if each == state] or None
    runs = await server.store.list_runs(project=server.config.project_name, states=states, limit=_MAX_SEARCHED)
    wanted = matching_runs([run for run in runs if run.spider != BatchSpider.name], text)
    start = next((index + 1 for index, run in enumerate(wanted) if run.run_id == before), 0)
    shown = wanted[start : start + _PAGE]
    active = {each.run.run_id: (each.stats, None) for each in (await server.snapshots.get()).runs}
    results = [(run, active.get(run.run_id) or await read_result(server, run)) for run in shown]
    rows = [
        (run, await read_limit(server, run, result[0]), *result, ledger_bar(result[0]))
        for run, result in results
        if result is not None
    ]
    return {
        "rows": rows, "total": len(wanted), "state": state if states else "", "text": text, "states": STATES,
        "next": shown[-1].run_id if len(wanted) > start + _PAGE else "", "first": start == 0,
        "spiders": spider_names(server),
    }  # fmt: skip


async def read_result(server: Server, run: Run) -> tuple[Stats, Outcome | None] | None:
    """The counters of a run, and its outcome if it has ended; None if it was deleted in the meantime. Those of a run
    that has ended hardly change."""

    async def read() -> tuple[Stats, Outcome | None] | None:
        try:
            frontier = await server.store.frontier(run.run_id)
            return await frontier.stats(), await read_outcome(server.store, run, frontier, server.config.outcome)
        except RunError:
            return None

    if run.ended_at is None:
        return await read()
    return await server.cache.get(("result", run.run_id, run.ended_at), _KEPT_SECONDS, read)


async def read_outcomes(server: Server, runs: Sequence[Run]) -> list[tuple[Run, Outcome | None]]:
    """Each run with its outcome."""
    results = [(run, await read_result(server, run)) for run in runs]
    return [(run, result[1]) for run, result in results if result is not None]


async def read_limit(server: Server, run: Run, stats: Stats) -> LimitReached | None:
    """At which limit a run stopped."""
    if run.state != "finished" or not stats.remaining:
        return None
    key = "limit", run.run_id, run.ended_at
    return await server.cache.get(key, _KEPT_SECONDS, lambda: limit_of(server.store, run))


def spider_names(server: Server) -> list[str]:
    """The names in the registry."""
    try:
        return sorted(server.orchestrator().registry)
    except ShoalError:
        return []


add_screen(router, "/ui/runs", "runs", load)
