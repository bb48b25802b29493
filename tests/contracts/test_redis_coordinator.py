"""The Redis coordinator beyond the contract: its server is away, comes back, or comes back empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from uuid import uuid4

import pytest

from shoal.errors import CoordinatorAwayError, CoordinatorError, NameTakenError, SessionLostError
from shoal.ports import Coordinator, Counts
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.redis import RedisCoordinator
from shoal.testing.coordination import COUNTS, holders, names, select_events
from shoal.testing.steps import complete, lease_one, push
from tests.contracts.test_redis import new_run, opened, raw, running, until
from tests.support.databases import RedisServer, free_port, shared
from tests.support.patience import allowance

T = TypeVar("T")


@asynccontextmanager
async def connected(url: str, ttl: float = 10.0, cluster: str = "c") -> AsyncIterator[Coordinator]:
    made = await RedisCoordinator.open(url, cluster, ttl)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def url() -> str:
    """With a prefix that nobody has on the server that the tests share."""
    return f"{shared(RedisServer).url}?prefix=m{uuid4().hex[:8]}"


# -- who answers there


async def test_nobody_answers() -> None:
    with pytest.raises(CoordinatorAwayError, match="cannot reach"):
        await open_coordinator(f"redis://127.0.0.1:{free_port()}/0", "c")


async def test_a_url_that_is_wrong_and_a_login_that_is_refused() -> None:
    with pytest.raises(CoordinatorError, match="prefix"):
        await open_coordinator("redis://h?prefix=", "c")
    with running(requirepass="hunter2") as server, pytest.raises(CoordinatorError, match="refuses the login"):
        await open_coordinator(f"redis://:wrong@127.0.0.1:{server.port}/0", "c")


async def test_a_user_who_may_do_what_is_advised() -> None:
    with running() as server:
        async with raw(server) as client:
            rules = "on >pw ~{shoal}:* +@all -@dangerous +info"
            await client.execute_command("ACL", "SETUSER", "advised", *rules.split())
        async with connected(f"redis://advised:pw@127.0.0.1:{server.port}/0") as member:
            await member.join("a", COUNTS)
            assert await member.take(0) is not None
            await member.wait(0.01)
            assert holders(await member.beat()) == {0: "a"}


async def test_keys_of_another_type_are_told(url: str) -> None:
    async with connected(url) as member, raw(shared(RedisServer)) as client:
        await client.set(f"{{{url.partition('=')[2]}}}:cluster:life:c", "something else")
        with pytest.raises(CoordinatorError, match=r"\?prefix=name"):
            await member.join("a", COUNTS)


# -- a server that is away for a while


async def test_a_killed_server_has_everything_when_it_is_back() -> None:
    with running(appendfsync="always") as server:
        async with connected(server.url) as member, connected(server.url) as other:
            await member.join("a", COUNTS, "here")
            await other.join("b", Counts(9, 9))
            epoch = await member.take(0)
            server.kill()
            for step in (member.beat(), member.take(0), member.observe(), member.leave(), member.wait(5.0)):
                with pytest.raises(CoordinatorAwayError):
                    await step
            server.start()
            view = await member.beat()
            assert (names(view), holders(view), view.counts) == (["a", "b"], {0: "a"}, COUNTS)
            assert await member.take(0) == epoch
            assert await other.take(0) is None


async def test_a_server_that_comes_back_empty() -> None:
    with running(appendonly="no") as server:
        async with connected(server.url) as member, connected(server.url) as other:
            await member.join("a", COUNTS)
            before = await member.take(1)
            server.kill()
            server.start()
            with pytest.raises(CoordinatorError, match="knows no cluster"):
                await until(other.observe, CoordinatorAwayError)
            with pytest.raises(SessionLostError):
                await until(member.beat, CoordinatorAwayError)
            await member.join("a", Counts(5, 0))
            assert (await member.beat()).counts == Counts(5, 0)
            assert (await member.take(1) or 0) > (before or 0)
            await other.join("b", COUNTS)
            await member.wait(5.0)
            assert names(await member.beat()) == ["a", "b"]


async def test_a_server_that_does_not_answer() -> None:
    with running() as server:
        async with connected(server.url, ttl=1.0) as member, connected(server.url, ttl=1.0) as other:
            await member.join("a", COUNTS)
            await member.take(0)
            with server.frozen():
                started = time.monotonic()
                with pytest.raises(CoordinatorAwayError):
                    await member.beat()
                with pytest.raises(CoordinatorAwayError):
                    await member.wait(5.0)
                assert time.monotonic() - started < allowance(2.5)
                with pytest.raises(CoordinatorAwayError):
                    await RedisCoordinator.open(server.url, "c", 1.0)
                await asyncio.sleep(1.0)
            with pytest.raises(SessionLostError):
                await member.beat()
            assert names(await other.observe()) == []
            await other.join("b", COUNTS)
            assert await other.take(0) is not None
            assert select_events(await other.events(), "lost", "took over") == [("lost", "a"), ("took over", "b")]


async def persist(step: Callable[[], Awaitable[T]]) -> T:
    """Repeat a step until it is answered: on a busy machine, a server that is awake may be late too."""
    while True:
        with suppress(CoordinatorAwayError):
            return await step()


async def test_what_timed_out_can_be_repeated() -> None:
    """Though the server does it all the same when it wakes up."""
    with running() as server:
        async with connected(f"{server.url}?timeout=1.5") as member, connected(server.url) as twin:
            await twin.join("b", COUNTS)  # now the server knows the script
            with server.frozen(), pytest.raises(CoordinatorAwayError):
                await member.join("a", COUNTS)
            while names(await twin.observe()) != ["a", "b"]:
                await asyncio.sleep(0.01)
            with pytest.raises(NameTakenError):
                await twin.join("a", COUNTS)
            await persist(lambda: member.join("a", COUNTS))
            with server.frozen(), pytest.raises(CoordinatorAwayError):
                await member.take(0)
            epoch = await persist(lambda: member.take(0))
            assert epoch is not None
            assert [slot.epoch for slot in (await persist(member.beat)).slots] == [epoch]
            with server.frozen(), pytest.raises(CoordinatorAwayError):
                await member.leave()
            await persist(member.leave)
            await twin.join("a", COUNTS)
            assert select_events(await twin.events(), "joined", "left")[1:] == [
                ("joined", "a"),
                ("left", "a"),
                ("joined", "a"),
            ]


async def test_closing_takes_no_time_though_the_server_does_not_answer() -> None:
    with running() as server:
        member = await RedisCoordinator.open(server.url, "c", 10.0)
        await member.join("a", COUNTS)
        await member.wait(0.01)
        with server.frozen():
            started = time.monotonic()
            await member.close()
            assert time.monotonic() - started < allowance(1.0)


# -- waiting


async def test_heartbeats_wake_nobody(url: str) -> None:
    async with connected(url) as member, connected(url) as other:
        await member.join("a", COUNTS)
        await other.join("b", COUNTS)
        await member.beat()
        waiting = asyncio.create_task(member.wait(30.0))
        for number in range(5):
            await other.beat(f"works: {number} pages", fit=number % 2 == 0)
            await asyncio.sleep(0.02)
        assert not waiting.done()
        await other.leave()
        async with asyncio.timeout(5):
            await waiting


async def test_whoever_gives_up_waiting_misses_nothing(url: str) -> None:
    async with connected(url) as member, connected(url) as other:
        await member.join("a", COUNTS)
        await other.join("b", COUNTS)
        await member.beat()
        for _ in range(20):
            waiting = asyncio.create_task(member.wait(30.0))
            await asyncio.sleep(0.005)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await other.take(0)
        async with asyncio.timeout(5):
            await member.wait(30.0)
        assert holders(await member.beat()) == {0: "b"}
        started = time.monotonic()
        await member.wait(0.2)  # what was seen already is no news
        assert time.monotonic() - started >= 0.2


# -- beside others


@pytest.mark.parametrize("cluster", ["naïve ☃ name", "with space:and/colon", "head:c", "x" * 300])
async def test_clusters_of_all_names(url: str, cluster: str) -> None:
    async with connected(url) as other, connected(url, cluster=cluster) as member:
        await other.join("a", Counts(1, 0))
        await member.join("b", COUNTS)
        await member.beat()
        await member.take(1)
        async with asyncio.timeout(5):
            await member.wait(30.0)
        assert (names(await member.beat()), holders(await member.beat())) == (["b"], {1: "b"})
        assert (names(await other.beat()), holders(await other.beat())) == (["a"], {})


async def test_a_frontier_and_a_coordinator_on_the_same_prefix(url: str) -> None:
    async with connected(url) as member, opened(url) as store:
        frontier = await new_run(store)
        await push(frontier, 1)
        await member.join("a", COUNTS)
        await complete(frontier, await lease_one(frontier))
        await store.delete_run("run")
        assert names(await member.beat()) == ["a"]


async def test_on_a_cluster() -> None:
    with running(cluster_enabled="yes", cluster_port=str(free_port())) as server:
        async with raw(server) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            while (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                await asyncio.sleep(0.02)
        url = f"redis+cluster://127.0.0.1:{server.port}"
        async with connected(url) as member, connected(url) as other:
            await member.join("a", COUNTS)
            await other.join("b", COUNTS)
            epoch = await member.take(0)
            await other.beat()
            waiting = asyncio.create_task(other.wait(30.0))
            await asyncio.sleep(0.05)
            await member.retire()
            async with asyncio.timeout(5):
                await waiting
            assert (await other.take(0) or 0) > (epoch or 0)
            server.kill()
            with pytest.raises(CoordinatorAwayError):
                await other.wait(5.0)
            with pytest.raises(CoordinatorAwayError):
                await other.beat()
            server.start()
            await until(other.beat, CoordinatorAwayError)
            assert holders(await other.beat()) == {0: "b"}
