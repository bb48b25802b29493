"""The PostgreSQL frontier beyond the contract: faults, schema, concurrent workers, query plans."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import asyncpg
import pytest

from shoal.clients import postgres, postgres_schema
from shoal.clients.postgres import PostgresAddress
from shoal.errors import FencedError, FrontierError, QueueFullError, RunError, StoreAwayError, StoreError
from shoal.frontier.postgres import PostgresStore
from shoal.frontier.postgres.store import COMPONENT
from shoal.frontier.rules import FULL_KIND, UNREADABLE
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, Holder, HostUpdate, Lease, Pushed, Run, Stats
from shoal.testing.server_faults import wait_until_back
from shoal.testing.steps import check_balance, history, reissue
from tests.contracts.postgres_steps import WIDE, ask, check_tables, lease_one, opened, pages, schema_of
from tests.support.databases import PostgresServer, RedisServer, shared


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One to be harmed."""
    server = PostgresServer(synchronous_commit="on")
    yield server
    server.close()


# -- opening


@pytest.mark.parametrize(
    ("query", "what"),
    [("schema=pg_mine", "pg_mine"), ("schema=a-b", "a-b"), ('schema=x";drop', "schema"), ("timeout=soon", "timeout"),
     ("timeout=-1", "timeout"), ("schema=" + "x" * 64, "schema")],
)  # fmt: skip
async def test_a_url_that_cant_be_used(query: str, what: str) -> None:
    with pytest.raises(StoreError, match=re.escape(what)) as caught:
        await PostgresStore.open(f"postgresql://me:sesame@127.0.0.1/db?{query}")
    assert "sesame" not in str(caught.value)


async def test_a_port_where_nobody_listens(unused_tcp_port: int) -> None:
    with pytest.raises(StoreAwayError, match="cannot reach") as caught:
        await PostgresStore.open(f"postgresql://me:sesame@127.0.0.1:{unused_tcp_port}/db")
    assert "sesame" not in str(caught.value)


async def test_a_server_that_is_redis() -> None:
    port = shared(RedisServer).port
    with pytest.raises(StoreError, match="is not PostgreSQL"):
        await PostgresStore.open(f"postgresql://me:sesame@127.0.0.1:{port}/db")


async def test_a_server_that_speaks_http() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreError, match="is not PostgreSQL"):
            await PostgresStore.open(f"postgresql://me:sesame@127.0.0.1:{port}/db")


async def test_who_may_not(server: PostgresServer) -> None:
    await ask(server.url, "CREATE ROLE guarded LOGIN PASSWORD 'sesame'")
    await ask(server.url, "CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
    rules = server.folder / "data" / "pg_hba.conf"
    rules.write_text(f"host all guarded 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
    server.signal(signal.SIGHUP)
    url = server.url.replace("shoal@", "guarded:{}@")

    async def refused(url: str, kind: type[Exception] = StoreError) -> str:
        with pytest.raises(kind) as caught:
            await PostgresStore.open(url)
        assert type(caught.value) is kind
        assert "sesame" not in str(caught.value)
        assert "wrong-word" not in str(caught.value)
        return str(caught.value)

    limit = time.monotonic() + 20
    while True:  # until it has read its rules again
        try:
            assert "password" in await refused(url.format("wrong-word"))
            break
        except AssertionError:
            assert time.monotonic() < limit
    assert "password" in await refused(url.format("").replace(":@", "@"))
    assert "may not" in await refused(url.format("sesame"))
    assert "no such database" in await refused(server.url.replace("/postgres", "/nothing"))
    assert "nobody" in await refused(server.url.replace("shoal@", "nobody@"))
    assert "too many" in await refused(server.url.replace("shoal@", "crowded@"), StoreAwayError)


async def test_a_user_who_may_only_work_on_what_is_there(url: str) -> None:
    name = schema_of(url)
    async with opened(url):
        pass
    await ask(url, f"CREATE ROLE {name} LOGIN")
    for right in ("USAGE ON SCHEMA", "ALL ON ALL TABLES IN SCHEMA", "ALL ON ALL SEQUENCES IN SCHEMA"):
        await ask(url, f"GRANT {right} {name} TO {name}")
    theirs = url.replace("shoal@", f"{name}@")
    async with opened(theirs) as frontier:
        assert await frontier.push(pages(1)) == Pushed(1, 0)
    await ask(url, f"ALTER ROLE {name} SET default_transaction_read_only = on")
    store = await PostgresStore.open(theirs)
    try:
        frontier = await store.frontier("run")
        assert (await frontier.stats()).ready == 1
        with pytest.raises(FrontierError, match="nothing was changed"):
            await frontier.push(pages(2))
    finally:
        await store.close()
    await ask(url, f"REVOKE ALL ON ALL TABLES IN SCHEMA {name} FROM {name}")
    with pytest.raises(StoreError, match="may not"):
        await PostgresStore.open(theirs)


async def test_a_run_is_created_after_all_earlier_ones_are_visible(url: str) -> None:
    """Otherwise two processes that start together could each believe that they are the first."""
    store = await PostgresStore.open(url)
    functions = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
    link = await asyncpg.connect(url.partition("?")[0])
    try:
        async with link.transaction():
            await link.fetchval(f"""SELECT "{functions}".create_run('a', 's', 'queued', 0, '\\x80', 'shoal', NULL)""")
            second = asyncio.create_task(store.create_run(Run(run_id="b", spider="s", state="queued", created_at=0.0)))
            await asyncio.sleep(0.3)
            assert not second.done()
        await second
        assert [run.run_id for run in await store.list_runs()] == ["b", "a"]
    finally:
        await link.close()
        await store.close()


async def test_fifty_open_it_first(url: str) -> None:
    stores = await asyncio.gather(*(PostgresStore.open(url) for _ in range(50)))
    for number, store in enumerate(stores):
        await store.create_run(Run(run_id=str(number), spider="s", state="queued", created_at=0.0))
    assert len(await stores[0].list_runs()) == 50
    for store in stores:
        await store.close()
    assert await ask(url, f"SELECT count(*) FROM {schema_of(url)}.migration") == sum(
        len(postgres_schema.migrations(component)) for component in (postgres_schema.CLOCK, COMPONENT)
    )


async def test_a_server_that_is_too_old(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "MIN_VERSION", 99)
    with pytest.raises(StoreError, match=r"has version \d+\.\d+; Shoal needs 99 or later"):
        await PostgresStore.open(url)


async def test_a_schema_of_something_else(url: str) -> None:
    await ask(url, f"CREATE SCHEMA {schema_of(url)}")
    await ask(url, f"CREATE TABLE {schema_of(url)}.run (speed integer)")
    with pytest.raises(StoreError, match="another program"):
        await PostgresStore.open(url)
    await ask(url, f"SELECT speed FROM {schema_of(url)}.run")


async def test_it_says_when_the_server_may_lose_something(url: str, caplog: pytest.LogCaptureFixture) -> None:
    postgres_schema._warned.clear()
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(2):
            async with opened(url):
                pass
    assert [record.getMessage().count("fsync off") for record in caplog.records] == [1]


# -- faults


async def test_opening_a_frozen_server_says_how_long_it_waited(server: PostgresServer) -> None:
    with server.frozen(), pytest.raises(StoreAwayError, match="did not answer within 1 s"):
        await PostgresStore.open(f"{server.url}?timeout=1")


async def test_a_connection_that_an_administrator_ends(url: str) -> None:
    async with opened(f"{url}&timeout=5") as frontier:
        await frontier.push(pages(1))
        await asyncio.gather(*(frontier.stats() for _ in range(8)))
        await ask(url, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'shoal'")
        await wait_until_back(frontier)
        assert await frontier.push(pages(1, 2)) == Pushed(1, 1)


@pytest.fixture
def small_disk(server: PostgresServer) -> Iterator[Path]:
    """A folder of the server's with room for 6 MB."""
    folder = server.folder / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        why = f"no small disk could be mounted: {mounted.stderr.decode().strip()}"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    shutil.chown(folder, PostgresServer.user)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_disk_that_is_full(server: PostgresServer, small_disk: Path) -> None:
    await ask(server.url, f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    await ask(server.url, "CREATE ROLE tight LOGIN SUPERUSER")
    await ask(server.url, "ALTER ROLE tight SET default_tablespace = small")
    async with opened(f"{server.url.replace('shoal@', 'tight@')}?schema=tight") as frontier:

        async def fill() -> None:
            for start in range(0, 100_000, 1000):
                seen.append(await frontier.stats())
                await frontier.push(pages(*range(start, start + 1000)))

        seen: list[Stats] = []
        with pytest.raises(FrontierError, match="its disk is full; nothing was changed"):
            await fill()
        assert seen[-1].pushed > 1000
        assert await frontier.stats() == seen[-1]
        await check_balance(frontier)
    await ask(server.url, "DROP SCHEMA tight CASCADE")
    await ask(server.url, "DROP TABLESPACE small")


# -- what others write


async def test_a_request_that_something_else_wrote(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(url) as frontier:
        await frontier.push(pages(1, 2, 3, 4))
        name = schema_of(url)
        await ask(url, f"UPDATE {name}.request SET payload = '\\xc1' WHERE id = (SELECT min(id) FROM {name}.request)")
        await ask(
            url, f"UPDATE {name}.request SET payload = '\\x81a161c0' WHERE id = (SELECT max(id) FROM {name}.request)"
        )
        assert [lease.request for lease in (await frontier.lease(1, 60)).leases] == pages(2)
        assert [lease.request for lease in (await frontier.lease(9, 60)).leases] == pages(3)
        assert await frontier.dead_kinds() == {UNREADABLE: 2}
        dead = [each async for each in frontier.dead()]
        assert all("cannot read its record" in each.reason for each in dead)
        found = await frontier.find(pages(1)[0])
        assert found is not None
        assert (found.state, found.url) == ("dead", pages(1)[0].url)
        await check_balance(frontier)


async def test_text_that_cant_be_stored(url: str) -> None:
    odd = "a\0b\ud800c"
    async with opened(url) as frontier:
        await frontier.push(pages(1, 2))
        first, second = (await frontier.lease(2, 60)).leases
        assert await frontier.fail([Failure(lease=first, kind=odd, reason=odd)]) == ["dead"]
        await frontier.complete([Completion(lease=second, note=odd)])
        assert await frontier.retry_dead([odd]) == 1
        await frontier.update_host("a.example", HostUpdate(block_for=5, block_reason=odd))
        claim = await frontier.claim(odd, 60)
        assert claim is not None
        assert await frontier.relinquish(claim)
        await frontier.remember(odd, b"v", 60)
        assert await frontier.recall(odd) == b"v"
        assert await frontier.recall("a\ufffdb?c") is None
        assert await frontier.find(Request("http://a.example/\ud800")) is None


# -- many at once


async def test_clients_that_lease_at_the_same_time(url: str) -> None:
    async with opened(url) as one, opened(url) as two, opened(url, "other") as other:
        numbers = range(600)
        await one.push([Request(f"http://h{number % 9}.example/{number}") for number in numbers])
        await other.push([Request(f"http://h{number % 9}.example/{number}") for number in numbers])
        seen: list[tuple[int, str]] = []

        async def work(frontier: Frontier) -> None:
            while leases := (await frontier.lease(7, 600)).leases:
                seen.extend((id(frontier) if frontier is other else 0, lease.request.url) for lease in leases)
                await frontier.complete([Completion(lease=lease) for lease in leases])

        await asyncio.gather(*(work(frontier) for frontier in (one, two, other) * 3))
        assert len(seen) == len(set(seen)) == 1200
        for frontier in (one, other):
            await check_balance(frontier)
        assert all(state.in_flight == 0 for state in await one.host_states())


async def test_runs_that_meet_on_two_hosts_never_block_each_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each asks for the host that the other has used alone. Both calls stop before they lease, and go on together."""
    monkeypatch.setattr(postgres, "_MAX_TRIES", 1)  # a deadlock is an error
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid))"
    async with opened(url, "one") as one, opened(url, "two") as two:
        for frontier, own, other in ((one, "a.example", "b.example"), (two, "b.example", "a.example")):
            await frontier.push(pages(1, host=own))
            await lease_one(frontier)
            await frontier.push(pages(2, host=other))
        blocker = await asyncpg.connect(url.partition("?")[0])
        async with blocker.transaction():
            await blocker.execute(f"SELECT FROM {schema_of(url)}.lane FOR UPDATE")
            calls = [asyncio.create_task(lease_one(frontier)) for frontier in (one, two)]
            async with asyncio.timeout(10):
                while await ask(url, waiting, blocker.get_server_pid()) < 2:
                    await asyncio.sleep(0.01)
        await blocker.close()
        assert [lease.host for lease in await asyncio.gather(*calls)] == ["b.example", "a.example"]
        assert await ask(url, f"SELECT count(*) FROM {schema_of(url)}.presence") == 2


async def test_completions_with_the_same_children_never_block_each_other(url: str) -> None:
    async with opened(url) as one, opened(url) as two, opened(url) as three:
        await one.push([Request(f"http://h{number % 5}.example/{number}") for number in range(60)])
        links = [Request(f"http://h{number % 7}.example/child/{number}") for number in range(400)]
        added: list[int] = []

        async def work(frontier: Frontier, turn: int) -> None:
            while leases := (await frontier.lease(3, 600)).leases:
                shift = turn * 37 % len(links)
                children = (links[shift:] + links[:shift])[:: 1 if turn % 2 else -1]
                completions = [
                    Completion(lease=lease, children=children if "child" not in lease.request.url else ())
                    for lease in leases
                ]
                added.extend(pushed.added for pushed in await frontier.complete(completions) if pushed)
                turn += 1

        async def renew(frontier: Frontier) -> None:
            for _ in range(40):
                leases = (await frontier.lease(2, 600)).leases
                await frontier.renew(leases, 600)
                reissued = await reissue(frontier, leases[::-1])
                await frontier.release([lease for lease in reissued if lease])
                await frontier.push(links[::9])

        await asyncio.gather(
            *(work(frontier, turn) for turn, frontier in enumerate((one, two, three) * 2)), renew(two), renew(three)
        )
        await work(one, 0)  # what the renewing ones gave back last
        assert (await one.stats()).done == 460
        assert sum(added) <= 400
        await check_balance(one)


async def test_whatever_workers_do_at_the_same_time_the_tables_agree(url: str) -> None:
    """Four runs with different options on the same hosts; leases run out, requests wait, hosts change meanwhile."""
    runs = {
        "a": FrontierOptions(concurrency_per_host=2, max_attempts=2),
        "b": FrontierOptions(delay=0.02),
        "c": FrontierOptions(concurrency_per_host=5, max_queue_size=400),
        "d": FrontierOptions(concurrency_per_host=5, max_queue_size=50, overflow="refuse"),
    }
    dice = random.Random(7)
    end = time.monotonic() + 5

    def some_pages() -> list[Request]:
        return [
            Request(f"http://h{dice.randrange(9)}.example/{dice.randrange(2000)}", priority=dice.choice([0, 0, 1, -1]))
            for _ in range(dice.randrange(20))
        ]

    async def step(frontier: Frontier, mine: list[Lease]) -> None:
        some = [mine.pop() for _ in range(min(len(mine), dice.randrange(1, 6)))]
        match dice.choice(
            ["lease", "lease", "complete", "complete", "fail", "release", "push", "host", "retry", "lose"]
        ):
            case "lease":
                mine.extend((await frontier.lease(dice.randrange(1, 8), dice.choice([0.05, 0.3, 600]))).leases)
            case "complete":
                await frontier.complete([Completion(lease=each, children=some_pages()) for each in some])
            case "fail":
                retry_in = dice.choice([None, 0.0, 0.05])
                await frontier.fail([Failure(lease=each, kind="k", reason="r", retry_in=retry_in) for each in some])
            case "release":
                await frontier.release(some, contacted=dice.random() < 0.5)
            case "push":
                with suppress(QueueFullError):
                    await frontier.push(some_pages())
            case "host":
                host = dice.choice(["*", *(f"h{number}.example" for number in range(9))])
                value = dice.choice([None, 0.01])
                update = dice.choice([HostUpdate(delay=value), HostUpdate(block_for=value), HostUpdate(concurrency=3)])
                await frontier.update_host(host, update)
            case "retry":
                await frontier.retry_dead()

    async def work(frontiers: list[Frontier]) -> None:
        mine: dict[int, list[Lease]] = {number: [] for number in range(len(frontiers))}
        while time.monotonic() < end:
            number = dice.randrange(len(frontiers))
            await step(frontiers[number], mine[number])

    async with AsyncExitStack() as stack:
        workers = [
            [await stack.enter_async_context(opened(url, run_id, options)) for run_id, options in runs.items()]
            for _ in range(3)
        ]
        await asyncio.gather(*(work(worker) for worker in workers * 4))
        refusing = workers[0][-1]
        for host in ["*", *(f"h{number}.example" for number in range(9))]:  # leases of others must not keep it from one
            await refusing.update_host(host, HostUpdate(delay=0, concurrency=1000, block_for=None))
        with suppress(QueueFullError):
            await refusing.push([Request("http://first.example/")])
        links = [Request(f"http://last.example/{number}") for number in range(100)]
        leases = (await refusing.lease(1000, 600)).leases
        assert leases
        await refusing.complete([Completion(lease=lease, children=links) for lease in leases])
        await check_tables(url)
        for frontier in workers[0]:
            await check_balance(frontier)
        assert FULL_KIND in await refusing.dead_kinds()


async def test_the_item_log_has_no_gap_for_who_reads_behind_a_cursor(url: str) -> None:
    async with opened(url) as one, opened(url) as two, opened(url) as three:
        await one.push([Request(f"http://h{number % 40}.example/{number}") for number in range(800)])
        working = 0

        async def work(frontier: Frontier) -> None:
            nonlocal working
            working += 1
            while leases := (await frontier.lease(4, 600)).leases:
                await frontier.complete([Completion(lease=lease, items=[b"1", b"2"]) for lease in leases])
            working -= 1

        async def drain() -> list[int]:
            read: list[int] = []
            while True:
                over = not working
                some = await three.read_items(read[-1] if read else 0, 50)
                read += [item.seq for item in some]
                if over and not some:
                    return read
                await asyncio.sleep(0)

        workers = [asyncio.create_task(work(frontier)) for frontier in (one, two, three) * 2]
        await asyncio.sleep(0)
        read = await drain()
        await asyncio.gather(*workers)
        assert read == list(range(1, 1601))


async def test_a_reissue_is_repeated_while_the_first_is_still_under_way(url: str) -> None:
    """Its connection was cut, which the server has not noticed yet."""
    async with opened(f"{url}&timeout=2") as hasty, opened(url) as patient:
        await patient.push(pages(1, 2))
        leases = (await patient.lease(2, 600, counts_attempt=False)).leases
        blocker = await asyncpg.connect(url.partition("?")[0])
        async with blocker.transaction():
            await blocker.execute(f"SELECT FROM {schema_of(url)}.held FOR UPDATE")
            with pytest.raises(StoreAwayError):
                await hasty.reissue(leases, 600, nonce=b"one-receiver")
            again = asyncio.create_task(patient.reissue(leases[::-1], 600, nonce=b"one-receiver"))
            late = asyncio.create_task(reissue(patient, leases))
            await asyncio.sleep(0.1)
        await blocker.close()
        begun = [lease for lease in await again if lease]
        assert len(begun) == 2
        assert await late == [None, None]
        assert (await history(patient, pages(1)[0])).attempts == 1
        assert None not in await patient.complete([Completion(lease=lease) for lease in begun])
        await check_balance(patient)
        await check_tables(url)


async def test_a_fence_takes_what_is_reissued_at_the_same_moment(url: str) -> None:
    async with opened(url) as one, opened(url) as two:
        await one.push(pages(*range(5)))
        store = await PostgresStore.open(url)
        for epoch in range(1, 31):
            holder = await store.frontier("run", FrontierOptions(max_attempts=100), Holder("s", epoch))
            leases = (await holder.lease(5, 600)).leases
            reissued, count = await asyncio.gather(reissue(two, leases), one.fence("s", epoch + 1))
            assert (len(leases), count) == (5, 5)
            kept = [lease for lease in reissued if lease]
            assert await one.renew(leases + kept, 600) == [None] * len(leases + kept)
        await store.close()
        await check_balance(one)
        await check_tables(url)


async def test_a_run_that_is_deleted_while_others_work_on_it(url: str) -> None:
    async with opened(url) as frontier, opened(url, "other", FrontierOptions(concurrency_per_host=1)) as other:
        await frontier.push(pages(*range(200)))
        await other.push(pages(1))

        async def work() -> None:
            turn = 0
            while True:
                turn += 1
                leases = (await frontier.lease(3, 600)).leases
                children = pages(turn, host="b.example")
                await frontier.complete([Completion(lease=lease, children=children) for lease in leases[:2]])
                await asyncio.sleep(0)

        workers = [asyncio.create_task(work()) for _ in range(3)]
        await asyncio.sleep(0.1)
        store = await PostgresStore.open(url)
        await store.delete_run("run")
        for ended in await asyncio.gather(*workers, return_exceptions=True):
            assert isinstance(ended, RunError)
        name = schema_of(url)
        for table in ("request", "ready", "held", "outcome", "event", "lane"):
            rest = await ask(url, f"SELECT count(*) FROM {name}.{table}")
            assert rest == (1 if table in ("request", "ready", "lane") else 0), table
        assert await ask(url, f"SELECT max(in_flight) FROM {name}.host") == 0
        assert len((await other.lease(1, 60)).leases) == 1
        with pytest.raises(RunError):
            await frontier.stats()
        with pytest.raises(RunError):
            await store.delete_run("run")
        await store.close()


async def test_no_lease_slips_through_a_fence(url: str) -> None:
    """Holders of one slot follow each other, each while the one before goes on leasing and completing."""
    patient = FrontierOptions(concurrency_per_host=10_000, max_attempts=1000)
    tables = schema_of(url)
    holder = f"(SELECT number FROM {tables}.holder WHERE name = 's')"
    earlier = f"SELECT count(*) FROM {tables}.held WHERE worker = {holder} AND epoch < $1"

    async def work(frontier: Frontier, busy: asyncio.Event) -> None:
        with suppress(FencedError):
            while True:
                leases = (await frontier.lease(5, 600)).leases
                await frontier.complete([Completion(lease=lease) for lease in leases[:1]])
                busy.set()

    async with opened(url, options=patient) as frontier, AsyncExitStack() as stack:
        await frontier.push([Request(f"http://h{number % 9}.example/{number}") for number in range(5000)])
        stores = [await PostgresStore.open(url) for _ in range(3)]
        for store in stores:
            stack.push_async_callback(store.close)
        workers = []
        lost = 0
        for epoch in range(1, 31):
            lost += await frontier.fence("s", epoch)
            assert await ask(url, earlier, epoch) == 0
            busy = asyncio.Event()
            for store in stores:
                holder = await store.frontier("run", patient, Holder("s", epoch))
                workers.append(asyncio.create_task(work(holder, busy)))
            await busy.wait()
        lost += await frontier.fence("s", 31)
        await asyncio.gather(*workers)
        stats = await frontier.stats()
        assert (stats.leased, stats.dead) == (0, 0)
        assert lost > 100
        assert stats.done > 30
        await check_balance(frontier)
        await check_tables(url)


async def test_a_fence_goes_with_its_run(url: str) -> None:
    async with opened(url) as frontier:
        await frontier.fence("s", 5)
        store = await PostgresStore.open(url)
        await store.delete_run("run")
        assert await ask(url, f"SELECT count(*) FROM {schema_of(url)}.holder") == 0
        with pytest.raises(RunError):
            await frontier.fence("s", 6)
        assert await ask(url, f"SELECT count(*) FROM {schema_of(url)}.holder") == 0
        await store.close()


async def test_a_lease_that_waits_takes_nothing_that_came_after_a_pause(url: str) -> None:
    """Leases of a run wait for each other. A run may be paused meanwhile, and when that call has returned, what is
    pushed then stays in the queue."""
    link = await asyncpg.connect(url.partition("?")[0])
    store = await PostgresStore.open(url)
    try:
        await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
        frontier = await store.frontier("run", WIDE)
        number = await link.fetchval(f"SELECT id FROM {schema_of(url)}.run")
        lock = f"pg_advisory_lock('{schema_of(url)}.ledger'::regclass::oid::integer, {number})"
        await link.fetch(f"SELECT {lock}")
        lease = asyncio.create_task(frontier.lease(1, 60, nonce=os.urandom(16)))
        await waiting(link, 1)
        async with opened(url) as other:
            pause = asyncio.create_task(store.transition("run", "paused"))
            while not pause.done() and await count_waiting(link) < 2:
                await asyncio.sleep(0.01)
            if pause.done():
                await other.push(pages(1))
            await link.fetch(f"SELECT {lock.replace('lock', 'unlock')}")
            await pause
            await other.push(pages(1))
            assert not (await lease).leases
            assert (await other.stats()).ready == 1
    finally:
        await store.close()
        await link.close()


async def count_waiting(link: asyncpg.Connection[asyncpg.Record]) -> int:
    """How many calls wait for the lock of a run."""
    count: int = await link.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    return count


async def waiting(link: asyncpg.Connection[asyncpg.Record], count: int) -> None:
    while await count_waiting(link) < count:
        await asyncio.sleep(0.01)


# -- plans


@pytest.mark.parametrize("known", [True, False], ids=["known", "grown"])
async def test_no_index_is_lost(url: str, known: bool) -> None:
    """Whatever is done often looks its rows up in indexes and passes over few others, also while the planner does not
    know yet how much the tables have grown."""
    store = await PostgresStore.open(url)
    name = schema_of(url)
    tables = ["request", "ready", "held", "outcome", "item", "lane", "host"]
    for table in tables:
        await ask(url, f"ALTER TABLE {name}.{table} SET (autovacuum_enabled = off)")
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    frontier = await store.frontier("run", WIDE)
    holder = await store.frontier("run", WIDE, Holder("s", 1))
    link = store._database._idle[0]

    async def analyze() -> None:
        for table in tables:
            await link.execute(f"VACUUM ANALYZE {name}.{table}")

    await frontier.push(pages(1))
    await frontier.complete([Completion(lease=lease) for lease in (await frontier.lease(1, 600)).leases])
    await analyze()
    for start in range(0, 50_000, 2500):
        numbers = range(start, start + 2500)
        await frontier.push([Request(f"http://h{number % 500}.example/{number}") for number in numbers])
    for _ in range(5):
        leases = (await frontier.lease(200, 600)).leases
        await frontier.complete([Completion(lease=lease, items=[b"i"] * 20) for lease in leases])
    await frontier.lease(2000, 600)
    if known:
        await analyze()
    plans: list[str] = []
    link.add_log_listener(lambda _, message: plans.append(f"{message}\n{getattr(message, 'context', '')}"))
    await link.execute(
        "DISCARD PLANS; LOAD 'auto_explain'; SET client_min_messages = notice; SET auto_explain.log_level = notice;"
        "SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on; SET auto_explain.log_timing = off;"
        "SET auto_explain.log_nested_statements = on"
    )
    leases = (await frontier.lease(100, 600)).leases
    assert len(leases) == 100
    await frontier.renew(leases, 600)
    leases = [lease for lease in await reissue(frontier, leases) if lease]
    links = [Request(f"http://h{number % 600}.example/{number + 49_900}") for number in range(200)]
    await frontier.complete([Completion(lease=lease, items=[b"i"], children=links) for lease in leases[:5]])
    await frontier.fail([Failure(lease=lease, kind="k", reason="r", retry_in=0.001) for lease in leases[5:15]])
    await frontier.release(leases[50:60])
    await frontier.push(links + pages(*range(50)))
    await frontier.read_items(100, 50)
    await asyncio.sleep(0.002)
    await frontier.lease(10, 600)
    await holder.claim("drain", 600)
    assert len((await holder.lease(50, 600)).leases) == 50
    assert await frontier.fence("s", 2) == 50
    await store.close()

    seen = "\n".join(plans)
    for function in (
        "lease", "near_lanes", "best_requests", "requeue", "finish", "push", "enqueue", "hosts_of", "renew",
        "reissue", "release", "end_leases", "fence", "check_fence", "fill_lanes", "place_lanes", "free_hosts",
        "lock_hosts", "lock_lanes", "hosts_for_lease",
    ):  # fmt: skip
        assert f"function {function}(" in seen, f"no plan of {function} was seen"
    whole = set(re.findall(r"Seq Scan on (\w+)", seen)) - {"run", "ledger"}
    assert not whole, f"read whole: {whole}"
    for plan in plans:
        if "function fence(" in plan:  # rare: it may read all that the run holds, so that leases need no further index
            continue
        for passed in re.findall(r"Rows Removed by .*: (\d+)", plan):
            assert int(passed) <= 300, plan
        for rows, loops in re.findall(r"actual rows=(\d+) loops=(\d+)", plan):
            assert int(rows) * int(loops) <= 3000, plan
