"""A node of a cluster: a worker while it has a slot, a Backup Runner while it has none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from shoal.cluster import open_coordinator
from shoal.cluster.election import Role
from shoal.cluster.frontier_watch import FrontierWatch
from shoal.cluster.membership import Membership
from shoal.cluster.slot_work import NodeSlot
from shoal.config import Config, mask
from shoal.crawling.onion import preload
from shoal.crawling.stats import Counters, Snapshot, Standing, Summary, Vitals
from shoal.errors import ConfigError, ShoalError, StoreBusyError, StoreError
from shoal.frontier import open_store
from shoal.ports import Coordinator, Counts, Frontier, Holder, Run, Store
from shoal.runs.crawl import run_blocking
from shoal.runs.lifecycle import GRACE, last_stats
from shoal.runs.start import ensure_run, find_run
from shoal.runs.worker import Worker, WorkerOptions, new_worker_id
from shoal.spider import Spider

log = logging.getLogger("shoal.cluster")

_LONGEST_NAME = 200
_MAKING = 10.0  # seconds that another node may take to begin the run in a file
_BETWEEN_TRIES = 0.05
_LAST_WORD = 1.0  # seconds that closing, and the last look at the run, may take


class Node:
    """One process of a cluster. ``run()`` works and stands by; in a program with an event loop, ``await node``."""

    def __init__(
        self,
        spider: Spider | type[Spider],
        config: Config | None = None,
        *,
        name: str | None = None,
        run_id: str | None = None,
        cluster: str | None = None,
        runner: int | None = None,
        backup: int | None = None,
        coordinator: str | None = None,
        session: float | None = None,
        outputs: Sequence[str] = (),
        keep_alive: bool = False,
        allow_changed: bool = False,
        grace: float = GRACE,
    ) -> None:
        """``name`` is unique in the cluster; the number at its end is its place in line. ``run_id`` is a run that was
        started; without it, the first node makes one, named like the cluster or the spider. ``cluster`` is named like
        the run unless told otherwise. What else is not given comes from ``config.cluster``."""
        self.spider = spider() if isinstance(spider, type) else spider
        self.config = config or Config()
        own = self.config.cluster
        self.name = new_worker_id() if name is None else name
        self.run_id = run_id or cluster or self.spider.spider_name()
        self.cluster = cluster or self.run_id
        self.counts = Counts(own.runner if runner is None else runner, own.backup if backup is None else backup)
        self.coordinator = coordinator or own.coordinator or self.config.frontier
        self.session = own.session if session is None else session
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        self._makes_run = run_id is None
        self._outputs = tuple(outputs)
        self._keep_alive = keep_alive
        self._allow_changed = allow_changed
        self._grace = grace
        self._member: Membership | None = None
        self._slot: NodeSlot | None = None
        self._frontier: Frontier | None = None
        self._asked = False
        self._check()

    def _check(self) -> None:
        if self.config.frontier.startswith("memory:"):
            raise ConfigError(
                "nodes can't share a frontier in memory; name one with --frontier redis://host, "
                "postgresql://host/database, or sqlite:///file for one Runner at a time on one machine"
            )
        if self.config.frontier.startswith("sqlite:") and self.counts.runner > 1:
            raise ConfigError(
                f"one Runner at a time can work on {self.config.frontier}, not {self.counts.runner}; for more, name a "
                "server with --frontier redis://host or postgresql://host/database"
            )
        if self.coordinator.startswith("sqlite:"):
            raise ConfigError(
                "where is the cluster kept? Say it with --coordinator zookeeper://host:2181, redis:// ..."
            )
        if self.counts.runner < 1 or self.counts.backup < 0:
            raise ConfigError(f"runner must be 1 or more and backup 0 or more, not {self.counts}")
        for what, text in (("node", self.name), ("cluster", self.cluster)):
            if not text.strip() or len(text) > _LONGEST_NAME or "\0" in text:
                raise ConfigError(f"the name of a {what} has 1 to {_LONGEST_NAME} characters, not {text[:50]!r}")
        if self.session <= 0:
            raise ConfigError(f"a session lasts for some time, not for {self.session:g} seconds")

    # -- from outside

    def run(self) -> Summary:
        """Work and stand by until the run is finished. SIGINT and SIGTERM end it in good order."""
        run_blocking(self)
        assert self.summary is not None
        return self.summary

    def stop(self) -> None:
        """Give back what is leased, and leave."""
        self._asked = True
        if self._member is not None:
            self._member.over.set()

    @property
    def role(self) -> Role | None:
        """What it is at this moment; None before it is a member, and after."""
        return None if self._member is None else self._member.role

    @property
    def happened(self) -> Counter[str]:
        """How often it was elected, took over, retired, was lost or fenced."""
        return Counter() if self._slot is None else self._slot.happened

    async def snapshot(self) -> Snapshot | None:
        """The crawl at this moment; None while this node does not work."""
        running = None if self._slot is None else self._slot.running
        return None if running is None else await running.worker.snapshot()

    def vitals(self) -> Vitals:
        """What it knows of itself."""
        worker = None if self._slot is None else self._slot.worker
        working = None if worker is None else worker.vitals()
        return Vitals(
            worker=self.name,
            run_id=self.run_id,
            spider=self.spider.spider_name(),
            counters=self._counters(),
            in_flight=0 if working is None else working.in_flight,
            looped_at=None if working is None else working.looped_at,
            frontier=self._frontier,
            standing=Standing(cluster=self.cluster, role=self.role, happened=self.happened),
        )

    def _counters(self) -> Counters:
        return Counters() if self._slot is None else self._slot.counters

    def __await__(self) -> Generator[Any, None, Summary]:
        return self._execute().__await__()

    # -- putting it together

    async def _execute(self) -> Summary:
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            await self._make_run()
            store = await open_store(self.config.frontier, readonly=True)
            stack.push_async_callback(_quietly, store.close)
            run, settings = await find_run(store, self.run_id, self.spider, allow_changed=self._allow_changed)
            frontier = self._frontier = await store.frontier(run.run_id, settings.options)
            coordinator = await open_coordinator(self.coordinator, self.cluster, ttl=self.session)
            stack.push_async_callback(_quietly, coordinator.close)
            if run.state == "finished" and not self._keep_alive:
                log.warning("run %s is finished; begin another one with a --run-id of its own", run.run_id)
            else:
                await self._take_part(coordinator, store, frontier)
            self.summary = await self._summarize(run, frontier, time.monotonic() - started)
        return self.summary

    async def _take_part(self, coordinator: Coordinator, store: Store, frontier: Frontier) -> None:
        watch = FrontierWatch(store, self.run_id, max(1.0, coordinator.ttl / 2), keep_alive=self._keep_alive)
        self._slot = NodeSlot(self.name, self.cluster, coordinator, frontier, watch, self._make_worker)
        self._member = Membership(self.name, self.cluster, self.counts, coordinator, watch, self._slot)
        if self._asked:
            self._member.over.set()
        preload()
        try:
            await self._member.live()
            self.error = self._slot.error
        except ShoalError as exc:
            self.error = exc

    async def _make_run(self) -> None:
        """Begin it, unless another node has done so. In a file one node at a time can; while it is at it, wait."""
        until = time.monotonic() + _MAKING
        while self._makes_run:
            try:
                store = await open_store(self.config.frontier)
            except StoreBusyError:
                if await self._run_is_made():
                    return
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_BETWEEN_TRIES)
                continue
            try:
                await ensure_run(store, self.spider, self.config, self.run_id)
            finally:
                await store.close()
            return

    async def _run_is_made(self) -> bool:
        """Whether the file in which another node works has the run already."""
        try:
            store = await open_store(self.config.frontier, readonly=True)
        except StoreError:  # a file that is just being made
            return False
        try:
            return await store.get_run(self.run_id) is not None
        finally:
            await store.close()

    def _make_worker(self, holder: Holder, may_work: Callable[[], bool]) -> Worker:
        options = WorkerOptions(
            keep_alive=self._keep_alive, allow_changed=self._allow_changed, grace=self._grace, holder=holder,
            may_work=may_work,
        )  # fmt: skip
        return Worker(self.spider, self.config, self.run_id, outputs=self._outputs, options=options)

    async def _summarize(self, run: Run, frontier: Frontier, elapsed: float) -> Summary:
        has_worked = self.happened.keys() & {"elected", "took over"}
        if self._outputs and not has_worked:
            log.warning(
                "this node was never a Runner, and has written nothing to %s", ", ".join(map(mask, self._outputs))
            )
        stats, kinds = await last_stats(frontier, asyncio.get_running_loop().time() + _LAST_WORD)
        state = "finished" if stats.finished else "stopped"
        return Summary(
            run_id=run.run_id,
            spider=run.spider,
            state="failed" if self.error is not None else state,
            error="" if self.error is None else str(self.error),
            stats=stats,
            dead_kinds=kinds,
            counters=self._counters(),
            elapsed=elapsed,
            outputs=self._outputs if has_worked else (),
        )


async def _quietly(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(ShoalError, TimeoutError):
        async with asyncio.timeout(_LAST_WORD):
            await close()


class ZookeeperCrawler(Node):
    """A node whose cluster is kept in ZooKeeper::

    ZookeeperCrawler(Books, runner=3, backup=2, name="crawler_1", zk_hosts="localhost:2181").run()
    """

    def __init__(
        self,
        spider: Spider | type[Spider],
        config: Config | None = None,
        *,
        runner: int,
        backup: int,
        name: str,
        zk_hosts: str = "localhost:2181",
        **options: Any,
    ) -> None:
        """``zk_hosts``: ``host:port``, several by comma. ``options`` are those of ``Node``."""
        if "://" in zk_hosts:
            raise ConfigError(f"zk_hosts is host:port, several by comma, not {zk_hosts!r}")
        super().__init__(
            spider, config, runner=runner, backup=backup, name=name, coordinator=f"zookeeper://{zk_hosts}", **options
        )
