"""`/api/runs/compare`, and `/history`, `/workers`, `/failures`, `/items/recent` of a run."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from msgspec.structs import asdict
from pydantic import BaseModel, Field

from shoal.api.batch.urls import redacted
from shoal.api.resources.common import PRINTABLE, RUN_ID, URL, RunId, find_run, open_frontier, with_examples
from shoal.api.resources.runs import RequestCounts, RunStateName
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import Server, server_of
from shoal.crawling.outcome import Verdict
from shoal.crawling.stats import ledger
from shoal.errors import StoreAwayError
from shoal.operations.charts import Chart, speed_chart, state_chart
from shoal.operations.compare import RunFigures, compare_runs
from shoal.operations.dead_requests import dead_examples
from shoal.operations.processes import ProcessState, read_run_processes
from shoal.operations.snapshot import read_fleet
from shoal.runs.reports import field_coverage, read_processes, read_recent_items
from shoal.runs.samples import RunSample, Speed, read_history, speeds, spread

# Bodies of the reports below `/api/runs`.


_AT = 1771156800.0
_FIGURES = {
    "run_id": RUN_ID, "spider": "books", "state": "finished", "ending": "finished", "outcome": "good",
    "created_at": _AT, "seconds": 60.0, "pages": 1000, "items": 980, "failed": 3, "failed_kinds": {"http 500": 3},
    "left": 0,
}  # fmt: skip


class SampleModel(RequestCounts):
    """The counts of a run at one moment."""

    at: Annotated[float, Field(description="Unix time, in seconds.")]
    incoming: Annotated[int, Field(description="Links of done pages that are not queued yet.")]
    pages_per_second: Annotated[float | None, Field(description="Since the previous sample; `null` for the first one.")]
    items_per_second: float | None


class HistoryPage(BaseModel):
    """The counts of a run over time, oldest first. Times in which no process worked on it have no samples."""

    model_config = with_examples(
        {
            "run_id": RUN_ID,
            "samples": [
                {
                    "at": _AT, "pushed": 120, "ready": 60, "waiting": 0, "in_flight": 20, "done": 39, "failed": 1,
                    "left": 80, "items": 39, "incoming": 0, "duplicates": 310, "pages_per_second": 8.0,
                    "items_per_second": 7.8,
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    samples: list[SampleModel]


PROCESS = {
    "name": "crawler-1-4711-9f2c", "state": "working", "role": "worker", "machine": "crawler-1", "pid": 4711,
    "slot": "crawler-1-4711-9f2c", "epoch": 1, "started_at": _AT, "last_seen": 1.2, "leases": 20, "pages": 39,
    "items": 39, "failed": 1, "pages_per_second": 8.0, "memory": 90000000, "browser": "", "tor": "",
}  # fmt: skip


class ProcessModel(BaseModel):
    """A process that works on a run, or did so."""

    name: str
    state: Annotated[
        ProcessState,
        Field(
            description="`stuck`: a callback blocks it. `silent`: its heartbeat is late. `lost`: killed or cut off. "
            "`ended`: stopped normally."
        ),
    ]
    role: Annotated[
        Literal["crawl", "worker", "runner", "server"],
        Field(description="`runner`: a node of a cluster. `server`: a run in a server."),
    ]
    machine: str
    pid: int
    slot: Annotated[str, Field(description="Its name in leases; empty if it needs none.")]
    epoch: int
    started_at: Annotated[float | None, Field(description="Unix time; `null` if it has not reported yet.")]
    last_seen: Annotated[float, Field(description="Seconds since its last heartbeat or report.")]
    leases: Annotated[int, Field(description="Requests that it has in flight.")]
    pages: int
    items: int
    failed: int
    pages_per_second: Annotated[float, Field(description="Over the last minute.")]
    memory: Annotated[int, Field(description="Bytes of resident memory; 0 if unknown.")]
    browser: str
    tor: str


class ProcessList(BaseModel):
    """The processes of a run, those that work first."""

    model_config = with_examples({"run_id": RUN_ID, "total": 1, "workers": [PROCESS]})

    run_id: str
    total: Annotated[int, Field(description="Number of all processes, also those beyond `limit`.")]
    workers: list[ProcessModel]


class FailureExample(BaseModel):
    """A failed request."""

    url: str
    status: Annotated[int, Field(description="HTTP status of the last response; 0 if there was none.")]
    attempts: int
    reason: str


class FailureKind(BaseModel):
    """The failed requests of one kind."""

    kind: str
    count: int
    examples: list[FailureExample]


class FailureKinds(BaseModel):
    """The failed requests of a run by kind, most frequent first."""

    model_config = with_examples(
        {
            "run_id": RUN_ID,
            "kinds": [
                {
                    "kind": "http 500", "count": 3,
                    "examples": [{"url": f"{URL}b", "status": 500, "attempts": 3, "reason": "HTTP 500"}],
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    kinds: list[FailureKind]


class FieldModel(BaseModel):
    """How often a field of the items has a value: neither null nor empty."""

    type: Annotated[str, Field(description="Class name of the items; `item` for a dict.")]
    field: str
    filled: int
    items: Annotated[int, Field(description="Items of this type whose fields were counted.")]
    share: float


class RecentItemsPage(BaseModel):
    """The last items of a run, newest first, and which fields its items have."""

    model_config = with_examples(
        {
            "run_id": RUN_ID, "items": ['{"title":"A Light in the Attic"}'],
            "fields": [{"type": "item", "field": "title", "filled": 39, "items": 39, "share": 1.0}],
        }
    )  # fmt: skip

    run_id: str
    items: Annotated[list[str], Field(description="JSON text. An item of more than 2,000 characters is cut.")]
    fields: Annotated[list[FieldModel], Field(description="Counted on up to 50 items per second and process.")]


class FiguresModel(BaseModel):
    """The results of a run, so far or at its end."""

    run_id: str
    spider: str
    state: RunStateName
    ending: Annotated[str, Field(description="How it ended, as text: `finished`, or at which limit it stopped.")]
    outcome: Annotated[Verdict | None, Field(description="`null` unless it is finished.")]
    created_at: float
    seconds: Annotated[float, Field(description="From its creation to its end, or to now.")]
    pages: int
    items: int
    failed: int
    failed_kinds: dict[str, int]
    left: int


class DifferenceModel(BaseModel):
    """A figure of two runs; `null` if a run does not have it."""

    name: str
    unit: Literal["count", "seconds", "per second", "share"]
    a: float | None
    b: float | None
    change: Annotated[float | None, Field(description="0.1 if `b` is 10 % larger; `null` if undefined.")]


class ComparisonPage(BaseModel):
    """Two runs, and their figures side by side."""

    model_config = with_examples(
        {
            "a": _FIGURES, "b": {**_FIGURES, "pages": 1100},
            "differences": [{"name": "pages", "unit": "count", "a": 1000.0, "b": 1100.0, "change": 0.1}],
        }
    )  # fmt: skip

    a: FiguresModel
    b: FiguresModel
    differences: list[DifferenceModel]


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


# Bodies of the charts.


class SeriesModel(BaseModel):
    """One line of a chart."""

    label: str
    colour: Annotated[str, Field(description="A colour of the dashboard: `done`, `dead`, `leased`, `waiting`...")]
    values: list[float]


class ChartModel(BaseModel):
    """Lines over time. Empty if nothing is known yet."""

    model_config = with_examples(
        {
            "times": [1771156800.0, 1771156810.0],
            "series": [{"label": "pages/s", "colour": "accent", "values": [12.5, 13.0]}],
        }
    )

    times: Annotated[list[float], Field(description="Unix times, in seconds.")]
    series: list[SeriesModel]


# Charts of the history of runs, as the dashboard draws them.


charts_router = APIRouter(prefix="/api", tags=["charts"])

_FRESH = 4.0  # seconds for which readers share a chart
_FRESH_OF_ALL = 15.0

ChartName = Annotated[
    Literal["states", "speed"],
    Path(description="`states`: requests in each state. `speed`: pages and items per second."),
]


@charts_router.get("/charts/speed", response_model=ChartModel, responses=problems(401, 422, 503))
async def read_speed(
    request: Request, hours: Annotated[float, Query(gt=0, le=24, description="How far back.")] = 1.0
) -> Response:
    """Pages and items per second of all runs together over the last hours."""
    server = server_of(request)

    async def read() -> Chart:
        now = time.time()
        return await server.speed_history.read(now - 3600 * hours, now)

    return json_response(await server.cache.get(("speed", hours), _FRESH_OF_ALL, read))


@charts_router.get("/runs/{run_id}/charts/{chart}", response_model=ChartModel, responses=problems(401, 404, 422, 503))
async def read_chart(
    run_id: RunId,
    chart: ChartName,
    request: Request,
    hours: Annotated[float | None, Query(gt=0, le=10_000, description="Hours to show. Default: the whole run.")] = None,
) -> Response:
    """The history of a run as lines over time. Older points are further apart."""
    server = server_of(request)
    await find_run(server, run_id)
    return json_response(
        await server.cache.get(("chart", run_id, chart, hours), _FRESH, lambda: _draw(server, run_id, chart, hours))
    )


async def _draw(server: Server, run_id: str, chart: str, hours: float | None) -> Chart:
    samples = await read_history(server.store, run_id)
    if hours is not None:
        samples = [each for each in samples if each.at >= time.time() - 3600 * hours]
    if chart == "states":
        return state_chart(samples)
    return speed_chart([samples], samples[0].at, samples[-1].at) if samples else Chart([], [])


# Bodies of `/api/workers`.


class FleetProcessModel(ProcessModel):
    """A process of one of the unfinished runs."""

    run_id: str


class FleetPage(BaseModel):
    """The processes of all unfinished runs, those that work first."""

    model_config = with_examples({"processes": [{"run_id": RUN_ID, **PROCESS}]})

    processes: list[FleetProcessModel]


# `/api/workers`: the processes of all unfinished runs.


workers_router = APIRouter(prefix="/api/workers", tags=["workers"], route_class=BoundedRoute)


@workers_router.get("", response_model=FleetPage, responses=problems(401, 422, 503))
async def list_processes(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000, description="Number of processes.")] = 200
) -> Response:
    """Every process of the unfinished runs: where it runs, its role, last heartbeat, speed and memory. Those that
    work come first."""
    server = server_of(request)
    snapshot = await server.snapshots.get()
    if snapshot.away:
        raise StoreAwayError(snapshot.away)
    return json_response({"processes": (await read_fleet(server.store, snapshot))[:limit]})
