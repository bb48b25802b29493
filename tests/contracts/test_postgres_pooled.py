"""PostgreSQL behind pgbouncer in transaction mode, and how many connections a worker needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from shoal.errors import StoreRewoundError
from shoal.frontier import rules
from shoal.frontier.postgres import PostgresStore
from shoal.http import Request
from shoal.ports import Completion, Counts, Failure, Frontier, FrontierOptions, HostUpdate, Run
from shoal.runs.cluster.postgres import PostgresCoordinator
from tests.contracts.postgres_steps import schema_for
from tests.support.databases import PgBouncer, PostgresServer, shared

WIDE = FrontierOptions(concurrency_per_host=1000)


@pytest.fixture(scope="module")
def pooler() -> Iterator[PgBouncer]:
    """With fewer connections than it has clients."""
    pooler = PgBouncer(shared(PostgresServer))
    yield pooler
    pooler.close()


@pytest.fixture
def schema(request: pytest.FixtureRequest) -> str:
    return schema_for(request)


def links(count: int, start: int = 0) -> list[Request]:
    return [Request(f"http://h{number % 7}.example/{number}") for number in range(start, start + count)]


async def ask(statement: str, *arguments: Any) -> Any:
    link = await asyncpg.connect(shared(PostgresServer).url)
    try:
        return await link.fetchval(statement, *arguments)
    finally:
        await link.close()


async def test_a_crawl_through_a_pooler(pooler: PgBouncer, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_LINKS", 100)
    url = f"{pooler.url}?schema={schema}"
    stores = await asyncio.gather(*(PostgresStore.open(url) for _ in range(4)))
    await stores[0].create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    frontiers = [await store.frontier("run", WIDE) for store in stores]
    seed = await frontiers[0].claim("seed", 600)
    assert seed is not None
    await frontiers[0].push(links(100), seed=seed, cursor=b"1")
    assert await frontiers[0].relinquish(seed.moved_to(b"1"), finished=True)
    done = 0

    async def work(frontier: Frontier) -> None:
        nonlocal done
        while not (await frontier.stats()).finished:
            leases = [each for each in await frontier.renew((await frontier.lease(5, 600)).leases, 600) if each]
            first, rest = leases[:1], leases[1:]
            for lease in first:
                if lease.attempt == 1:
                    await frontier.fail([Failure(lease=lease, kind="k", reason="r", retry_in=0.0)])
                else:
                    rest.append(lease)
            many = [links(150, start=1000)] + [[]] * len(rest)
            answers = await frontier.complete(
                [Completion(lease=lease, items=[b"i"], children=many[nth]) for nth, lease in enumerate(rest)]
            )
            done += len([each for each in answers if each])
            await frontier.update_host("h1.example", HostUpdate(learned_delay=0.0))

    await asyncio.gather(*(work(frontier) for frontier in frontiers * 2))
    stats = await frontiers[0].stats()
    assert stats == await frontiers[1].audit()
    assert done == stats.done == stats.pushed == stats.items == 250
    assert len(await frontiers[2].read_items(0, 1000)) == 250
    assert all(store._database._pooled for store in stores)
    for store in stores:
        await store.close()
    # Nothing stays on the connections that the pooler gives to others.
    link = await asyncpg.connect(pooler.url, statement_cache_size=0)
    for _ in range(3):
        async with link.transaction():
            assert await link.fetchval("SELECT count(*) FROM pg_prepared_statements") == 0
            assert await link.fetchval("SELECT count(*) FROM pg_listening_channels()") == 0
            assert await link.fetchval("SHOW search_path") == '"$user", public'
            assert await link.fetchval("SHOW tcp_keepalives_idle") != "30"
    assert await ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    await link.close()


async def test_errors_come_through_a_pooler(pooler: PgBouncer, schema: str) -> None:
    store = await PostgresStore.open(f"{pooler.url}?schema={schema}")
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    frontier = await store.frontier("run", WIDE)
    claim = await frontier.claim("drain", 600)
    assert claim is not None
    with pytest.raises(StoreRewoundError):
        await frontier.advance(claim.moved_to(b"elsewhere"), b"1", 600)
    await frontier.recover()
    assert await frontier.advance(claim, b"1", 600)
    await store.close()


async def test_a_cluster_behind_a_pooler(pooler: PgBouncer, schema: str) -> None:
    url = f"{pooler.url}?schema={schema}"
    one, two = [await PostgresCoordinator.open(url, "cluster", 30) for _ in "12"]
    await one.join("one", Counts(1, 1))
    await two.join("two", Counts(1, 1))
    epoch = await one.take(0)
    assert epoch
    assert await two.take(0) is None
    await asyncio.wait_for(two.wait(0.1), 10)  # there is no news through a pooler: it looks again after its time
    view = await two.beat()
    assert [(slot.holder, slot.epoch) for slot in view.slots] == [("one", epoch)]
    await one.leave()
    assert await two.take(0)
    for each in (one, two):
        await each.close()


async def test_a_worker_needs_two_connections(schema: str) -> None:
    store = await PostgresStore.open(f"{shared(PostgresServer).url}?schema={schema}")
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    frontier = await store.frontier("run", WIDE)
    await frontier.push(links(400))
    most = 0
    # Those of other tests may still be closing.
    mine = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'shoal' AND query LIKE $1"

    async def work() -> None:
        while leases := (await frontier.lease(3, 600)).leases:
            await asyncio.gather(frontier.stats(), frontier.renew(leases, 600), frontier.host_states())
            await frontier.complete([Completion(lease=lease, items=[b"i"]) for lease in leases])

    async def count() -> None:
        nonlocal most
        while True:
            most = max(most, await ask(mine, f"%{schema[:40]}%"))

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work() for _ in range(8)))
    counting.cancel()
    await asyncio.wait({counting})
    assert most == 2
    await store.close()
