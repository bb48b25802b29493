"""Schedules: the list with a form, and one schedule with its runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice
from zoneinfo import available_timezones

from fastapi import APIRouter, Request

from shoal.batch.redaction import redacted
from shoal.errors import ShoalError
from shoal.schedules.schedule import Schedule, describe_timing
from shoal.server.dashboard.pages import add_screen
from shoal.server.dashboard.screens.runs import read_result, spider_names
from shoal.server.errors import ProblemError
from shoal.server.state import Server

router = APIRouter()

_RUNS = 30
_SEARCHED = 2000
_NEXT = 5


async def load(server: Server, request: Request) -> dict[str, object]:
    rows = []
    for each in await server.schedules.list_all():
        state = await server.store.run_state(each.run_id) if each.run_id else None
        rows.append((each, describe_timing(each.definition), next(iter(_next_times(each, 1)), None), state))
    return {"rows": [(*row, redacted(row[0].error)) for row in rows], **_choices(server)}


async def load_one(server: Server, request: Request) -> dict[str, object]:
    name = request.path_params["name"]
    schedule = await server.schedules.find(name)
    if schedule is None:
        raise ProblemError(404, "no such schedule", f"There is no schedule {name!r:.200}.")
    runs = (await server.schedules.runs(name, among=_SEARCHED))[:_RUNS]
    rows = [(run, *result) for run in runs if (result := await read_result(server, run)) is not None]
    return {
        "schedule": schedule, "definition": schedule.definition, "timing": describe_timing(schedule.definition),
        "next_times": _next_times(schedule, _NEXT), "rows": rows, "error": redacted(schedule.error),
        **_choices(server),
    }  # fmt: skip


def _choices(server: Server) -> dict[str, object]:
    return {"spiders": spider_names(server), "zones": _zones()}


@cache
def _zones() -> list[str]:
    return sorted(available_timezones())


def _next_times(schedule: Schedule, count: int) -> list[float]:
    """The next times, without jitter. Empty while it is paused, or if another program stored an invalid schedule."""

    def times() -> Iterator[float]:
        at = schedule.next_due
        while at is not None:
            yield at
            at = schedule.definition.times.after(at)

    try:
        return list(islice(times(), count))
    except ShoalError:
        return []


add_screen(router, "/ui/schedules", "schedules", load)
add_screen(router, "/ui/schedules/{name}", "schedule", load_one)
