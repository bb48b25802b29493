"""A Redis server that restarts with older data than its clients have seen, and lost responses."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from shoal.errors import RunError, StoreAwayError, StoreRewoundError
from shoal.frontier.redis import RedisStore
from shoal.ports import Claim, Completion, Failure, Frontier, FrontierOptions, HostUpdate, Lease, Pushed, Run
from shoal.testing.steps import TTL, check_balance, complete, lease_one, names, page, push
from tests.support.databases import RedisServer, shared

OPTIONS = FrontierOptions(concurrency_per_host=1000)
ONE, ANOTHER = b"the first call", b"the second one"
_prefixes = (f"w{uuid4().hex[:8]}-{number}" for number in count(1))


class Rewindable(RedisServer):
    """A server whose data can be set back."""

    _saved: Path

    def save(self) -> None:
        """What a power cut would leave if it came now."""
        self._saved = self.folder / "saved"
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self.folder / "appendonlydir", self._saved)

    def rewind(self) -> None:
        """Back to what was saved."""
        self.kill()
        shutil.rmtree(self.folder / "appendonlydir")
        shutil.copytree(self._saved, self.folder / "appendonlydir")
        self.start()


@pytest.fixture(scope="module")
def one_server() -> Iterator[Rewindable]:
    server = Rewindable(appendfsync="always")  # otherwise a busy disk delays writes, and `save` misses some
    yield server
    server.close()


@pytest.fixture
def server(one_server: Rewindable) -> Rewindable:
    """The same for all, as each test has a prefix of its own."""
    return one_server


@pytest_asyncio.fixture
async def open_frontier(server: Rewindable) -> AsyncIterator[Callable[..., Awaitable[Frontier]]]:
    """Opens clients of one run, each with connections of its own."""
    url, stores = f"{server.url}?prefix={next(_prefixes)}", []

    async def opened(run_id: str = "run", options: FrontierOptions = OPTIONS) -> Frontier:
        store = await RedisStore.open(url)
        stores.append(store)
        if await store.get_run(run_id) is None:
            await store.create_run(Run(run_id=run_id, spider="s", state="running", created_at=1.0))
        return await store.frontier(run_id, options)

    yield opened
    for store in stores:
        await store.close()


@pytest_asyncio.fixture
async def frontier(open_frontier: Callable[..., Awaitable[Frontier]]) -> Frontier:
    return await open_frontier()


@asynccontextmanager
async def unchanged(server: RedisServer) -> AsyncIterator[None]:
    """Nothing on the server changes meanwhile."""
    client = Redis(port=server.port, protocol=2)

    async def value(key: bytes | str) -> Any:
        if await client.type(key) != b"hash":  # whose dump has no order
            return await client.dump(key)
        fields = await client.hgetall(key)
        # the clock; and that all hosts wait, as the server was restarted
        for field in (b"seen", bytes(4), b"defaults"):
            fields.pop(field, None)
        return fields

    async def everything() -> dict[bytes | str, Any]:
        return {key: await value(key) for key in sorted(await client.keys())}

    try:
        before = await everything()
        yield
        assert await everything() == before
    finally:
        await client.aclose()
        await client.connection_pool.disconnect()


async def rewind(server: Rewindable, *clients: Frontier) -> None:
    server.rewind()
    await reconnect(*clients)


async def reconnect(*clients: Frontier) -> None:
    """A client is told once that its connection was lost."""
    for client in clients:
        with suppress(StoreAwayError):
            await client.stats()


async def lose_a_completion(server: Rewindable, frontier: Frontier) -> None:
    """The server acknowledges one, and forgets it."""
    lease = await lease_one(frontier)
    server.save()
    await complete(frontier, lease, items=[b"lost"], children=[page("child")])
    await rewind(server, frontier)


# -- noticing


@pytest.mark.parametrize("step", ["lease", "push", "complete", "fail", "release"])
async def test_a_lost_completion_is_noticed_by(step: str, server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, *range(5))
    other = await lease_one(frontier)
    await lose_a_completion(server, frontier)
    steps: dict[str, Callable[[], Awaitable[object]]] = {
        "lease": lambda: frontier.lease(5, TTL),
        "push": lambda: frontier.push([page("new")]),
        "complete": lambda: frontier.complete([Completion(lease=other, items=[b"x"])]),
        "fail": lambda: frontier.fail([Failure(lease=other, kind="k", reason="r")]),
        "release": lambda: frontier.release([other]),
    }
    async with unchanged(server):
        with pytest.raises(StoreRewoundError):
            await steps[step]()
    await check_balance(frontier)


async def test_after_a_rewind_nothing_is_done_until_it_is_recovered(server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, *range(5))
    claim = await frontier.claim("drain", TTL)
    other = await lease_one(frontier)
    assert claim is not None
    assert await frontier.recover() is None
    await lose_a_completion(server, frontier)
    with pytest.raises(StoreRewoundError):
        await frontier.lease(5, TTL)
    async with unchanged(server):
        for step in (
            lambda: frontier.lease(1, TTL),
            lambda: frontier.push([page("new")]),
            lambda: frontier.complete([Completion(lease=other)]),
            lambda: frontier.fail([Failure(lease=other, kind="k", reason="r")]),
            lambda: frontier.release([other]),
            lambda: frontier.renew([other], TTL),
            lambda: frontier.reissue([other], TTL, nonce=ONE),
            lambda: frontier.claim("seed", TTL),
            lambda: frontier.forget("drain"),
            lambda: frontier.advance(claim, b"1", TTL),
            lambda: frontier.relinquish(claim),
            lambda: frontier.read_items(0, 5),
        ):
            with pytest.raises(StoreRewoundError):
                await step()
        assert (await frontier.stats()).rewinds == 0
        await frontier.host_states()
    found = await frontier.recover()
    assert found is not None
    assert await frontier.rewinds() == [found]
    assert (await frontier.stats()).rewinds == 1
    assert await frontier.recover() is None
    assert await frontier.advance(claim, b"1", TTL)
    assert names(await frontier.lease(9, TTL)) == ["2", "3", "4"]
    await check_balance(frontier)


async def test_a_run_goes_on_after_a_rewind(server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, 1)
    lease = await lease_one(frontier, ttl=0.2)
    server.save()
    await complete(frontier, lease, items=[b"lost"], children=[page("child")])
    await complete(frontier, await lease_one(frontier))
    await rewind(server, frontier)
    with pytest.raises(StoreRewoundError):
        await frontier.lease(1, TTL)
    await frontier.recover()
    again: list[Lease] = []
    while not again:  # the lease was taken back, so it runs out
        again = (await frontier.lease(1, TTL)).leases
    assert again[0].request == lease.request
    assert again[0].token != lease.token
    assert await frontier.complete([Completion(lease=lease, items=[b"stale"])]) == [None]
    await complete(frontier, again[0], items=[b"again"], children=[page("child")])
    await complete(frontier, await lease_one(frontier))
    assert [item.payload for item in await frontier.read_items(0, 9)] == [b"again"]
    stats = await frontier.stats()
    assert (stats.done, stats.remaining, stats.rewinds) == (2, 0, 1)
    await check_balance(frontier)


async def test_links_that_were_refused_are_refused_again_after_a_rewind(
    server: Rewindable, open_frontier: Callable[..., Awaitable[Frontier]]
) -> None:
    """The page is fetched again, perhaps with other links. No link is counted twice, and a retry works."""
    frontier = await open_frontier(options=FrontierOptions(max_queue_size=2, overflow="refuse"))
    await push(frontier, "parent")
    lease = await lease_one(frontier)
    server.save()
    children = [page(number) for number in range(5)]
    assert await frontier.complete([Completion(lease=lease, children=children)]) == [Pushed(2, 0, 3)]
    await rewind(server, frontier)
    with pytest.raises(StoreRewoundError):
        await frontier.lease(1, TTL)
    assert await frontier.recover() is not None
    assert (await frontier.stats()).dead == 0
    assert await frontier.retry_dead() == 0
    assert await frontier.complete([Completion(lease=lease, children=children[:4])]) == [Pushed(2, 0, 2)]
    await check_balance(frontier)
    leases = (await frontier.lease(2, TTL)).leases
    assert await frontier.retry_dead() == 2
    assert names(leases) + names(await frontier.lease(9, TTL)) == ["0", "1", "2", "3"]


async def test_how_much_was_lost_is_known(server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, *range(3))
    await complete(frontier, await lease_one(frontier))
    await lose_a_completion(server, frontier)
    with pytest.raises(StoreRewoundError):
        await frontier.lease(1, TTL)
    found = await frontier.recover()
    assert found is not None
    assert found.lost_seconds is not None
    assert 0 < found.lost_seconds < 60
    await lose_a_completion(server, frontier)  # the only one that it remembers now
    with pytest.raises(StoreRewoundError):
        await frontier.lease(1, TTL)
    found = await frontier.recover()
    assert found is not None
    assert found.lost_seconds is None
    assert [each.lost_seconds is None for each in await frontier.rewinds()] == [False, True]
    assert (await frontier.stats()).rewinds == 2


async def test_a_rewind_that_loses_the_record_of_a_rewind_is_recorded(server: Rewindable, frontier: Frontier) -> None:
    """The client has no receipt by then, so it does not notice that the store goes back again."""
    await push(frontier, *range(3))
    await lose_a_completion(server, frontier)
    with pytest.raises(StoreRewoundError):
        await frontier.lease(1, TTL)
    assert await frontier.recover() is not None
    await rewind(server, frontier)
    assert await frontier.rewinds() == []
    assert (await frontier.stats()).rewinds == (await frontier.stats()).rewinds == len(await frontier.rewinds()) == 1


async def test_clients_record_the_same_rewind_once(
    server: Rewindable, open_frontier: Callable[..., Awaitable[Frontier]]
) -> None:
    one, two, idle = [await open_frontier() for _ in range(3)]
    await push(one, *range(9))
    server.save()
    for client in (one, two):
        await complete(client, await lease_one(client))
    await rewind(server, one, two, idle)
    assert len((await idle.lease(1, TTL)).leases) == 1  # it knows of nothing that was lost
    for client in (one, two):
        with pytest.raises(StoreRewoundError):
            await client.lease(1, TTL)
        assert await client.recover() is not None
    assert len(await idle.rewinds()) == 1
    server.save()
    await complete(two, await lease_one(two))
    await rewind(server, two, idle)
    with pytest.raises(StoreRewoundError):
        await two.lease(1, TTL)
    await two.recover()
    assert len(await idle.rewinds()) == (await idle.stats()).rewinds == 2
    await check_balance(idle)


async def test_every_host_with_a_delay_waits_one_after_a_rewind(
    server: Rewindable, open_frontier: Callable[..., Awaitable[Frontier]]
) -> None:
    frontier, other = await open_frontier(), await open_frontier("other", FrontierOptions(delay=1000))
    await push(frontier, *range(3))
    await push(other, page(1, host="b.example"))
    await other.update_host("c.example", HostUpdate(delay=0))
    await push(other, page(2, host="c.example"))
    await lose_a_completion(server, frontier)
    await reconnect(other)
    with pytest.raises(StoreRewoundError):
        await frontier.lease(1, TTL)
    await frontier.recover()
    leased = await other.lease(5, TTL)
    assert names(leased) == ["2"]
    assert leased.wait is not None
    assert leased.wait > 500
    assert len(names(await frontier.lease(5, TTL))) == 2  # without a delay there is none to keep


async def test_the_newest_completion_speaks_for_all_whichever_answer_comes_first(
    server: Rewindable, frontier: Frontier
) -> None:
    await push(frontier, *range(3))
    first, second, third = (await frontier.lease(3, TTL)).leases
    await complete(frontier, first)
    server.save()
    await complete(frontier, second)
    assert await frontier.complete([Completion(lease=first)]) == [Pushed(0, 0)]  # an older one, told again
    await rewind(server, frontier)
    with pytest.raises(StoreRewoundError):
        await frontier.release([third])


async def test_a_run_that_is_another_one_now(
    server: Rewindable, open_frontier: Callable[..., Awaitable[Frontier]]
) -> None:
    await open_frontier("first")
    server.save()
    lost = await open_frontier("lost")
    await rewind(server, lost)
    await push(await open_frontier("third"), 1)  # which has its number
    with pytest.raises(RunError, match="lost"):
        await lost.lease(1, TTL)


# -- cursors


@pytest.mark.parametrize("step", ["advance", "push", "finish"])
async def test_a_cursor_that_went_back_is_noticed(step: str, server: Rewindable, frontier: Frontier) -> None:
    claim = await frontier.claim("seed", TTL)
    assert claim is not None
    server.save()
    assert await frontier.push([page(1)], seed=claim, cursor=b"1") == Pushed(1, 0)
    claim = claim.moved_to(b"1")
    assert await frontier.advance(claim, b"2", TTL)
    claim = claim.moved_to(b"2")
    await rewind(server, frontier)
    steps: dict[str, Callable[[Claim], Awaitable[object]]] = {
        "advance": lambda claim: frontier.advance(claim, b"3", TTL),
        "push": lambda claim: frontier.push([page(3)], seed=claim, cursor=b"3"),
        "finish": lambda claim: frontier.relinquish(claim, finished=True),
    }
    async with unchanged(server):
        with pytest.raises(StoreRewoundError):
            await steps[step](claim)
        with pytest.raises(StoreRewoundError):
            await frontier.lease(1, TTL)
    assert await frontier.recover() is not None
    claim = claim.moved_to(b"")
    assert await frontier.push([page(1)], seed=claim, cursor=b"1") == Pushed(1, 0)
    assert await frontier.relinquish(claim.moved_to(b"1"), finished=True)


# -- items


@pytest.mark.parametrize("size", [1, 3])
async def test_items_that_are_gone_or_others_are_noticed(size: int, server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, *range(4))
    first, second, third, _ = (await frontier.lease(4, TTL)).leases
    await complete(frontier, first, items=[b"1"] * size)
    server.save()
    await complete(frontier, second, items=[b"2"] * size)
    log = await frontier.read_items(0, 99)
    assert [item.token for item in log] == [first.token] * size + [second.token] * size
    await rewind(server, frontier)
    reader = await _again(frontier)
    for item in log[:size]:
        assert await reader.read_items(item.seq, 99, last=item) == log[item.seq : size]
    for item in log[size:]:
        reader = await _again(frontier)
        assert await reader.read_items(item.seq, 99) == []  # it is not asked
        with pytest.raises(StoreRewoundError):
            await reader.read_items(item.seq, 99, last=item)
        with pytest.raises(StoreRewoundError):
            await reader.lease(1, TTL)
    writer = await _again(frontier)
    await complete(writer, third, items=[b"3"] * (size + 1))
    for item in log[size:]:
        with pytest.raises(StoreRewoundError):
            await (await _again(frontier)).read_items(item.seq, 99, last=item)
    reader = await _again(frontier)
    assert len(await reader.read_items(log[0].seq, 99, last=log[0])) == 2 * size
    await reader.trim_items(2 * size)
    await reader.read_items(log[-1].seq, 99, last=log[-1])  # nobody knows any more
    with pytest.raises(StoreRewoundError):
        await reader.trim_items(99)


async def test_a_page_that_stands_elsewhere_in_the_log_is_noticed(server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, 1, 2)
    first, second = (await frontier.lease(2, TTL)).leases
    server.save()
    await complete(await _again(frontier), second, items=[b"a", b"b", b"c"])
    reader = await _again(frontier)
    (*_, item) = await reader.read_items(0, 2)
    await rewind(server, frontier)
    await complete(await _again(frontier), first, items=[b"x"])
    await complete(await _again(frontier), second, items=[b"a", b"b", b"c"])  # its answer had been lost
    with pytest.raises(StoreRewoundError):
        await reader.read_items(item.seq, 9, last=item)


async def _again(frontier: Frontier) -> Frontier:
    """Another client of the same run, who remembers nothing."""
    assert hasattr(frontier, "_scripts")
    return await RedisStore(frontier._scripts).frontier(frontier._run_id, OPTIONS)  # type: ignore[attr-defined]


# -- lost answers: each call is made twice


@pytest_asyncio.fixture
async def store() -> AsyncIterator[RedisStore]:
    store = await RedisStore.open(f"{shared(RedisServer).url}?prefix={next(_prefixes)}")
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=1.0))
    yield store
    await store.close()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_repeated_lease_leases_nothing_more(store: RedisStore, begun: bool) -> None:
    frontier, other = await store.frontier("run", OPTIONS), await store.frontier("run", OPTIONS)
    await push(frontier, *range(9))
    first = await frontier.lease(3, TTL, counts_attempt=begun, nonce=ONE)
    assert len((await other.lease(1, TTL, nonce=ONE)).leases) == 1  # a nonce belongs to its client
    again = await frontier.lease(3, TTL, counts_attempt=begun, nonce=ONE)
    assert [(each.request, each.token, each.attempt) for each in again.leases] == [
        (each.request, each.token, each.attempt) for each in first.leases
    ]
    assert again.leases[0].deadline > first.leases[0].deadline
    assert (await frontier.stats()).leased == 4
    await complete(frontier, again.leases[0])
    await frontier.release([again.leases[1]])
    assert names(await frontier.lease(3, TTL, counts_attempt=begun, nonce=ONE)) == ["2"]
    assert names(await frontier.lease(2, TTL, nonce=ANOTHER)) == ["1", "4"]
    with pytest.raises(ValueError, match="nonce"):
        await frontier.lease(2, TTL, nonce=b"short")
    await check_balance(frontier)


async def test_a_repeated_lease_keeps_its_leases(store: RedisStore) -> None:
    frontier = await store.frontier("run", OPTIONS)
    await push(frontier, 1)
    await frontier.lease(1, 0.3, nonce=ONE)
    await frontier.lease(1, TTL, nonce=ONE)
    ended = (await frontier.lease(0, TTL)).wait
    assert ended is not None
    assert ended > TTL / 2


async def test_a_lease_is_repeated_after_a_restart(server: Rewindable, frontier: Frontier) -> None:
    await push(frontier, *range(5))
    first = await frontier.lease(2, TTL, nonce=ONE)
    server.kill()
    server.start()
    await reconnect(frontier)
    again = await frontier.lease(2, TTL, nonce=ONE)
    assert [each.token for each in again.leases] == [each.token for each in first.leases]


async def test_a_repeated_lease_has_what_stood_behind_unreadable_records(store: RedisStore) -> None:
    frontier = await store.frontier("run", OPTIONS)
    await push(frontier, *range(4))
    client = store._scripts.client._client
    for number in range(2):
        key = f"{store._scripts.client.address.prefix}run:1:req"
        good = await client.execute_command("HGET", key, page(number).fingerprint())
        await client.execute_command("HSET", key, page(number).fingerprint(), good[:61] + b"\xc1 no msgpack")
    first = await frontier.lease(2, TTL, nonce=ONE)
    again = await frontier.lease(2, TTL, nonce=ONE)
    assert names(first) == names(again) == ["2", "3"]
    assert [each.token for each in first.leases] == [each.token for each in again.leases]
    assert len({each.token for each in first.leases}) == 2
    await complete(frontier, *again.leases)
    assert await frontier.dead_kinds() == {"unreadable": 2}


async def test_other_repeated_calls(store: RedisStore) -> None:
    frontier, other = await store.frontier("run", OPTIONS), await store.frontier("run", OPTIONS)
    claim = await frontier.claim("seed", TTL, nonce=ONE)
    assert claim is not None
    assert await frontier.claim("seed", TTL, nonce=ONE) == claim
    assert await other.claim("seed", TTL, nonce=ANOTHER) is None
    assert await frontier.push([page(1), page(2)], seed=claim, cursor=b"2") == Pushed(2, 0)
    assert await frontier.push([page(1), page(2)], seed=claim, cursor=b"2") == Pushed(0, 2)
    claim = claim.moved_to(b"2")
    for _ in range(2):
        assert await frontier.advance(claim, b"3", TTL)
    claim = claim.moved_to(b"3")
    lease = await lease_one(frontier)
    done = [Completion(lease=lease, items=[b"x"], children=[page(3)], duplicates=4)]
    assert await frontier.complete(done) == [Pushed(1, 4)]
    assert await frontier.complete(done) == [Pushed(0, 0)]
    stats = await frontier.stats()
    assert (stats.pushed, stats.done, stats.items, stats.duplicates) == (3, 1, 1, 6)
    assert await frontier.fail([Failure(lease=lease, kind="k", reason="r")]) == [None]
    assert await frontier.release([lease]) == [False]
    assert await frontier.renew([lease], TTL) == [None]
    assert await frontier.relinquish(claim, finished=True)
    await frontier.relinquish(claim, finished=True)
    assert not (await frontier.stats()).seeding
    await check_balance(frontier)
