"""`/api/clusters`: the state of a cluster, and its number of Runners and Backup Runners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from msgspec import Struct
from msgspec.structs import asdict
from pydantic import Field, model_validator

from shoal.api.batch.options import StrictModel
from shoal.api.resources.common import PRINTABLE, record_action, with_examples
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import ProblemError, problems, public_message
from shoal.api.server.responses import json_response
from shoal.api.server.state import server_of
from shoal.config import Config
from shoal.errors import ConfigError, CoordinatorAwayError, CoordinatorError
from shoal.ports import ClusterEvent, ClusterView, Coordinator, Counts
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.election import Role, roles


class ClusterPage(ClusterView, frozen=True, kw_only=True):
    """The current state of a cluster and its latest events."""

    cluster: str
    roles: dict[str, Role]
    events: list[ClusterEvent]
    """The latest events, oldest first."""


class ScaleCluster(StrictModel):
    """The number of Runners and Backup Runners you want. Omitted numbers stay as they are."""

    model_config = with_examples({"runner": 3, "backup": 2}, {"runner": 5})

    runner: Annotated[int | None, Field(ge=1, le=10_000)] = None
    backup: Annotated[int | None, Field(ge=0, le=10_000)] = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> ScaleCluster:
        if self.runner is None and self.backup is None:
            raise ValueError("nothing to change: send runner, backup or both")
        return self


class Scaled(Struct, frozen=True, kw_only=True):
    """The numbers before and after the change."""

    cluster: str
    before: Counts
    after: Counts


# -- coordinators of clusters, for one request each


_TIMEOUT = 10.0  # seconds for all calls of the coordinator


@asynccontextmanager
async def opened_coordinator(config: Config, name: str) -> AsyncIterator[Coordinator]:
    """The coordinator of a cluster. It is not kept open: its server may be down while this one works."""
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


async def read_view(coordinator: Coordinator) -> ClusterView:
    """The cluster as it is now. A cluster that never existed is 404."""
    try:
        return await coordinator.observe()
    except CoordinatorAwayError:
        raise
    except CoordinatorError as exc:
        raise ProblemError(404, "no such cluster", public_message(exc)) from exc


router = APIRouter(prefix="/api/clusters", tags=["clusters"], route_class=BoundedRoute)

Name = Annotated[
    str,
    Path(max_length=200, pattern=PRINTABLE, description="Name of the cluster; by default the `run_id`."),
]


@router.get("/{name}", response_model=answer(ClusterPage), responses=problems(401, 404, 422, 503))
async def read_cluster(
    name: Name,
    request: Request,
    events: Annotated[int, Query(ge=0, le=1000, description="Number of latest events.")] = 20,
) -> Response:
    """Members with their roles and last heartbeats, slots, and the latest events."""
    async with opened_coordinator(server_of(request).config, name) as coordinator:
        view = await read_view(coordinator)
        last = await coordinator.events(events) if events else []
    return json_response(ClusterPage(cluster=name, roles=roles(view), events=last, **asdict(view)))


@router.post("/{name}/scale", response_model=answer(Scaled), responses=problems(401, 404, 422, 503))
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
    return json_response(Scaled(cluster=name, before=before, after=after))
