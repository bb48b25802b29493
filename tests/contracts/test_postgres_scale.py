"""Large pages, many hosts, many runs and long deletions in PostgreSQL do not delay other clients."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from contextlib import suppress

import asyncpg
import pytest

from shoal.clients import postgres_schema
from shoal.clients.postgres import PostgresAddress
from shoal.errors import RunError, StoreAwayError
from shoal.frontier import rules
from shoal.frontier.postgres import PostgresStore, columns
from shoal.frontier.postgres.frontier import PostgresFrontier
from shoal.frontier.postgres.store import COMPONENT
from shoal.http import Request
from shoal.ports import (
    Completion,
    Failure,
    Frontier,
    FrontierOptions,
    Heartbeat,
    Holder,
    HostUpdate,
    Lease,
    Pushed,
    Run,
    Stats,
)
from tests.contracts.postgres_steps import WIDE, ask, lease_one, opened


def links(count: int, hosts: int = 20, start: int = 0) -> list[Request]:
    return [Request(f"http://h{number % hosts}.example/{number}") for number in range(start, start + count)]


async def check_balance(frontier: Frontier) -> Stats:
    stats = await frontier.stats()
    assert stats.balanced
    assert await frontier.audit() == stats
    return stats


# -- large pages


async def test_a_page_with_many_links_keeps_nobody_waiting(url: str) -> None:
    children = links(100_000)
    children += children[:500]
    async with opened(url) as frontier, opened(url) as other:
        await frontier.push(links(50, 1, start=200_000))
        lease = await lease_one(frontier)
        working = asyncio.create_task(frontier.complete([Completion(lease=lease, items=[b"i"], children=children)]))
        longest, seen_incoming = 0.0, 0
        while not working.done():
            before = await other.stats()
            started = time.monotonic()
            for mine in (await other.lease(1, 600)).leases:
                await other.complete([Completion(lease=mine)])
            longest = max(longest, time.monotonic() - started)
            stats = await other.stats()
            assert stats.balanced
            assert stats.done == 0 or stats.items == 1 or not before.incoming  # its items come with it
            seen_incoming = max(seen_incoming, stats.incoming)
            await asyncio.sleep(0.01)
        assert await working == [Pushed(100_000, 500)]
        assert seen_incoming > 1000
        assert longest < 10  # quietly a twentieth of that
        stats = await check_balance(frontier)
        assert (stats.incoming, stats.pushed) == (0, 100_050)
        print(f"others waited at most {longest:.3f} s")


async def test_links_of_a_client_that_died_are_moved_by_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_LINKS", 20)
    async with opened(url) as dying, opened(url) as other:
        await dying.push(links(1, start=9999))
        lease = await lease_one(dying)

        async def no_more(token: int) -> int:
            raise asyncio.CancelledError

        monkeypatch.setattr(dying, "_move_links", no_more)
        with suppress(asyncio.CancelledError):
            await dying.complete([Completion(lease=lease, children=links(2500), duplicates=3)])
        stats = await check_balance(other)
        assert (stats.done, stats.ready, stats.incoming, stats.remaining, stats.duplicates) == (1, 0, 2500, 2500, 3)
        assert not (await other.stats()).finished
        found = await other.find(links(1, start=2400)[0])
        assert found is not None
        assert (found.state, found.parent) == ("ready", links(1, start=9999)[0].url)
        seen: set[str] = set()
        while leases := (await other.lease(500, 600)).leases:
            seen |= {each.request.url for each in leases}
            await other.complete([Completion(lease=each) for each in leases])
            await check_balance(other)
        assert len(seen) == 2500
        stats = await check_balance(other)
        assert (stats.done, stats.incoming) == (2501, 0)


async def test_uploads_that_are_not_committed_are_removed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_LINKS", 20)
    chunks = f"SELECT count(*) FROM {PostgresAddress.parse(url).schema}.chunk"

    async def upload(frontier: PostgresFrontier, lease: Lease) -> None:
        endings = columns.EndingColumns()
        endings.add(0, Completion(lease=lease, children=links(1500)))
        await frontier._upload(endings.staged[0].lease, endings.staged[0].children)
        assert await ask(url, chunks) == 2

    async with opened(url) as frontier:
        await frontier.push(links(5, start=9000))
        lease = await lease_one(frontier)
        await upload(frontier, lease)
        await frontier.release([lease])
        assert await ask(url, chunks) == 0
        lease = await lease_one(frontier)
        await upload(frontier, lease)
        (again,) = await frontier.reissue([lease], 600, nonce=b"12345678")
        assert again is not None
        assert await ask(url, chunks) == 0
        await upload(frontier, again)
        failed = Failure(lease=again, kind="k", reason="r", retry_in=0.001, children=links(30))
        assert await frontier.fail([failed]) == ["waiting"]
        assert await ask(url, chunks) == 0
        lease = await lease_one(frontier)
        await upload(frontier, lease)
        assert await frontier.complete([Completion(lease=lease)]) == [Pushed(0, 0)]  # by who knows nothing of it
        lease = await lease_one(frontier)
        dead = Failure(lease=lease, kind="k", reason="r", children=links(30))
        assert await frontier.fail([dead]) == ["dead"]
        assert await ask(url, chunks) == 0
        assert (await check_balance(frontier)).ready >= 30


async def test_a_large_completion_is_repeated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_LINKS", 20)
    async with opened(url) as frontier:
        await frontier.push(links(1, start=9999))
        large = Completion(lease=await lease_one(frontier), children=links(1500))
        assert await frontier.complete([large]) == [Pushed(1500, 0)]
        assert await frontier.complete([large]) == [Pushed(0, 0)]
        assert (await check_balance(frontier)).pushed == 1501


# -- many hosts, many runs


async def _planned(url: str, call: str) -> int:
    """Blocks that a call reads."""
    link = await asyncpg.connect(url.partition("?")[0])
    try:
        rows = await link.fetch(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM {call}")
        rows = await link.fetch(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM {call}")
        found = re.search(r'"Shared Hit Blocks": (\d+)', rows[0][0])
        assert found is not None
        return int(found[1])
    finally:
        await link.close()


async def test_the_states_of_hosts_cost_the_same_however_many_there_are(url: str) -> None:
    async with opened(url) as frontier:
        functions = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
        call = f'"{functions}".host_states({frontier._run}, 0, 100)'
        await frontier.push(links(3000, 2000))
        some = await _planned(url, call)
        name = PostgresAddress.parse(url).schema
        await ask(url, f"INSERT INTO {name}.host (name) SELECT 'many' || n FROM generate_series(1, 60000) n")
        await ask(
            url,
            f"""INSERT INTO {name}.lane (id, run, host, place, ready, best_rank, best_id)
                SELECT ({frontier._run}::bigint << 32) + h.id, {frontier._run}, h.id, 1, 0, 0, h.id
                FROM {name}.host h WHERE h.name LIKE 'many%'""",
        )
        await ask(url, f"ANALYZE {name}.lane")
        await ask(url, f"ANALYZE {name}.host")
        assert await _planned(url, call) < 3 * some


async def test_the_busiest_hosts_come_first(url: str) -> None:
    async with opened(url) as frontier:
        await frontier.push(
            [Request(f"http://h{host}.example/{page}") for host in range(30) for page in range(host + 1)]
        )
        await frontier.update_host("h29.example", HostUpdate(block_for=600))
        await frontier.update_host("nothing.example", HostUpdate(delay=3))
        leases = (await frontier.lease(5, 600)).leases
        states = await frontier.host_states()
        assert [state.ready + state.in_flight for state in states] == [*range(30, 0, -1), 0]
        assert sum(state.in_flight for state in states) == len(leases)
        assert [state.host for state in await frontier.host_states(2)] == ["h29.example", "h28.example"]


async def test_workers_are_listed_without_a_lookup_for_each_worker_and_each_lease(url: str) -> None:
    """A dashboard lists them again and again."""
    functions = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
    async with opened(url) as frontier:
        frontier.hold(Holder("w0", 1))
        await frontier.push(links(400))
        await frontier.beat(Heartbeat(worker="w0", epoch=1, session=60))
        assert len((await frontier.lease(1, 600)).leases) == 1
        call = f'"{functions}".workers({frontier._run}, 0)'
        one = await _planned(url, call)
        assert len((await frontier.lease(399, 600)).leases) == 399
        for number in range(1, 150):
            await frontier.beat(Heartbeat(worker=f"w{number}", epoch=1, session=60))
        assert await _planned(url, call) < one + 100
        found = await frontier.workers()
        assert len(found) == 150
        assert {each.worker: each.leases for each in found if each.leases} == {"w0": 400}


async def test_thousands_of_runs_on_one_host(url: str) -> None:
    """A completion looks at few of their lanes, and none of them is forgotten."""
    one = FrontierOptions(concurrency_per_host=1)
    name = PostgresAddress.parse(url).schema
    async with opened(url, options=one) as frontier:
        await frontier.push(links(60, 1))
        lease = await lease_one(frontier)
        store = await PostgresStore.open(url)
        await ask(
            url,
            f"""WITH runs AS (
                    INSERT INTO {name}.run (run_id, spider, state, created_at, settings, concurrency, project)
                    SELECT 'many' || n, 's', 'running', 0, '\\x80', 1, 'p' FROM generate_series(1, 3000) n RETURNING id
                ), ledgers AS (INSERT INTO {name}.ledger (run) SELECT id FROM runs)
                INSERT INTO {name}.lane (id, run, host, place, ready, best_rank, best_id, due)
                SELECT (id::bigint << 32) + 1, id, 1, 3, 1, 0, id, 0 FROM runs""",
        )
        await ask(url, f"ANALYZE {name}.lane")
        changed = f"SELECT n_tup_upd FROM pg_stat_user_tables WHERE schemaname = '{name}' AND relname = 'lane'"

        async def lanes_changed() -> int:
            await asyncio.sleep(1.1)  # its statistics are sent once a second
            await frontier.stats()
            return int(await ask(url, changed))

        before = await lanes_changed()
        for _ in range(5):
            await frontier.complete([Completion(lease=lease)])
            lease = await lease_one(frontier)  # it need not wait for theirs to be looked at
        assert await lanes_changed() - before < 200
        await frontier.complete([Completion(lease=lease)])
        # The last one of them, though nobody completes anything any more.
        late = await store.frontier("many3000", one)
        await late.push(links(1, 1))
        limit = time.monotonic() + 30
        while not (await late.lease(1, 600)).leases:
            assert time.monotonic() < limit
            await asyncio.sleep(0.1)
        await store.close()


# -- deleting


_DELETE = """
import asyncio, sys
from shoal.frontier.postgres import PostgresStore, store
store._DELETE_BATCH = 20
async def main():
    opened = await PostgresStore.open(sys.argv[1])
    await opened.delete_run("run")
asyncio.run(main())
"""


async def test_a_deletion_that_is_killed_is_repeated(url: str) -> None:
    name = PostgresAddress.parse(url).schema
    async with opened(url) as frontier, opened(url, "other") as other:
        await frontier.push(links(8000))
        await other.push(links(10))
        leases = (await frontier.lease(300, 600)).leases
        await frontier.complete([Completion(lease=lease, items=[b"i"]) for lease in leases[:200]])
        await frontier.fail([Failure(lease=lease, kind="k", reason="r", retry_in=600) for lease in leases[200:290]])
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", _DELETE, url)
        limit = time.monotonic() + 60
        while not 0 < await ask(url, f"SELECT count(*) FROM {name}.request WHERE run = {frontier._run}") < 8000:
            assert time.monotonic() < limit
        process.kill()
        await process.wait()
        assert await ask(url, f"SELECT count(*) FROM {name}.request WHERE run = {frontier._run}") > 0
        store = await PostgresStore.open(url)
        assert await store.get_run("run") is None
        assert [run.run_id for run in await store.list_runs()] == ["other"]
        assert await store.run_states("s") == {"other": "running"}
        for call in (frontier.push(links(1)), frontier.lease(1, 60), frontier.stats(), store.frontier("run", WIDE)):
            with pytest.raises(RunError):
                await call
        await store.delete_run("run")
        for table in ("request", "ready", "held", "outcome", "event", "lane", "item", "role", "ledger", "run", "chunk"):
            column = "lane NOT IN (SELECT id FROM {0}.lane)" if table == "ready" else f"run <> {other._run}"
            column = {"event": "true", "run": f"id <> {other._run}"}.get(table, column).format(name)
            assert await ask(url, f"SELECT count(*) FROM {name}.{table} WHERE {column}") == 0, table
        assert await ask(url, f"SELECT max(in_flight) FROM {name}.host") == 0
        with pytest.raises(RunError):
            await store.delete_run("run")
        await check_balance(other)
        await store.create_run(Run(run_id="run", spider="s", state="queued", created_at=0.0))
        await store.close()


# -- many who wait


async def test_who_polls_in_vain_is_told_to_wait(url: str) -> None:
    async with opened(url) as frontier, opened(url) as other:
        assert (await frontier.lease(1, 60)).poll_after == 0
        limit = time.monotonic() + 60
        while (await frontier.lease(1, 60)).poll_after == 0:
            assert time.monotonic() < limit
        await other.push(links(1))
        leased = await frontier.lease(1, 60)
        assert (len(leased.leases), leased.poll_after) == (1, 0)


async def test_an_empty_lease_waits_for_nobody(url: str) -> None:
    """Also while another lease of the run takes its time."""
    async with opened(f"{url}&timeout=2") as frontier:
        await frontier.lease(1, 60)
        link = await asyncpg.connect(url.partition("?")[0])
        name = PostgresAddress.parse(url).schema
        async with link.transaction():
            await link.execute(
                f"SELECT pg_advisory_xact_lock('{name}.ledger'::regclass::oid::integer, {frontier._run})"
            )
            assert (await frontier.lease(1, 60)).leases == []
            await frontier.push(links(1))
            with pytest.raises(StoreAwayError):
                await frontier.lease(1, 60)
        await link.close()
