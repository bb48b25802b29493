"""A store on a Redis Cluster while its slot moves to another node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis

from shoal.errors import StoreAwayError
from shoal.frontier.redis import RedisStore
from shoal.ports import Completion, Frontier, FrontierOptions, Run
from shoal.testing.steps import TTL, check_balance, page
from tests.support.databases import RedisServer, free_port

T = TypeVar("T")

PAGES = 150


@pytest.fixture
def nodes() -> Iterator[list[RedisServer]]:
    servers = [RedisServer(cluster_enabled="yes", cluster_port=str(free_port())) for _ in range(3)]
    yield servers
    for server in servers:
        server.close()


@asynccontextmanager
async def clients(servers: list[RedisServer]) -> AsyncIterator[list[Any]]:
    made = [Redis(port=server.port, protocol=2) for server in servers]
    try:
        yield made
    finally:
        for client in made:
            await client.aclose()
            await client.connection_pool.disconnect()


async def join(servers: list[RedisServer], redises: list[Any]) -> list[str]:
    """One cluster of all nodes, each with a third of the slots. Returns their names."""
    for index, client in enumerate(redises):
        bounds = index * 16384 // 3, (index + 1) * 16384 // 3 - 1
        await client.execute_command("CLUSTER", "ADDSLOTSRANGE", *bounds)
    for server in servers[1:]:
        bus = server.settings["cluster_port"]
        await redises[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
    async with asyncio.timeout(60):
        for client in redises:
            while True:
                info = await client.execute_command("CLUSTER INFO")
                if info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3":
                    break
                await asyncio.sleep(0.05)
    return [(await client.execute_command("CLUSTER", "MYID")).decode() for client in redises]


async def insist(step: Callable[[], Awaitable[T]]) -> T:
    """Again and again while the store is away."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await step()
            except StoreAwayError:
                await asyncio.sleep(0.02)


async def crawl(frontier: Frontier) -> None:
    """Every page leads to the next two, until there are PAGES."""
    while True:
        nonce = os.urandom(16)
        leased = await insist(lambda nonce=nonce: frontier.lease(3, TTL, nonce=nonce))  # type: ignore[misc]
        pages = []
        for lease in leased.leases:
            number = int(lease.request.url.rpartition("/")[2])
            below = [page(each, host=f"{each % 7}.example") for each in (2 * number, 2 * number + 1) if each <= PAGES]
            pages.append(Completion(lease=lease, items=[b"%d" % number], children=below))
        await insist(lambda pages=pages: frontier.complete(pages))  # type: ignore[misc]
        if (await insist(frontier.stats)).done == PAGES:
            return
        await asyncio.sleep(0.01)


async def move_slot(redises: list[Any], servers: list[RedisServer], names: list[str], slot: int) -> None:
    """From the node that has it to the next one, key by key."""
    source = slot * 3 // 16384
    target = (source + 1) % 3
    await redises[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
    await redises[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target])
    moved = 0
    while keys := await redises[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
        await redises[source].execute_command("MIGRATE", "127.0.0.1", servers[target].port, keys[0], 0, 5000)
        moved += 1
        await asyncio.sleep(0.02)
    assert moved > 10
    for index in (target, source, 3 - target - source):
        await redises[index].execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target])


async def test_a_slot_that_moves_leaves_no_half_steps(nodes: list[RedisServer]) -> None:
    async with clients(nodes) as redises:
        names = await join(nodes, redises)
        slot = await redises[0].execute_command("CLUSTER", "KEYSLOT", "{shoal}:store")
        store = await RedisStore.open(f"redis+cluster://127.0.0.1:{nodes[0].port}")
        try:
            await store.create_run(Run(run_id="run", spider="s", state="running", created_at=1.0))
            workers = [await store.frontier("run", FrontierOptions()) for _ in range(3)]
            await workers[0].push([page(1)])
            crawls = [asyncio.ensure_future(crawl(worker)) for worker in workers]
            while (await insist(workers[0].stats)).done < 10:
                await asyncio.sleep(0.01)
            await move_slot(redises, nodes, names, slot)
            await asyncio.gather(*crawls)
            frontier = workers[0]
            stats = await frontier.stats()
            assert (stats.pushed, stats.done, stats.items, stats.remaining) == (PAGES, PAGES, PAGES, 0)
            items = sorted(int(item.payload) for item in await frontier.read_items(0, 999))
            assert items == list(range(1, PAGES + 1))
            assert all(state.in_flight == 0 for state in await frontier.host_states())
            await check_balance(frontier)
        finally:
            await store.close()
