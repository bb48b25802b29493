"""`/api/runs/compare`, and `/history`, `/workers`, `/failures`, `/items/recent` of a run."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from msgspec.structs import asdict

from shoal.batch.redaction import redacted
from shoal.crawling.stats import ledger
from shoal.monitoring.compare import RunFigures, compare_runs
from shoal.monitoring.processes import read_run_processes
from shoal.monitoring.reports import field_coverage, read_processes, read_recent_items
from shoal.monitoring.samples import RunSample, Speed, read_history, speeds, spread
from shoal.runs.dead_requests import dead_examples
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.run_lookup import RunId, find_run, open_frontier
from shoal.server.schemas.common import PRINTABLE
from shoal.server.schemas.run_reports import ComparisonPage, FailureKinds, HistoryPage, ProcessList, RecentItemsPage
from shoal.server.state import server_of

router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=BoundedRoute)

_LATEST = 4_102_444_800.0  # the year 2100

Compared = Annotated[str, Query(min_length=1, max_length=200, pattern=PRINTABLE, description="`run_id` of a run.")]


@router.get("/compare", response_model=ComparisonPage, responses=problems(401, 404, 422, 503))
async def compare(a: Compared, b: Compared, request: Request) -> Response:
    """Compare two runs, the older one first: pages, items, failures by kind, duration, speed, coverage of fields."""
    server = server_of(request)
    found = await compare_runs(server.store, await find_run(server, a), await find_run(server, b))
    differences = [{**asdict(each), "change": each.change} for each in found.differences]
    return json_response({"a": _figures(found.a), "b": _figures(found.b), "differences": differences})


def _figures(run: RunFigures) -> dict[str, object]:
    stats = run.stats
    return {
        "run_id": run.run_id, "spider": run.spider, "state": run.state, "ending": run.ending, "outcome": run.outcome,
        "created_at": run.created_at, "seconds": round(run.seconds, 3), "pages": stats.done, "items": stats.items,
        "failed": stats.dead, "failed_kinds": run.failed_kinds, "left": stats.remaining,
    }  # fmt: skip


@router.get("/{run_id}/history", response_model=HistoryPage, responses=problems(401, 404, 422, 503))
async def read_samples(
    run_id: RunId,
    request: Request,
    since: Annotated[float, Query(ge=0, le=_LATEST, description="Only samples after this Unix time.")] = 0.0,
    points: Annotated[int, Query(ge=2, le=5000, description="At most about this many samples.")] = 500,
) -> Response:
    """The counts and the speed of a run over time. Samples are kept every 5 seconds for a quarter of an hour, every
    minute for a day, every quarter of an hour for a week, and every hour beyond that."""
    server = server_of(request)
    await find_run(server, run_id)
    samples = spread([each for each in await read_history(server.store, run_id) if each.at > since], points)
    shown = [_shown(sample, speed) for sample, speed in zip(samples, speeds(samples), strict=True)]
    return json_response({"run_id": run_id, "samples": shown})


def _shown(sample: RunSample, speed: Speed | None) -> dict[str, object]:
    counts = ledger(sample.stats)
    for name in ("seeding", "rewinds"):
        del counts[name]
    return {
        "at": sample.at, **counts,
        "pages_per_second": None if speed is None else speed.pages,
        "items_per_second": None if speed is None else speed.items,
    }  # fmt: skip


@router.get("/{run_id}/workers", response_model=ProcessList, responses=problems(401, 404, 422, 503))
async def read_workers(run_id: RunId, request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 200) -> Response:
    """The processes that work on a run, or did so: machine, role, slot, last heartbeat, speed, memory."""
    frontier = await open_frontier(server_of(request), run_id)
    found = await read_run_processes(server_of(request).store, frontier, run_id)
    return json_response({"run_id": run_id, "total": len(found), "workers": found[:limit]})


@router.get("/{run_id}/failures", response_model=FailureKinds, responses=problems(401, 404, 422, 503))
async def read_failures(
    run_id: RunId,
    request: Request,
    examples: Annotated[int, Query(ge=0, le=20, description="Examples of each kind.")] = 3,
) -> Response:
    """Failed requests by kind, with examples. A rare kind may have no example if very many requests failed."""
    found = await dead_examples(await open_frontier(server_of(request), run_id), examples)
    kinds = [
        {
            "kind": kind.kind, "count": kind.count,
            "examples": [
                {"url": each.url, "status": each.status, "attempts": each.attempts, "reason": redacted(each.reason)}
                for each in kind.examples
            ],
        }
        for kind in found
    ]  # fmt: skip
    return json_response({"run_id": run_id, "kinds": kinds})


@router.get("/{run_id}/items/recent", response_model=RecentItemsPage, responses=problems(401, 404, 422, 503))
async def read_recent(run_id: RunId, request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """The last items of a run, and how often each field of its items has a value."""
    server = server_of(request)
    await find_run(server, run_id)
    coverage = field_coverage(await read_processes(server.store, run_id))
    return json_response(
        {
            "run_id": run_id,
            "items": await read_recent_items(server.store, run_id, limit),
            "fields": [{**asdict(each), "share": round(each.share, 4)} for each in coverage],
        }
    )
