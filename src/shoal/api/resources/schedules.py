"""`/api/schedules`: spiders that run at set times."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from msgspec import Struct, convert
from msgspec.structs import replace
from pydantic import Field

from shoal.api.batch.options import StrictModel, at_most
from shoal.api.batch.urls import redacted
from shoal.api.resources.common import PRINTABLE, Scalar, Word, record_action, spider_problems, with_examples
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BodyError, BoundedRoute
from shoal.api.server.errors import ProblemError, problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import Server, server_of
from shoal.operations.schedules.definitions import DefinitionError, make_definition
from shoal.operations.schedules.schedule import Definition, Schedule, describe_timing
from shoal.operations.schedules.service import Schedules, describe

Overlap = Annotated[
    Literal["skip", "wait", "cancel"],
    Field(description="If the previous run is still active: skip the time, wait until the run ends, or cancel it."),
]
Missed = Annotated[
    Literal["one", "all", "none"],
    Field(description="Times at which no server ran: start a run for the latest, for all of them, or for none."),
]


class ChangeSchedule(StrictModel):
    """What runs, and when. Set either `cron` or `every`."""

    model_config = with_examples({"spider": "Books", "every": "30m", "overlap": "wait"})

    spider: Word
    arguments: Annotated[
        dict[Word, Scalar], Field(max_length=100, description="Constructor arguments of the spider."), at_most(100)
    ] = {}
    settings: Annotated[
        dict[Word, Scalar | Annotated[list[Scalar], Field(max_length=1000), at_most(1000)]],
        Field(max_length=100, description="Settings by dotted key, such as `scope.max_pages`."),
        at_most(100),
    ] = {}
    cron: Annotated[Word | None, Field(description="Minute, hour, day of month, month, day of week.")] = None
    every: Annotated[Word | None, Field(description="An interval such as `90s`, `15m`, `1h30m`, `1d`.")] = None
    time_zone: Annotated[Word | None, Field(description="IANA name, for `cron`. Default: UTC.")] = None
    jitter: Annotated[float, Field(ge=0, le=86400, description="Start up to this many seconds later.")] = 0.0
    overlap: Overlap = "skip"
    missed: Missed = "one"
    keep: Annotated[
        int | None, Field(ge=0, le=1_000_000, description="Number of ended runs to keep. Default: all.")
    ] = None


class AddSchedule(ChangeSchedule):
    """Runs a spider of the registry at set times. Set either `cron` or `every`."""

    model_config = with_examples(
        {"name": "nightly", "spider": "Books", "cron": "30 2 * * *", "time_zone": "Europe/Berlin", "keep": 30},
        {"name": "often", "spider": "Books", "every": "15m", "arguments": {"category": "travel"}, "overlap": "wait"},
    )

    name: Word


class SchedulePage(Definition, frozen=True, kw_only=True, omit_defaults=False):
    """A schedule and its state. Times are Unix times, in seconds."""

    name: str
    origin: Literal["file", "store"]
    """`file`: it is defined in shoal.toml."""
    source: str
    """The machine and the shoal.toml that define it, or an empty string."""
    orphaned_at: float | None
    """Since when no server that runs has it in its shoal.toml. It starts no runs until then."""
    paused: bool
    next: float | None
    """The next time, without jitter; `null` while it is paused or orphaned."""
    waiting: float | None
    """A time whose run starts when the previous run ends."""
    run_id: str
    """The newest run, or an empty string."""
    run_state: str | None
    """State of that run; `null` if it does not exist."""
    fired_at: float | None
    """The time of the newest run."""
    fired: int
    """Number of runs."""
    skipped: int
    """Number of times that were skipped because of `overlap`."""
    missed_times: int
    """Number of missed times without a run."""
    missed_at: float | None
    """The last missed time."""
    error: str
    """Why the last run could not start or failed, or an empty string."""


class ScheduleList(Struct, frozen=True, kw_only=True):
    """All schedules of the project, in the order of their names."""

    schedules: list[SchedulePage]


class ScheduleRun(Struct, frozen=True, kw_only=True):
    """A run that was started now. `run_id` is empty if it waits for the previous run."""

    name: str
    run_id: str
    waits: bool


class ScheduleRemoved(Struct, frozen=True, kw_only=True):
    """A schedule that was deleted. Its runs stay."""

    name: str
    removed: bool


router = APIRouter(prefix="/api/schedules", tags=["schedules"], route_class=BoundedRoute)

Name = Annotated[str, Path(max_length=200, pattern=PRINTABLE, description="Name of the schedule.")]


@router.get("", response_model=answer(ScheduleList), responses=problems(401, 422, 503))
async def list_schedules(request: Request) -> Response:
    """All schedules of the project, also those that other servers, commands or shoal.toml added."""
    schedules = server_of(request).schedules
    pages = await asyncio.gather(*(_describe(schedules, schedule) for schedule in await schedules.list_all()))
    return json_response(ScheduleList(schedules=pages))


@router.post("", status_code=201, response_model=answer(SchedulePage), responses=problems(401, 409, 413, 422, 503))
async def add(body: AddSchedule, request: Request) -> Response:
    """Add a schedule for a spider of the registry. Each time starts one run, however many servers there are."""
    server = server_of(request)
    definition = _define(server, body.name, body)
    await server.schedules.add(body.name, definition)
    await record_action(request, "add schedule", body.name, f"{definition.spider}, {describe_timing(definition)}")
    server.schedule_runner.wake()
    location = {"Location": f"/api/schedules/{body.name}"}
    return json_response(await _page(server.schedules, body.name), 201, location)


@router.get("/{name}", response_model=answer(SchedulePage), responses=problems(401, 404, 422, 503))
async def read_schedule(name: Name, request: Request) -> Response:
    """A schedule, its next time, and its newest run."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    return json_response(await _page(schedules, name))


@router.put("/{name}", response_model=answer(SchedulePage), responses=problems(401, 404, 409, 413, 422, 503))
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


@router.post("/{name}/pause", response_model=answer(SchedulePage), responses=problems(401, 404, 422, 503))
async def pause(name: Name, request: Request) -> Response:
    """Start no more runs until you resume the schedule. An active run continues."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    await schedules.pause(name)
    await record_action(request, "pause schedule", name)
    return json_response(await _page(schedules, name))


@router.post("/{name}/resume", response_model=answer(SchedulePage), responses=problems(401, 404, 422, 503))
async def resume(name: Name, request: Request) -> Response:
    """Resume a schedule at its next time. Times during the pause are skipped."""
    server = server_of(request)
    await _find(server.schedules, name)
    await server.schedules.resume(name)
    await record_action(request, "resume schedule", name)
    server.schedule_runner.wake()
    return json_response(await _page(server.schedules, name))


@router.post(
    "/{name}/run", status_code=201, response_model=answer(ScheduleRun), responses=problems(401, 404, 409, 422, 503)
)
async def run(name: Name, request: Request) -> Response:
    """Start a run now. The overlap policy applies: 409 if the previous run is still active and the policy is `skip`."""
    server = server_of(request)
    await _find(server.schedules, name)
    with spider_problems():
        fired = await server.schedules.run(name, server.scheduled_runs.make_run)
    if fired.cancelled:
        await server.scheduled_runs.cancelled(fired.cancelled)
    if fired.run is not None and not server.ui_only:
        await server.scheduled_runs.launch(fired.run)
    server.schedule_runner.wake()
    run_id = "" if fired.run is None else fired.run.run_id
    await record_action(request, "run schedule", name, f"run {run_id}" if run_id else "it waits for the earlier run")
    return json_response(ScheduleRun(name=name, run_id=run_id, waits=not run_id), 201)


@router.delete("/{name}", response_model=answer(ScheduleRemoved), responses=problems(401, 404, 409, 422, 503))
async def remove(name: Name, request: Request) -> Response:
    """Delete a schedule. Its runs stay. 409 if it is defined in shoal.toml: remove it there."""
    schedules = server_of(request).schedules
    await _find(schedules, name)
    await schedules.remove(name)
    await record_action(request, "delete schedule", name)
    return json_response(ScheduleRemoved(name=name, removed=True))


def _define(server: Server, name: str, body: ChangeSchedule) -> Definition:
    """The checked definition. BodyError names the key that is wrong."""
    values = body.model_dump(exclude={"name"}, exclude_none=True)
    try:
        return make_definition(name, values, server.orchestrator().registry)
    except DefinitionError as exc:
        raise BodyError(f"body.{exc.key}", redacted(str(exc))) from exc


async def _find(schedules: Schedules, name: str) -> None:
    if await schedules.find(name) is None:
        raise ProblemError(404, "no such schedule", f"schedule {name!r:.120} does not exist")


async def _page(schedules: Schedules, name: str) -> SchedulePage:
    return await _describe(schedules, await schedules.get(name))


async def _describe(schedules: Schedules, schedule: Schedule) -> SchedulePage:
    page = convert(await describe(schedules, schedule), SchedulePage)
    return replace(page, error=redacted(page.error))
