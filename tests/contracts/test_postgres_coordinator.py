"""The PostgreSQL coordinator beyond the contract: faults, its single connection, sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from shoal.errors import CoordinatorAwayError, CoordinatorError, NameTakenError, SessionLostError, StoreAwayError
from shoal.ports import Counts
from shoal.runs.cluster.postgres import PostgresCoordinator
from tests.contracts.postgres_steps import schema_for
from tests.support.databases import PostgresServer
from tests.support.patience import allowance

COUNTS = Counts(2, 1)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One to be harmed."""
    server = PostgresServer(synchronous_commit="on")
    yield server
    server.close()


@pytest.fixture
def harmed(request: pytest.FixtureRequest, server: PostgresServer) -> str:
    """A schema of its own on the server that is harmed."""
    return f"{server.url}?schema={schema_for(request)}"


@asynccontextmanager
async def opened(url: str, ttl: float = 10.0, cluster: str = "cluster") -> AsyncIterator[PostgresCoordinator]:
    made = await PostgresCoordinator.open(url, cluster, ttl)
    try:
        yield made
    finally:
        await made.close()


async def execute(url: str, statement: str) -> None:
    """On the tables of the coordinator."""
    address, _, schema = url.partition("?schema=")
    link = await asyncpg.connect(address, server_settings={"search_path": schema})
    try:
        await link.execute(statement)
    finally:
        await link.close()


async def until_back(member: PostgresCoordinator) -> None:
    """It finds its server again by itself."""
    limit = time.monotonic() + 20
    while True:
        try:
            await member.beat()
            return
        except CoordinatorAwayError:
            assert time.monotonic() < limit
            await asyncio.sleep(0.05)


async def until_news(member: PostgresCoordinator) -> None:
    """Something happened; what is behind is not waited for."""
    started = time.monotonic()
    await member.wait(20)
    assert time.monotonic() - started < allowance(10)


# -- opening


async def test_a_port_where_nobody_listens(unused_tcp_port: int) -> None:
    with pytest.raises(CoordinatorAwayError, match="cannot reach") as caught:
        await PostgresCoordinator.open(f"postgresql://me:sesame@127.0.0.1:{unused_tcp_port}/db", "cluster", 10)
    assert isinstance(caught.value.__cause__, StoreAwayError)
    assert "sesame" not in str(caught.value)


async def test_a_url_that_cant_be_used() -> None:
    with pytest.raises(CoordinatorError, match="schema") as caught:
        await PostgresCoordinator.open("postgresql://me:sesame@127.0.0.1/db?schema=pg_mine", "cluster", 10)
    assert not isinstance(caught.value, CoordinatorAwayError)
    assert "sesame" not in str(caught.value)


async def test_fifty_members_with_a_connection_each(url: str) -> None:
    members = await asyncio.gather(*(PostgresCoordinator.open(url, "cluster", 30) for _ in range(50)))
    await asyncio.gather(*(member.join(f"m{number}", COUNTS) for number, member in enumerate(members)))
    epochs = await asyncio.gather(*(member.take(number % 2) for number, member in enumerate(members)))
    assert sum(epoch is not None for epoch in epochs) == 2
    views = await asyncio.gather(*(member.beat() for member in members))
    assert {len(view.members) for view in views} == {50}
    assert all(len(member._database._idle) == 1 for member in members)
    await asyncio.gather(*(member.close() for member in members))


# -- faults


async def test_a_server_that_is_killed_forgets_nothing(server: PostgresServer, harmed: str) -> None:
    async with opened(harmed, ttl=60) as member, opened(harmed, ttl=60) as other:
        await member.join("a", COUNTS, "there")
        await other.join("b", COUNTS)
        epoch = await member.take(1)
        server.kill()
        with pytest.raises(CoordinatorAwayError):
            await member.beat()
        with pytest.raises(CoordinatorAwayError):
            await other.take(0)
        await other.wait(0)
        started = time.monotonic()
        await other.wait(0.2)
        assert 0.19 <= time.monotonic() - started < allowance(2)
        server.start()
        await until_back(member)
        await until_back(other)
        assert await member.take(1) == epoch
        view = await member.beat()
        assert sorted((each.name, each.where) for each in view.members) == [("a", "there"), ("b", "")]
        await other.wait(0)
        await member.retire()
        await until_news(other)  # it listens again


async def test_a_server_that_is_away_for_too_long(server: PostgresServer, harmed: str) -> None:
    async with opened(harmed, ttl=1) as member:
        await member.join("a", COUNTS)
        epoch = await member.take(0)
        server.kill()
        await asyncio.sleep(1)
        server.start()
        with pytest.raises(SessionLostError):
            await until_back(member)
        await member.join("a", COUNTS)
        assert (await member.take(0) or 0) > (epoch or 0)
        assert [event.what for event in await member.events(3)] == ["lost", "joined", "took over"]


async def test_calls_end_in_time_while_the_server_is_frozen(server: PostgresServer, harmed: str) -> None:
    async with opened(f"{harmed}&timeout=1", ttl=60) as member, opened(harmed, ttl=2) as brief:
        await member.join("a", COUNTS)
        await brief.join("b", COUNTS)
        with server.frozen():
            started = time.monotonic()
            for call in (member.beat(), brief.beat()):  # half a session is the most, whatever the URL says
                with pytest.raises(CoordinatorAwayError, match="did not answer within 1 s"):
                    await call
            assert time.monotonic() - started < allowance(4)
            hung = asyncio.create_task(member.take(0))
            await asyncio.sleep(0.1)
            closing = time.monotonic()
            await brief.close()
            assert time.monotonic() - closing < allowance(2.5)
        await asyncio.gather(hung, return_exceptions=True)
        await until_back(member)
        assert await member.take(0) is not None


async def test_closing_does_not_wait_for_a_call_that_hangs(server: PostgresServer, harmed: str) -> None:
    member = await PostgresCoordinator.open(harmed, "cluster", 60)
    await member.join("a", COUNTS)
    waiting = asyncio.create_task(member.wait(60))
    with server.frozen():
        hung = asyncio.create_task(member.beat())
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await member.close()
        assert time.monotonic() - started < allowance(4)
        await waiting
        assert time.monotonic() - started < allowance(4)
    await asyncio.wait({hung})


async def test_a_connection_that_an_administrator_ends(harmed: str) -> None:
    async with opened(harmed) as member, opened(harmed) as other:
        await member.join("a", COUNTS)
        await other.join("b", COUNTS)
        await execute(harmed, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shoal'")
        await until_back(member)
        await until_back(other)
        await member.wait(0)
        await other.leave()
        await until_news(member)


# -- sessions


async def test_joining_again_replaces_the_own_session(url: str) -> None:
    """Nobody knows whether a call happened that was not answered."""
    async with opened(url) as member, opened(url) as other:
        await member.join("a", COUNTS)
        await member.take(0)
        await member.join("a", COUNTS)
        view = await member.beat()
        assert [each.name for each in view.members] == ["a"]
        assert [slot.holder for slot in view.slots] == [""]
        await member.join("b", COUNTS)
        assert [each.name for each in (await member.beat()).members] == ["b"]
        with pytest.raises(NameTakenError):
            await other.join("b", COUNTS)


async def test_a_late_call_of_an_earlier_session_changes_nothing(url: str) -> None:
    async with opened(url) as member:
        await member.join("a", COUNTS)
        first = member._session
        await member.join("a", COUNTS)
        await member.take(0)
        for function, arguments in (
            ("leave", ()), ("retire", (member._epoch,)), ("join", (10.0, 5, 5, False, "", member._channel)),
        ):  # fmt: skip
            await member._call(function, "a", member._client, first, *arguments)
        assert await member._call("take", "a", member._client, first, 1) == []
        view = await member.beat()
        assert [slot.holder for slot in view.slots] == ["a"]
        assert view.counts == COUNTS


async def test_epochs_grow_when_the_tables_were_lost(url: str) -> None:
    async with opened(url) as member:
        await member.join("a", COUNTS)
        before = await member.take(0)
        await execute(url, "TRUNCATE cluster, member, slot, cluster_event")
        with pytest.raises(SessionLostError):
            await member.beat()
        await member.join("a", COUNTS)
        assert (await member.take(0) or 0) > (before or 0)
        await execute(url, "UPDATE cluster SET epoch = 1::bigint << 60")  # a clock that was set back
        await member.retire()
        assert await member.take(0) == (1 << 60) + 1


async def test_text_of_all_kinds_is_data(url: str) -> None:
    odd = "a\0b\ud800'; DROP TABLE member; --"
    async with opened(url, cluster=odd) as member, opened(url, cluster=odd) as other:
        await member.join(odd, COUNTS, odd)
        await member.beat(odd)
        assert await member.take(0) is not None
        (seen,) = (await other.observe()).members
        assert (seen.name, seen.doing, seen.where) == ("a\ufffdb?'; DROP TABLE member; --",) * 3
        await other.join("b", COUNTS)
        await until_news(member)


# -- news


async def test_heartbeats_are_no_news(url: str) -> None:
    async with opened(url) as member, opened(url) as other, opened(url, cluster="another") as stranger:
        await member.join("a", COUNTS)
        await other.join("b", COUNTS)
        await asyncio.sleep(0.1)
        await member.wait(0)
        for _ in range(3):
            await other.beat("works")
        await other.observe()
        await stranger.join("c", COUNTS)
        started = time.monotonic()
        await member.wait(0.3)
        assert time.monotonic() - started >= 0.29
        await other.scale(Counts(1, 1))
        await until_news(member)


async def test_waiting_may_be_cancelled(url: str) -> None:
    async with opened(url) as member, opened(url) as other:
        await member.join("a", COUNTS)
        await member.wait(0)
        for _ in range(3):
            task = asyncio.create_task(member.wait(60))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task})
        await other.join("b", COUNTS)
        await until_news(member)
        await member.beat()


async def test_whoever_looks_finds_the_lost(url: str) -> None:
    """Also when nobody lives who would have noticed."""
    async with opened(url, ttl=0.5) as member, opened(url) as stranger:
        await member.join("a", COUNTS)
        await member.take(0)
        assert len((await stranger.observe()).members) == 1
        await asyncio.sleep(0.6)
        view = await stranger.observe()
        assert (view.members, [slot.holder for slot in view.slots]) == ((), [""])
        event = (await stranger.events())[-1]
        assert (event.what, event.member, event.slot) == ("lost", "a", 0)
