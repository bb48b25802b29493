"""Scales workers with the depth of the queue. `step` decides, as a function of values. `Autoscaler` polls the run and
scales a pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator
from contextlib import suppress

from msgspec import Struct

from shoal.errors import FrontierError, RunError
from shoal.frontier import open_store
from shoal.ports import Inspection, Store
from shoal.runs.worker_pools import Pool

log = logging.getLogger("shoal.autoscale")

_TIMEOUT = 3.0  # seconds that the frontier has to answer


class PoolLimits(Struct, frozen=True, kw_only=True):
    """The limits for the number of workers."""

    per_worker: int = 1000
    """Requests per worker."""
    min: int = 1
    max: int = 50
    cool_down: float = 60.0
    """Seconds for which fewer workers must be enough before any is stopped."""


class Scale(Struct, frozen=True):
    """The number of workers, and since when fewer would be enough."""

    workers: int
    lower_since: float | None = None
    enough: int = 0
    """The largest number that was needed since then."""


def wanted(depth: int, limits: PoolLimits) -> int:
    """The number of workers for a queue of this depth."""
    return min(limits.max, max(limits.min, -(-depth // limits.per_worker)))


def step(scale: Scale, depth: int, limits: PoolLimits, now: float) -> Scale:
    """The next scale for a queue of this depth.

    It grows at once: the depth is work that exists, not a peak of a rate. It shrinks only if fewer workers were enough
    for the whole cool-down, and then to the largest number that was needed during it. So a queue that swings around a
    threshold changes nothing.
    """
    want = wanted(depth, limits)
    workers = min(scale.workers, limits.max)
    if want >= workers:
        return Scale(want)
    since = now if scale.lower_since is None else scale.lower_since
    enough = max(scale.enough, want)
    return Scale(workers, since, enough) if now - since < limits.cool_down else Scale(enough)


class Autoscaler:
    """Scales a pool with the queue of a run. ``await`` it once. It returns when the run is over, or after ``stop``."""

    def __init__(self, frontier: str, run_id: str, pool: Pool, limits: PoolLimits, *, every: float) -> None:
        """``frontier``: the URL of the store. ``every``: seconds between polls."""
        self._url = frontier
        self._run_id = run_id
        self._pool = pool
        self._limits = limits
        self._every = every
        self._asked = asyncio.Event()
        self._scale: Scale | None = None
        self._away = False
        self._over = False

    def stop(self) -> None:
        """Stop scaling. Local workers stop too; those that another program manages keep running."""
        self._asked.set()

    def __await__(self) -> Generator[object, None, None]:
        return self.run().__await__()

    async def run(self) -> None:
        """Scale until the run is finished, cancelled or removed, and its workers have stopped."""
        store = await open_store(self._url)
        try:
            frontier = await self._open(store)
            while not self._asked.is_set():
                depth = await self._depth(store, frontier)
                if self._over:
                    break
                await self._scale_pool(depth)
                await self._wait()
            while self._over and not self._asked.is_set():
                await self._pool.scale(0)
                if await self._pool.current() == 0:
                    break
                await self._wait()
        finally:
            await self._pool.close()
            with suppress(FrontierError, TimeoutError):
                async with asyncio.timeout(_TIMEOUT):
                    await store.close()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), self._every)

    async def _open(self, store: Store) -> Inspection:
        """Open the frontier. A finished run that has new requests (`shoal retry-failed`) becomes running again."""
        run = await store.get_run(self._run_id)
        if run is None:
            raise RunError(f"there is no run {self._run_id}")
        frontier = await store.frontier(run.run_id)
        if run.state == "finished" and not (await frontier.stats()).finished:
            with suppress(RunError):  # another process was first
                await store.transition(run.run_id, "running")
        return frontier

    async def _depth(self, store: Store, frontier: Inspection) -> int | None:
        """The number of ready and leased requests. None if the frontier does not answer, or the run is over.

        Requests that wait for their next attempt do not count: more workers would not make them due earlier. The depth
        of a paused run is 0.
        """
        try:
            async with asyncio.timeout(_TIMEOUT):
                state = await store.run_state(self._run_id)
                if state in (None, "finished", "cancelled"):
                    log.info("run %s is %s", self._run_id, state or "removed")
                    self._over = True
                    return None
                stats = await frontier.stats()
        except (FrontierError, TimeoutError) as exc:
            if not self._away:
                why = str(exc) or f"no answer in {_TIMEOUT:g} s"
                log.warning("the number of workers stays the same: the frontier cannot be reached: %s", why)
            self._away = True
            return None
        if self._away:
            log.warning("the frontier is back")
        self._away = False
        return 0 if state == "paused" else stats.ready + stats.leased

    async def _scale_pool(self, depth: int | None) -> None:
        """Scale the pool, also if the number has not changed: workers may have died."""
        if self._scale is None:
            found = await self._pool.current()
            if found is None:
                return
            self._scale = Scale(found)
        if depth is not None:
            before, self._scale = self._scale.workers, step(self._scale, depth, self._limits, time.monotonic())
            if self._scale.workers != before:
                log.info("%s for %s (was %d)", _count(self._scale.workers, "worker"), _count(depth, "request"), before)
        await self._pool.scale(self._scale.workers)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
