"""A worker of a fleet: one of any number of processes that crawl the same run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from msgspec import Struct, structs

from shoal.config import Config
from shoal.crawling.engine import Engine
from shoal.crawling.retrying import Persistence
from shoal.crawling.run_choice import finished_at
from shoal.crawling.scheduler import make_scheduler
from shoal.crawling.seeder import start_requests
from shoal.crawling.stats import Counters, CrawlSnapshot, Summary, Vitals
from shoal.errors import FrontierError, ShoalError
from shoal.frontier import share_store
from shoal.monitoring.recorder import RecordedProcess
from shoal.ports import Frontier, Holder, Run, Store
from shoal.runs.lifecycle import GRACE, RunLifecycle
from shoal.runs.plan import Output, Plan
from shoal.runs.start import RunSettings, find_run
from shoal.runs.trust import check_outputs, check_proxies, with_run_settings
from shoal.runs.worker_session import make_session, new_worker_id
from shoal.sinks import named_for_run, open_sink, sink_id
from shoal.sinks.takeover import ROLE_TTL, StandbyDrainer
from shoal.spider import Spider

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


class Worker:
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
        self.spider = spider
        self.config = config
        self.address = config.frontier
        """Where other processes find the store."""
        self.run_id = run_id
        self.worker_id = new_worker_id()
        self.outputs = tuple(outputs)
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        """Why the work ended early."""
        self._options = options
        self._starting: Persistence | None = None
        """Retries the calls before the run is found."""
        self._life: RunLifecycle | None = None
        self._stop_asked = False

    def stop(self) -> None:
        """Release the leases: at once, except for pages that end within the grace period."""
        self._stop_asked = True
        if self._life is not None:
            self._life.stop()
        elif self._starting is not None:
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

    async def snapshot(self) -> CrawlSnapshot | None:
        """The state of the crawl now. None before it begins."""
        return None if self._life is None else await self._life.snapshot()

    def vitals(self) -> Vitals:
        """What the worker knows of itself, without a call to the store."""
        if self._life is not None:
            return self._life.vitals(self.worker_id)
        spider = self.spider.spider_name()
        return Vitals(worker=self.worker_id, run_id=self.run_id, spider=spider, counters=Counters())

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
            if run.state == "finished":
                await persist(partial(self._report_finished, store, run))
            self._life = RunLifecycle(store, run, self._plan(settings, shared=store.shared))
            if self._stop_asked:
                self._life.stop()
            self.summary = await self._life.work()
            self.error = self._life.error
        return self.summary

    async def _report_finished(self, store: Store, run: Run) -> None:
        """Log that there is nothing to do for now. The outputs of the run are still completed."""
        ended = await finished_at(run, await store.frontier(run.run_id))
        if ended is not None:
            next_step = "waiting for more requests" if self._options.keep_alive else "`shoal start` begins another run"
            log.warning("run %s already finished at %s; %s", run.run_id, ended, next_step)

    def _plan(self, settings: RunSettings, *, shared: bool) -> Plan:
        options = self._options
        session = None
        if options.holder is None:  # a node has the session of its cluster
            session = make_session(self.config, self.run_id, self.worker_id)
        return Plan(
            spider=self.spider,
            config=self.config,
            options=settings.options,
            open_outputs=partial(self._open_outputs, settings),
            make_scheduler=lambda frontier: make_scheduler(self.spider, self.config, frontier, shared=shared),
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
                self.worker_id,
                "worker" if options.holder is None else "runner",
                command=options.command,
                address=self.config.frontier,
            ),
            session=session,
            on_begin=lambda: log.info("worker %s works on run %s", self.worker_id, self.run_id),
            on_unseeded=_warn_unseeded,
        )

    async def _open_outputs(self, settings: RunSettings, frontier: Frontier) -> Sequence[Output]:
        specs = {sink_id(spec): spec for spec in (*settings.outputs, *self.outputs)}
        ttl = min(ROLE_TTL, self.config.lease.ttl)
        assert self._life is not None
        make_sink = partial(open_sink, run_id=self.run_id, on_reject=self._life.count_rejects)
        patience = self.config.items.patience
        return [
            StandbyDrainer(
                frontier, partial(make_sink, spec), await self._life.role_of(spec), ttl=ttl, patience=patience
            )
            for spec in specs.values()
        ]


async def _warn_unseeded() -> None:
    log.warning("seeding is incomplete and no process is seeding; run `shoal start` again")


async def _close_quietly(store: Store) -> None:
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await store.close()
