"""A large store: many runs, one of them with most of the URLs on many hosts, and workers that send heartbeats."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import Completion, Frontier, FrontierOptions, Heartbeat, Run

BIG = "big"
"""The run with most of the URLs."""
_BATCH = 5000
_PUSHERS = 3
"""Batches that are made and pushed at the same time, so that neither the store nor this process waits."""
_HOST_SHARE = 0.9
"""Of the URLs are on a tenth of the hosts."""
_SMALL_HOSTS = 20
_OPTIONS = FrontierOptions(concurrency_per_host=100)


class Size(NamedTuple):
    """How large the store is."""

    urls: int
    hosts: int
    runs: int
    active: int
    workers: int


async def fill(url: str, size: Size) -> None:
    """Create the runs, push the URLs, and complete some of them."""
    store = await open_store(url)
    settings = {"note": "x" * 1000}
    for number in range(size.runs - 1):
        await _small_run(store, number, number >= size.runs - 1 - size.active, settings)
    await store.create_run(Run(run_id=BIG, spider="big", state="running", created_at=time.time(), settings=settings))
    frontier = await store.frontier(BIG, _OPTIONS)
    batches = _batches(size)
    await asyncio.gather(*(_push_all(frontier, batches) for _ in range(_PUSHERS)))
    for _ in range(20):
        leased = await frontier.lease(1000, 600, nonce=os.urandom(16))
        await frontier.complete([Completion(lease=lease, items=[b'{"a": 1}']) for lease in leased.leases[:900]])
    await store.close()


async def _small_run(store: Any, number: int, is_active: bool, settings: dict[str, object]) -> None:
    run = Run(
        run_id=f"run_{number:05}", spider=f"spider{number % 20}", state="running" if is_active else "finished",
        created_at=time.time() - 1000 + number / 10, settings=settings, ended_at=None if is_active else time.time(),
    )  # fmt: skip
    await store.create_run(run)
    frontier = await store.frontier(run.run_id, FrontierOptions())
    await frontier.push([Request(f"http://host{host}.example/{number}") for host in range(_SMALL_HOSTS)])


def _batches(size: Size) -> Iterator[list[Request]]:
    some = max(1, size.hosts // 10)
    for first in range(0, size.urls, _BATCH):
        numbers = range(first, min(first + _BATCH, size.urls))
        hosts = [random.randrange(some if random.random() < _HOST_SHARE else size.hosts) for _ in numbers]
        yield [Request(f"http://host{host}.example/p/{page}") for host, page in zip(hosts, numbers, strict=True)]


async def _push_all(frontier: Frontier, batches: Iterator[list[Request]]) -> None:
    for batch in batches:
        await frontier.push(batch)


async def send_heartbeats(url: str, count: int) -> None:
    """Heartbeats of many workers, and changes that the pages have to show, until the task is cancelled."""
    store = await open_store(url)
    frontier = await store.frontier(BIG, _OPTIONS)
    names = [f"machine{number // 10}-{number:05}" for number in range(count)]
    with suppress(asyncio.CancelledError):
        while True:
            for name in names:
                await frontier.beat(Heartbeat(worker=name, epoch=1, session=60, machine=name.partition("-")[0], pid=1))
                await asyncio.sleep(5 / count)
            leased = await frontier.lease(100, 600, nonce=os.urandom(16))
            await frontier.complete([Completion(lease=lease) for lease in leased.leases])
    await store.close()
