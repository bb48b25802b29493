"""`/api/clusters`: Runners and Backup Runners, how they stand, and how many there are to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from shoal.cluster import open_coordinator
from shoal.cluster.election import roles
from shoal.errors import ConfigError, CoordinatorAwayError, CoordinatorError
from shoal.ports import ClusterView, Coordinator, Counts
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import ProblemError, responses, told
from shoal.server.schemas.runs import PRINTABLE, ClusterPage, ScaleCluster, Scaled
from shoal.server.state import server_of

router = APIRouter(prefix="/api/clusters", tags=["clusters"], route_class=BoundedRoute)

_PATIENCE = 10.0  # seconds that a coordinator has for all of an answer

Name = Annotated[
    str,
    Path(max_length=200, pattern=PRINTABLE, description="Its name: that of the run, unless it was given one."),
]


@router.get("/{name}", response_model=ClusterPage, responses=responses(401, 404, 422, 503))
async def read_cluster(
    name: Name,
    request: Request,
    events: Annotated[int, Query(ge=0, le=1000, description="How many of the last events.")] = 20,
) -> Response:
    """Who is a member, what each does and when it was heard of, which slots they have, and what happened last."""
    async with _opened(request, name) as coordinator:
        view = await _look(coordinator)
        last = await coordinator.events(events) if events else []
    return _json({"cluster": name, "roles": roles(view), **msgspec.structs.asdict(view), "events": last})


@router.post("/{name}/scale", response_model=Scaled, responses=responses(401, 404, 422, 503))
async def scale(name: Name, wanted: ScaleCluster, request: Request) -> Response:
    """Change how many nodes work and how many stand by. Nodes see to it: some are promoted, or retire in good
    order."""
    async with _opened(request, name) as coordinator:
        before = (await _look(coordinator)).counts
        after = Counts(
            before.runner if wanted.runner is None else wanted.runner,
            before.backup if wanted.backup is None else wanted.backup,
        )
        await coordinator.scale(after)
    return _json({"cluster": name, "before": before, "after": after})


@asynccontextmanager
async def _opened(request: Request, name: str) -> AsyncIterator[Coordinator]:
    """For one request: a server of its own, that may be away while all else is well."""
    config = server_of(request).config
    url = config.cluster.coordinator or config.frontier
    if url.partition(":")[0] in ("memory", "sqlite"):
        raise ConfigError(
            "this server knows no coordinator: set cluster.coordinator to zookeeper://host:2181, redis://host or "
            "postgresql://host/database, or use a frontier on such a server"
        )
    try:
        async with asyncio.timeout(_PATIENCE):
            coordinator = await open_coordinator(url, name, ttl=config.cluster.session)
            try:
                yield coordinator
            finally:
                await coordinator.close()
    except TimeoutError:
        raise CoordinatorAwayError(f"the coordinator did not answer within {_PATIENCE:g} s") from None


async def _look(coordinator: Coordinator) -> ClusterView:
    try:
        return await coordinator.look()
    except CoordinatorAwayError:
        raise
    except CoordinatorError as exc:
        raise ProblemError(404, "no such cluster", told(exc)) from exc


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
