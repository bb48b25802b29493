"""The harness of the PostgreSQL frontier, on the shared server."""

from __future__ import annotations

import asyncpg

from shoal.frontier.postgres import PostgresStore
from shoal.ports import Store
from shoal.testing import Harness
from tests.support.databases import PostgresServer, shared

SCHEMA = "contract"
_EMPTY = f"""
DELETE FROM {SCHEMA}.run; DELETE FROM {SCHEMA}.ledger; DELETE FROM {SCHEMA}.lane; DELETE FROM {SCHEMA}.request;
DELETE FROM {SCHEMA}.host WHERE id <> 0;
UPDATE {SCHEMA}.host SET delay = NULL, concurrency = NULL, crawl_delay = NULL, learned_delay = NULL, blocked_until = 0,
    ended_at = 0;
DELETE FROM {SCHEMA}.ready; DELETE FROM {SCHEMA}.held; DELETE FROM {SCHEMA}.outcome; DELETE FROM {SCHEMA}.item;
DELETE FROM {SCHEMA}.stage; DELETE FROM {SCHEMA}.chunk; DELETE FROM {SCHEMA}.rewind; DELETE FROM {SCHEMA}.document;
UPDATE {SCHEMA}.clock_state SET seen = 0, skew = 0; UPDATE {SCHEMA}.poll_state SET since = 0, polls = 0, poll_after = 0;
DELETE FROM {SCHEMA}.turn; DELETE FROM {SCHEMA}.presence; DELETE FROM {SCHEMA}.cookie_version;
DELETE FROM {SCHEMA}.inventory;
DELETE FROM {SCHEMA}.event; DELETE FROM {SCHEMA}.role; DELETE FROM {SCHEMA}.note; DELETE FROM {SCHEMA}.holder;
DELETE FROM {SCHEMA}.worker; DELETE FROM {SCHEMA}.heard;
"""


class PostgresHarness(Harness):
    """All tests use one schema, which is emptied before each."""

    durable = True
    drift = 0.99

    def __init__(self) -> None:
        super().__init__()
        self._url = f"{shared(PostgresServer).url}?schema={SCHEMA}"
        self._offset = 0.0

    async def open_store(self) -> Store:
        store = await self._open()
        link: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(shared(PostgresServer).url)
        await link.execute(_EMPTY)
        await link.close()
        return store

    async def _open(self) -> Store:
        return await PostgresStore.open(self._url, offset=lambda: self._offset)

    async def revive_store(self) -> Store:
        """Open the store with new connections, as another process does."""
        await self.store.close()
        return await self._open()

    async def advance(self, seconds: float) -> None:
        self._offset += seconds
