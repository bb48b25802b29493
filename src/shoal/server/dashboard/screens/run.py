"""One run: its counters, history, failures, items, hosts, outputs, workers, settings, events and user actions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request

from shoal.batch.redaction import redacted
from shoal.batch.spider import BatchSpider
from shoal.config import mask
from shoal.monitoring.actions import Action, ActionLog
from shoal.monitoring.limits import limit_of
from shoal.monitoring.processes import RunProcess, merge_processes
from shoal.monitoring.reports import FieldCoverage, field_coverage, read_processes, read_recent_items
from shoal.monitoring.run_events import run_events
from shoal.monitoring.snapshot import ACTIVE, RunSnapshot
from shoal.ports import Frontier, Run, Stats
from shoal.runs.dead_requests import dead_examples, start_hint
from shoal.runs.outcome import read_outcome
from shoal.server.dashboard.ledger import ledger_bar
from shoal.server.dashboard.pages import add_screen
from shoal.server.errors import ProblemError
from shoal.server.state import Server
from shoal.sinks.drainer import output_name, position_of

router = APIRouter()

HOURS = ("1", "24", "all")
_ITEMS = 20
_ITEMS_FRESH = 8.0  # seconds
_EXAMPLES_FRESH = 60.0
_PROCESSES_FRESH = 4.0
_PROCESSES = 100
_EVENTS = 20
_KINDS = 30


async def find_run(server: Server, run_id: str) -> Run:
    run = await server.store.get_run(run_id)
    if run is None or run.spider == BatchSpider.name or run.project != server.config.project_name:
        raise ProblemError(404, "no such run", f"There is no run {run_id!r:.200}.")
    return run


async def load(server: Server, request: Request) -> dict[str, object]:
    run = await find_run(server, request.path_params["run_id"])
    frontier = await server.store.frontier(run.run_id)
    stats = await frontier.stats()
    snapshot = with_counts((await server.snapshots.get()).runs, run, stats)
    outputs = [
        (mask(output_name(role.role)), role, min(position_of(role.cursor), stats.items))
        for role in await frontier.roles()
        if role.role.startswith("sink:")
    ]
    items, coverage = await _items(server, run.run_id)
    processes, reported = await _processes(server, run, frontier)
    rewinds = await frontier.rewinds() if stats.rewinds else []
    limit = await limit_of(server.store, run)
    actions, ending = await _actions(server, run.run_id), "" if limit is None else str(limit)
    events = run_events(run, processes, reported, rewinds, actions, _EVENTS, ending)
    hours = request.query_params.get("hours", "")
    waits = run.state in ("queued", "running") and not any(each.state in ("working", "silent") for each in processes)
    outcome = await read_outcome(server.store, run, frontier, server.config.outcome)
    return {
        "start_hint": await start_hint(server.store, run) if waits else "",
        "run": run, "outcome": outcome, "reasons": [redacted(reason) for reason in outcome.reasons] if outcome else [],
        "limit": limit, "stats": stats, "bar": ledger_bar(stats), "snapshot": snapshot, "outputs": outputs,
        "kinds": await _failures(server, run.run_id, frontier, stats), "max_kinds": _KINDS,
        "hosts": await frontier.host_states(20), "processes": _shown(run, processes),
        "rewinds": rewinds, "error": server.jobs.failure(run.run_id), "items": items, "coverage": coverage,
        "settings": _settings(run), "events": events,
        "hours": hours if hours in HOURS else "1" if run.state in ACTIVE else "all",
    }  # fmt: skip


def with_counts(snapshots: Sequence[RunSnapshot], run: Run, stats: Stats) -> RunSnapshot | None:
    """The snapshot of a run, with the counts that the rest of the screen shows: so its time left is that of these."""
    found = next((each for each in snapshots if each.run.run_id == run.run_id), None)
    return None if found is None else msgspec.structs.replace(found, run=run, stats=stats)


async def _failures(server: Server, run_id: str, frontier: Frontier, stats: Stats) -> list[dict[str, object]]:
    """The kinds of failures with examples, and what a button sends to retry each."""
    if not stats.dead:
        return []
    counts = await frontier.dead_kinds()
    key = ("examples", run_id, stats.dead, len(counts))
    found = await server.cache.get(key, _EXAMPLES_FRESH, lambda: dead_examples(frontier))
    examples = {each.kind: [(one.url, redacted(one.reason)) for one in each.examples] for each in found}
    return [
        {"kind": kind, "count": count, "examples": examples.get(kind, []), "body": json.dumps({"kinds": [kind]})}
        for kind, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_KINDS]
    ]


async def _processes(server: Server, run: Run, frontier: Frontier) -> tuple[list[RunProcess], dict[str, float]]:
    """The processes of the run, and when each reported last."""

    async def read() -> tuple[list[RunProcess], dict[str, float]]:
        reports = await read_processes(server.store, run.run_id)
        processes = merge_processes(await frontier.workers(), reports, time.time())
        return processes, {each.name: each.at for each in reports}

    return await server.cache.get(("processes", run.run_id), _PROCESSES_FRESH, read)


def _shown(run: Run, found: Sequence[RunProcess]) -> list[RunProcess]:
    """Those that work on the run now, and those that were lost."""
    is_over = run.state not in ACTIVE
    return [each for each in found if each.state != "ended" and not (is_over and each.state == "lost")][:_PROCESSES]


async def _items(server: Server, run_id: str) -> tuple[list[str], list[FieldCoverage]]:
    """The last items as JSON, and how often each field has a value."""

    async def read() -> tuple[list[str], list[FieldCoverage]]:
        items = await read_recent_items(server.store, run_id, _ITEMS)
        return items, field_coverage(await read_processes(server.store, run_id))

    return await server.cache.get(("items", run_id), _ITEMS_FRESH, read)


def _settings(run: Run) -> list[tuple[str, str]]:
    """What the run was started with. Passwords in URLs are masked."""
    shown = {name: value for name, value in run.settings.items() if value not in (None, "", [], {}, ())}
    return [(name, mask(value if isinstance(value, str) else _json(value))) for name, value in sorted(shown.items())]


def _json(value: object) -> str:
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return ", ".join(mask(each) for each in value)
    return msgspec.json.encode(value).decode()


async def _actions(server: Server, run_id: str) -> list[Action]:
    log = ActionLog(server.store, server.config.project_name)
    return [each for each in await log.recent(400) if each.target == run_id][:_EVENTS]


add_screen(router, "/ui/runs/{run_id}", "run", load)
