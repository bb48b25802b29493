"""A worker without a run of its own: it takes the runs of a spider one after the other, as they are queued."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Generator
from contextlib import suppress

from shoal import clock
from shoal.config import Config
from shoal.crawling.stats import Counters, CrawlSnapshot, Summary, Vitals
from shoal.errors import FrontierError, RunError, ShoalError
from shoal.frontier import share_store
from shoal.ports import Run, Store
from shoal.runs.worker import Worker
from shoal.runs.worker_session import new_worker_id

log = logging.getLogger("shoal.worker")

_POLL = 2.0
"""Seconds between two searches for a run."""
_RETRY_AFTER = 60.0
"""Seconds until a run that ended with an error in this worker is tried again."""
_CLOSE_TIMEOUT = 0.5


class QueueWorker:
    """Works on the oldest unfinished run of a spider until it ends, then on the next one. ``stop`` ends it."""

    def __init__(self, config: Config, spider: str, make_worker: Callable[[Run], Worker]) -> None:
        """``spider``: the name of the spider. ``make_worker`` makes the worker of a run, with its arguments."""
        self.summary: Summary | None = None
        """Of the last run; None if there was none."""
        self.address = config.frontier
        """Where other processes find the store."""
        self._config = config
        self._spider = spider
        self._make_worker = make_worker
        self._worker_id = new_worker_id()
        self._store: Store | None = None
        self._worker: Worker | None = None
        self._stop_asked = asyncio.Event()
        self._refused: dict[str, float] = {}
        """Runs that this worker cannot work on now, and until when."""
        self._is_away = False

    def stop(self) -> None:
        """Release the leases, and end."""
        self._stop_asked.set()
        if self._worker is not None:
            self._worker.stop()

    async def snapshot(self) -> CrawlSnapshot | None:
        """The state of the run that it works on. None while it waits for one."""
        return None if self._worker is None else await self._worker.snapshot()

    def vitals(self) -> Vitals:
        """What the worker knows of itself, without a call to the store."""
        if self._worker is not None:
            return self._worker.vitals()
        return Vitals(
            worker=self._worker_id, run_id="", spider=self._spider, counters=Counters(), waits=not self._is_away
        )

    def __await__(self) -> Generator[object, None, None]:
        return self.run().__await__()

    async def run(self) -> None:
        """Work until ``stop``. Wait while the store is away."""
        log.info("waiting for runs of %s", self._spider)
        try:
            while not self._stop_asked.is_set():
                run = await self._find()
                if run is not None:
                    await self._work(run)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_POLL * random.uniform(0.5, 1)):
                            await self._stop_asked.wait()
        finally:
            if self._store is not None:
                with suppress(FrontierError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_TIMEOUT):
                        await self._store.close()

    async def _find(self) -> Run | None:
        """The oldest run that can be worked on."""
        try:
            self._store = self._store or await share_store(self._config.frontier)
            found = await self._list(self._store)
        except FrontierError as exc:
            if not self._is_away:
                log.error("waiting for the store: %s", exc)
            self._is_away = True
            return None
        self._is_away = False
        return found

    async def _list(self, store: Store) -> Run | None:
        runs = await store.list_runs(self._spider, self._config.project_name, states=("queued", "running"))
        now = clock.now()
        self._refused = {run.run_id: self._refused[run.run_id] for run in runs if run.run_id in self._refused}
        for run in reversed(runs):
            if "seeds" in run.settings and self._refused.get(run.run_id, 0.0) <= now:
                return run
        return None

    async def _work(self, run: Run) -> None:
        try:
            self._worker = self._make_worker(run)
            if self._stop_asked.is_set():
                return
            self.summary = await self._worker
            error: ShoalError | None = self._worker.error
        except ShoalError as exc:
            error = exc
        finally:
            self._worker = None
        if error is not None:
            log.error("run %s: %s", run.run_id, error)
            for_good = isinstance(error, RunError)  # such as a spider whose file has changed
            self._refused[run.run_id] = math.inf if for_good else clock.now() + _RETRY_AFTER
