"""Clients of one store, each with its own connections, which fail: for histories of concurrent calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import asyncpg
from redis.asyncio import Redis

from shoal.errors import StoreAwayError
from shoal.frontier import open_store
from shoal.frontier.local.server import FrontierServer
from shoal.frontier.memory import MemoryStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.ports import Store
from tests.nemesis.proxy import How, lossy
from tests.nemesis.wire_formats import Call
from tests.support.databases import DatabaseServer, PostgresServer, RedisServer, shared

Faults: TypeAlias = Literal["none", "lost", "killed"]
"""``lost``: some answers get lost, and the server did the call. ``killed``: the server ends connections."""
BACKENDS = ("memory", "sqlite", "redis", "postgresql")
LOSSES = 0.03
"""The part of the answers that get lost."""


@asynccontextmanager
async def clients(
    backend: str, count: int, faults: Faults, seed: int, name: str = "histories"
) -> AsyncIterator[list[Store]]:
    """``name``: of the store on its server. Stores in memory and in a file have no faults. All clients of a file but
    the first reach it over a socket."""
    async with AsyncExitStack() as stack:

        async def connect(url: str) -> Store:
            while True:
                with suppress(StoreAwayError):
                    store = await open_store(url)
                    stack.push_async_callback(store.close)
                    return store

        if backend == "memory":
            yield [MemoryStore()] * count
        elif backend == "sqlite":
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="shoal-histories-")))
            owned = await SQLiteStore.open(folder / "crawl.db")
            stack.push_async_callback(owned.close)
            server = FrontierServer(owned, durable=True)
            await server.start(folder / "socket")
            stack.push_async_callback(server.close)
            yield [owned, *[await connect(f"local:{folder / 'socket'}") for _ in range(count - 1)]]
        else:
            database: DatabaseServer = shared(RedisServer if backend == "redis" else PostgresServer)
            kind, place = ("redis", "prefix") if backend == "redis" else ("postgres", "schema")
            dice = random.Random(seed)

            def loses(call: Call, number: int) -> How | None:
                return "cut" if dice.random() < LOSSES else None

            proxy = stack.enter_context(lossy(kind, database.port, lambda call, number: None))
            url = database.url.replace(f":{database.port}/", f":{proxy.port}/") if faults == "lost" else database.url
            stores = [await connect(f"{url}?{place}={name}") for _ in range(count)]
            if faults == "lost":
                proxy.loses = loses
            killing = asyncio.create_task(_kill_connections(database, dice)) if faults == "killed" else None
            try:
                yield stores
            finally:
                proxy.loses = lambda call, number: None
                if killing is not None:
                    killing.cancel()
                    with suppress(asyncio.CancelledError):
                        await killing


async def _kill_connections(database: DatabaseServer, dice: random.Random) -> None:
    """Have the server end all connections of Shoal, now and then."""
    kill: Callable[[], Awaitable[object]]
    async with AsyncExitStack() as stack:
        if isinstance(database, RedisServer):
            client: Redis = await stack.enter_async_context(Redis(port=database.port, protocol=2))
            kill = lambda: client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # noqa: E731
        else:
            link = await asyncpg.connect(database.url)
            stack.push_async_callback(link.close)
            kill = lambda: link.fetch(  # noqa: E731
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shoal'"
            )
        while True:
            await asyncio.sleep(0.5 + dice.random() * 1.5)
            await kill()
