"""The harness of the PostgreSQL coordinator, on the shared server."""

from __future__ import annotations

import asyncpg

from shoal.ports import Coordinator
from shoal.runs.cluster.postgres import PostgresCoordinator
from shoal.testing import CoordinatorHarness
from shoal.testing.coordination import TTL
from tests.support.databases import PostgresServer, shared

SCHEMA = "coordination"
_EMPTY = "; ".join(f"DELETE FROM {SCHEMA}.{table}" for table in ("cluster", "member", "slot", "cluster_event"))


class PostgresCoordination(CoordinatorHarness):
    """All tests use one schema, one after the other. It is emptied before each."""

    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        server = shared(PostgresServer)
        made = await PostgresCoordinator.open(f"{server.url}?schema={SCHEMA}", cluster, ttl)
        if not self.opened:
            link: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(server.url)
            await link.execute(_EMPTY)
            await link.close()
        return made

    async def abandon(self, coordinator: Coordinator) -> None:
        """Do nothing: without further calls of `beat`, the session expires."""
