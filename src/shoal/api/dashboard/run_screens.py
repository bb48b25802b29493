"""Screens of runs: one run, the list, the overview, two runs side by side, one URL."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Request

from shoal.api.batch.urls import redacted
from shoal.api.dashboard.pages import screen
from shoal.api.server.errors import ProblemError
from shoal.api.server.state import Server
from shoal.config import mask
from shoal.crawling.outcome import Outcome
from shoal.crawling.stats import STATE_NAMES, LimitReached
from shoal.errors import RequestError, RunError, ShoalError
from shoal.operations.actions import MAX_ACTIONS, ActionLog, run_events
from shoal.operations.compare import compare_runs
from shoal.operations.dead_requests import dead_examples, start_hint
from shoal.operations.hosts import matching_runs
from shoal.operations.processes import RunProcess, merge_processes
from shoal.operations.snapshot import ACTIVE, RunSnapshot, StoreSnapshot
from shoal.operations.url_report import UrlReport, read_agent, read_url_items, report_url
from shoal.ports import Frontier, HostState, Run, RunState, Stats
from shoal.runs.reports import FieldCoverage, field_coverage, read_processes, read_recent_items
from shoal.runs.run_end import limit_of, read_outcome
from shoal.sinks.drainer import output_name, position_of
from shoal.system import clock

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
    run = await server.get_run(run_id)
    if run is None:
        raise ProblemError(404, "no such run", f"There is no run {run_id!r:.200}.")
    return run


@screen(router, "/ui/runs/{run_id}", "run")
async def load_run(server: Server, request: Request) -> dict[str, object]:
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
    log = ActionLog(server.store, server.config.project_name)
    actions = [action for action in await log.recent(MAX_ACTIONS) if action.target == run.run_id][:_EVENTS]
    ending = "" if limit is None else str(limit)
    events = run_events(run, processes, reported, rewinds, actions, _EVENTS, ending)
    hours = request.query_params.get("hours", "")
    is_worked_on = any(process.state in ("working", "silent") for process in processes)
    waits = run.state in ("queued", "running") and not is_worked_on
    outcome = await read_outcome(server.store, run, frontier, server.config.outcome)
    return {
        "start_hint": await start_hint(server.store, run) if waits else "",
        "run": run,
        "outcome": outcome,
        "reasons": [redacted(reason) for reason in outcome.reasons] if outcome else [],
        "limit": limit,
        "stats": stats,
        "snapshot": snapshot,
        "outputs": outputs,
        "kinds": await _failures(server, run.run_id, frontier, stats),
        "max_kinds": _KINDS,
        "hosts": await frontier.host_states(20),
        "processes": _shown(run, processes),
        "rewinds": rewinds,
        "error": server.jobs.failure(run.run_id),
        "items": items,
        "coverage": coverage,
        "settings": _settings(run),
        "events": events,
        "hours": hours if hours in HOURS else "1" if run.state in ACTIVE else "all",
    }


def with_counts(snapshots: Sequence[RunSnapshot], run: Run, stats: Stats) -> RunSnapshot | None:
    """The snapshot of a run, with the counts that the rest of the screen shows: so its time left is that of these."""
    snapshot = next((active for active in snapshots if active.run.run_id == run.run_id), None)
    return None if snapshot is None else msgspec.structs.replace(snapshot, run=run, stats=stats)


async def _failures(server: Server, run_id: str, frontier: Frontier, stats: Stats) -> list[dict[str, object]]:
    """The kinds of failures with examples, and what a button sends to retry each."""
    if not stats.dead:
        return []
    counts = await frontier.dead_kinds()
    key = ("examples", run_id, stats.dead, len(counts))
    kinds = await server.cache.get(key, _EXAMPLES_FRESH, lambda: dead_examples(frontier))
    examples = {kind.kind: [(page.url, redacted(page.reason)) for page in kind.examples] for kind in kinds}
    return [
        {"kind": kind, "count": count, "examples": examples.get(kind, []), "body": json.dumps({"kinds": [kind]})}
        for kind, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_KINDS]
    ]


async def _processes(server: Server, run: Run, frontier: Frontier) -> tuple[list[RunProcess], dict[str, float]]:
    """The processes of the run, and when each reported last."""

    async def read() -> tuple[list[RunProcess], dict[str, float]]:
        reports = await read_processes(server.store, run.run_id)
        processes = merge_processes(await frontier.workers(), reports, clock.time())
        return processes, {report.name: report.at for report in reports}

    return await server.cache.get(("processes", run.run_id), _PROCESSES_FRESH, read)


def _shown(run: Run, processes: Sequence[RunProcess]) -> list[RunProcess]:
    """Those that work on the run now, and those that were lost."""
    hidden = ("ended",) if run.state in ACTIVE else ("ended", "lost")
    return [process for process in processes if process.state not in hidden][:_PROCESSES]


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
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return ", ".join(mask(part) for part in value)
    return msgspec.json.encode(value).decode()


# -- the list of runs, and the form that starts one


STATES: tuple[RunState, ...] = ("queued", "running", "paused", "finished", "cancelled")
_PAGE = 50
_MAX_SEARCHED = 5000
_KEPT_SECONDS = 30.0
"""Seconds for which the counters of an ended run are cached. A retry of failed pages makes it active again."""


@screen(router, "/ui/runs", "runs")
async def load_runs(server: Server, request: Request) -> dict[str, object]:
    query = request.query_params
    state, text = query.get("state", ""), query.get("q", "")[:200].strip()
    before = query.get("before", "")[:200]
    states = [name for name in STATES if name == state] or None
    matching = matching_runs(await server.list_runs(states=states, limit=_MAX_SEARCHED), text)
    start = next((index + 1 for index, run in enumerate(matching) if run.run_id == before), 0)
    shown = matching[start : start + _PAGE]
    active = {run.run.run_id: (run.stats, None) for run in (await server.snapshots.get()).runs}
    results = [(run, active.get(run.run_id) or await read_result(server, run)) for run in shown]
    rows = [(run, await read_limit(server, run, result[0]), *result) for run, result in results if result is not None]
    return {
        "rows": rows,
        "total": len(matching),
        "state": state if states else "",
        "text": text,
        "states": STATES,
        "next": shown[-1].run_id if len(matching) > start + _PAGE else "",
        "first": start == 0,
        "spiders": spider_names(server),
    }


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


# -- the overview: running crawls, and what needs attention


_PROBLEMS = 20
_HOSTS = 10
OVERVIEW_HOURS = (1, 3, 12, 24)


@screen(router, "/", "overview")
async def load_overview(server: Server, request: Request) -> dict[str, object]:
    snapshot = await server.snapshots.get()
    problems = await server.current_problems()
    hours = request.query_params.get("hours", "")
    return {
        "snapshot": snapshot,
        "runs": snapshot.runs,
        "total": _total(snapshot),
        "recent": await _recent(server, snapshot),
        "waiting_hosts": _waiting_hosts(snapshot),
        "hosts_age": hosts_age(snapshot),
        "problems": [(problem, redacted(problem.text)) for problem in problems[:_PROBLEMS]],
        "more_problems": max(0, len(problems) - _PROBLEMS),
        "hours": next((choice for choice in OVERVIEW_HOURS if str(choice) == hours), OVERVIEW_HOURS[0]),
        "all_hours": OVERVIEW_HOURS,
    }


async def _recent(server: Server, snapshot: StoreSnapshot) -> list[tuple[Run, Outcome | None]]:
    """The runs that ended lately, with their outcomes as far as the store answers."""
    if not snapshot.away:
        with suppress(ShoalError):
            results = [(run, await read_result(server, run)) for run in snapshot.recent]
            return [(run, result[1]) for run, result in results if result is not None]
    return [(run, None) for run in snapshot.recent]


def _total(snapshot: StoreSnapshot) -> dict[str, float]:
    runs = snapshot.runs
    return {
        "running": sum(run.run.state == "running" for run in runs),
        "pages_per_second": sum(run.pages_per_second for run in runs),
        "items_per_second": sum(run.items_per_second for run in runs),
        "remaining": sum(run.stats.remaining for run in runs),
        "workers": sum(run.processes for run in runs),
    }


def hosts_age(snapshot: StoreSnapshot) -> float:
    """How much older the numbers of hosts are than those of runs, in seconds."""
    return max((run.at - (run.details_at or run.at) for run in snapshot.runs), default=0.0)


def _waiting_hosts(snapshot: StoreSnapshot) -> list[HostState]:
    """Hosts whose requests wait: those that are blocked, the longest block first, then those whose queue takes longest
    because of their delay."""
    hosts = {
        host.host: host
        for run in snapshot.runs
        for host in run.hosts
        if host.blocked_for > 0 or (host.ready > 1 and host.delay > 0)
    }
    return sorted(hosts.values(), key=lambda host: (-host.blocked_for, -host.ready * host.delay))[:_HOSTS]


# -- two runs side by side


_CHOICES = 100
_FRESH = 5.0  # seconds


@screen(router, "/ui/compare", "compare")
async def load_compare(server: Server, request: Request) -> dict[str, object]:
    a_id, b_id = (request.query_params.get(name, "")[:200] for name in ("a", "b"))
    b = await find_run(server, b_id) if b_id else None
    a = await find_run(server, a_id) if a_id else None
    spider = b.spider if b is not None else a.spider if a is not None else None
    runs = await server.list_runs(spider, limit=_CHOICES)
    if b is not None and a is None:
        a = next((run for run in runs if run.created_at < b.created_at), None)
    comparison = None
    if a is not None and b is not None:
        older, newer = a, b
        key = ("compare", a.run_id, b.run_id)
        comparison = await server.cache.get(key, _FRESH, lambda: compare_runs(server.store, older, newer))
    return {"runs": runs, "a": a, "b": b, "comparison": comparison}


# -- one URL of a run: where it was found, what happened to it, and why it is in its state


_MAX_URL = 8192
_URL_FRESH = 60.0  # seconds for which items that were found, and the user agent, are kept
_ADDRESS = re.compile(r"(https?://[^\s\"'<>]+)")


@screen(router, "/ui/runs/{run_id}/url", "url")
async def load_url(server: Server, request: Request) -> dict[str, object]:
    run = await find_run(server, request.path_params["run_id"])
    url = request.query_params.get("url", "").strip()[:_MAX_URL]
    report: UrlReport | None = None
    items: list[str] = []
    if url:
        frontier = await server.store.frontier(run.run_id)
        read = partial(read_agent, server.store, run.run_id, server.config)
        agent = await server.cache.get(("agent", run.run_id), _URL_FRESH, read)
        try:
            report = await report_url(frontier, url, server.config, agent, exact=True)
        except RequestError as exc:
            raise ProblemError(422, "bad request", str(exc)) from exc
        if report is not None:
            history = report.history
            key = ("items", run.run_id, history.fingerprint, history.items)
            read_items = partial(read_url_items, server.store, frontier, run.run_id, history)
            items = await server.cache.get(key, _URL_FRESH, read_items)
    return {
        "run": run,
        "url": url,
        "report": report,
        "address": lambda each: address_of(run.run_id, each),
        "parts": _parts,
        "state": _state(report),
        "body": json.dumps({"url": url}),
        "items": items,
    }


def _state(report: UrlReport | None) -> str:
    return "" if report is None else STATE_NAMES.get(report.history.state, report.history.state)


def address_of(run_id: str, url: str) -> str:
    """The address of this screen for a URL."""
    return f"/ui/runs/{quote(run_id, safe='')}/url?url={quote(url, safe='')}"


def _parts(text: str) -> list[tuple[str, bool]]:
    """A text in parts, and whether each part is a web address, such as the target of a redirect."""
    return [(part, bool(number % 2)) for number, part in enumerate(_ADDRESS.split(redacted(text))) if part]
