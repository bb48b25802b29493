"""The workload of the frontiers, and its clock. Runs in the environment that has Shoal."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from crawl.measure import busy_seconds
from shoal.http import Request
from shoal.ports import Completion, Frontier
from stores.servers import cpu_seconds

TTL = 600.0


def url(number: int, hosts: int) -> str:
    """A URL of 60 characters. The numbers are spread over the hosts."""
    head = f"https://host{number % hosts:02d}.example/catalogue/section/page-"
    return f"{head}{number:0{60 - len(head)}d}"


def new_urls(start: int, stop: int, hosts: int) -> list[Request]:
    return [Request(url(number, hosts)) for number in range(start, stop)]


def half_known(start: int, stop: int, size: int, hosts: int) -> list[list[Request]]:
    """Batches of this size with all URLs from start to stop, and as many earlier ones, in random order."""
    rng = random.Random(f"{start}/{stop}/{size}")
    numbers: list[int] = []
    for number in range(start, stop):
        numbers += [number, int(rng.random() * number)]
    batches = []
    for first in range(0, len(numbers), size):
        batch = numbers[first : first + size]
        rng.shuffle(batch)
        batches.append([Request(url(number, hosts)) for number in batch])
    return batches


class Clock:
    """Wall-clock seconds, and CPU seconds of this process, of the server, and of others on their cores."""

    def __init__(self, server: int) -> None:
        """``server`` is a process ID, or 0 if there is no server."""
        self._server = server
        self._cores = os.sched_getaffinity(0) | (os.sched_getaffinity(server) if server else set())
        self.seconds = self.client = self.served = self.busy = 0.0

    def __enter__(self) -> Clock:
        gc.collect()
        self.busy -= self._busy()
        self.served -= self._served()
        self.client -= time.process_time()
        self.seconds -= time.perf_counter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.seconds += time.perf_counter()
        self.client += time.process_time()
        self.served += self._served()
        self.busy += self._busy()

    def _busy(self) -> float:
        return sum(map(busy_seconds, self._cores))

    def _served(self) -> float:
        return cpu_seconds(self._server) if self._server else 0.0

    def figure(self, count: int) -> dict[str, Any]:
        """The result for this number of URLs."""
        return {
            "count": count,
            "rate": count / self.seconds,
            "client_us": 1e6 * self.client / count,
            "server_us": 1e6 * self.served / count,
            "others": max(0.0, self.busy - self.client - self.served) / self.seconds,
        }


async def by_callers(callers: int, work: Callable[[], Awaitable[int]]) -> int:
    """Call ``work`` concurrently until it returns 0. Returns the sum."""

    async def caller() -> int:
        total = 0
        while done := await work():
            total += done
        return total

    return sum(await asyncio.gather(*(caller() for _ in range(callers))))


async def push_all(frontier: Frontier, batches: list[list[Request]], callers: int) -> int:
    """Push all batches, one call each. Returns the number of new URLs."""
    waiting, added = iter(batches), 0

    async def push() -> int:
        nonlocal added
        batch = next(waiting, None)
        if batch is None:
            return 0
        pushed = await frontier.push(batch)
        added += pushed.added
        return len(batch)

    await by_callers(callers, push)
    return added


async def work_off(frontier: Frontier, count: int, size: int, callers: int) -> int:
    """Lease and complete ``count`` requests in batches. Returns their number."""
    taken = 0

    async def work() -> int:
        nonlocal taken
        limit = min(size, count - taken)
        if limit <= 0:
            return 0
        taken += limit
        leases = (await frontier.lease(limit, TTL)).leases
        done = await frontier.complete([Completion(lease=lease, status=200) for lease in leases])
        assert None not in done, "a lease was lost"
        assert len(leases) == limit, f"asked for {limit}, got {len(leases)}"
        return limit

    return await by_callers(callers, work)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
