"""Screens of workers, clusters, hosts, schedules, notifications, user actions and settings."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice
from typing import get_args
from zoneinfo import available_timezones

from fastapi import APIRouter, Request

from shoal.api.batch.urls import redacted
from shoal.api.dashboard.pages import screen
from shoal.api.dashboard.run_screens import find_run, read_result, spider_names
from shoal.api.resources.clusters import opened_coordinator, read_view
from shoal.api.server.errors import ProblemError
from shoal.api.server.state import Server, SettingInForce
from shoal.errors import ConfigError, CoordinatorAwayError, RequestError, ShoalError
from shoal.operations.actions import MAX_ACTIONS, ActionLog
from shoal.operations.hosts import host_name, hosts_of, report_host
from shoal.operations.processes import ProcessState
from shoal.operations.schedules.schedule import Schedule, describe_timing, each_after
from shoal.operations.snapshot import ACTIVE, FleetProcess, read_fleet
from shoal.runs.cluster.election import roles
from shoal.system import clock

router = APIRouter()

CONDITIONS = get_args(ProcessState)
_PAGE = 100


@screen(router, "/ui/workers", "workers")
async def load_workers(server: Server, request: Request) -> dict[str, object]:
    query = request.query_params
    text, condition = query.get("q", "").strip().lower()[:200], query.get("state", "")
    start = int(number) if (number := query.get("from", "")).isascii() and number.isdigit() and len(number) < 6 else 0
    snapshot = await server.snapshots.get()
    processes = await read_fleet(server.store, snapshot)
    matching = [process for process in processes if _is_wanted(process, text, condition)]
    return {
        "snapshot": snapshot,
        "processes": matching[start : start + _PAGE],
        "total": len(matching),
        "start": start,
        "next": start + _PAGE if len(matching) > start + _PAGE else 0,
        "text": text,
        "condition": condition if condition in CONDITIONS else "",
        "conditions": CONDITIONS,
        "counts": Counter(process.state for process in processes),
        "clusters": _clusters(processes),
        "spiders": {run.run.run_id: run.run.spider for run in snapshot.runs},
        "pages_per_second": sum(process.pages_per_second for process in processes),
        "memory": sum(process.memory for process in processes if process.state == "working"),
    }


def _is_wanted(process: FleetProcess, text: str, condition: str) -> bool:
    words = f"{process.name} {process.machine} {process.run_id} {process.role} {process.cluster}".lower()
    return text in words and condition in ("", process.state)


def _clusters(processes: list[FleetProcess]) -> list[tuple[str, str, int]]:
    """The clusters of these processes: name, run, and how many of them crawl."""
    runs = {process.cluster: process.run_id for process in processes if process.cluster}
    active = Counter(process.cluster for process in processes if process.state == "working")
    return [(name, run_id, active[name]) for name, run_id in sorted(runs.items())]


# -- one cluster: its members, slots and events, and how many Runners and Backup Runners it should have


_EVENTS = 100


@screen(router, "/ui/clusters/{name}", "cluster")
async def load_cluster(server: Server, request: Request) -> dict[str, object]:
    name = request.path_params["name"][:200]
    try:
        async with opened_coordinator(server.config, name) as coordinator:
            view = await read_view(coordinator)
            events = await coordinator.events(_EVENTS)
    except CoordinatorAwayError:
        raise ProblemError(503, "coordinator away", "The coordinator does not answer. Reload in a moment.") from None
    processes = await read_fleet(server.store, await server.snapshots.get())
    own = [process for process in processes if process.cluster == name]
    run = await server.store.get_run(own[0].run_id if own else name)
    is_shown = run is not None and run.project == server.config.project_name
    return {
        "cluster": name,
        "run": run if is_shown else None,
        "view": view,
        "roles": roles(view),
        "slots": {slot.holder: slot for slot in view.slots if slot.holder},
        "events": events[::-1],
        "takeovers": sum(event.what == "took over" for event in events),
        "processes": {process.epoch: process for process in own},
    }


# -- the hosts of the active runs: their delays and the reasons for them


_MAX_RUNS = 10
"""How many runs are included. Each costs a call of the store."""


@screen(router, "/ui/hosts", "hosts")
async def load_hosts(server: Server, request: Request) -> dict[str, object]:
    query = request.query_params
    text, run_id = query.get("q", "").strip().lower()[:200], query.get("run", "")[:200]
    runs = (await server.list_runs(states=ACTIVE, limit=2 * _MAX_RUNS))[:_MAX_RUNS]
    chosen = [await find_run(server, run_id)] if run_id else runs
    return {
        "hosts": await hosts_of(server.store, chosen, _PAGE, text),
        "text": text,
        "run_id": run_id,
        "runs": runs,
        "chosen": chosen,
        "limit": _PAGE,
    }


# -- one host: its politeness, robots.txt, identities, and what its pages need


_MAX_RUNS_OF_HOST = 20


@screen(router, "/ui/hosts/{host}", "host")
async def load_host(server: Server, request: Request) -> dict[str, object]:
    try:
        host = host_name(request.path_params["host"])
    except (ConfigError, RequestError) as exc:
        raise ProblemError(404, "no such host", str(exc)) from exc
    if host == "*":
        raise ProblemError(404, "no such host", "'*' stands for all hosts. Open one host.")
    runs = await server.store.list_runs(states=ACTIVE, limit=_MAX_RUNS_OF_HOST) or await server.store.list_runs(limit=1)
    if not runs:
        raise ProblemError(404, "no run", "The store has no run yet, so it knows no hosts.")
    report = await report_host(server.store, runs, server.config, host)
    return {
        "host": host,
        "report": report,
        "state": report.state,
        "now": clock.time(),
        "runs": {run.run_id: run for run in runs if run.project == server.config.project_name},
    }


# -- schedules: the list with a form, and one schedule with its runs


_RUNS = 30
_SEARCHED = 2000
_NEXT = 5


@screen(router, "/ui/schedules", "schedules")
async def load_schedules(server: Server, request: Request) -> dict[str, object]:
    rows = []
    for schedule in await server.schedules.list_all():
        state = await server.store.run_state(schedule.run_id) if schedule.run_id else None
        rows.append((schedule, describe_timing(schedule.definition), next(iter(_next_times(schedule, 1)), None), state))
    return {"rows": [(*row, redacted(row[0].error)) for row in rows], **_choices(server)}


@screen(router, "/ui/schedules/{name}", "schedule")
async def load_one(server: Server, request: Request) -> dict[str, object]:
    name = request.path_params["name"]
    schedule = await server.schedules.find(name)
    if schedule is None:
        raise ProblemError(404, "no such schedule", f"There is no schedule {name!r:.200}.")
    runs = (await server.schedules.runs(name, among=_SEARCHED))[:_RUNS]
    rows = [(run, *result) for run in runs if (result := await read_result(server, run)) is not None]
    return {
        "schedule": schedule,
        "definition": schedule.definition,
        "timing": describe_timing(schedule.definition),
        "next_times": _next_times(schedule, _NEXT),
        "rows": rows,
        "error": redacted(schedule.error),
        **_choices(server),
    }


def _choices(server: Server) -> dict[str, object]:
    return {"spiders": spider_names(server), "zones": _zones()}


@cache
def _zones() -> list[str]:
    return sorted(available_timezones())


def _next_times(schedule: Schedule, count: int) -> list[float]:
    """The next times, without jitter. Empty while it is paused, or if another program stored an invalid schedule."""

    if schedule.paused or schedule.orphaned_at is not None:
        return []
    try:
        return list(islice(each_after(schedule.definition.times, schedule.last), count))
    except ShoalError:
        return []


# -- notifications: current problems, what was reported, channels and rules


_PROBLEMS = 100
_CLOSED = 50


@screen(router, "/ui/notifications", "notifications")
async def load_notifications(server: Server, request: Request) -> dict[str, object]:
    problems = await server.current_problems()
    reports = await server.notifications.problems(server.store)
    closed = [report for report in reports if not report.is_open]
    return {
        "problems": [(problem, redacted(problem.text)) for problem in problems[:_PROBLEMS]],
        "reports": {report.problem.key: report for report in reports if report.is_open},
        "closed": [(report, redacted(report.problem.text)) for report in closed[:_CLOSED]],
        "channels": [
            (channel, redacted(channel.state.error)) for channel in await server.notifications.channels(server.store)
        ],
        "rules": [
            (name, rule, ", ".join(f"{limit}={value:g}" for limit, value in rule.limits.items()))
            for name, rule in server.notifications.rules.items()
        ],
    }


# -- the log of user actions


@screen(router, "/ui/actions", "actions")
async def load_actions(server: Server, request: Request) -> dict[str, object]:
    text = request.query_params.get("q", "")[:200].strip().lower()
    actions = [
        action
        for action in await ActionLog(server.store, server.config.project_name).recent(MAX_ACTIONS)
        if text in f"{action.who} {action.what} {action.target} {action.detail}".lower()
    ]
    return {"actions": actions[:_PAGE], "total": len(actions), "text": text, "max_actions": MAX_ACTIONS}


# -- the settings in force, for admins


@screen(router, "/ui/settings", "settings", needs="admin")
async def load_settings(server: Server, request: Request) -> dict[str, object]:
    text = request.query_params.get("q", "")[:100].strip()
    changed = "changed" in request.query_params
    sections: dict[str, list[tuple[SettingInForce, str]]] = {}
    for setting in server.settings():
        if text.lower() in setting.key and not (changed and setting.source == "default"):
            section, mark, _ = setting.key.partition(".")
            sections.setdefault(section if mark else "", []).append((setting, _shown(setting.value)))
    return {"sections": sections, "text": text, "changed": changed}


def _shown(value: object) -> str:
    """A value as `shoal config` prints it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={part}" for name, part in value.items())
    return str(value)
