"""A crawl on several processes of one machine.

This process seeds the run, writes its outputs and shows its progress. Worker processes fetch and parse. With a frontier
in memory or in a SQLite file, one more process owns the frontier, and all others reach it over a socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from msgspec.structs import replace

from shoal.config import Config, Resolved
from shoal.config.checks import frontier_kind
from shoal.crawling.onion import make_fetcher
from shoal.crawling.scheduler import Scheduler, make_scheduler
from shoal.crawling.stats import CrawlSnapshot, Summary, Vitals
from shoal.errors import FrontierError, ShoalError, StoreBusyError
from shoal.frontier import file_of, share_store
from shoal.frontier.local.sharing import start_new_owner
from shoal.ports import Frontier, Sink, Store
from shoal.runs.crawl import Crawl
from shoal.runs.lifecycle import RunLifecycle
from shoal.runs.plan import Plan
from shoal.runs.process_fork import ForkedProcesses
from shoal.runs.process_part import ProcessPart
from shoal.runs.process_workers import WorkerProcesses
from shoal.spider import Spider

log = logging.getLogger("shoal.crawl")

_POLL = 0.25
"""Seconds between two checks whether the run or its workers have ended."""


class ProcessCrawl(Crawl):
    """A `Crawl` whose pages are fetched and parsed by worker processes."""

    def __init__(
        self,
        spider: Spider,
        config: Config | Resolved,
        forked: ForkedProcesses,
        words: Sequence[str],
        *,
        outputs: Sequence[str] = (),
        new_run: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """``forked``: the processes of this crawl. ``words``: the command line of `shoal` for one process. ``on_line``:
        see `WorkerProcesses`."""
        super().__init__(spider, config, outputs=outputs, new_run=new_run, collect=False)
        self._processes = len(forked.workers)
        self._owner = forked.owner
        self._workers = WorkerProcesses(forked.workers, words, on_line=on_line)
        self.address = self.config.frontier
        """Where worker processes find the frontier."""
        self._scheduler: Scheduler | None = None
        self._supervising: asyncio.Task[None] | None = None

    # -- control

    def stop(self, grace: float | None = None) -> None:
        """Shut down: the workers first, then the outputs."""
        if self._supervising is None:
            super().stop(grace)
        elif not self._stop_asked:
            self._stop_asked = True
            log.warning("stopping: pages in flight have %g s to end", self.config.shutdown_grace)
            self._workers.stop()

    async def snapshot(self) -> CrawlSnapshot | None:
        """The whole run now. None before it begins."""
        found = await super().snapshot()
        workers = self._workers
        return None if found is None else replace(found, in_flight=workers.in_flight, counters=workers.counters)

    def vitals(self) -> Vitals:
        """What the processes of the crawl know of themselves."""
        return replace(super().vitals(), in_flight=self._workers.in_flight, counters=self._workers.counters)

    # -- the crawl

    async def _execute(self, collector: Sink | None) -> Summary:
        try:
            summary = await super()._execute(collector)
            await self._workers.wait(self.config.shutdown_grace)
        finally:
            if self._supervising is not None:
                self._supervising.cancel()
            self._workers.kill()
        workers = self._workers
        own = workers.own_counters
        own.update(summary.own_counters)
        return replace(
            summary, counters=workers.counters, processes=self._processes, own_counters=dict(own),
            unmatched=workers.unmatched,
        )  # fmt: skip

    async def _open_store(self, stack: AsyncExitStack) -> Store:
        kind = frontier_kind(self.address)
        if kind == "memory":
            path = await asyncio.to_thread(self._owner.own(None, self.spider.spider_name()).wait)
            self.address = f"local:{path}"
        elif kind == "sqlite":
            await self._own_file()
        self._owner.close()
        store = await share_store(self.address)
        stack.push_async_callback(store.close)
        return store

    async def _own_file(self) -> None:
        """Start the process that owns the file. StoreBusyError if another process works on the file already. One that
        was killed a moment ago may not have ended yet."""
        file = file_of(self.address)
        assert file is not None
        try:
            await asyncio.to_thread(self._owner.own(file, "").wait)
        except StoreBusyError:
            await start_new_owner(file)

    def _plan(self, store: Store, collector: Sink | None) -> Plan:
        plan = super()._plan(store, collector)
        config = plan.config.with_settings({"tor.enabled": False})  # only the worker processes fetch
        is_local = frontier_kind(self.config.frontier) in ("memory", "sqlite")
        return replace(
            plan,
            config=config,
            fetcher=make_fetcher(config),
            make_scheduler=self._make_scheduler,
            watches=True,
            output_timeout=None if is_local else plan.output_timeout,
            on_begin=partial(self._begin, plan.on_begin),
        )

    def _make_scheduler(self, frontier: Frontier) -> Scheduler:
        self._scheduler = make_scheduler(self.spider, self.config, frontier, shared=True)
        return self._scheduler

    def _begin(self, on_begin: Callable[[], None]) -> None:
        """The run exists, and its outputs are open: start the workers."""
        assert self._life is not None
        assert self._life.engine is not None
        self._life.engine.concurrency = 0  # this process leases nothing
        concurrency = -(-self.config.concurrency // self._processes)
        self._workers.start(
            ProcessPart(
                frontier=self.address,
                run_id=self._life.run_id,
                concurrency=concurrency,
                relayed=self._workers.relays,
            )
        )
        self._supervising = asyncio.create_task(self._supervise())
        if self._stop_asked:
            self._workers.stop()
        on_begin()

    async def _check_limits(self, life: RunLifecycle, scheduler: Scheduler) -> None:
        if self._workers.have_ended:
            await life.check_end()
        elif self.config.scope.max_bytes is not None:
            await life.check_limits(self._workers.counters)
        has_limit = self.config.scope.max_pages is not None or life.limit is not None
        if has_limit and (life.limit is None or self._workers.have_ended):  # until then they store pages
            await scheduler.next_requests(0)  # counts the pages of all workers

    async def _supervise(self) -> None:
        """Let the engine check whether the run has ended, and stop it when no worker is left."""
        life, scheduler = self._life, self._scheduler
        assert life is not None
        assert life.engine is not None
        assert scheduler is not None
        while not life.stopping:
            await self._workers.wait_for_end(_POLL)
            try:
                await self._check_limits(life, scheduler)
            except FrontierError as exc:
                log.debug("could not count the pages of the run: %s", exc)
            if self._workers.have_ended:
                if self._workers.error and not self._stop_asked:
                    life.error = life.error or ShoalError(self._workers.error)
                life.engine.stop(0.0)
                return
            life.engine.poll_now()
