"""The harness of the Redis coordinator, on the shared server."""

from __future__ import annotations

from itertools import count
from uuid import uuid4

from shoal.ports import Coordinator
from shoal.runs.cluster.redis import RedisCoordinator
from shoal.testing import CoordinatorHarness
from shoal.testing.coordination import TTL
from tests.support.databases import RedisServer, shared

_prefixes = (f"c{uuid4().hex[:8]}-{number}" for number in count(1))


class RedisCoordination(CoordinatorHarness):
    """Each test has its own prefix."""

    def __init__(self) -> None:
        super().__init__()
        self._url = f"{shared(RedisServer).url}?prefix={next(_prefixes)}"

    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        return await RedisCoordinator.open(self._url, cluster, ttl)

    async def abandon(self, coordinator: Coordinator) -> None:
        """Do nothing: without further calls of `beat`, the session expires."""
