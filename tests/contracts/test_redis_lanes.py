"""Long lanes on Redis: the front of a lane, its list and its sorted set give requests in one order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from uuid import uuid4

import pytest
import pytest_asyncio

from shoal.frontier.redis import RedisStore
from shoal.http import Request
from shoal.ports import Completion, Frontier, FrontierOptions, Lease, Run
from shoal.testing.steps import TTL, check_balance, complete, lease_names, page
from tests.support.databases import RedisServer, shared

_prefixes = (f"l{uuid4().hex[:8]}-{number}" for number in count(1))


@pytest_asyncio.fixture
async def store() -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(f"{shared(RedisServer).url}?prefix={next(_prefixes)}")
    yield store
    await store.close()


async def new_run(store: RedisStore, concurrency: int = 1000) -> Frontier:
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=1.0))
    return await store.frontier("run", FrontierOptions(concurrency_per_host=concurrency))


class Model:
    """A queue that sorts all requests each time."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._order: dict[str, tuple[float, int]] = {}
        self._ready: set[str] = set()
        self._in_flight: Counter[str] = Counter()
        self._hosts: dict[str, str] = {}

    def push(self, request: Request, host: str) -> None:
        self._order[request.url] = (-request.priority, len(self._order))
        self._hosts[request.url] = host
        self._ready.add(request.url)

    def lease(self, limit: int) -> list[str]:
        taken: list[str] = []
        for url in sorted(self._ready, key=self._order.__getitem__):
            if len(taken) < limit and self._in_flight[self._hosts[url]] < self._room:
                self._in_flight[self._hosts[url]] += 1
                taken.append(url)
        self._ready.difference_update(taken)
        return taken

    def end(self, url: str, *, released: bool) -> None:
        self._in_flight[self._hosts[url]] -= 1
        if released:
            self._ready.add(url)

    def ready_on(self, host: str) -> int:
        return sum(self._hosts[url] == host for url in self._ready)


@pytest.mark.parametrize("priorities", [(0,), (0, 0, 0, 1), (-1, 0, 1, 2.5)], ids=["none", "few", "many"])
@pytest.mark.parametrize("room", [3, 1000])
@pytest.mark.parametrize("seed", range(3))
async def test_requests_of_long_lanes_are_leased_in_order(
    store: RedisStore, priorities: tuple[float, ...], room: int, seed: int
) -> None:
    rng, frontier, model = random.Random(f"{priorities} {room} {seed}"), await new_run(store, room), Model(room)
    names, held = count(), list[Lease]()
    for _ in range(60):
        batch = []
        for _ in range(rng.choice((0, 1, 3, 20, 60))):
            host = rng.choice(("a.example", "a.example", "b.example"))
            batch.append(page(next(names), host=host, priority=rng.choice(priorities)))
            model.push(batch[-1], host)
        await frontier.push(batch)
        limit = rng.choice((1, 2, 7, 30))
        leases = (await frontier.lease(limit, TTL)).leases
        assert [lease.request.url for lease in leases] == model.lease(limit)
        held += leases
        rng.shuffle(held)
        ended = held[: rng.randrange(len(held) + 1)]
        del held[: len(ended)]
        released = [lease for lease in ended if rng.random() < 0.3]
        done = [lease for lease in ended if lease not in released]
        await frontier.release(released)
        await complete(frontier, *done)
        for lease in ended:
            model.end(lease.request.url, released=lease in released)
    for host in ("a.example", "b.example"):
        assert (await frontier.host_state(host)).ready == model.ready_on(host)
    await check_balance(frontier)
    await frontier.release(held)
    for lease in held:
        model.end(lease.request.url, released=True)
    while leases := (await frontier.lease(30, TTL)).leases:
        assert [lease.request.url for lease in leases] == model.lease(30)
        await complete(frontier, *leases)
        for lease in leases:
            model.end(lease.request.url, released=False)
    assert model.lease(1) == []
    await check_balance(frontier)


async def test_a_finished_lane_leaves_no_list_and_no_set(store: RedisStore) -> None:
    frontier = await new_run(store)
    await frontier.push([page(each, priority=each % 3) for each in range(100)])
    client, prefix = store._scripts.client._client, store._scripts.client.address.prefix
    lanes = [f"{prefix}run:1:{part}:*" for part in "qp"]
    assert [len(await client.execute_command("KEYS", each)) for each in lanes] == [1, 1]
    leases = (await frontier.lease(200, TTL)).leases
    assert len(leases) == 100
    assert [len(await client.execute_command("KEYS", each)) for each in lanes] == [0, 0]
    assert await frontier.complete([Completion(lease=lease) for lease in leases]) != []
    assert await lease_names(frontier) == []
