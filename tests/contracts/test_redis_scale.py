"""Large pages, many hosts, many runs and many polling workers do not block a Redis server; clock steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from shoal.errors import RunError
from shoal.frontier.redis import RedisStore
from shoal.frontier.redis.frontier import RedisFrontier
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, FrontierOptions, HostUpdate, Lease, Pushed, Run
from shoal.testing.steps import TTL, check_balance, complete, fail, history, lease_names, lease_one, page, push
from tests.support.databases import RedisServer, shared

OPTIONS = FrontierOptions(concurrency_per_host=1000)
_prefixes = (f"s{uuid4().hex[:8]}-{number}" for number in count(1))


@pytest.fixture
def url() -> str:
    return f"{shared(RedisServer).url}?prefix={next(_prefixes)}"


@pytest.fixture
def ahead() -> list[float]:
    """How far the server's clock is ahead."""
    return [0.0]


@pytest_asyncio.fixture
async def store(url: str, ahead: list[float]) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(url, offset=lambda: ahead[0])
    yield store
    await store.close()


async def new_run(store: RedisStore, run_id: str = "run", options: FrontierOptions = OPTIONS) -> Frontier:
    await store.create_run(Run(run_id=run_id, spider="s", state="running", created_at=1.0))
    return await store.frontier(run_id, options)


async def ask(store: RedisStore, *words: Any) -> Any:
    """The server itself; ``{}`` stands for the prefix."""
    prefix = store._scripts.client.address.prefix
    named = [word.replace("{}", prefix) if isinstance(word, str) else word for word in words]
    return await store._scripts.client._client.execute_command(*named)


async def cpu(store: RedisStore) -> float:
    """Seconds that the server has worked."""
    info = await ask(store, "INFO", "cpu")
    seconds: float = info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"]
    return seconds


# -- pages with very many links


def links(number: int, hosts: int = 50) -> list[Request]:
    return [page(each, host=f"{each % hosts}.example") for each in range(number)]


async def longest_wait(frontier: Frontier, until: asyncio.Future[Any]) -> float:
    """Of somebody who goes on leasing and completing meanwhile."""
    longest = 0.0
    while not until.done():
        begin = time.monotonic()
        lease = (await frontier.lease(1, TTL)).leases
        longest = max(longest, time.monotonic() - begin)
        begin = time.monotonic()
        await frontier.complete([Completion(lease=each) for each in lease])
        longest = max(longest, time.monotonic() - begin)
        await asyncio.sleep(0.001)
    return longest


async def test_a_page_with_very_many_links_keeps_nobody_waiting(store: RedisStore, url: str) -> None:
    frontier = await new_run(store)
    await push(frontier, page("large", host="0.example"), *(page(f"x{each}") for each in range(5)))
    large, known = await lease_one(frontier), links(100_000)
    other_store = await RedisStore.open(url)
    try:
        other = await other_store.frontier("run", OPTIONS)
        ending = asyncio.ensure_future(frontier.complete([Completion(lease=large, items=[b"x"], children=known)]))
        assert await longest_wait(other, ending) < 1.0
        assert await ending == [Pushed(100_000, 0)]
        stats = await frontier.stats()
        assert (stats.pushed, stats.incoming) == (100_006, 0)
        await check_balance(frontier)
        assert await frontier.complete([Completion(lease=large, children=known)]) == [Pushed(0, 0)]
    finally:
        await other_store.close()


async def stage(frontier: Frontier, lease: Lease, children: list[Request], **options: Any) -> None:
    """Complete a page as a client does who dies at once: nobody helps to move its links."""

    async def nobody(lease: Lease, settled: object) -> object:
        return settled

    frontier._move_links = nobody  # type: ignore[attr-defined]
    try:
        assert await frontier.complete([Completion(lease=lease, children=children, **options)]) == [Pushed(0, 0)]
    finally:
        del frontier._move_links  # type: ignore[attr-defined]


async def test_links_that_are_staged_belong_to_the_run(store: RedisStore) -> None:
    frontier = await new_run(store)
    other = await store.frontier("run", OPTIONS)
    claim = await frontier.claim("seed", TTL)
    assert claim is not None
    assert await frontier.relinquish(claim, finished=True)
    await push(frontier, "large", page(7, host="7.example"))
    large, seven = (await frontier.lease(2, TTL)).leases
    await stage(frontier, large, links(3500), items=[b"x"])
    stats = await frontier.stats()
    assert (stats.pushed, stats.done, stats.items, stats.incoming, stats.remaining) == (2, 1, 1, 3500, 3501)
    assert not (await frontier.stats()).finished
    await check_balance(frontier)
    found = await history(frontier, page(3499, host="49.example"))
    assert (found.state, found.parent, found.depth) == ("ready", large.request.url, 0)
    assert await frontier.find(page("nothing")) is None
    await complete(other, seven)  # each step moves some, whoever takes it
    assert (await frontier.stats()).incoming == 2500
    assert len((await other.lease(1, TTL)).leases) == 1
    stats = await frontier.stats()
    assert (stats.incoming, stats.pushed, stats.duplicates) == (1500, 2001, 1)
    await check_balance(frontier)
    leases = (await other.lease(4000, TTL)).leases
    while more := (await other.lease(4000, TTL)).leases:
        leases += more
    assert len({lease.fingerprint for lease in leases}) == len(leases) == 3498
    stats = await frontier.stats()
    assert (stats.incoming, stats.pushed, stats.duplicates) == (0, 3501, 1)
    await check_balance(frontier)


async def test_what_was_uploaded_for_nothing_leaves_no_trace(store: RedisStore, ahead: list[float]) -> None:
    frontier = await new_run(store, options=FrontierOptions(max_attempts=9))
    await push(frontier, 1, 2)
    lost, waits = (await frontier.lease(2, 5)).leases
    ahead[0] += 5
    assert await lease_names(frontier) == ["1", "2"]
    assert await frontier.complete([Completion(lease=lost, children=links(2500))]) == [None]
    assert await ask(store, "KEYS", "{}run:1:stage*") == []
    assert await frontier.fail([Failure(lease=waits, kind="k", reason="r", children=links(2500))]) == [None]
    ahead[0] += TTL
    retried = await lease_one(frontier)
    put = frontier._upload  # type: ignore[attr-defined]
    assert (await put(Completion(lease=retried, children=links(2500)))).chunks == 3
    (key,) = await ask(store, "KEYS", "{}run:1:stage*")
    assert 0 < await ask(store, "PTTL", key) <= 600_000
    again = Failure(lease=retried, kind="k", reason="r", retry_in=5, children=links(2500))
    assert await frontier.fail([again]) == ["waiting"]
    assert await ask(store, "KEYS", "{}run:1:stage*") == []
    assert (await frontier.stats()).incoming == 0


async def test_a_stage_that_went_before_its_page_was_completed_is_uploaded_again(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontier = await new_run(store)
    await push(frontier, 1)
    lease, upload = await lease_one(frontier), RedisFrontier._upload
    uploads: list[object] = []

    async def slow(self: RedisFrontier, ended: Completion) -> object:
        made = await upload(self, ended)
        if not uploads:
            await ask(store, "DEL", *(await ask(store, "KEYS", "{}run:1:stage*")))
        uploads.append(made)
        return made

    monkeypatch.setattr(RedisFrontier, "_upload", slow)
    assert await frontier.complete([Completion(lease=lease, children=links(2500))]) == [Pushed(2500, 0)]
    assert len(uploads) == 2
    await check_balance(frontier)


async def test_a_deleted_run_takes_its_stages_along(store: RedisStore) -> None:
    frontier = await new_run(store)
    await push(frontier, 1)
    await stage(frontier, await lease_one(frontier), links(3500))
    assert len(await ask(store, "KEYS", "{}run:1:stage*")) == 2
    await store.delete_run("run")
    assert await ask(store, "KEYS", "{}run:1*") == []


# -- many hosts


async def test_hosts_are_shown_at_the_same_cost_however_many_there_are(store: RedisStore) -> None:
    frontier = await new_run(store)
    await frontier.push([page(each, host=f"{each}.example") for each in range(900)])
    busy = [page(each, host=f"{host}.example") for host in (5, 6) for each in range(3 + host)]
    await frontier.push(busy)
    assert [state.host for state in await frontier.host_states(3)] == ["6.example", "5.example", "0.example"]
    assert len(await frontier.host_states(5000)) == 900
    before = await cpu(store)
    for _ in range(20):
        await frontier.host_states()
    few = await cpu(store) - before
    for first in range(900, 20_000, 2000):
        await frontier.push([page(each, host=f"{each}.example") for each in range(first, first + 2000)])
    leased = await lease_one(frontier)
    states = await frontier.host_states(5000)
    assert {leased.host: 1}.items() <= {state.host: state.in_flight for state in states}.items()
    assert 100 < len(states) < 3000
    before = await cpu(store)
    for _ in range(20):
        await frontier.host_states()
    assert await cpu(store) - before < 5 * few + 0.05


# -- many runs on the same host


async def cost_of_completions(store: RedisStore, frontier: Frontier) -> float:
    before = await cpu(store)
    for _ in range(50):
        await complete(frontier, await lease_one(frontier))
    return await cpu(store) - before


async def test_a_completion_costs_the_same_however_many_runs_share_its_host(
    store: RedisStore, ahead: list[float]
) -> None:
    options = FrontierOptions(concurrency_per_host=1)
    frontier = await new_run(store, options=options)
    await push(frontier, *range(101))
    one = await cost_of_completions(store, frontier)
    others = [await new_run(store, f"run-{number}", options) for number in range(500)]
    lease = await lease_one(frontier)
    for other in others:
        await push(other, "x")
        assert await lease_names(other) == []
    await complete(frontier, lease)
    ahead[0] += 2.0  # nobody waits for their turns any more
    assert await cost_of_completions(store, frontier) < 5 * one + 0.05
    for other in others[::50]:  # and each of them comes to its turn
        assert await lease_names(other) == ["x"]
        assert await lease_names(frontier) == []
        await other.release((await other.lease(0, TTL)).leases)
        await store.delete_run(f"run-{others.index(other)}")


async def test_no_run_waits_for_a_host_that_has_room(store: RedisStore) -> None:
    options = FrontierOptions(concurrency_per_host=1)
    one, two = await new_run(store, "one", options), await new_run(store, "two", options)
    pages = [page("x", host=f"{each}.example") for each in range(700)]
    for run in (one, two):
        await run.push(pages)
    held = (await one.lease(700, TTL)).leases
    for _ in range(5):
        assert await lease_names(two) == []
    await complete(one, *held[500:])
    got = await two.lease(1000, TTL)
    for _ in range(5):  # some are looked at with each call
        got.leases.extend((await two.lease(1000, TTL)).leases)
    assert {lease.host for lease in got.leases} == {lease.host for lease in held[500:]}
    await one.release(held[:500])
    got = await two.lease(1000, TTL)
    for _ in range(5):
        got.leases.extend((await two.lease(1000, TTL)).leases)
    assert len(got.leases) == 500
    await check_balance(two)


@pytest.mark.parametrize("how", ["expiry", "delay", "unblock", "room", "star"])
async def test_a_host_that_comes_free_is_free_for_other_runs(store: RedisStore, ahead: list[float], how: str) -> None:
    options = FrontierOptions(concurrency_per_host=1, delay=5 if how == "delay" else 0)
    one, two = await new_run(store, "one", options), await new_run(store, "two", options)
    await push(one, 1)
    await push(two, 2)
    match how:
        case "expiry":
            await lease_one(one, ttl=5)
            assert await lease_names(two) == []
            ahead[0] += 5.2
            await one.lease(0, TTL)
        case "delay":
            lease = await lease_one(one)
            assert await lease_names(two) == []
            await complete(one, lease)
            leased = await two.lease(1, TTL)
            assert leased.leases == []
            assert leased.wait is not None
            assert 4 < leased.wait < 5.2
            ahead[0] += 5.2
        case "unblock":
            await one.update_host("a.example", HostUpdate(block_for=500))
            assert await lease_names(two) == []
            await one.update_host("a.example", HostUpdate(block_for=0))
        case "room":
            await lease_one(one)
            assert await lease_names(two) == []
            await one.update_host("a.example", HostUpdate(concurrency=2))
        case _:
            await lease_one(one)
            assert await lease_names(two) == []
            await one.update_host("*", HostUpdate(concurrency=2))
    assert await lease_names(two) == ["2"]


# -- many who poll


async def test_many_who_get_nothing_are_spread(store: RedisStore) -> None:
    frontier = await new_run(store)
    assert (await frontier.lease(1, TTL)).poll_after == 0
    begin = time.monotonic()
    for _ in range(899):
        leased = await frontier.lease(1, TTL)
    passed = time.monotonic() - begin
    assert leased.poll_after < 3.1
    assert leased.poll_after + passed > 2.9  # the last of 900 in all, and 300 in a second
    await push(frontier, 1)
    assert (await frontier.lease(1, TTL)).poll_after == 0
    assert (await frontier.lease(0, TTL)).poll_after == 0


# -- runs that are deleted


async def test_a_deletion_that_was_interrupted_is_finished_by_the_next(store: RedisStore) -> None:
    options = FrontierOptions(concurrency_per_host=1)
    frontier, other = await new_run(store, options=options), await new_run(store, "other", options)
    await frontier.push([page(each, host=f"{each}.example") for each in range(2000)])
    await frontier.push([page(f"more {each}", host="1999.example") for each in range(100)])
    held = (await frontier.lease(1500, TTL)).leases
    await other.push([lease.request for lease in held])
    assert await lease_names(other) == []
    (number,) = await ask(store, "HMGET", "{}runs", "run")
    await store._run("delete", run=int(number))  # and its process dies
    assert await store.get_run("run") is None
    assert await ask(store, "KEYS", "{}run:1:q:*") != []
    await store.delete_run("run")
    assert await ask(store, "KEYS", "{}run:1:*") == []
    got: list[Lease] = []
    while more := (await other.lease(2000, TTL)).leases:
        got += more
    assert len(got) == 1500
    with pytest.raises(RunError):
        await store.delete_run("run")


# -- a server whose clock steps


@pytest.mark.parametrize("hour", [-3600, 3600])
async def test_a_clock_that_steps_delays_nothing(store: RedisStore, ahead: list[float], hour: int) -> None:
    frontier = await new_run(store, options=FrontierOptions(delay=5))
    await frontier.push([page(1, host=f"{host}.example") for host in ("lost", "waits", "delayed", "blocked")])
    await frontier.push([page(2, host="delayed.example")])
    await frontier.update_host("blocked.example", HostUpdate(block_for=5))
    leases = {lease.host: lease for lease in (await frontier.lease(9, 5)).leases}
    assert sorted(leases) == ["delayed.example", "lost.example", "waits.example"]
    await fail(frontier, leases["waits.example"], retry_in=5)
    await complete(frontier, leases["delayed.example"])
    claim = await frontier.claim("drain", 5)
    assert claim is not None
    await frontier.remember("fact", b"x", 5)
    ahead[0] += hour
    if hour < 0:
        assert await lease_names(frontier) == []
        assert await frontier.claim("drain", TTL) is None
    else:
        await frontier.lease(0, TTL)
    ahead[0] += 5.3  # the time is kept to a tenth of a second
    await frontier.lease(0, TTL)  # expired leases are released, and their host waits once more
    ahead[0] += 5.3
    assert sorted(lease.host for lease in (await frontier.lease(9, TTL)).leases) == [
        "blocked.example", "delayed.example", "lost.example", "waits.example",
    ]  # fmt: skip
    assert await frontier.claim("drain", TTL)
    assert await frontier.recall("fact") is None
    told = await history(frontier, page(1, host="waits.example"))
    assert abs(told.events[-1].at - (time.time() + ahead[0])) < 30
    await check_balance(frontier)


class SteppingServer(RedisServer):
    """Its clock is set by a file."""

    def _command(self) -> list[str]:
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
        assert library is not None, "these tests need libfaketime: apt-get install faketime"
        libc = library.parent.parent / "libc.so.6"  # whose malloc does not ask for the time, as jemalloc's does
        self.step(0)
        return [
            "env", f"LD_PRELOAD={library} {libc}", f"FAKETIME_TIMESTAMP_FILE={self.folder}/clock",
            "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", *super()._command(),
        ]  # fmt: skip

    def step(self, seconds: int) -> None:
        fresh = self.folder / "fresh"
        fresh.write_text(f"{seconds:+d}s\n")
        fresh.replace(self.folder / "clock")


async def test_a_server_whose_real_clock_steps() -> None:
    server = SteppingServer()
    try:
        store = await RedisStore.open(server.url)
        frontier = await new_run(store, options=FrontierOptions(delay=0.1))
        await push(frontier, *range(5))
        await frontier.lease(1, 0.3)  # which nobody works on
        for hour in (-3600, 0, 3600, 0):
            await frontier.push([page(f"at {hour}")])
            server.step(hour)
            async with asyncio.timeout(30):
                while not (leased := (await frontier.lease(1, TTL)).leases):
                    await asyncio.sleep(0.02)
            clock, _ = await ask(store, "TIME")
            assert abs(int(clock) - time.time() - hour) < 60
            assert await frontier.complete([Completion(lease=leased[0])]) == [Pushed(0, 0)]
            told = await history(frontier, leased[0].request)
            assert abs(told.events[-1].at - time.time() - hour) < 60
        assert (await frontier.stats()).done == 4
        await check_balance(frontier)
        await store.close()
    finally:
        server.close()
