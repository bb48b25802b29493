"""One run: its counters, speed, failures, hosts, outputs, workers and settings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from shoal.batch.spider import BatchSpider
from shoal.config import mask
from shoal.ports import Run
from shoal.runs.queries import run_options
from shoal.server.dashboard.ledger import ledger_bar
from shoal.server.dashboard.pages import add_screen
from shoal.server.errors import ProblemError
from shoal.server.state import Server
from shoal.sinks.drainer import position_of

router = APIRouter()


async def find_run(server: Server, run_id: str) -> Run:
    run = await server.store.get_run(run_id)
    if run is None or run.spider == BatchSpider.name or run.project != server.config.project_name:
        raise ProblemError(404, "no such run", f"There is no run {run_id!r:.200}.")
    return run


async def load(server: Server, request: Request) -> dict[str, Any]:
    run = await find_run(server, request.path_params["run_id"])
    frontier = await server.store.frontier(run.run_id, run_options(run, server.config))
    stats = await frontier.stats()
    snapshot = next((each for each in (await server.snapshots.get()).runs if each.run.run_id == run.run_id), None)
    outputs = [
        (mask(role.role.removeprefix("sink:")), role, min(position_of(role.cursor), stats.items))
        for role in await frontier.roles()
        if role.role.startswith("sink:")
    ]
    return {
        "run": run, "stats": stats, "bar": ledger_bar(stats), "snapshot": snapshot, "outputs": outputs,
        "kinds": sorted((await frontier.dead_kinds()).items(), key=lambda pair: -pair[1]),
        "hosts": await frontier.host_states(20), "workers": await frontier.workers(),
        "rewinds": await frontier.rewinds() if stats.rewinds else [], "error": server.jobs.failure(run.run_id),
    }  # fmt: skip


add_screen(router, "/ui/runs/{run_id}", "run", load)
