"""Reports about runs: `/api/runs/compare`, and `/history`, `/workers`, `/failures`, `/items/recent`, `/charts` of each.
Reports about all runs: `/api/charts/speed`, `/api/workers`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from msgspec import Struct, convert
from msgspec.structs import asdict

from shoal.api.batch.urls import redacted
from shoal.api.resources.common import PRINTABLE, RunId, find_run, open_frontier
from shoal.api.resources.runs import RequestCounts
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import Server, server_of
from shoal.crawling.outcome import Verdict
from shoal.crawling.stats import ledger
from shoal.errors import StoreAwayError
from shoal.operations.charts import Chart, speed_chart, state_chart
from shoal.operations.compare import Difference, RunFigures, compare_runs
from shoal.operations.dead_requests import DeadKind, dead_examples
from shoal.operations.processes import RunProcess, read_run_processes
from shoal.operations.snapshot import FleetProcess, read_fleet
from shoal.ports import RunState
from shoal.runs.reports import FieldCoverage, field_coverage, read_processes, read_recent_items
from shoal.runs.samples import RunSample, Speed, read_history, speeds, spread
from shoal.system import clock


class Sample(RequestCounts, frozen=True, kw_only=True):
    """The counts of a run at one moment."""

    at: float
    """Unix time, in seconds."""
    incoming: int
    """Links of done pages that are not queued yet."""
    pages_per_second: float | None
    """Since the previous sample; `null` for the first one."""
    items_per_second: float | None


class HistoryPage(Struct, frozen=True, kw_only=True):
    """The counts of a run over time, oldest first. Times in which no process worked on it have no samples."""

    run_id: str
    samples: list[Sample]


class ProcessList(Struct, frozen=True, kw_only=True):
    """The processes of a run, those that work first."""

    run_id: str
    total: int
    """Number of all processes, also those beyond `limit`."""
    workers: list[RunProcess]


class FleetPage(Struct, frozen=True, kw_only=True):
    """The processes of all unfinished runs, those that work first."""

    processes: list[FleetProcess]


class FailureExample(Struct, frozen=True, kw_only=True):
    """A failed request."""

    url: str
    status: int
    """HTTP status of the last response; 0 if there was none."""
    attempts: int
    reason: str


class FailureKind(Struct, frozen=True, kw_only=True):
    """The failed requests of one kind."""

    kind: str
    count: int
    examples: list[FailureExample]


class FailureKinds(Struct, frozen=True, kw_only=True):
    """The failed requests of a run by kind, most frequent first."""

    run_id: str
    kinds: list[FailureKind]


class FieldShare(FieldCoverage, frozen=True, kw_only=True):
    """How often a field of the items has a value: neither null nor empty."""

    share: float


class RecentItemsPage(Struct, frozen=True, kw_only=True):
    """The last items of a run, newest first, and which fields its items have."""

    run_id: str
    items: list[str]
    """JSON text. An item of more than 2,000 characters is cut."""
    fields: list[FieldShare]
    """Counted on up to 50 items per second and process."""


class Figures(Struct, frozen=True, kw_only=True):
    """The results of a run, so far or at its end."""

    run_id: str
    spider: str
    state: RunState
    ending: str
    """How it ended, as text: `finished`, or at which limit it stopped."""
    outcome: Verdict | None
    """`null` unless it is finished."""
    created_at: float
    seconds: float
    """From its creation to its end, or to now."""
    pages: int
    items: int
    failed: int
    failed_kinds: dict[str, int]
    left: int


class RelativeDifference(Difference, frozen=True, kw_only=True):
    """A figure of two runs; `null` if a run does not have it."""

    change: float | None
    """0.1 if `b` is 10 % larger; `null` if undefined."""


class ComparisonPage(Struct, frozen=True, kw_only=True):
    """Two runs, and their figures side by side."""

    a: Figures
    b: Figures
    differences: list[RelativeDifference]


router = APIRouter(prefix="/api/runs", tags=["runs"], route_class=BoundedRoute)

_LATEST = 4_102_444_800.0  # the year 2100

ComparedId = Annotated[str, Query(min_length=1, max_length=200, pattern=PRINTABLE, description="`run_id` of a run.")]


@router.get("/compare", response_model=answer(ComparisonPage), responses=problems(401, 404, 422, 503))
async def compare(a: ComparedId, b: ComparedId, request: Request) -> Response:
    """Compare two runs, the older one first: pages, items, failures by kind, duration, speed, coverage of fields."""
    server = server_of(request)
    comparison = await compare_runs(server.store, await find_run(server, a), await find_run(server, b))
    differences = convert(comparison.differences, list[RelativeDifference], from_attributes=True)
    return json_response(ComparisonPage(a=_figures(comparison.a), b=_figures(comparison.b), differences=differences))


def _figures(run: RunFigures) -> Figures:
    values = {**asdict(run), **ledger(run.stats), "pages": run.stats.done, "ending": run.ending}
    return convert({**values, "seconds": round(run.seconds, 3)}, Figures)


@router.get("/{run_id}/history", response_model=answer(HistoryPage), responses=problems(401, 404, 422, 503))
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
    samples = spread([sample for sample in await read_history(server.store, run_id) if sample.at > since], points)
    with_speeds = [_sample(sample, speed) for sample, speed in zip(samples, speeds(samples), strict=True)]
    return json_response(HistoryPage(run_id=run_id, samples=with_speeds))


def _sample(sample: RunSample, speed: Speed | None) -> Sample:
    pages, items = (None, None) if speed is None else (speed.pages, speed.items)
    counts = ledger(sample.stats)
    return convert({**counts, "at": sample.at, "pages_per_second": pages, "items_per_second": items}, Sample)


@router.get("/{run_id}/workers", response_model=answer(ProcessList), responses=problems(401, 404, 422, 503))
async def read_workers(run_id: RunId, request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 200) -> Response:
    """The processes that work on a run, or did so: machine, role, slot, last heartbeat, speed, memory."""
    frontier = await open_frontier(server_of(request), run_id)
    processes = await read_run_processes(server_of(request).store, frontier, run_id)
    return json_response(ProcessList(run_id=run_id, total=len(processes), workers=processes[:limit]))


@router.get("/{run_id}/failures", response_model=answer(FailureKinds), responses=problems(401, 404, 422, 503))
async def read_failures(
    run_id: RunId,
    request: Request,
    examples: Annotated[int, Query(ge=0, le=20, description="Examples of each kind.")] = 3,
) -> Response:
    """Failed requests by kind, with examples. A rare kind may have no example if very many requests failed."""
    kinds = await dead_examples(await open_frontier(server_of(request), run_id), examples)
    return json_response(FailureKinds(run_id=run_id, kinds=[_failure_kind(kind) for kind in kinds]))


def _failure_kind(kind: DeadKind) -> FailureKind:
    examples = [convert(asdict(page) | {"reason": redacted(page.reason)}, FailureExample) for page in kind.examples]
    return FailureKind(kind=kind.kind, count=kind.count, examples=examples)


@router.get("/{run_id}/items/recent", response_model=answer(RecentItemsPage), responses=problems(401, 404, 422, 503))
async def read_recent(run_id: RunId, request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """The last items of a run, and how often each field of its items has a value."""
    server = server_of(request)
    await find_run(server, run_id)
    items = await read_recent_items(server.store, run_id, limit)
    coverage = field_coverage(await read_processes(server.store, run_id))
    fields = [FieldShare(**asdict(field), share=round(field.share, 4)) for field in coverage]
    return json_response(RecentItemsPage(run_id=run_id, items=items, fields=fields))


# -- charts of the history of runs, as the dashboard draws them


charts_router = APIRouter(prefix="/api", tags=["charts"])

_FRESH = 4.0  # seconds for which readers share a chart
_FRESH_OF_ALL = 15.0

ChartName = Annotated[
    Literal["states", "speed"],
    Path(description="`states`: requests in each state. `speed`: pages and items per second."),
]


@charts_router.get("/charts/speed", response_model=answer(Chart), responses=problems(401, 422, 503))
async def read_speed(
    request: Request, hours: Annotated[float, Query(gt=0, le=24, description="How far back.")] = 1.0
) -> Response:
    """Pages and items per second of all runs together over the last hours."""
    server = server_of(request)

    async def read() -> Chart:
        now = clock.time()
        return await server.speed_history.read(now - 3600 * hours, now)

    return json_response(await server.cache.get(("speed", hours), _FRESH_OF_ALL, read))


@charts_router.get(
    "/runs/{run_id}/charts/{chart}", response_model=answer(Chart), responses=problems(401, 404, 422, 503)
)
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
        samples = [sample for sample in samples if sample.at >= clock.time() - 3600 * hours]
    if chart == "states":
        return state_chart(samples)
    return speed_chart([samples], samples[0].at, samples[-1].at) if samples else Chart([], [])


# -- the processes of all unfinished runs


workers_router = APIRouter(prefix="/api/workers", tags=["workers"], route_class=BoundedRoute)


@workers_router.get("", response_model=answer(FleetPage), responses=problems(401, 422, 503))
async def list_processes(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000, description="Number of processes.")] = 200
) -> Response:
    """Every process of the unfinished runs: where it runs, its role, last heartbeat, speed and memory. Those that
    work come first."""
    server = server_of(request)
    snapshot = await server.snapshots.get()
    if snapshot.away:
        raise StoreAwayError(snapshot.away)
    processes = await read_fleet(server.store, snapshot)
    return json_response(FleetPage(processes=processes[:limit]))
