"""The session of a worker: it stops in time without heartbeats, and joins again after a fence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from shoal.errors import FencedError, StoreAwayError
from shoal.ports import Frontier, Heartbeat, Holder
from shoal.runs.worker_session import WorkerSession

SESSION = 1.6


class Store:
    """A frontier that records heartbeats, and may be away."""

    def __init__(self) -> None:
        self.away = False
        self.fenced_below = 0
        self.beats: list[Heartbeat] = []
        self.left: list[tuple[str, int]] = []
        self.holder: Holder | None = None

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        if self.away:
            raise StoreAwayError("away")
        if heartbeat.epoch < self.fenced_below:
            raise FencedError("fenced")
        self.beats.append(heartbeat)
        return None

    def hold(self, holder: Holder) -> None:
        self.holder = holder

    async def leave(self, worker: str, epoch: int) -> None:
        self.left.append((worker, epoch))


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not so():
            await asyncio.sleep(0.01)


def make() -> tuple[WorkerSession, Store, Frontier]:
    store = Store()
    return WorkerSession("redis://127.0.0.1:9", "run", "me", SESSION), store, cast("Frontier", store)


async def test_work_stops_before_the_session_ends_and_resumes_with_the_store() -> None:
    session, store, frontier = make()
    assert not session.may_work()
    await session.join(frontier)
    try:
        await until(lambda: len(store.beats) >= 3)
        assert session.may_work()
        store.away = True
        last = time.monotonic()
        await until(lambda: not session.may_work())
        assert time.monotonic() - last < SESSION + 0.5  # the machine may be busy
        store.away = False
        await until(session.may_work)
        assert {beat.epoch for beat in store.beats} == {1}
    finally:
        await session.close()
    assert not session.may_work()
    assert store.left == [("me", 1)]


async def test_a_fenced_worker_reports_it_and_joins_under_the_next_epoch() -> None:
    session, store, frontier = make()
    fenced = asyncio.Event()
    session.on_fenced = fenced.set
    await session.join(frontier)
    try:
        store.fenced_below = 3  # twice
        async with asyncio.timeout(20):
            await fenced.wait()
        assert not session.may_work()
        await session.rejoin()
        assert session.may_work()
        assert session.holder == store.holder == Holder("me", 3)
    finally:
        await session.close()
    assert store.left == [("me", 3)]
    count = len(store.beats)
    await asyncio.sleep(SESSION / 2)
    assert len(store.beats) == count  # no heartbeat after it left
