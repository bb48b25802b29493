"""One host: its politeness, robots.txt, identities, and what its pages need."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from shoal.errors import ConfigError, RequestError
from shoal.monitoring.host_report import report_host
from shoal.monitoring.snapshot import ACTIVE
from shoal.runs.queries import host_name
from shoal.server.dashboard.pages import add_screen
from shoal.server.errors import ProblemError
from shoal.server.state import Server

router = APIRouter()

_MAX_RUNS = 20


async def load(server: Server, request: Request) -> dict[str, object]:
    try:
        host = host_name(request.path_params["host"])
    except (ConfigError, RequestError) as exc:
        raise ProblemError(404, "no such host", str(exc)) from exc
    if host == "*":
        raise ProblemError(404, "no such host", "'*' stands for all hosts. Open one host.")
    runs = await server.store.list_runs(states=ACTIVE, limit=_MAX_RUNS) or await server.store.list_runs(limit=1)
    if not runs:
        raise ProblemError(404, "no run", "The store has no run yet, so it knows no hosts.")
    report = await report_host(server.store, runs, server.config, host)
    return {
        "host": host, "report": report, "state": report.state, "now": time.time(),
        "runs": {run.run_id: run for run in runs if run.project == server.config.project_name},
    }  # fmt: skip


add_screen(router, "/ui/hosts/{host}", "host", load)
