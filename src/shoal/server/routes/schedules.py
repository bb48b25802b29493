"""`/api/schedules`: spiders that run at set times."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from shoal.batch.redaction import redacted
from shoal.errors import SinkError, SpiderError
from shoal.schedules.definitions import make_definition
from shoal.schedules.service import Schedules, describe
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import ProblemError, problems, public_message
from shoal.server.responses import json_response
from shoal.server.schemas.common import PRINTABLE
from shoal.server.schemas.schedules import AddSchedule, ScheduleList, ScheduleModel, ScheduleRemoved, ScheduleRun
from shoal.server.state import server_of

router = APIRouter(prefix="/api/schedules", tags=["schedules"], route_class=BoundedRoute)

Name = Annotated[str, Path(max_length=200, pattern=PRINTABLE, description="Name of the schedule.")]


@router.get("", response_model=ScheduleList, responses=problems(401, 422, 503))
async def list_schedules(request: Request) -> Response:
    """All schedules of the project, also those that other servers, commands or shoal.toml added."""
    schedules = server_of(request).schedules
    return json_response({"schedules": [await _page(schedules, each.name) for each in await schedules.list_all()]})


@router.post("", status_code=201, response_model=ScheduleModel, responses=problems(401, 409, 413, 422, 503))
async def add(body: AddSchedule, request: Request) -> Response:
    """Add a schedule for a spider of the registry. Each time starts one run, however many servers there are."""
    server = server_of(request)
    given = body.model_dump(exclude={"name"}, exclude_none=True)
    definition = make_definition(body.name, given, server.orchestrator().registry)
    await server.schedules.add(body.name, definition)
    server.schedule_runner.wake()
    location = {"Location": f"/api/schedules/{body.name}"}
    return json_response(await _page(server.schedules, body.name), 201, location)


@router.get("/{name}", response_model=ScheduleModel, responses=problems(401, 404, 422, 503))
async def read_schedule(name: Name, request: Request) -> Response:
    """A schedule, its next time, and its newest run."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    return json_response(await _page(schedules, name))


@router.post("/{name}/pause", response_model=ScheduleModel, responses=problems(401, 404, 422, 503))
async def pause(name: Name, request: Request) -> Response:
    """Start no more runs until you resume the schedule. A run that works continues."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    await schedules.pause(name)
    return json_response(await _page(schedules, name))


@router.post("/{name}/resume", response_model=ScheduleModel, responses=problems(401, 404, 422, 503))
async def resume(name: Name, request: Request) -> Response:
    """Continue with the next time. Times during the pause are not made up for."""
    server = server_of(request)
    await _find(server.schedules, name)
    await server.schedules.resume(name)
    server.schedule_runner.wake()
    return json_response(await _page(server.schedules, name))


@router.post("/{name}/run", status_code=201, response_model=ScheduleRun, responses=problems(401, 404, 409, 422, 503))
async def run(name: Name, request: Request) -> Response:
    """Start a run now. The overlap policy applies: 409 if the run before still works and the policy is `skip`."""
    server = server_of(request)
    await _find(server.schedules, name)
    try:
        fired = await server.schedules.run(name, server.scheduled_runs.make_run)
    except (SpiderError, SinkError) as exc:
        raise ProblemError(422, "bad request", public_message(exc)) from exc
    if fired.cancelled:
        await server.scheduled_runs.cancelled(fired.cancelled)
    if fired.run is not None and not server.visits:
        await server.scheduled_runs.launch(fired.run)
    server.schedule_runner.wake()
    run_id = "" if fired.run is None else fired.run.run_id
    return json_response({"name": name, "run_id": run_id, "waits": not run_id}, 201)


@router.delete("/{name}", response_model=ScheduleRemoved, responses=problems(401, 404, 409, 422, 503))
async def remove(name: Name, request: Request) -> Response:
    """Delete a schedule. Its runs stay. One that is defined in shoal.toml is removed there: 409."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    await schedules.remove(name)
    return json_response({"name": name, "removed": True})


async def _find(schedules: Schedules, name: str) -> None:
    if await schedules.find(name) is None:
        raise ProblemError(404, "no such schedule", f"schedule {name!r:.120} does not exist")


async def _page(schedules: Schedules, name: str) -> dict[str, object]:
    found = await describe(schedules, await schedules.get(name))
    return {**found, "error": redacted(str(found["error"]))}
