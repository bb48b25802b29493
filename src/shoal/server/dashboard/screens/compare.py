"""Two runs side by side."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.batch.spider import BatchSpider
from shoal.monitoring.compare import compare_runs
from shoal.ports import Run
from shoal.server.dashboard.pages import add_screen
from shoal.server.dashboard.screens.run import find_run
from shoal.server.state import Server

router = APIRouter()

_CHOICES = 100
_FRESH = 5.0  # seconds


async def load(server: Server, request: Request) -> dict[str, object]:
    a_id, b_id = (request.query_params.get(name, "")[:200] for name in ("a", "b"))
    b = await find_run(server, b_id) if b_id else None
    a = await find_run(server, a_id) if a_id else None
    spider = b.spider if b is not None else a.spider if a is not None else None
    runs = [
        run
        for run in await server.store.list_runs(spider, server.config.project_name, limit=_CHOICES)
        if run.spider != BatchSpider.name
    ]
    if b is not None and a is None:
        a = _run_before(runs, b)
    comparison = None
    if a is not None and b is not None:
        older, newer = a, b
        key = ("compare", a.run_id, b.run_id)
        comparison = await server.cache.get(key, _FRESH, lambda: compare_runs(server.store, older, newer))
    return {"runs": runs, "a": a, "b": b, "comparison": comparison}


def _run_before(runs: list[Run], run: Run) -> Run | None:
    """The run of the same spider before this one."""
    return next((each for each in runs if each.spider == run.spider and each.created_at < run.created_at), None)


add_screen(router, "/ui/compare", "compare", load)
