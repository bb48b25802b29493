"""`/api/clusters`: the state of a cluster, and its number of Runners and Backup Runners."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from shoal.cluster.election import roles
from shoal.ports import Counts
from shoal.server.action_log import record_action
from shoal.server.bodies import BoundedRoute
from shoal.server.coordinators import opened_coordinator, read_view
from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.schemas.clusters import ClusterPage, ScaleCluster, Scaled
from shoal.server.schemas.common import PRINTABLE
from shoal.server.state import server_of

router = APIRouter(prefix="/api/clusters", tags=["clusters"], route_class=BoundedRoute)

Name = Annotated[
    str,
    Path(max_length=200, pattern=PRINTABLE, description="Name of the cluster; by default the `run_id`."),
]


@router.get("/{name}", response_model=ClusterPage, responses=problems(401, 404, 422, 503))
async def read_cluster(
    name: Name,
    request: Request,
    events: Annotated[int, Query(ge=0, le=1000, description="Number of latest events.")] = 20,
) -> Response:
    """Members with their roles and last heartbeats, slots, and the latest events."""
    async with opened_coordinator(server_of(request).config, name) as coordinator:
        view = await read_view(coordinator)
        last = await coordinator.events(events) if events else []
    return json_response({"cluster": name, "roles": roles(view), **msgspec.structs.asdict(view), "events": last})


@router.post("/{name}/scale", response_model=Scaled, responses=problems(401, 404, 422, 503))
async def scale(name: Name, target: ScaleCluster, request: Request) -> Response:
    """Change the number of Runners and Backup Runners. The nodes apply it: they promote Backup Runners, or Runners
    finish their work and step down."""
    async with opened_coordinator(server_of(request).config, name) as coordinator:
        before = (await read_view(coordinator)).counts
        after = Counts(
            before.runner if target.runner is None else target.runner,
            before.backup if target.backup is None else target.backup,
        )
        await coordinator.scale(after)
    await record_action(request, "scale", name, f"{after.runner} Runners, {after.backup} Backup Runners")
    return json_response({"cluster": name, "before": before, "after": after})
