"""Coordinators of clusters, for one request each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.cluster import open_coordinator
from shoal.config import Config
from shoal.errors import ConfigError, CoordinatorAwayError, CoordinatorError
from shoal.ports import ClusterView, Coordinator
from shoal.server.errors import ProblemError, public_message

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
