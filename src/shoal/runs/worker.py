"""A worker of a fleet: one of any number of processes that crawl the same run."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from msgspec import Struct, structs

from shoal.config import Config
from shoal.crawling.engine import Engine
from shoal.crawling.leases import Persistence
from shoal.crawling.seeder import start_requests
from shoal.crawling.stats import Counters, CrawlSnapshot, Summary, Vitals
from shoal.errors import FrontierError, RunError, ShoalError
from shoal.frontier import share_store
from shoal.ports import Frontier, Holder, Run, Store
from shoal.runs.lifecycle import GRACE, Participant
from shoal.runs.plan import Output, Plan
from shoal.runs.recorder import RecordedProcess
from shoal.runs.start import RunSettings, find_run
from shoal.runs.trust import check_outputs, check_proxies, with_run_settings
from shoal.runs.worker_session import make_worker_session, new_worker_id
from shoal.sinks import named_for_run, sink_id
from shoal.spider import Spider
from shoal.system import chance, clock

log = logging.getLogger("shoal.worker")

_OUTPUT_TIMEOUT = 1.2
"""Seconds that outputs have after a stop. Another worker continues with them."""
_CLOSE_TIMEOUT = 0.5


class WorkerOptions(Struct, frozen=True, kw_only=True):
    """How a worker takes part in its run."""

    keep_alive: bool = False
    """Stay when the run is finished."""
    allow_changed: bool = False
    """Work also if the file of the spider has changed since the run began."""
    grace: float = GRACE
    """Seconds that pages in flight have after a stop."""
    holder: Holder | None = None
    """The slot in a cluster under which the worker works."""
    may_work: Callable[[], bool] | None = None
    """Whether it still holds that slot. None: it needs no slot."""
    command: str = ""
    """The command that starts such a worker, for its reports. Empty if there is none."""


class Worker(Participant):
    """One process's part in a run. ``await worker.run()`` once; ``stop`` shuts it down."""

    def __init__(
        self,
        spider: Spider,
        config: Config,
        run_id: str,
        *,
        outputs: Sequence[str] = (),
        options: WorkerOptions = WorkerOptions(),
    ) -> None:
        """``config`` is complete: `load_config` merges the layers. ``outputs`` are written by this worker, in addition
        to those of the run."""
        super().__init__(spider, config)
        self.run_id = run_id
        self.outputs = tuple(outputs)
        self.summary: Summary | None = None
        self._options = options
        self._starting: Persistence | None = None
        """Retries the calls before the run is found."""

    @property
    def _run_id(self) -> str:
        return self.run_id

    def stop(self, grace: float | None = None) -> None:
        """Release the leases: at once, except for pages that end within the grace period."""
        super().stop(grace)
        if self._life is None and self._starting is not None:
            self._starting.give_up()

    def abort(self) -> None:
        """Stop now: the slot is lost."""
        self._stop_asked = True
        if self._life is not None:
            self._life.abort()
        elif self._starting is not None:
            self._starting.give_up()

    @property
    def engine(self) -> Engine | None:
        """None before the work begins."""
        return None if self._life is None else self._life.engine

    def __await__(self) -> Generator[object, None, Summary]:
        return self.run().__await__()

    async def run(self) -> Summary:
        """Work until the run is finished, cancelled, or ``stop``. The error that ended it early is in ``error``."""
        async with AsyncExitStack() as stack:
            store = await share_store(self.config.frontier)
            stack.push_async_callback(_close_quietly, store)
            persist = self._starting = Persistence(shared=store.shared)
            changed = self._options.allow_changed
            project = self.config.project_name
            run, settings = await persist(
                partial(find_run, store, self.run_id, self.spider, project, allow_changed=changed)
            )
            settings = structs.replace(settings, outputs=named_for_run(settings.outputs, run))
            self.outputs = named_for_run(self.outputs, run)
            check_outputs(run.run_id, settings.outputs, self.outputs, self.config)
            self.config = with_run_settings(run.run_id, settings.shared_settings(), self.config)
            check_proxies(self.spider, self.config)
            self.spider._arguments_of_others = tuple(settings.arguments)
            next_step = "waiting for more requests" if self._options.keep_alive else "`shoal start` begins another run"
            await persist(partial(self._report_finished, store, run, next_step))
            self.summary = await self._take_part(store, run, self._plan(settings, shared=store.shared))
        return self.summary

    def _plan(self, settings: RunSettings, *, shared: bool) -> Plan:
        options = self._options
        session = None
        if options.holder is None:  # a node has the session of its cluster
            session = make_worker_session(self.config, self.run_id, self._worker_id)
        return Plan(
            spider=self.spider,
            config=self.config,
            options=settings.options,
            open_outputs=partial(self._open_outputs, settings),
            source=(lambda: start_requests(self.spider)) if settings.seeds == "spider" else None,
            networks=settings.networks,
            shared=shared,
            output_names=self.outputs,
            watches=True,
            stays=options.keep_alive,
            keep_items=settings.keep_items,
            grace=options.grace,
            output_timeout=_OUTPUT_TIMEOUT,
            holder=options.holder,
            may_work=options.may_work,
            process=RecordedProcess(
                self._worker_id,
                "worker" if options.holder is None else "runner",
                command=options.command,
                address=self.config.frontier,
            ),
            session=session,
            on_begin=lambda: log.info("worker %s works on run %s", self._worker_id, self.run_id),
            on_unseeded=_warn_unseeded,
        )

    async def _open_outputs(self, settings: RunSettings, frontier: Frontier) -> Sequence[Output]:
        specs = {sink_id(spec): spec for spec in (*settings.outputs, *self.outputs)}
        return [await self._standby_drainer(frontier, spec) for spec in specs.values()]


async def _warn_unseeded() -> None:
    log.warning("seeding is incomplete and no process is seeding; run `shoal start` again")


async def _close_quietly(store: Store) -> None:
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await store.close()


# A worker without a run of its own: it takes the runs of a spider one after the other, as they are queued.


_POLL = 2.0
"""Seconds between two searches for a run."""
_RETRY_AFTER = 60.0
"""Seconds until a run that ended with an error in this worker is tried again."""


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
                        async with asyncio.timeout(_POLL * chance.uniform(0.5, 1)):
                            await self._stop_asked.wait()
        finally:
            if self._store is not None:
                await _close_quietly(self._store)

    async def _find(self) -> Run | None:
        """The oldest run that can be worked on."""
        try:
            self._store = self._store or await share_store(self._config.frontier)
            run = await self._list(self._store)
        except FrontierError as exc:
            if not self._is_away:
                log.error("waiting for the store: %s", exc)
            self._is_away = True
            return None
        self._is_away = False
        return run

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
