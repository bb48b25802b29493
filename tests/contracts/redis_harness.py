"""The harness of the Redis frontier, on the shared server."""

from __future__ import annotations

from itertools import count
from uuid import uuid4

from shoal.frontier.redis import RedisStore
from shoal.ports import Store
from shoal.testing import Harness
from tests.support.databases import RedisServer, shared

_FAMILY = uuid4().hex[:8]
_numbers = count(1)


class RedisHarness(Harness):
    """Each store has its own prefix. Its time is that of the server plus an offset."""

    durable = True
    keeps_leases = True
    drift = 0.9

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0
        self._url = ""

    async def open_store(self) -> Store:
        self._url = f"{shared(RedisServer).url}?prefix={_FAMILY}-{next(_numbers)}"
        return await self._open()

    async def revive_store(self) -> Store:
        """Open the store with new connections, as another process does."""
        await self.store.close()
        return await self._open()

    async def _open(self) -> Store:
        return await RedisStore.open(self._url, offset=lambda: self._ahead)

    async def advance(self, seconds: float) -> None:
        self._ahead += seconds
