"""Charts of the history of runs, as the dashboard draws them."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from shoal.monitoring.charts import Chart, speed_chart, state_chart
from shoal.monitoring.samples import read_history
from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.run_lookup import RunId, find_run
from shoal.server.schemas.charts import ChartModel
from shoal.server.state import Server, server_of

router = APIRouter(prefix="/api", tags=["charts"])

_FRESH = 4.0  # seconds for which readers share a chart
_FRESH_OF_ALL = 15.0

ChartName = Annotated[
    Literal["states", "speed"],
    Path(description="`states`: requests in each state. `speed`: pages and items per second."),
]


@router.get("/charts/speed", response_model=ChartModel, responses=problems(401, 422, 503))
async def read_speed(
    request: Request, hours: Annotated[float, Query(gt=0, le=24, description="How far back.")] = 1.0
) -> Response:
    """Pages and items per second of all runs together over the last hours."""
    server = server_of(request)

    async def read() -> Chart:
        now = time.time()
        return await server.speed_history.read(now - 3600 * hours, now)

    return json_response(await server.cache.get(("speed", hours), _FRESH_OF_ALL, read))


@router.get("/runs/{run_id}/charts/{chart}", response_model=ChartModel, responses=problems(401, 404, 422, 503))
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
