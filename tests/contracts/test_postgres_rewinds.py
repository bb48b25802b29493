"""A database that is restored from a backup while clients use it, and lost responses."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from shoal.errors import RunError, StoreAwayError, StoreRewoundError
from shoal.frontier.postgres import PostgresStore
from shoal.ports import Claim, Completion, Failure, Frontier, FrontierOptions, Lease, Pushed, Run
from tests.contracts.postgres_steps import WIDE, lease_one, opened, pages, schema_for
from tests.support.databases import PostgresServer, shared


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that loses its data."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, server: PostgresServer) -> str:
    """A schema of its own on that server."""
    return f"{server.url}?schema={schema_for(request)}"


async def rewind(server: PostgresServer, *frontiers: Frontier) -> None:
    """To the last backup; until the clients have found it again."""
    server.rewind()
    limit = time.monotonic() + 30
    for frontier in frontiers:
        while True:
            try:
                await frontier.stats()
                break
            except StoreAwayError:
                assert time.monotonic() < limit
                await asyncio.sleep(0.05)


async def work_off(frontier: Frontier, count: int) -> list[Lease]:
    leases = (await frontier.lease(count, 600)).leases
    assert None not in await frontier.complete([Completion(lease=lease, items=[b"i"]) for lease in leases])
    return leases


async def claimed(frontier: Frontier, role: str = "seed") -> Claim:
    claim = await frontier.claim(role, 600)
    assert claim is not None
    return claim


Call = Callable[[Frontier, Lease, Claim], Awaitable[Any]]
NOTICING: dict[str, Call] = {
    "lease": lambda frontier, lease, claim: frontier.lease(1, 600),
    "push": lambda frontier, lease, claim: frontier.push(pages(50)),
    "complete": lambda frontier, lease, claim: frontier.complete([Completion(lease=lease, children=pages(51))]),
    "fail": lambda frontier, lease, claim: frontier.fail([Failure(lease=lease, kind="k", reason="r")]),
    "release": lambda frontier, lease, claim: frontier.release([lease]),
}
REFUSED: dict[str, Call] = NOTICING | {
    "renew": lambda frontier, lease, claim: frontier.renew([lease], 600),
    "reissue": lambda frontier, lease, claim: frontier.reissue([lease], 600, nonce=b"12345678"),
    "claim": lambda frontier, lease, claim: frontier.claim("drain", 600),
    "forget": lambda frontier, lease, claim: frontier.forget("drain"),
    "advance": lambda frontier, lease, claim: frontier.advance(claim, b"1", 600),
    "relinquish": lambda frontier, lease, claim: frontier.relinquish(claim),
    "read_items": lambda frontier, lease, claim: frontier.read_items(0, 10),
}


async def test_each_call_that_changes_something_notices(server: PostgresServer, url: str) -> None:
    async with opened(url) as other:
        await other.push(pages(*range(30)))
        claim = await claimed(other)
        lease = await lease_one(other)
        server.save()
        store = await PostgresStore.open(url)
        clients = {name: await store.frontier("run", WIDE) for name in NOTICING}
        for client in clients.values():
            await work_off(client, 1)
        await rewind(server, other)
        before = await other.stats()
        for name, client in clients.items():
            with pytest.raises(StoreRewoundError, match="went back in time"):
                await NOTICING[name](client, lease, claim)
            assert await other.stats() == before, name
        for name, call in REFUSED.items():
            with pytest.raises(StoreRewoundError):
                await call(clients["lease"], lease, claim)
            assert await other.stats() == before, name
        assert before == await other.audit()
        assert await other.complete([Completion(lease=lease)]) == [Pushed(0, 0)]
        await store.close()


async def test_recovery_and_going_on(server: PostgresServer, url: str) -> None:
    async with opened(url) as frontier, opened(url) as two, opened(url) as fresh:
        assert await frontier.recover() is None
        await frontier.push(pages(*range(10)))
        await work_off(frontier, 2)
        await work_off(two, 1)
        server.save()
        await asyncio.sleep(0.15)  # older receipts are kept ten times a second
        lost = await work_off(frontier, 3)
        await work_off(two, 1)
        await rewind(server, frontier, two, fresh)
        for client in (frontier, two):
            with pytest.raises(StoreRewoundError):
                await client.lease(1, 600)
        noticed = await frontier.recover()
        assert noticed is not None
        assert noticed.lost_seconds is not None
        assert 0.1 < noticed.lost_seconds < 120
        assert abs(noticed.at - time.time()) < 60
        assert await frontier.recover() is None
        again = await two.recover()
        assert again is not None
        assert again.at == noticed.at
        assert len(await fresh.rewinds()) == (await fresh.stats()).rewinds == (await fresh.audit()).rewinds == 1
        leases = (await frontier.lease(10, 600)).leases
        assert {lease.request.url for lease in lost} < {lease.request.url for lease in leases}
        assert not {lease.token for lease in lost} & {lease.token for lease in leases}
        assert len(await frontier.complete([Completion(lease=lease) for lease in leases])) == 7
        assert (await fresh.stats()).done == 10
        assert (await fresh.stats()).balanced


async def test_links_that_were_refused_are_refused_again_after_a_rewind(server: PostgresServer, url: str) -> None:
    options = FrontierOptions(max_queue_size=2, overflow="refuse", concurrency_per_host=100)
    async with opened(url) as other:  # it makes the run
        store = await PostgresStore.open(url)
        frontier = await store.frontier("run", options)
        await frontier.push(pages(100))
        lease = await lease_one(frontier)
        server.save()
        assert await frontier.complete([Completion(lease=lease, children=pages(*range(5)))]) == [Pushed(2, 0, 3)]
        await rewind(server, frontier, other)
        with pytest.raises(StoreRewoundError):
            await frontier.lease(1, 600)
        assert await frontier.recover() is not None
        assert (await frontier.stats()).dead == 0
        assert await frontier.retry_dead() == 0
        assert await frontier.complete([Completion(lease=lease, children=pages(*range(4)))]) == [Pushed(2, 0, 2)]
        assert await frontier.stats() == await frontier.audit()
        assert len((await frontier.lease(9, 600)).leases) == 2
        assert await frontier.retry_dead() == 2
        assert len((await frontier.lease(9, 600)).leases) == 2
        await store.close()


async def test_the_second_rewind_is_another_one(server: PostgresServer, url: str) -> None:
    async with opened(url) as frontier:
        await frontier.push(pages(*range(10)))
        await work_off(frontier, 1)
        for count in (1, 2):
            server.save()
            await work_off(frontier, 1)
            await rewind(server, frontier)
            with pytest.raises(StoreRewoundError):
                await frontier.push(pages(1))
            assert await frontier.recover() is not None
            assert len(await frontier.rewinds()) == count


async def test_a_rewind_that_loses_the_record_of_a_rewind_is_recorded(server: PostgresServer, url: str) -> None:
    """The client has no receipt by then, so it does not notice that the store goes back again."""
    async with opened(url) as frontier, opened(url) as other:
        await frontier.push(pages(*range(3)))
        server.save()
        await work_off(frontier, 1)
        await rewind(server, frontier)
        server.save()
        with pytest.raises(StoreRewoundError):
            await frontier.push(pages(1))
        assert await frontier.recover() is not None
        await rewind(server, other)
        assert await other.rewinds() == []
        with suppress(StoreAwayError):
            await frontier.stats()  # its connection was lost
        assert (await frontier.stats()).rewinds == len(await frontier.rewinds()) == 1
        assert (await frontier.stats()).rewinds == 1


async def test_who_has_no_receipt_works_on(server: PostgresServer, url: str) -> None:
    async with opened(url) as idle, opened(url) as busy:
        await idle.push(pages(1, 2))
        server.save()
        await work_off(busy, 1)
        await rewind(server, idle)
        assert len(await work_off(idle, 2)) == 2
        assert await idle.rewinds() == []


async def test_every_host_waits_a_delay_after_a_rewind(server: PostgresServer, url: str) -> None:
    polite = FrontierOptions(delay=30)
    async with opened(url, options=polite) as frontier:
        await frontier.push(pages(1) + pages(1, 2, host="b.example"))
        server.save()
        await work_off(frontier, 1)
        await rewind(server, frontier)
        with pytest.raises(StoreRewoundError):
            await frontier.lease(5, 600)
        assert await frontier.recover() is not None
        leased = await frontier.lease(5, 600)
        assert leased.leases == []
        assert leased.wait is not None
        assert 20 < leased.wait <= 30


async def test_cursors_of_a_rewound_store(server: PostgresServer, url: str) -> None:
    async with opened(url) as frontier:
        seed, drain = await claimed(frontier), await claimed(frontier, "drain")
        assert await frontier.advance(drain, b"1", 600)
        drain = drain.moved_to(b"1")
        assert await frontier.push(pages(1), seed=seed, cursor=b"1") == Pushed(1, 0)
        seed = seed.moved_to(b"1")
        server.save()
        assert await frontier.advance(drain, b"2", 600)
        assert await frontier.push(pages(2), seed=seed, cursor=b"2") == Pushed(1, 0)
        await rewind(server, frontier)
        before = await frontier.stats(), await frontier.roles()
        ahead = drain.moved_to(b"2"), seed.moved_to(b"2")
        for call in (
            lambda: frontier.advance(ahead[0], b"3", 600),
            lambda: frontier.relinquish(ahead[0], finished=True),
            lambda: frontier.push(pages(3), seed=ahead[1], cursor=b"3"),
        ):
            with pytest.raises(StoreRewoundError):
                await call()
            with pytest.raises(StoreRewoundError, match="recover"):
                await frontier.read_items(0, 1)
            assert (await frontier.stats(), await frontier.roles())[1] == before[1]
            noticed = await frontier.recover()
            assert noticed is not None
            assert noticed.lost_seconds is None
        assert len(await frontier.rewinds()) >= 1
        assert (await frontier.stats()).pushed == 1
        assert await frontier.advance(drain, b"2", 600)
        assert await frontier.push(pages(2), seed=seed, cursor=b"2") == Pushed(1, 0)


async def test_an_item_log_that_was_rewound(server: PostgresServer, url: str) -> None:
    async with opened(url) as frontier:
        await frontier.push(pages(*range(9)))
        await work_off(frontier, 2)
        server.save()
        await work_off(frontier, 2)
        (kept,) = await frontier.read_items(1, 1)
        (lost,) = await frontier.read_items(3, 1)
        assert await frontier.read_items(lost.seq, 9, last=lost) == []
        async with opened(url) as reader, opened(url) as shorter, opened(url) as trimmed:
            await rewind(server, reader, shorter, trimmed)
            assert await shorter.read_items(kept.seq, 9, last=kept) == []
            with pytest.raises(StoreRewoundError):
                await shorter.read_items(lost.seq, 9, last=lost)
            assert await reader.read_items(lost.seq, 9) == []
            await work_off(reader, 3)
            with pytest.raises(StoreRewoundError):
                await reader.read_items(lost.seq, 9, last=lost)
            assert await trimmed.read_items(kept.seq, 1, last=kept) != []
            await trimmed.trim_items(lost.seq)
            assert [item.seq for item in await trimmed.read_items(lost.seq, 9, last=lost)] == [5]


async def test_a_rewind_goes_with_its_run(server: PostgresServer, url: str) -> None:
    async with opened(url) as frontier:
        await frontier.push(pages(1))
        server.save()
        await work_off(frontier, 1)
        await rewind(server, frontier)
        with pytest.raises(StoreRewoundError):
            await frontier.lease(1, 60)
        await frontier.recover()
        store = await PostgresStore.open(url)
        await store.delete_run("run")
        await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
        anew = await store.frontier("run", WIDE)
        assert await anew.rewinds() == []
        await store.close()


async def test_a_lost_run_is_not_taken_for_another(server: PostgresServer, url: str) -> None:
    async with opened(url, "before") as before:
        server.save()
        async with opened(url, "lost") as lost:
            await lost.push(pages(1))
            await rewind(server, before)
            async with opened(url, "anew") as anew:
                await anew.push(pages(2))
                with pytest.raises(RunError):
                    await lost.lease(1, 60)
                assert (await anew.stats()).leased == 0


# -- answers that are lost: the caller does the same once more


@pytest.fixture
def calm(request: pytest.FixtureRequest) -> str:
    name = re.sub(r"\W", "_", request.node.name.lower())[-50:].strip("_")
    return f"{shared(PostgresServer).url}?schema=t_{name}"


async def test_a_lease_is_repeated(calm: str) -> None:
    async with opened(calm) as frontier:
        await frontier.push(pages(*range(5)))
        first = (await frontier.lease(3, 600, nonce=b"nonce-one")).leases
        again = (await frontier.lease(3, 600, nonce=b"nonce-one")).leases
        assert [(each.token, each.fingerprint, each.attempt) for each in again] == [
            (each.token, each.fingerprint, each.attempt) for each in first
        ]
        assert all(later.deadline > each.deadline for each, later in zip(first, again, strict=True))
        assert (await frontier.stats()).leased == 3
        await frontier.complete([Completion(lease=first[0])])
        await frontier.release([first[1]])
        rest = (await frontier.lease(3, 600, nonce=b"nonce-one")).leases
        assert [each.token for each in rest] == [first[2].token]
        assert len((await frontier.lease(3, 600, nonce=b"nonce-two")).leases) == 3
        assert (await frontier.audit()).balanced


async def test_a_lease_that_gave_nothing_may_give_something_when_it_is_repeated(calm: str) -> None:
    async with opened(calm) as frontier:
        assert (await frontier.lease(3, 600, nonce=b"nonce-one")).leases == []
        await frontier.push(pages(1))
        assert len((await frontier.lease(3, 600, nonce=b"nonce-one")).leases) == 1


async def test_a_lease_is_repeated_while_the_first_is_still_under_way(calm: str) -> None:
    async with opened(f"{calm}&timeout=2") as hasty, opened(calm) as patient:
        await patient.push(pages(*range(9)))
        async with asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(client.lease(3, 600, nonce=b"nonce-one")) for client in (hasty, patient) for _ in "12"
            ]
        tokens = {tuple(lease.token for lease in (await answer).leases) for answer in answers}
        assert len(tokens) == 1
        assert (await patient.stats()).leased == 3


async def test_roles_are_repeated(calm: str) -> None:
    async with opened(calm) as frontier:
        claim = await frontier.claim("drain", 600, nonce=b"nonce-one")
        assert claim is not None
        assert await frontier.claim("drain", 600, nonce=b"nonce-one") == claim
        assert await frontier.claim("drain", 600, nonce=b"nonce-two") is None
        for _ in "12":
            assert await frontier.advance(claim, b"1", 600)
        claim = claim.moved_to(b"1")
        assert await frontier.advance(claim, b"2", 600)
        assert await frontier.relinquish(claim.moved_to(b"2"), finished=True)
        assert not await frontier.relinquish(claim.moved_to(b"2"), finished=True)
        assert await frontier.claim("drain", 600, nonce=b"nonce-one") is None
        seed = await claimed(frontier)
        assert await frontier.push(pages(1, 2), seed=seed, cursor=b"1") == Pushed(2, 0)
        assert await frontier.push(pages(1, 2), seed=seed, cursor=b"1") == Pushed(0, 2)


async def test_a_completion_is_repeated(calm: str) -> None:
    async with opened(calm) as frontier, opened(calm) as other:
        await frontier.push(pages(1, 2))
        first, second = (await frontier.lease(2, 600)).leases
        done = Completion(lease=first, items=[b"i"], children=pages(3))
        assert await frontier.complete([done]) == [Pushed(1, 0)]
        before = await frontier.stats()
        assert await frontier.complete([done]) == [Pushed(0, 0)]
        assert await other.complete([done, Completion(lease=second)]) == [Pushed(0, 0), Pushed(0, 0)]
        assert (await frontier.stats()).items == before.items
        assert await frontier.fail([Failure(lease=first, kind="k", reason="r")]) == [None]
        assert (await frontier.audit()) == await frontier.stats()
