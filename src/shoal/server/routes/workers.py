"""`/api/workers`: the processes of all unfinished runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from shoal.errors import StoreAwayError
from shoal.monitoring.fleet import read_fleet
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.schemas.workers import FleetPage
from shoal.server.state import server_of

router = APIRouter(prefix="/api/workers", tags=["workers"], route_class=BoundedRoute)


@router.get("", response_model=FleetPage, responses=problems(401, 422, 503))
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
