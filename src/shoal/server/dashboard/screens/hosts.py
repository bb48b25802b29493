"""The hosts of the active runs: their delays and the reasons for them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.batch.spider import BatchSpider
from shoal.monitoring.snapshot import ACTIVE
from shoal.runs.queries import hosts_of
from shoal.server.dashboard.pages import add_screen
from shoal.server.dashboard.screens.run import find_run
from shoal.server.state import Server

router = APIRouter()

_PAGE = 100
_MAX_SEARCHED = 1000
_MAX_RUNS = 10
"""How many runs are included. Each costs a call of the store."""


async def load(server: Server, request: Request) -> dict[str, object]:
    query = request.query_params
    text, run_id = query.get("q", "").strip().lower()[:200], query.get("run", "")[:200]
    active = await server.store.list_runs(project=server.config.project_name, states=ACTIVE, limit=2 * _MAX_RUNS)
    runs = [run for run in active if run.spider != BatchSpider.name][:_MAX_RUNS]
    chosen = [await find_run(server, run_id)] if run_id else runs
    found = await hosts_of(server.store, chosen, _MAX_SEARCHED if text else _PAGE)
    return {
        "hosts": [state for state in found if text in state.host][:_PAGE],
        "text": text, "run_id": run_id, "runs": runs, "chosen": chosen, "limit": _PAGE,
    }  # fmt: skip


add_screen(router, "/ui/hosts", "hosts", load)
