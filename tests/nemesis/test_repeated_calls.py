"""For each call of a frontier, one response gets lost and the call is repeated. The effect is that of one call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import pytest

from shoal.errors import FencedError, RunError, StoreAwayError, StoreRewoundError
from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    Failure,
    Frontier,
    FrontierOptions,
    Heartbeat,
    HostUpdate,
    Lease,
    LoggedItem,
    OutputCount,
    Pushed,
    Run,
    Store,
)
from shoal.sinks.drainer import export
from tests.nemesis.proxy import How, LossyProxy, lossy
from tests.nemesis.servers import AofRedis, BackupPostgres
from tests.nemesis.wire_formats import Call
from tests.support.databases import PostgresServer, RedisServer, shared

T = TypeVar("T")

pytestmark = pytest.mark.parametrize("kind", ["redis", "postgres"])


@dataclass
class Bench:
    """A frontier behind a proxy, and the same one without it."""

    lossy: Frontier
    direct: Frontier
    store: Store
    proxy: LossyProxy
    armed: set[str] = field(default_factory=set)

    async def twice(self, step: Callable[[], Awaitable[T]], *kinds: str) -> T:
        """Make a call whose answer gets lost, then the same call again. ``kinds``: what the server knows it by."""
        before = self.proxy.lost.total()
        self.armed.update(kinds)
        with pytest.raises(StoreAwayError):
            await step()
        assert self.proxy.lost.total() == before + 1
        assert not self.armed
        return await step()

    async def leases(self, count: int) -> list[Lease]:
        await self.direct.push([Request(f"http://h{number}.example/") for number in range(count)])
        leases = (await self.lossy.lease(count, 300)).leases
        assert len(leases) == count
        return leases

    async def claim(self, role: str = "seed") -> Claim:
        claim = await self.lossy.claim(role, 300)
        assert claim is not None
        return claim

    async def check(self, **expected: int) -> None:
        """These counters, and a ledger that balances when it is counted anew."""
        stats = await self.direct.stats()
        assert {name: getattr(stats, name) for name in expected} == expected
        assert stats == await self.direct.audit()
        assert stats.balanced


async def persistently(step: Callable[[], Awaitable[T]]) -> T:
    """Again while the server is away."""
    while True:
        with suppress(StoreAwayError):
            return await step()


@asynccontextmanager
async def opened(kind: str, url: str, port: int) -> AsyncIterator[Bench]:
    armed: set[str] = set()

    def loses(call: Call, number: int) -> How | None:
        if call not in armed:
            return None
        armed.clear()
        return "cut"

    with lossy(kind, port, loses) as proxy:
        direct = await open_store(url)
        behind = await open_store(url.replace(f":{port}/", f":{proxy.port}/"))
        try:
            await direct.create_run(Run(run_id="run", spider="nemesis", state="running", created_at=0.0))
            options = FrontierOptions(max_attempts=2, max_queue_size=20, overflow="refuse")
            frontiers = await behind.frontier("run", options), await direct.frontier("run", options)
            yield Bench(*frontiers, behind, proxy, armed)
        finally:
            await behind.close()
            await direct.close()


@pytest.fixture
async def bench(kind: str) -> AsyncIterator[Bench]:
    server = shared(RedisServer if kind == "redis" else PostgresServer)
    place = "prefix" if kind == "redis" else "schema"
    async with opened(kind, f"{server.url}?{place}=n{secrets.token_hex(6)}", server.port) as found:
        yield found


async def test_lease(bench: Bench) -> None:
    await bench.direct.push([Request(f"http://h{number}.example/") for number in range(10)])
    nonce = secrets.token_bytes(16)
    leased = await bench.twice(lambda: bench.lossy.lease(4, 300, nonce=nonce), "lease")
    assert [lease.attempt for lease in leased.leases] == [1] * 4
    await bench.check(leased=4, ready=6)
    assert all(await bench.lossy.complete([Completion(lease=lease) for lease in leased.leases]))
    await bench.check(done=4, ready=6)


async def test_reissue(bench: Bench) -> None:
    leases = await bench.leases(2)
    nonce = secrets.token_bytes(16)
    anew = await bench.twice(lambda: bench.lossy.reissue(leases, 300, nonce=nonce), "reissue")
    assert await bench.direct.complete([Completion(lease=lease) for lease in leases]) == [None, None]
    assert all(await bench.lossy.complete([Completion(lease=lease) for lease in anew if lease]))
    await bench.check(done=2)


async def test_renew(bench: Bench) -> None:
    leases = await bench.leases(2)
    assert all(await bench.twice(lambda: bench.lossy.renew(leases, 300), "renew"))
    await bench.check(leased=2)


async def test_complete(bench: Bench) -> None:
    (lease,) = await bench.leases(1)
    done = [Completion(lease=lease, items=[b"a", b"b"], children=[Request("http://c.example/")])]
    (pushed,) = await bench.twice(lambda: bench.lossy.complete(done), "settle", "finish", "complete")
    assert pushed is not None
    assert (pushed.added, pushed.duplicates) == (0, 0)
    await bench.check(done=1, ready=1, items=2, duplicates=0)


@pytest.mark.parametrize("links", [30, 2500])  # many links are moved into the queue in steps
async def test_complete_a_page_whose_links_do_not_fit(bench: Bench, links: int) -> None:
    (lease,) = await bench.leases(1)
    done = [Completion(lease=lease, children=[Request(f"http://c.example/{number}") for number in range(links)])]
    await bench.twice(lambda: bench.lossy.complete(done), "settle", "finish", "complete")
    while (await bench.direct.stats()).incoming:
        await bench.direct.lease(0, 300)
    await bench.check(done=1, ready=20, dead=links - 20, pushed=links + 1, duplicates=0, incoming=0)
    leases = (await bench.lossy.lease(5, 300)).leases
    await bench.twice(lambda: bench.lossy.retry_dead(), "retry", "retry_dead")
    await bench.check(leased=5, ready=20, dead=links - 25)
    assert await bench.lossy.complete(done) == [Pushed(0, 0)]
    assert len(await bench.lossy.release(leases)) == 5
    await bench.check(ready=25, dead=links - 25)


async def test_fail(bench: Bench) -> None:
    (lease,) = await bench.leases(1)
    failed = [Failure(lease=lease, kind="timeout", reason="slow", retry_in=0.0)]
    await bench.twice(lambda: bench.lossy.fail(failed), "settle", "finish", "fail")
    (again,) = (await bench.direct.lease(5, 300)).leases
    assert again.attempt == 2
    await bench.check(leased=1)


async def test_release(bench: Bench) -> None:
    (lease,) = await bench.leases(1)
    await bench.twice(lambda: bench.lossy.release([lease]), "settle", "release")
    (again,) = (await bench.direct.lease(5, 300)).leases
    assert again.attempt == 1
    await bench.check(leased=1)


async def test_push(bench: Bench) -> None:
    requests = [Request(f"http://h{number}.example/") for number in range(5)]
    await bench.twice(lambda: bench.lossy.push(requests), "push")
    await bench.check(pushed=5, ready=5)


async def test_claim(bench: Bench) -> None:
    nonce = secrets.token_bytes(16)
    claim = await bench.twice(lambda: bench.lossy.claim("seed", 300, nonce=nonce), "role claim", "claim")
    assert claim is not None
    assert await bench.direct.claim("seed", 300) is None
    assert await bench.lossy.advance(claim, b"1", 300)


async def test_seeding(bench: Bench) -> None:
    claim = await bench.claim()
    requests = [Request(f"http://h{number}.example/") for number in range(5)]
    await bench.twice(lambda: bench.lossy.push(requests, seed=claim, cursor=b"5"), "push")
    claim = claim.moved_to(b"5")
    assert await bench.twice(lambda: bench.lossy.advance(claim, b"6", 300), "role advance", "advance")
    claim = claim.moved_to(b"6")
    await bench.twice(lambda: bench.lossy.relinquish(claim, finished=True), "role relinquish", "relinquish")
    (role,) = await bench.direct.roles()
    assert (role.cursor, role.finished, role.held) == (b"6", True, False)
    await bench.check(pushed=5, ready=5)


async def test_fence(bench: Bench) -> None:
    await bench.twice(lambda: bench.lossy.fence("slot", 3), "fence")
    await bench.check(pushed=0)


async def test_items(bench: Bench) -> None:
    (lease,) = await bench.leases(1)
    await bench.lossy.complete([Completion(lease=lease, items=[b"a", b"b", b"c"])])
    read = await bench.twice(lambda: bench.lossy.read_items(0, 10), "items read", "read_items")
    assert [item.payload for item in read] == [b"a", b"b", b"c"]
    await bench.twice(lambda: bench.lossy.trim_items(2), "items trim", "trim_items")
    assert [item.payload for item in await bench.direct.read_items(0, 10)] == [b"c"]
    await bench.check(items=3)


async def test_hosts_and_facts(bench: Bench) -> None:
    await bench.leases(1)
    update = HostUpdate(crawl_delay=2.0)
    await bench.twice(lambda: bench.lossy.update_host("h0.example", update), "host", "update_host")
    (state,) = await bench.direct.host_states()
    assert state.delay == 2.0
    await bench.twice(lambda: bench.lossy.remember("robots", b"x", 60), "fact", "remember")
    assert await bench.twice(lambda: bench.lossy.recall("robots"), "fact", "recall") == b"x"


async def test_retry_dead(bench: Bench) -> None:
    (lease,) = await bench.leases(1)
    await bench.lossy.fail([Failure(lease=lease, kind="http 404", reason="gone", retry_in=None)])
    await bench.check(dead=1)
    await bench.twice(lambda: bench.lossy.retry_dead(), "retry", "retry_dead", "retry_page")
    await bench.check(dead=0, ready=1)


async def test_runs(bench: Bench) -> None:
    run = Run(run_id="other", spider="nemesis", state="queued", created_at=0.0)
    with pytest.raises(RunError, match="other"):  # it was created by the call whose answer was lost
        await bench.twice(lambda: bench.store.create_run(run), "create", "create_run")
    assert (await bench.twice(lambda: bench.store.get_run("other"), "runs", "find_run")) == run
    bench.armed.update(("transition", "set_state"))
    with pytest.raises(StoreAwayError):
        await bench.store.transition("other", "running")
    assert await bench.store.run_state("other") == "running"


async def test_documents(bench: Bench) -> None:
    run = Run(run_id="scheduled", spider="nemesis", state="queued", created_at=0.0)
    first, second, last = (secrets.token_bytes(16) for _ in range(3))
    puts: list[tuple[bytes | None, bytes, bytes, Run | None]] = [
        (b"1", b"", first, run),
        (b"2", first, second, None),
        (None, second, last, None),
    ]
    for value, replaces, version, created in puts:
        put = partial(bench.store.put_document, "a", value, replaces=replaces, version=version, run=created)
        assert await bench.twice(put, "document", "put_document")
        found = await bench.store.get_document("a")
        assert (found and (found.value, found.version)) == (value and (value, version))
    assert await bench.store.get_run("scheduled") == run


async def test_heartbeats(bench: Bench) -> None:
    beat = Heartbeat(worker="w", epoch=1, session=1.0)
    assert await bench.twice(lambda: bench.lossy.beat(beat), "beat") is None
    assert [each.worker for each in await bench.direct.workers()] == ["w"]
    silent = Heartbeat(worker="silent", epoch=1, session=1.0)
    await bench.direct.beat(silent)
    while await bench.direct.beat(beat) != 0:  # silence counts only while heartbeats of others arrive
        await asyncio.sleep(0.02)
    await bench.twice(lambda: bench.lossy.fence_silent(), "fence", "fence_silent")
    assert [each.worker for each in await bench.direct.workers()] == ["w"]
    with pytest.raises(FencedError):
        await bench.direct.beat(silent)
    await bench.twice(lambda: bench.lossy.leave("w", 1), "leave")
    assert not await bench.direct.workers()


class RewindingSink:
    """An output that is slow: the store goes back in time during its first write."""

    def __init__(self, rewind: Callable[[], Awaitable[None]]) -> None:
        self._rewind: Callable[[], Awaitable[None]] | None = rewind
        self.ended: list[bool] = []

    async def open(self, state: bytes, epoch: int = 0) -> None: ...

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if self._rewind is not None:
            rewind, self._rewind = self._rewind, None
            await rewind()

    async def flush(self) -> bytes:
        return b""

    async def close(self, *, finished: bool) -> None:
        self.ended.append(finished)

    async def count(self, state: bytes) -> OutputCount:
        return OutputCount(items=None)


async def test_export(kind: str) -> None:
    """An export that is running when the store goes back does not mix the items of two logs."""
    server = AofRedis() if kind == "redis" else BackupPostgres()
    try:
        async with opened(kind, server.url, server.port) as bench:
            first, second = await bench.leases(2)
            server.mark()
            await bench.lossy.complete([Completion(lease=first, items=[b"first"])])

            async def rewind() -> None:
                server.back_to_mark()
                await persistently(lambda: bench.direct.complete([Completion(lease=second, items=[b"2", b"3"])]))
                await persistently(lambda: bench.lossy.recall("connected again"))

            sink = RewindingSink(rewind)
            with pytest.raises(StoreRewoundError, match="export again"):
                await export(bench.lossy, sink)
            assert sink.ended == [False]
    finally:
        server.close()


async def test_recover(kind: str) -> None:
    server = AofRedis() if kind == "redis" else BackupPostgres()
    try:
        async with opened(kind, server.url, server.port) as bench:
            before, after = await bench.leases(2)
            await bench.lossy.complete([Completion(lease=before, items=[b"before"])])
            server.mark()
            await bench.lossy.complete([Completion(lease=after, items=[b"after"])])
            server.back_to_mark()
            with pytest.raises(StoreRewoundError):
                await persistently(lambda: bench.lossy.lease(1, 300))
            assert await bench.twice(bench.lossy.recover, "recover", "record_rewind")
            assert len(await bench.direct.rewinds()) == 1
            assert not (await bench.lossy.lease(1, 300)).leases
            assert [item.payload for item in await bench.lossy.read_items(0, 10)] == [b"before"]
            await bench.check(done=1, leased=1, rewinds=1)
    finally:
        server.close()
