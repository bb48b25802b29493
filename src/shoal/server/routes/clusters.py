"""`/api/clusters`: the state of a cluster, and its number of Runners and Backup Runners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from shoal.cluster import open_coordinator
from shoal.cluster.election import roles
from shoal.errors import ConfigError, CoordinatorAwayError, CoordinatorError
from shoal.ports import ClusterView, Coordinator, Counts
from shoal.server.action_log import record_action
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import ProblemError, problems, public_message
from shoal.server.responses import json_response
from shoal.server.schemas.clusters import ClusterPage, ScaleCluster, Scaled
from shoal.server.schemas.common import PRINTABLE
from shoal.server.state import server_of

router = APIRouter(prefix="/api/clusters", tags=["clusters"], route_class=BoundedRoute)

_TIMEOUT = 10.0  # seconds for all calls of the coordinator

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
    async with _open_coordinator(request, name) as coordinator:
        view = await _read_view(coordinator)
        last = await coordinator.events(events) if events else []
    return json_response({"cluster": name, "roles": roles(view), **msgspec.structs.asdict(view), "events": last})


@router.post("/{name}/scale", response_model=Scaled, responses=problems(401, 404, 422, 503))
async def scale(name: Name, target: ScaleCluster, request: Request) -> Response:
    """Change the number of Runners and Backup Runners. The nodes apply it: they promote Backup Runners, or Runners
    finish their work and step down."""
    async with _open_coordinator(request, name) as coordinator:
        before = (await _read_view(coordinator)).counts
        after = Counts(
            before.runner if target.runner is None else target.runner,
            before.backup if target.backup is None else target.backup,
        )
        await coordinator.scale(after)
    await record_action(request, "scale", name, f"{after.runner} Runners, {after.backup} Backup Runners")
    return json_response({"cluster": name, "before": before, "after": after})


@asynccontextmanager
async def _open_coordinator(request: Request, name: str) -> AsyncIterator[Coordinator]:
    """A coordinator for one request. It is not kept open: its server may be down while the API works."""
    config = server_of(request).config
    url = config.cluster.coordinator or config.frontier
    if url.partition(":")[0] in ("memory", "sqlite"):
        raise ConfigError(
            "no coordinator configured: set cluster.coordinator to zookeeper://host:2181, redis://host or "
            "postgresql://host/database, or use a Redis or PostgreSQL frontier"
        )
    try:
        async with asyncio.timeout(_TIMEOUT):
            coordinator = await open_coordinator(url, name, ttl=config.cluster.session)
            try:
                yield coordinator
            finally:
                await coordinator.close()
    except TimeoutError:
        raise CoordinatorAwayError(f"the coordinator did not respond within {_TIMEOUT:g} s") from None


async def _read_view(coordinator: Coordinator) -> ClusterView:
    try:
        return await coordinator.observe()
    except CoordinatorAwayError:
        raise
    except CoordinatorError as exc:
        raise ProblemError(404, "no such cluster", public_message(exc)) from exc
