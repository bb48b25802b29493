"""As many workers as the queue's depth asks for. The decision is `step`, a function of values; `Autoscaler` looks at
the run, decides, and tells a pool."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from msgspec import Struct

from shoal.errors import FrontierError, RunError
from shoal.frontier import open_store
from shoal.ports import Inspection, Store
from shoal.runs.start import RunSettings
from shoal.runs.worker_pools import Pool

log = logging.getLogger("shoal.autoscale")

_PATIENCE = 3.0  # seconds that the frontier has to answer


class Limits(Struct, frozen=True, kw_only=True):
    """What somebody has decided about a run's workers."""

    per_worker: int = 1000
    """Requests that one worker is enough for."""
    min: int = 1
    max: int = 50
    cool_down: float = 60.0
    """Seconds for which fewer must be enough before there are fewer."""


class Scale(Struct, frozen=True):
    """How many workers there are to be, and since when fewer would have been enough."""

    workers: int
    lower_since: float | None = None
    enough: int = 0
    """The most that were needed since then."""


def wanted(depth: int, limits: Limits) -> int:
    """The number of workers for a queue, as if it had always been so deep."""
    return min(limits.max, max(limits.min, -(-depth // limits.per_worker)))


def step(scale: Scale, depth: int, limits: Limits, now: float) -> Scale:
    """What follows from how deep the queue is now.

    More workers come at once: depth is what is there, not a rate that may be a moment's peak, so whatever it asks for
    will be used. Fewer come only when fewer were enough all through the cool-down, and then as many as were needed at
    its worst moment, so a queue that swings around a threshold moves nothing.
    """
    want = wanted(depth, limits)
    workers = min(scale.workers, limits.max)
    if want >= workers:
        return Scale(want)
    since = now if scale.lower_since is None else scale.lower_since
    enough = max(scale.enough, want)
    return Scale(workers, since, enough) if now - since < limits.cool_down else Scale(enough)


class Autoscaler:
    """Keeps a pool at the size that a run asks for. ``await`` it once; it returns when the run is over or after
    ``stop``."""

    def __init__(self, frontier: str, run_id: str, pool: Pool, limits: Limits, *, every: float) -> None:
        """``frontier``: the URL of the store that has the run. ``every``: seconds between two looks at it."""
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
        """The run goes on without it: local workers leave in good order, those of others stay as they are."""
        self._asked.set()

    def __await__(self) -> Generator[Any, None, None]:
        return self.run().__await__()

    async def run(self) -> None:
        """Until the run is finished, cancelled or gone, and its workers too."""
        store = await open_store(self._url)
        try:
            frontier = await self._open(store)
            while not self._asked.is_set():
                depth = await self._look(store, frontier)
                if self._over:
                    break
                await self._keep(depth)
                await self._wait()
            while self._over and not self._asked.is_set():
                await self._pool.scale(0)
                if await self._pool.current() == 0:
                    break
                await self._wait()
        finally:
            await self._pool.close()
            with suppress(FrontierError, TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await store.close()

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), self._every)

    async def _open(self, store: Store) -> Inspection:
        """A run that was finished may have more to do by now (`shoal retry-failed`): then it goes on, as with any
        worker."""
        run = await store.get_run(self._run_id)
        if run is None:
            raise RunError(f"there is no run {self._run_id}")
        frontier = await store.frontier(run.run_id, RunSettings.of(run).options)
        if run.state == "finished" and not (await frontier.stats()).finished:
            with suppress(RunError):  # somebody else was first
                await store.transition(run.run_id, "running")
        return frontier

    async def _look(self, store: Store, frontier: Inspection) -> int | None:
        """How deep the queue is; None while nobody can say, and when the run is over.

        What is ready or leased counts. What waits for its next attempt does not: it waits for a host, and more
        workers would only wait beside it. A paused run has nothing to do for now.
        """
        try:
            async with asyncio.timeout(_PATIENCE):
                state = await store.run_state(self._run_id)
                if state in (None, "finished", "cancelled"):
                    log.info("run %s is %s", self._run_id, state or "removed")
                    self._over = True
                    return None
                stats = await frontier.stats()
        except (FrontierError, TimeoutError) as exc:
            if not self._away:
                why = str(exc) or f"no answer in {_PATIENCE:g} s"
                log.warning("the number of workers stays as it is, as the frontier can't be asked: %s", why)
            self._away = True
            return None
        if self._away:
            log.warning("the frontier is back")
        self._away = False
        return 0 if state == "paused" else stats.ready + stats.leased

    async def _keep(self, depth: int | None) -> None:
        """Decide, and see that there are so many: also when nothing has changed, as workers die."""
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
