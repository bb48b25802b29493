"""A server that is frozen finds old calls in its sockets when it goes on: they must not take what nobody works on."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import StoreAwayError
from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import FrontierOptions, Run
from tests.databases import DatabaseServer, PostgresServer, RedisServer


@pytest.mark.parametrize("kind", [RedisServer, PostgresServer])
async def test_a_lease_that_nobody_waits_for_takes_nothing(kind: type[DatabaseServer]) -> None:
    server = kind()
    try:
        store = await open_store(f"{server.url}?timeout=1")
        await store.create_run(Run(run_id="run", spider="x", state="running", created_at=0.0))
        frontier = await store.frontier("run", FrontierOptions())
        await frontier.push([Request(f"http://a.example/{number}") for number in range(10)])
        assert len((await frontier.lease(1, 300)).leases) == 1
        with server.frozen():
            with pytest.raises(StoreAwayError):
                await frontier.lease(5, 300)
            await asyncio.sleep(1.2)
        await asyncio.sleep(0.3)
        stats = await frontier.stats()
        assert (stats.leased, stats.ready) == (1, 9)
        assert len((await frontier.lease(2, 300)).leases) == 2
        await store.close()
    finally:
        server.close()
