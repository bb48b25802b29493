"""The Redis frontier beyond the contract: a server that is away, full, used by another program, or not Redis."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from redis._parsers.base import BaseParser
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shoal.clients.redis import RedisAddress, explain
from shoal.errors import (
    FencedError,
    FrontierError,
    RunError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    StoreRewoundError,
)
from shoal.frontier import open_store
from shoal.frontier.redis import RedisStore, inspection
from shoal.frontier.redis import inspection as audit
from shoal.frontier.redis.store import FORMAT
from shoal.ports import (
    Completion,
    Failure,
    Frontier,
    FrontierOptions,
    Heartbeat,
    Holder,
    HostUpdate,
    Pushed,
    Run,
    SilentWorker,
    Stats,
)
from shoal.testing.ledger import audit_live_run
from shoal.testing.steps import TTL, check_balance, complete, history, lease_one, names, page, push, reissue
from tests.support.databases import DatabaseServer, PostgresServer, RedisServer, free_port, shared

_prefixes = (f"t{uuid4().hex[:8]}-{number}" for number in count(1))


@contextmanager
def running(**settings: str) -> Iterator[RedisServer]:
    """A server of one's own, to do harm to."""
    server = RedisServer(**settings)
    try:
        yield server
    finally:
        server.thaw()
        server.close()


@asynccontextmanager
async def opened(url: str, offset: Callable[[], float] = lambda: 0.0) -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(url, offset=offset)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def raw(server: DatabaseServer) -> AsyncIterator[Any]:
    """The server itself, as others see it."""
    client = Redis(port=server.port, protocol=2)
    try:
        yield client
    finally:
        await client.aclose()
        await client.connection_pool.disconnect()


async def new_run(store: RedisStore, run_id: str = "run", options: FrontierOptions | None = None) -> Frontier:
    await store.create_run(Run(run_id=run_id, spider="s", state="running", created_at=1.0))
    return await store.frontier(run_id, options or FrontierOptions(concurrency_per_host=1000))


@pytest.fixture
def prefix() -> str:
    """One that nobody has on the server that the tests share."""
    return next(_prefixes)


@pytest_asyncio.fixture
async def store(prefix: str) -> AsyncIterator[RedisStore]:
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}") as store:
        yield store


async def keys(prefix: str) -> list[bytes]:
    async with raw(shared(RedisServer)) as client:
        return sorted(await client.keys(f"{{{prefix}}}:*"))


# -- URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", ("server", (("h", 6379),), "", 0, None, None)),
        ("redis://:p%40ss@h:1/2", ("server", (("h", 1),), "", 2, None, "p@ss")),
        ("rediss://user:pw@[::1]:7/0", ("server", (("::1", 7),), "", 0, "user", "pw")),
        ("redis+sentinel://u:p@a,b:1/main/3", ("sentinel", (("a", 26379), ("b", 1)), "main", 3, "u", "p")),
        ("redis+cluster://a:1,b:2", ("cluster", (("a", 1), ("b", 2)), "", 0, None, None)),
    ],
)
def test_urls(url: str, expected: tuple[object, ...]) -> None:
    address = RedisAddress.parse(url)
    assert (address.kind, address.nodes, address.service, address.db, address.username, address.password) == expected
    assert bool(address.tls) == url.startswith("rediss")


@pytest.mark.parametrize(
    "url",
    [
        "redis://", "redis://h:0", "redis://h:99999", "redis://h/x", "redis://h/0/1", "redis://a,b/0", "redis+x://h",
        "redis+sentinel://h", "redis+cluster://h/1",
        "redis+sentinel://h/m/x", "redis://h?prefix=", "redis://h?prefix=a}b", "redis://h?timeout=0",
        "redis://h?timeout=soon", "redis://h?pool=3", "redis://h?ssl_ca_certs=x", "redis://h?x", "redis://h/0#part",
        "redis://[::1/0",
    ],
)  # fmt: skip
async def test_what_is_no_redis_url_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="redis://"):
        await open_store(url.replace("://", "://user:hunter2@"))


def test_a_url_is_shown_without_passwords() -> None:
    url = "redis+sentinel://user:hunter2@h:1/main/0?sentinel_password=hunter3"
    assert RedisAddress.parse(url).shown == "redis+sentinel://user:***@h:1/main/0"
    with pytest.raises(StoreError) as caught:
        RedisAddress.parse("redis://user:hunter2@h/x?prefix=hunter3")
    assert "hunter" not in str(caught.value)


# -- who answers there


async def test_nobody_answers() -> None:
    with pytest.raises(StoreAwayError, match="cannot reach"):
        await RedisStore.open(f"redis://127.0.0.1:{free_port()}/0")


async def test_a_wrong_password_and_a_user_who_may_not() -> None:
    with running(requirepass="hunter2") as server:
        for login in ("", ":wrong-hunter@", "nobody:hunter2@"):
            with pytest.raises(StoreError, match="refuses the login") as caught:
                await RedisStore.open(f"redis://{login}127.0.0.1:{server.port}/0")
            assert "hunter" not in str(caught.value)
        async with opened(f"redis://:hunter2@127.0.0.1:{server.port}/0") as store:
            client = store._scripts.client._client
            await client.execute_command("ACL", "SETUSER", "noscript", "on", ">pw", "~*", "+@all", "-@scripting")
            await client.execute_command("ACL", "SETUSER", "nokeys", "on", ">pw", "~other:*", "+@all")
            rules = "on >pw ~{shoal}:* +@all -@dangerous +info"
            await client.execute_command("ACL", "SETUSER", "advised", *rules.split())
            await client.execute_command("ACL", "SETUSER", "noinfo", *rules.removesuffix("+info").split())
        for user in ("noscript", "nokeys"):
            with pytest.raises(StoreError, match=r"ACL SETUSER name .* ~\{shoal\}:\*"):
                await RedisStore.open(f"redis://{user}:pw@127.0.0.1:{server.port}/0")
        for user in ("advised", "noinfo"):
            async with opened(f"redis://{user}:pw@127.0.0.1:{server.port}/0") as store:
                frontier = await new_run(store, user)
                await push(frontier, 1)
                await complete(frontier, await lease_one(frontier), items=[b"x"])
                await store.delete_run(user)


async def test_a_database_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="out of range"):
        await RedisStore.open(f"redis://127.0.0.1:{shared(RedisServer).port}/99")


async def test_a_single_server_is_no_cluster_and_no_sentinel() -> None:
    port = shared(RedisServer).port
    for url in (f"redis+cluster://127.0.0.1:{port}", f"redis+sentinel://127.0.0.1:{port}/main/0"):
        with pytest.raises(StoreError, match="write redis://"):
            await RedisStore.open(url)
    with pytest.raises(StoreAwayError, match="cannot reach"):
        await RedisStore.open(f"redis+cluster://127.0.0.1:{free_port()}")


@asynccontextmanager
async def answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[int]:
    """A server that says what it is told to whenever it hears something."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while heard := await reader.read(65536):
            writer.write(answer(heard))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"220 mail\r\n"])
async def test_something_else_answers(answer: bytes) -> None:
    async with answering(lambda heard: answer) as port:
        with pytest.raises(StoreError, match="not Redis"):
            await RedisStore.open(f"redis://127.0.0.1:{port}/0?timeout=2")


async def test_postgres_answers() -> None:
    with pytest.raises(StoreError, match="is PostgreSQL"):
        await RedisStore.open(f"redis://127.0.0.1:{shared(PostgresServer).port}/0")


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ("redis_version:6.0.16\r\nredis_mode:standalone\r\n", "6.2 or later"),
        ("redis_version:7.0.0\r\nredis_mode:sentinel\r\n", "is a sentinel"),
        ("something:else\r\n", "not Redis"),
    ],
)
async def test_a_server_that_is_too_old_or_of_another_kind(info: str, says: str) -> None:
    def answer(heard: bytes) -> bytes:
        answers = {b"PING": b"+PONG\r\n", b"CLIENT": b"+OK\r\n", b"INFO": b"$%d\r\n%s\r\n" % (len(info), info.encode())}
        return b"".join(answers.get(word, b"") for word in heard.split(b"\r\n"))

    async with answering(answer) as port:
        with pytest.raises(StoreError, match=says):
            await RedisStore.open(f"redis://127.0.0.1:{port}/0?timeout=2")


async def test_a_store_of_an_older_version_is_refused(store: RedisStore, prefix: str) -> None:
    await new_run(store)
    async with raw(shared(RedisServer)) as client:
        await client.hset(f"{{{prefix}}}:store", "format", "4")
    advice = r"older Shoal .* Finish its runs with that version, and export their items; .* \?prefix=name"
    with pytest.raises(StoreError, match=advice) as caught:
        await RedisStore.open(f"{shared(RedisServer).url}?prefix={prefix}")
    assert "delete" not in str(caught.value)


async def test_a_store_of_format_5_is_used_when_nobody_works_on_it(store: RedisStore, prefix: str) -> None:
    """All its hosts have long records, as those with settings still have."""
    url, key = f"{shared(RedisServer).url}?prefix={prefix}", f"{{{prefix}}}:store"
    frontier = await new_run(store)
    await push(frontier, 1, 2, 3)
    await frontier.update_host("a.example", HostUpdate(delay=0.0))
    lease = await lease_one(frontier)
    async with raw(shared(RedisServer)) as client:
        await client.hset(key, "format", "5")
        with pytest.raises(
            StoreError, match=r"older Shoal \(format 5.* that it has leased: 1, .* heartbeats: 0\. Stop its workers"
        ):
            await RedisStore.open(url)
        assert await client.hget(key, "format") == b"5"
        await frontier.release([lease])
        async with opened(url) as again:
            assert await client.hget(key, "format") == b"%d" % FORMAT
            stored = await again.frontier("run", FrontierOptions(concurrency_per_host=9))
            assert names(await stored.lease(9, TTL)) == ["1", "2", "3"]
            await check_balance(stored)


async def test_a_store_of_format_6_is_used_when_nobody_works_on_it(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs have fewer counters, and their own times of heartbeats. Its last worker was killed."""
    url, key, ahead = f"{shared(RedisServer).url}?prefix={prefix}", f"{{{prefix}}}", [0.0]
    async with opened(url) as store, raw(shared(RedisServer)) as client:
        await new_run(store)
        killed = await store.frontier("run", FrontierOptions(), Holder("killed", 1))
        await push(killed, 1, 2, 3)
        await complete(killed, await lease_one(killed))
        await killed.beat(Heartbeat(worker="killed", epoch=1, session=40))
        await client.hset(f"{key}:store", "format", "6")
        counters = await client.hget(f"{key}:run:1", "counters")
        await client.hset(f"{key}:run:1", "counters", counters[: -2 * 8])
        await client.delete(f"{key}:beat", f"{key}:heard")
        await client.zadd(f"{key}:run:1:beat", {"killed": time.time() + 40})
        with pytest.raises(StoreError, match=r"format 6.* leased: 0, workers that send heartbeats: 1\. Stop"):
            await RedisStore.open(url)
        assert await client.hget(f"{key}:store", "format") == b"6"

        ahead[0] = 41
        async with opened(url, lambda: ahead[0]) as again:
            assert await client.hget(f"{key}:store", "format") == b"%d" % FORMAT
            worker = await again.frontier("run", FrontierOptions(), Holder("new", 1))
            assert [state.worker for state in await worker.workers()] == ["killed"]
            for _ in range(4):  # the store may have been away: silence begins anew
                assert await worker.fence_silent() == []
                await worker.beat(Heartbeat(worker="new", epoch=1, session=30))
                ahead[0] += 10
            assert await worker.fence_silent() == [SilentWorker("run", "killed", 0)]
            leases = (await worker.lease(9, TTL)).leases
            assert names(leases) == ["2", "3"]
            redirect, other = leases
            await worker.complete([Completion(lease=redirect, redirected=True, children=[page(4)])])
            await worker.complete([Completion(lease=other, item_errors=5)])
            stats = await worker.stats()
            assert (stats.done, stats.redirects, stats.item_errors) == (3, 1, 5)
            await check_balance(worker)

    monkeypatch.setattr("shoal.frontier.redis.store.FORMAT", 6)
    with pytest.raises(StoreError, match=r"newer Shoal \(format 7, this one knows 6\); upgrade, or use"):
        await RedisStore.open(url)


async def test_a_store_from_before_claims_had_epochs(store: RedisStore, prefix: str) -> None:
    """A worker of an earlier version has claimed the roles."""
    frontier = await new_run(store)
    named = await store.frontier("run", FrontierOptions(), Holder("w", 1))
    held, free = await named.claim("held", TTL), await named.claim("free", TTL)
    assert held
    assert free
    assert await named.advance(held, b"far", TTL)
    assert await named.relinquish(free)
    async with raw(shared(RedisServer)) as client:
        assert await client.delete(f"{{{prefix}}}:run:1:claim") == 1
    assert {state.role: (state.cursor, state.held, state.holder) for state in await frontier.roles()} == {
        "held": (b"far", True, ""), "free": (b"", False, ""),
    }  # fmt: skip
    assert await frontier.claim("held", TTL) is None
    assert await named.relinquish(held.moved_to(b"far"))
    for before in (held, free):
        again = await frontier.claim(before.role, TTL)
        assert again is not None
        assert again.epoch > before.epoch


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("LOADING Redis is loading the dataset in memory", StoreAwayError),
        ("BUSY Redis is busy running a script", StoreAwayError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", StoreAwayError),
        ("CLUSTERDOWN Hash slot not served", StoreAwayError),
        ("MASTERDOWN Link with MASTER is down", StoreAwayError),
        ("READONLY You can't write against a read only replica.", StoreAwayError),
        ("NOREPLICAS Not enough good replicas to write.", StoreAwayError),
        ("ERR max number of clients reached", StoreAwayError),
        ("ERR Error running script (call to f_1): @user_script:12: -READONLY You can't write", StoreAwayError),
        ("ERR Error running script (call to f_1): @user_script:12: -OOM command not allowed", StoreFullError),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreFullError),
        ("MISCONF Errors writing to the AOF file: No space left on device", StoreFullError),
        ("ERR Error running script: WRONGTYPE Operation against a key holding the wrong kind", StoreError),
        ("MOVED 3999 127.0.0.1:6381", StoreError),
        ("NOPERM this user has no permissions to run the 'evalsha' command", StoreError),
        ("NOAUTH Authentication required.", StoreError),
        ("REWOUND the store does not know a change that it had acknowledged", StoreRewoundError),
        ("FENCED slot c/0 is held under epoch 7 by now", FencedError),
        ("ERR something new", StoreError),
    ],
)
def test_what_the_answers_of_a_server_mean(answer: str, error: type[FrontierError]) -> None:
    """Also in the words that Redis 6.2 uses for what happens inside of a script."""
    assert type(explain(BaseParser.parse_error(answer), RedisAddress.parse("redis://h"))) is error


# -- a server that is away for a while


async def test_a_server_that_does_not_answer() -> None:
    with running() as server:
        async with opened(f"{server.url}?timeout=1.5") as store:
            frontier = await new_run(store)
            await push(frontier, 1)
            with server.frozen():
                with pytest.raises(StoreAwayError):
                    await frontier.push([page(2)])  # which it does all the same when it wakes up
                with pytest.raises(StoreAwayError):
                    await RedisStore.open(f"{server.url}?timeout=1.5")
            while (await frontier.stats()).pushed < 2:
                await asyncio.sleep(0.01)
            assert await frontier.push([page(2)]) == Pushed(0, 1)
            assert names(await frontier.lease(5, TTL)) == ["1", "2"]


async def test_a_reissue_whose_answer_was_lost_is_repeated() -> None:
    with running() as server:
        async with opened(f"{server.url}?timeout=1.5") as store:
            frontier = await new_run(store)
            await push(frontier, 1, 2)
            sent, other = (await frontier.lease(2, TTL, counts_attempt=False)).leases
            await reissue(frontier, [other])  # so that the server has the script
            with server.frozen(), pytest.raises(StoreAwayError):
                await frontier.reissue([sent], TTL, nonce=b"one-receiver")  # which it does when it wakes up
            while (await history(frontier, sent.request)).attempts == 0:
                await asyncio.sleep(0.01)
            assert await reissue(frontier, [sent]) == [None]
            (lease,) = await frontier.reissue([sent], TTL, nonce=b"one-receiver")
            assert lease is not None
            await complete(frontier, lease)


async def test_a_server_that_is_busy_with_a_script() -> None:
    with running(busy_reply_threshold="50") as server:
        async with opened(server.url) as store, raw(server) as client, raw(server) as other:
            frontier = await new_run(store)
            endless = asyncio.ensure_future(client.eval("while true do end", 0))
            await asyncio.sleep(0.2)
            with pytest.raises(StoreAwayError, match="busy"):
                await frontier.push([page(1)])
            await other.script_kill()
            with pytest.raises(Exception, match="killed"):
                await endless
            assert await frontier.push([page(1)]) == Pushed(1, 0)


async def test_a_server_that_has_become_a_replica() -> None:
    with running() as server:
        async with opened(server.url) as store, raw(server) as client:
            frontier = await new_run(store)
            await client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
            with pytest.raises(StoreAwayError, match="read only"):
                await frontier.push([page(1)])
            await client.execute_command("REPLICAOF", "NO", "ONE")
            assert await frontier.push([page(1)]) == Pushed(1, 0)


async def test_a_server_that_has_forgotten_the_scripts() -> None:
    with running() as server:
        async with opened(server.url) as store, raw(server) as client:
            frontier = await new_run(store)
            await push(frontier, 1)
            await client.script_flush()
            await push(frontier, 2)
            assert (await frontier.stats()).pushed == 2


async def test_a_closed_store_says_so(prefix: str) -> None:
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}") as store:
        frontier = await new_run(store)
    with pytest.raises(StoreError, match="closed"):
        await frontier.stats()


# -- a server that is full


async def test_a_server_without_memory_leaves_no_trace() -> None:
    with running() as server:
        async with opened(server.url) as store, raw(server) as client:
            frontier = await new_run(store)
            await push(frontier, 1, 2)
            lease = await lease_one(frontier)
            before, known = await frontier.stats(), sorted(await client.keys())
            await client.config_set("maxmemory", "1mb")
            with pytest.raises(FrontierError, match="nothing was changed"):
                await frontier.push([page(3, host="new.example")])
            with pytest.raises(FrontierError, match="maxmemory"):
                await frontier.complete([Completion(lease=lease, items=[b"x"], children=[page(4)])])
            with pytest.raises(FrontierError, match="maxmemory"):
                await frontier.lease(1, TTL)
            assert (await frontier.stats(), sorted(await client.keys())) == (before, known)
            await check_balance(frontier)
            assert await frontier.find(page(3)) is None
            await client.config_set("maxmemory", "0")
            await complete(frontier, lease, items=[b"x"], children=[page(3), page(4)])
            assert (await frontier.stats()).items == 1


async def test_a_server_without_a_disk_leaves_no_trace() -> None:
    with running(appendonly="no", save="3600 1000000") as server:
        async with opened(server.url) as store, raw(server) as client:
            frontier = await new_run(store)
            await push(frontier, 1)
            shutil.rmtree(server.folder)
            await client.bgsave()
            while (await client.info("persistence"))["rdb_bgsave_in_progress"]:
                await asyncio.sleep(0.01)
            with pytest.raises(FrontierError, match="disk"):
                await frontier.push([page(2)])
            assert (await frontier.stats()).pushed == 1
            await client.config_set("stop-writes-on-bgsave-error", "no")
            assert await frontier.push([page(2)]) == Pushed(1, 0)


async def test_what_may_lose_requests_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    careless = running(appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru")
    with careless as server, caplog.at_level(logging.WARNING):
        async with opened(server.url):
            pass
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "noeviction" in told
    assert "appendonly yes" in told
    caplog.clear()
    async with opened(shared(RedisServer).url):
        assert not caplog.records


# -- what something else has written


async def test_what_cant_be_read_is_dead_and_stops_nobody(store: RedisStore, prefix: str) -> None:
    frontier = await new_run(store)
    await push(frontier, *range(6), page("waits"))
    *_, waits = (await frontier.lease(7, TTL)).leases
    await frontier.fail([Failure(lease=waits, kind="k", reason="r", retry_in=0.001)])
    await frontier.release(_)
    async with raw(shared(RedisServer)) as client:
        key = f"{{{prefix}}}:run:1:req"
        good = await client.hget(key, page(0).fingerprint())
        assert good is not None
        await client.hset(key, page(0).fingerprint(), good[:40] + b"\xc1 no msgpack")
        await client.hset(key, page(1).fingerprint(), good[:40] + b"\x81\xa3url\xa3ftp")  # no Request
        await client.hset(key, page(2).fingerprint(), good[:39])
        await client.hset(key, page("waits").fingerprint(), b"")
        await client.hdel(key, page(3).fingerprint())
    await asyncio.sleep(0.01)
    assert names(await frontier.lease(1, TTL)) == ["4"]  # all before it went to the dead on the way
    assert names(await frontier.lease(9, TTL)) == ["5"]
    assert await frontier.dead_kinds() == {"unreadable": 5}
    stats = await frontier.stats()
    assert (stats.leased, stats.dead, stats.ready, stats.waiting) == (2, 5, 0, 0)
    await check_balance(frontier)
    dead = [each async for each in frontier.dead()]
    assert len(dead) == 5
    assert all("another program" in each.reason for each in dead)
    assert await frontier.retry_dead() == 4  # nobody knows where the one that waited belonged
    assert names(await frontier.lease(9, TTL)) == []
    assert await frontier.dead_kinds() == {"unreadable": 5}
    await check_balance(frontier)


async def test_a_lease_whose_record_was_spoilt_gives_its_place_back(prefix: str) -> None:
    ahead = [0.0]
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}", lambda: ahead[0]) as store:
        frontier = await new_run(store, options=FrontierOptions(concurrency_per_host=1))
        await push(frontier, 1, 2)
        lease = await lease_one(frontier, ttl=5)
        async with raw(shared(RedisServer)) as client:
            await client.hset(f"{{{prefix}}}:run:1:req", lease.fingerprint, b"junk")
        assert await frontier.complete([Completion(lease=lease)]) == [None]
        ahead[0] += 5
        assert names(await frontier.lease(5, TTL)) == ["2"]
        assert await frontier.dead_kinds() == {"unreadable": 1}
        await check_balance(frontier)


@pytest.mark.parametrize("name", ["run:1", "run:1:req", "run:1:open", "run:1:role", "host", "lease", "name"])
async def test_a_key_of_another_type_is_told(store: RedisStore, prefix: str, name: str) -> None:
    frontier = await new_run(store)
    await push(frontier, 1)
    async with raw(shared(RedisServer)) as client:
        await client.delete(f"{{{prefix}}}:{name}")
        await client.set(f"{{{prefix}}}:{name}", "something else")
    steps = {"run:1:role": lambda: frontier.claim("seed", TTL), "lease": lambda: frontier.lease(5, TTL)}
    step = steps.get(name) or (lambda: frontier.push([page(2, host="new.example")]))
    with pytest.raises(StoreError, match=r"\?prefix=name"):
        await step()


# -- stores and runs beside each other


async def test_prefixes_keep_stores_apart(store: RedisStore, prefix: str) -> None:
    one = await new_run(store, options=FrontierOptions(delay=10))
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}-other") as other_store:
        assert await other_store.list_runs() == []
        other = await new_run(other_store, options=FrontierOptions(delay=10))
        await push(one, 1, 2)
        await push(other, 1)
        await one.remember("fact", b"1", TTL)
        await lease_one(one)
        await lease_one(other)  # politeness is kept within a store
        assert await other.recall("fact") is None
        await other_store.delete_run("run")
        assert (await one.stats()).pushed == 2


async def test_a_deleted_run_leaves_nothing_and_its_workers_are_told(store: RedisStore, prefix: str) -> None:
    options = FrontierOptions(concurrency_per_host=2)
    frontier, neighbour = await new_run(store, "gone", options), await new_run(store, "stays", options)
    await frontier.push([page(number, host=f"{number % 900}.example") for number in range(2000)])
    await push(neighbour, page("n", host="0.example"))
    held = (await frontier.lease(50, TTL)).leases
    await complete(frontier, held[0], items=[b"x"], note="n")
    await frontier.fail([Failure(lease=held[1], kind="k", reason="r")])
    await frontier.fail([Failure(lease=held[2], kind="k", reason="r", retry_in=5)])
    await frontier.claim("seed", TTL)
    held_by = await store.frontier("gone", options, Holder("c/0", 2))
    assert await held_by.fence("c/0", 1) == 0
    assert await held_by.claim("drain", TTL)
    await lease_one(held_by)
    await store.delete_run("gone")
    assert [name for name in await keys(prefix) if b":run:1" in name or b"deleted" in name] == []
    for step in (frontier.stats(), frontier.lease(1, TTL), frontier.push([page(1)]), frontier.claim("seed", 1)):
        with pytest.raises(RunError, match="gone"):
            await step
    assert await keys(prefix) == [name for name in await keys(prefix) if b":run:1" not in name]
    assert names(await neighbour.lease(5, TTL)) == ["n"]
    assert [(state.host, state.in_flight) for state in await neighbour.host_states()] == [("0.example", 1)]
    await new_run(store, "gone")


async def test_what_was_leased_under_a_slot_is_remembered_until_it_ends(prefix: str) -> None:
    ahead = [0.0]
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}", lambda: ahead[0]) as store:
        frontier = await new_run(store)
        await push(frontier, *range(9))
        await complete(frontier, await lease_one(frontier))
        slots = f"{{{prefix}}}:run:1:slot"
        assert slots.encode() not in await keys(prefix)  # nothing of the kind for plain workers
        held_by = await store.frontier("run", FrontierOptions(concurrency_per_host=1000), Holder("c/0", 1))
        done, failed, released, renewed, reissued, *_ = (await held_by.lease(8, 5)).leases
        async with raw(shared(RedisServer)) as client:
            assert await client.hlen(slots) == 8
            await complete(frontier, done)  # by whomever
            await held_by.fail([Failure(lease=failed, kind="k", reason="r")])
            await held_by.release([released])
            assert await held_by.renew([renewed], TTL)
            assert await reissue(frontier, [reissued])
            assert await client.hlen(slots) == 5
            ahead[0] += 5
            await frontier.lease(0, TTL)
            assert set(await client.hkeys(slots)) == {renewed.fingerprint, reissued.fingerprint}
            assert await frontier.fence("c/0", 2) == 2
            assert await client.exists(slots) == 0
        await check_balance(frontier)


async def test_what_was_sent_is_remembered_until_it_ends(prefix: str) -> None:
    ahead = [0.0]
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}", lambda: ahead[0]) as store:
        frontier = await new_run(store)
        await push(frontier, *range(9))
        await complete(frontier, await lease_one(frontier))
        sent = f"{{{prefix}}}:run:1:sent"
        assert sent.encode() not in await keys(prefix)  # nothing of the kind for plain workers
        done, failed, released, renewed, reissued, *_ = (await frontier.lease(8, 5, counts_attempt=False)).leases
        async with raw(shared(RedisServer)) as client:
            assert await client.hlen(sent) == 8
            await complete(frontier, done)
            await frontier.fail([Failure(lease=failed, kind="k", reason="r")])
            await frontier.release([released])
            assert await frontier.renew([renewed], TTL)
            (begun,) = await reissue(frontier, [reissued])
            assert begun is not None
            assert await client.hlen(sent) == 4  # what was reissued is begun
            ahead[0] += 5
            await frontier.lease(0, TTL)
            assert set(await client.hkeys(sent)) == {renewed.fingerprint}
            await complete(frontier, begun, renewed)
            assert await client.exists(sent) == 0
            await frontier.lease(1, TTL, counts_attempt=False)
            await store.delete_run("run")
            assert await client.exists(sent) == 0


async def test_many_things_become_due_at_once(prefix: str) -> None:
    ahead = [0.0]
    async with opened(f"{shared(RedisServer).url}?prefix={prefix}", lambda: ahead[0]) as store:
        frontier = await new_run(store, options=FrontierOptions(concurrency_per_host=9999, max_attempts=1))
        await frontier.push([page(number) for number in range(2500)])
        assert len((await frontier.lease(2500, 5)).leases) == 2500
        ahead[0] += 5
        left = []
        while (await frontier.lease(0, TTL)).wait == 0:  # no call works on all of them
            left.append((await frontier.stats()).leased)
            await check_balance(frontier)
        assert left == [1500, 500]
        assert await frontier.dead_kinds() == {"worker lost": 2500}
        assert await frontier.retry_dead() == 2500
        assert len([each async for each in frontier.dead()]) == 0


async def test_a_long_run_is_counted_and_searched_in_portions(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SEARCH_STEP", "_RETRY_STEP", "_PAGE"):
        monkeypatch.setattr(inspection, name, 50)
    for name in ("AUDIT_LIMIT", "_STEP", "_LANES"):
        monkeypatch.setattr(audit, name, 50)
    frontier = await new_run(store)
    await frontier.push([page(number, host=f"{number}.example", dont_filter=True) for number in range(3000)])
    leases = (await frontier.lease(1000, TTL)).leases
    await frontier.fail([Failure(lease=each, kind=f"k{each.token % 2}", reason="r") for each in leases[:600]])
    stats = await frontier.stats()
    assert stats == Stats(pushed=3000, ready=2000, leased=400, dead=600, seeding=True)
    assert await frontier.audit() == stats
    assert (await history(frontier, page(2999, host="2999.example"))).state == "ready"
    assert await frontier.find(page("nothing")) is None
    assert len({each.url async for each in frontier.dead()}) == 600
    assert await frontier.retry_dead(["k1"]) == 300
    assert await frontier.dead_kinds() == {"k0": 300}


async def test_an_audit_in_portions_of_a_live_run_finds_no_fault(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in {"AUDIT_LIMIT": 20, "_STEP": 20, "_LANES": 3, "_ITEMS": 5}.items():
        monkeypatch.setattr(audit, name, limit)
    await audit_live_run(await new_run(store), pages=300, audits=20)


async def test_the_items_of_a_page_are_read_and_trimmed_one_by_one(store: RedisStore) -> None:
    frontier = await new_run(store)
    await push(frontier, *range(4))
    sizes = (2500, 0, 1, 30)
    for lease, size in zip((await frontier.lease(4, TTL)).leases, sizes, strict=True):
        await complete(frontier, lease, items=[b"%d" % number for number in range(size)])
    log = await frontier.read_items(0, 9999)
    assert [item.seq for item in log] == list(range(1, 2532))
    assert [item.payload for item in log] == [b"%d" % item.index for item in log]
    assert len({item.key for item in log}) == 2531
    for after, limit in ((0, 1), (998, 5), (1999, 501), (2499, 2), (2500, 99), (2531, 9)):
        assert await frontier.read_items(after, limit) == log[after : after + limit]
    for through in (10, 5, 1000, 2515, 2531):
        await frontier.trim_items(through)
        assert await frontier.read_items(0, 3) == log[max(10, through) :][:3]
    assert (await frontier.stats()).items == 2531


# -- many at the same time


_WORKER = """
import asyncio, sys
from shoal.frontier.redis import RedisStore
from shoal.ports import Completion, FrontierOptions

async def work(url):
    store = await RedisStore.open(url)
    frontier = await store.frontier("run", FrontierOptions(concurrency_per_host=1000))
    print("ready", flush=True)
    sys.stdin.readline()
    while leases := (await frontier.lease(7, 60)).leases:
        print(*(lease.request.url for lease in leases))
        await frontier.complete([Completion(lease=lease, items=[lease.request.url.encode()]) for lease in leases])
    await store.close()

asyncio.run(work(sys.argv[1]))
"""


async def test_processes_never_get_the_same_request(store: RedisStore, prefix: str) -> None:
    frontier = await new_run(store)
    await frontier.push([page(number, host=f"{number % 7}.example") for number in range(2000)])
    command = (sys.executable, "-c", _WORKER, f"{shared(RedisServer).url}?prefix={prefix}")
    pipe = asyncio.subprocess.PIPE
    workers = [await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"
    shares = [said.split() for said, _ in await asyncio.gather(*(worker.communicate(b"go\n") for worker in workers))]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sum(map(len, shares)) == len({url for share in shares for url in share}) == 2000
    assert sum(bool(share) for share in shares) > 1
    assert await frontier.stats() == Stats(pushed=2000, done=2000, items=2000, seeding=True)


# -- other ways to a server


class SentinelServer(DatabaseServer):
    """A sentinel that watches one server, called ``main``."""

    def __init__(self, master: RedisServer) -> None:
        self._master = master
        super().__init__()

    def _prepare(self) -> None:
        (self.folder / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {self._master.port} 1\n"
        )

    def _command(self) -> list[str]:
        return ["redis-server", str(self.folder / "sentinel.conf"), "--sentinel"]

    _answers = RedisServer._answers

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.port}/main/0"


async def test_through_a_sentinel() -> None:
    with running(appendfsync="always") as server:
        sentinel = SentinelServer(server)
        try:
            async with opened(sentinel.url) as store:
                frontier = await new_run(store)
                await push(frontier, 1)
                await complete(frontier, await lease_one(frontier), items=[b"x"])
                server.kill()
                with pytest.raises(StoreAwayError):
                    await frontier.stats()
                server.start()
                assert (await frontier.stats()).items == 1
            with pytest.raises(StoreAwayError, match="no sentinel"):
                await RedisStore.open(sentinel.url.replace("/main/", "/other/"))
            with pytest.raises(StoreError, match=r"redis\+sentinel://"):
                await RedisStore.open(f"redis://127.0.0.1:{sentinel.port}/0")
        finally:
            sentinel.close()


async def until(step: Callable[[], Awaitable[object]], *away: type[Exception]) -> None:
    """Again and again, until it gives something and nobody is away."""
    async with asyncio.timeout(30):
        while True:
            with suppress(*away):
                if await step():
                    return
            await asyncio.sleep(0.05)


async def test_after_a_failover() -> None:
    with running() as server, running() as replica:
        async with raw(replica) as client:
            await client.execute_command("REPLICAOF", "127.0.0.1", str(server.port))

            async def is_replica() -> bool:
                return (await client.info("replication")).get("master_link_status") == "up"

            async def is_master() -> bool:
                return (await client.info("replication"))["role"] == "master"

            await until(is_replica)
            sentinel = SentinelServer(server)
            try:
                async with opened(sentinel.url) as store, raw(sentinel) as watcher:
                    frontier = await new_run(store)
                    await push(frontier, 1, 2)
                    first = await lease_one(frontier)
                    await until(lambda: watcher.execute_command("SENTINEL", "FAILOVER", "main"), ResponseError)
                    await until(is_master)
                    server.kill()
                    done = [Completion(lease=first, items=[b"x"])]
                    await until(lambda: frontier.complete(done), StoreAwayError)
                    second = await lease_one(frontier)
                    assert second.token != first.token
                    assert (await frontier.stats()).items == 1
                    await check_balance(frontier)
            finally:
                sentinel.close()


async def test_on_a_cluster() -> None:
    # "always": otherwise a busy disk delays writes, and a killed server forgets some.
    with running(cluster_enabled="yes", cluster_port=str(free_port()), appendfsync="always") as server:
        async with raw(server) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
            while (await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
                await asyncio.sleep(0.02)
        async with opened(f"redis+cluster://127.0.0.1:{server.port}") as store:
            frontier = await new_run(store)
            await frontier.push([page(number, host=f"{number}.example") for number in range(50)])
            leases = (await frontier.lease(50, TTL)).leases
            await complete(frontier, *leases, items=[b"x"], children=[page("child")])
            await frontier.remember("fact", b"1", TTL)
            assert await frontier.recall("fact") == b"1"
            assert len(await frontier.read_items(0, 99)) == 50
            await check_balance(frontier)
            server.kill()
            with pytest.raises(StoreAwayError):
                await frontier.stats()
            server.start()
            await until(frontier.stats, StoreAwayError)
            assert (await frontier.stats()).done == 50
            await store.delete_run("run")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


async def test_through_tls(certificate: Path) -> None:
    secure = free_port()
    files = {"tls_cert_file": "cert.pem", "tls_key_file": "key.pem", "tls_ca_cert_file": "cert.pem"}
    settings = {name: str(certificate / file) for name, file in files.items()}
    with running(tls_port=str(secure), tls_auth_clients="no", **settings) as server:
        async with opened(f"rediss://127.0.0.1:{secure}/0?ssl_ca_certs={certificate}/cert.pem") as store:
            await push(await new_run(store), 1)
        for url, says in (
            (f"rediss://127.0.0.1:{secure}/0", "certificate is not trusted"),
            (f"rediss://127.0.0.1:{secure}/0?ssl_ca_certs=/no/such/file", "cannot read a file"),
            (f"rediss://127.0.0.1:{server.port}/0?timeout=1", "does not speak TLS"),
        ):
            with pytest.raises(StoreError, match=says):
                await RedisStore.open(url)
        with pytest.raises(StoreAwayError, match="rediss://"):
            await RedisStore.open(f"redis://127.0.0.1:{secure}/0?timeout=2")
