"""`/api/schedules`: spiders that run at set times."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from shoal.batch.redaction import redacted
from shoal.errors import SinkError, SpiderError
from shoal.schedules.definitions import DefinitionError, make_definition
from shoal.schedules.schedule import Definition, Schedule, describe_timing
from shoal.schedules.service import Schedules, describe
from shoal.server.action_log import record_action
from shoal.server.bodies import BodyError, BoundedRoute
from shoal.server.errors import ProblemError, problems, public_message
from shoal.server.responses import json_response
from shoal.server.schemas.common import PRINTABLE
from shoal.server.schemas.schedules import (
    AddSchedule,
    ChangeSchedule,
    ScheduleList,
    ScheduleModel,
    ScheduleRemoved,
    ScheduleRun,
)
from shoal.server.state import Server, server_of

router = APIRouter(prefix="/api/schedules", tags=["schedules"], route_class=BoundedRoute)

Name = Annotated[str, Path(max_length=200, pattern=PRINTABLE, description="Name of the schedule.")]


@router.get("", response_model=ScheduleList, responses=problems(401, 422, 503))
async def list_schedules(request: Request) -> Response:
    """All schedules of the project, also those that other servers, commands or shoal.toml added."""
    schedules = server_of(request).schedules
    pages = await asyncio.gather(*(_describe(schedules, each) for each in await schedules.list_all()))
    return json_response({"schedules": pages})


@router.post("", status_code=201, response_model=ScheduleModel, responses=problems(401, 409, 413, 422, 503))
async def add(body: AddSchedule, request: Request) -> Response:
    """Add a schedule for a spider of the registry. Each time starts one run, however many servers there are."""
    server = server_of(request)
    definition = _define(server, body.name, body)
    await server.schedules.add(body.name, definition)
    await record_action(request, "add schedule", body.name, f"{definition.spider}, {describe_timing(definition)}")
    server.schedule_runner.wake()
    location = {"Location": f"/api/schedules/{body.name}"}
    return json_response(await _page(server.schedules, body.name), 201, location)


@router.get("/{name}", response_model=ScheduleModel, responses=problems(401, 404, 422, 503))
async def read_schedule(name: Name, request: Request) -> Response:
    """A schedule, its next time, and its newest run."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    return json_response(await _page(schedules, name))


@router.put("/{name}", response_model=ScheduleModel, responses=problems(401, 404, 409, 413, 422, 503))
async def change(name: Name, body: ChangeSchedule, request: Request) -> Response:
    """Replace the definition of a schedule. The new times apply from now on. 409 if it is defined in shoal.toml: change
    it there."""
    server = server_of(request)
    await _find(server.schedules, name)
    definition = _define(server, name, body)
    await server.schedules.add(name, definition, replaces=True)
    await record_action(request, "change schedule", name, f"{definition.spider}, {describe_timing(definition)}")
    server.schedule_runner.wake()
    return json_response(await _page(server.schedules, name))


@router.post("/{name}/pause", response_model=ScheduleModel, responses=problems(401, 404, 422, 503))
async def pause(name: Name, request: Request) -> Response:
    """Start no more runs until you resume the schedule. An active run continues."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    await schedules.pause(name)
    await record_action(request, "pause schedule", name)
    return json_response(await _page(schedules, name))


@router.post("/{name}/resume", response_model=ScheduleModel, responses=problems(401, 404, 422, 503))
async def resume(name: Name, request: Request) -> Response:
    """Resume a schedule at its next time. Times during the pause are skipped."""
    server = server_of(request)
    await _find(server.schedules, name)
    await server.schedules.resume(name)
    await record_action(request, "resume schedule", name)
    server.schedule_runner.wake()
    return json_response(await _page(server.schedules, name))


@router.post("/{name}/run", status_code=201, response_model=ScheduleRun, responses=problems(401, 404, 409, 422, 503))
async def run(name: Name, request: Request) -> Response:
    """Start a run now. The overlap policy applies: 409 if the previous run is still active and the policy is `skip`."""
    server = server_of(request)
    await _find(server.schedules, name)
    try:
        fired = await server.schedules.run(name, server.scheduled_runs.make_run)
    except (SpiderError, SinkError) as exc:
        raise ProblemError(422, "bad request", public_message(exc)) from exc
    if fired.cancelled:
        await server.scheduled_runs.cancelled(fired.cancelled)
    if fired.run is not None and not server.ui_only:
        await server.scheduled_runs.launch(fired.run)
    server.schedule_runner.wake()
    run_id = "" if fired.run is None else fired.run.run_id
    await record_action(request, "run schedule", name, f"run {run_id}" if run_id else "it waits for the earlier run")
    return json_response({"name": name, "run_id": run_id, "waits": not run_id}, 201)


@router.delete("/{name}", response_model=ScheduleRemoved, responses=problems(401, 404, 409, 422, 503))
async def remove(name: Name, request: Request) -> Response:
    """Delete a schedule. Its runs stay. 409 if it is defined in shoal.toml: remove it there."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    await schedules.remove(name)
    await record_action(request, "delete schedule", name)
    return json_response({"name": name, "removed": True})


def _define(server: Server, name: str, body: ChangeSchedule) -> Definition:
    """The checked definition. BodyError names the key that is wrong."""
    given = body.model_dump(exclude={"name"}, exclude_none=True)
    try:
        return make_definition(name, given, server.orchestrator().registry)
    except DefinitionError as exc:
        raise BodyError(f"body.{exc.key}", redacted(str(exc))) from exc


async def _find(schedules: Schedules, name: str) -> None:
    if await schedules.find(name) is None:
        raise ProblemError(404, "no such schedule", f"schedule {name!r:.120} does not exist")


async def _page(schedules: Schedules, name: str) -> dict[str, object]:
    return await _describe(schedules, await schedules.get(name))


async def _describe(schedules: Schedules, schedule: Schedule) -> dict[str, object]:
    found = await describe(schedules, schedule)
    return {**found, "error": redacted(str(found["error"]))}
