"""Start requests are pushed once, however often the seeder dies, and again if the store has lost them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shoal.config import Config
from shoal.crawling import seeder as seeding
from shoal.crawling.leases import Persistence
from shoal.crawling.run_queue import RunQueue
from shoal.crawling.seeder import Seeder
from shoal.crawling.stats import Counters
from shoal.errors import RequestError, StoreError, StoreRewoundError
from shoal.frontier.memory.requests import Fingerprints
from shoal.frontier.memory.store import MemoryFrontier
from shoal.http import Request
from shoal.urls.normalize import Scope
from tests.support.fakes import memory_frontier


def seeder_of(frontier: MemoryFrontier, count: int) -> Seeder:
    async def source() -> AsyncIterator[Request | RequestError]:
        for number in range(count):
            yield Request(f"http://a.example/{number}")

    config = Config()
    queue = RunQueue(frontier, Scope(config.scope))
    return Seeder(source, queue, config, Counters(), Persistence(shared=True), shared=True)


def set_back(frontier: MemoryFrontier, cursor: bytes) -> None:
    """As if the store had lost all that was pushed behind this cursor."""
    role = frontier._queue._roles._roles["seed"]
    role.cursor, role.finished = cursor, False
    requests, left = frontier._requests, Fingerprints()
    for number in range(int(cursor)):
        left.add(requests.fingerprints[number])
    requests.fingerprints = left
    del requests.records._ends[int(cursor) :]


async def test_a_seeder_resumes_behind_the_cursor() -> None:
    frontier = await memory_frontier()
    claim = await frontier.claim("seed", 60)
    assert claim is not None
    await frontier.push([Request("http://a.example/0"), Request("http://a.example/1")], seed=claim, cursor=b"2")
    await frontier.relinquish(claim)
    seeder = seeder_of(frontier, 1200)
    await seeder.run()
    assert (await frontier.stats()).pushed == 1200
    assert seeder.added == 1198
    assert not (await frontier.stats()).seeding


async def test_a_seeder_whose_cursor_went_back_pushes_nothing_and_starts_over() -> None:
    frontier = await memory_frontier()
    seeder = seeder_of(frontier, 1700)
    push, calls = frontier.push, []

    async def push_to_a_store_that_goes_back(*args: object, **options: object) -> object:
        calls.append(options["cursor"])
        if len(calls) == 3:
            set_back(frontier, b"500")
        return await push(*args, **options)  # type: ignore[arg-type]

    frontier.push = push_to_a_store_that_goes_back  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreRewoundError):
        await seeder.run()
    assert await frontier.find(Request("http://a.example/1200")) is None
    await seeder.start_over()
    await seeder.run()
    for number in range(1700):
        assert await frontier.find(Request(f"http://a.example/{number}")) is not None
    assert not (await frontier.stats()).seeding


async def test_a_seeder_that_is_done_sees_that_the_store_has_lost_start_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seeding, "_CHECK_EVERY", 0.01)
    frontier = await memory_frontier()
    task = asyncio.create_task(seeder_of(frontier, 1200).keep())
    try:
        async with asyncio.timeout(20):
            while (await frontier.stats()).seeding:
                await asyncio.sleep(0.01)
            set_back(frontier, b"500")
            while (await frontier.stats()).seeding:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
    for number in range(1200):
        assert await frontier.find(Request(f"http://a.example/{number}")) is not None


async def test_a_seeder_that_is_cancelled_pushes_nothing_more() -> None:
    frontier = await memory_frontier()

    async def endless() -> AsyncIterator[Request | RequestError]:
        number = 0
        while True:
            yield Request(f"http://a.example/{number}")
            number += 1
            await asyncio.sleep(0.005)

    config = Config()
    queue = RunQueue(frontier, Scope(config.scope))
    seeder = Seeder(endless, queue, config, Counters(), Persistence(shared=True), shared=True)
    task = asyncio.create_task(seeder.keep())
    async with asyncio.timeout(20):
        while (await frontier.stats()).pushed < 10:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    (role,) = await frontier.roles()
    assert not role.held


async def test_start_requests_whose_push_failed_are_pushed_with_the_next_ones() -> None:
    frontier = await memory_frontier()
    seeder = seeder_of(frontier, 1300)
    push, failed = frontier.push, []

    async def push_that_fails_once(*args: object, **options: object) -> object:
        if options["cursor"] == b"1000" and not failed:
            failed.append(True)
            raise StoreError("no room")
        return await push(*args, **options)  # type: ignore[arg-type]

    frontier.push = push_that_fails_once  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError):
        await seeder.run()
    await seeder._flush()
    assert await frontier.find(Request("http://a.example/999")) is not None
