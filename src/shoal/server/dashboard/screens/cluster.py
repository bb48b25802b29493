"""One cluster: its members, slots and events, and how many Runners and Backup Runners it should have."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.cluster.election import roles
from shoal.errors import CoordinatorAwayError
from shoal.monitoring.fleet import read_fleet
from shoal.server.coordinators import opened_coordinator, read_view
from shoal.server.dashboard.pages import add_screen
from shoal.server.errors import ProblemError
from shoal.server.state import Server

router = APIRouter()

_EVENTS = 100


async def load(server: Server, request: Request) -> dict[str, object]:
    name = request.path_params["name"][:200]
    try:
        async with opened_coordinator(server.config, name) as coordinator:
            view = await read_view(coordinator)
            events = await coordinator.events(_EVENTS)
    except CoordinatorAwayError:
        raise ProblemError(503, "coordinator away", "The coordinator does not answer. Reload in a moment.") from None
    processes = await read_fleet(server.store, await server.snapshots.get())
    own = [each for each in processes if each.cluster == name]
    run = await server.store.get_run(own[0].run_id if own else name)
    is_shown = run is not None and run.project == server.config.project_name
    return {
        "cluster": name, "run": run if is_shown else None, "view": view, "roles": roles(view),
        "slots": {slot.holder: slot for slot in view.slots if slot.holder}, "events": events[::-1],
        "takeovers": sum(event.what == "took over" for event in events),
        "processes": {each.epoch: each for each in own},
    }  # fmt: skip


add_screen(router, "/ui/clusters/{name}", "cluster", load)
