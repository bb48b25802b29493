"""A node of a cluster: a worker while it has a slot, a Backup Runner while it has none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TypedDict, Unpack

from shoal.cluster import open_coordinator
from shoal.cluster.election import Role
from shoal.cluster.frontier_watch import FrontierWatch
from shoal.cluster.membership import Membership
from shoal.cluster.slot_work import NodeSlot
from shoal.config import Config, Resolved, config_for, mask
from shoal.crawling.onion import preload
from shoal.crawling.stats import Counters, Snapshot, Standing, Summary, Vitals
from shoal.errors import ConfigError, ShoalError
from shoal.frontier import share_store
from shoal.ports import Coordinator, Counts, Frontier, Holder, Run, Store
from shoal.runs.crawl import run_blocking
from shoal.runs.last_questions import last_stats
from shoal.runs.lifecycle import GRACE
from shoal.runs.start import default_run_id, ensure_run, find_run
from shoal.runs.worker import Worker, WorkerOptions
from shoal.runs.worker_session import new_worker_id
from shoal.spider import Spider

log = logging.getLogger("shoal.cluster")

_MAX_NAME_LENGTH = 200
_CLOSE_TIMEOUT = 1.0
"""Seconds for closing, and for the statistics of the summary."""


class NodeOptions(TypedDict, total=False):
    """Further keyword arguments of a `Node`. All are optional."""

    run_id: str | None
    """A run that was started. Default: the first node creates a run, named like the cluster or the spider."""
    cluster: str | None
    """The name of the cluster. Default: that of the run."""
    session: float
    """Seconds without a heartbeat after which a node is dead. Default: ``cluster.session`` of the config."""
    outputs: Sequence[str]
    """Where this node writes items while it is a Runner."""
    keep_alive: bool
    """Stay when the run is finished: it may get more requests."""
    allow_changed: bool
    """Work even if the spider's file changed since the run started."""
    grace: float
    """Seconds that pages in flight have when the node stops."""


class Node:
    """One process of a cluster: a Runner while it holds a slot, otherwise a Backup Runner.

    ``run()`` joins the cluster and works until the run is finished. In a program with an event loop, use
    ``await node``.
    """

    def __init__(
        self,
        spider: Spider | type[Spider],
        config: Config | Resolved | Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        runner: int | None = None,
        backup: int | None = None,
        coordinator: str | None = None,
        **options: Unpack[NodeOptions],
    ) -> None:
        """``name`` is unique in the cluster; the number at its end is its rank in elections. ``runner`` nodes crawl and
        ``backup`` nodes stand by. ``coordinator`` is a URL; by default it is the frontier's server. These three and the
        session come from ``config.cluster`` if they are not given. See `NodeOptions` for ``options``."""
        if unknown := options.keys() - NodeOptions.__annotations__.keys():
            raise TypeError(f"Node has no option {min(unknown)!r}")
        settings = {"runner": runner, "backup": backup, "coordinator": coordinator, "session": options.get("session")}
        given = {f"cluster.{key}": value for key, value in settings.items() if value is not None}
        self.spider = spider() if isinstance(spider, type) else spider
        self.config = config_for(config, self.spider.settings, type(self.spider).__name__).with_settings(given)
        run_id, cluster = options.get("run_id"), options.get("cluster")
        self.name = new_worker_id() if name is None else name
        self.run_id = run_id or cluster or default_run_id(self.spider, self.config)
        self.cluster = cluster or self.run_id
        self.counts = Counts(self.config.cluster.runner, self.config.cluster.backup)
        self.coordinator = self.config.cluster.coordinator or self.config.frontier
        self.session = self.config.cluster.session
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        self._makes_run = run_id is None
        self._outputs = self.spider.with_outputs(options.get("outputs", ()))
        self._keep_alive = options.get("keep_alive", False)
        self._allow_changed = options.get("allow_changed", False)
        self._grace = options.get("grace", GRACE)
        self._member: Membership | None = None
        self._slot: NodeSlot | None = None
        self._frontier: Frontier | None = None
        self._stop_asked = False
        self._check()

    def _check(self) -> None:
        frontier = self.config.frontier
        if frontier.startswith("memory:"):
            raise ConfigError(
                "nodes cannot share a frontier in memory; pass --frontier redis://host or postgresql://host/database, "
                "or sqlite:///file for nodes on one machine"
            )
        if self.coordinator.startswith("sqlite:"):
            raise ConfigError("no coordinator configured: pass --coordinator URL, such as zookeeper://host:2181")
        for what, text in (("node", self.name), ("cluster", self.cluster)):
            if not text.strip() or len(text) > _MAX_NAME_LENGTH or "\0" in text:
                raise ConfigError(
                    f"the name of a {what} must have 1 to {_MAX_NAME_LENGTH} characters and no NUL, not {text[:50]!r}"
                )

    # -- control

    def run(self) -> Summary:
        """Work and stand by until the run is finished. SIGINT and SIGTERM shut the node down."""
        run_blocking(self)
        assert self.summary is not None
        return self.summary

    def stop(self) -> None:
        """Release the leases and leave the cluster."""
        self._stop_asked = True
        if self._member is not None:
            self._member.over.set()

    @property
    def role(self) -> Role | None:
        """The current role; None while the node is not a member."""
        return None if self._member is None else self._member.role

    @property
    def event_counts(self) -> Counter[str]:
        """How often the node was elected, took over, retired, was lost or fenced."""
        return Counter() if self._slot is None else self._slot.event_counts

    async def snapshot(self) -> Snapshot | None:
        """The state of the crawl now. None while this node is not a Runner."""
        running = None if self._slot is None else self._slot.running
        return None if running is None else await running.worker.snapshot()

    def vitals(self) -> Vitals:
        """What the node knows of itself, without a call to the store."""
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
            standing=Standing(cluster=self.cluster, role=self.role, happened=self.event_counts),
        )

    def _counters(self) -> Counters:
        return Counters() if self._slot is None else self._slot.counters

    def __await__(self) -> Generator[object, None, Summary]:
        return self._execute().__await__()

    # -- work

    async def _execute(self) -> Summary:
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            store = await share_store(self.config.frontier)
            stack.push_async_callback(_close_in_time, store.close)
            await self._make_run(store)
            project = self.config.project_name
            run, settings = await find_run(store, self.run_id, self.spider, project, allow_changed=self._allow_changed)
            frontier = self._frontier = await store.frontier(run.run_id, settings.options)
            coordinator = await open_coordinator(self.coordinator, self.cluster, ttl=self.session)
            stack.push_async_callback(_close_in_time, coordinator.close)
            if run.state == "finished" and not self._keep_alive:
                log.warning("run %s is finished; start another run with a new --run-id", run.run_id)
            else:
                await self._take_part(coordinator, store, frontier)
            self.summary = await self._summarize(run, frontier, time.monotonic() - started)
        return self.summary

    async def _take_part(self, coordinator: Coordinator, store: Store, frontier: Frontier) -> None:
        watch = FrontierWatch(store, self.run_id, max(1.0, coordinator.ttl / 2), keep_alive=self._keep_alive)
        self._slot = NodeSlot(self.name, self.cluster, coordinator, frontier, watch, self._make_worker)
        self._member = Membership(self.name, self.cluster, self.counts, coordinator, watch, self._slot)
        if self._stop_asked:
            self._member.over.set()
        preload()
        try:
            await self._member.live()
            self.error = self._slot.error
        except ShoalError as exc:
            self.error = exc

    async def _make_run(self, store: Store) -> None:
        """Create the run, unless another node has."""
        if self._makes_run:
            await ensure_run(store, self.spider, self.config, self.run_id)

    def _make_worker(self, holder: Holder, may_work: Callable[[], bool]) -> Worker:
        options = WorkerOptions(
            keep_alive=self._keep_alive, allow_changed=self._allow_changed, grace=self._grace, holder=holder,
            may_work=may_work,
        )  # fmt: skip
        return Worker(self.spider, self.config, self.run_id, outputs=self._outputs, options=options)

    async def _summarize(self, run: Run, frontier: Frontier, elapsed: float) -> Summary:
        has_worked = self.event_counts.keys() & {"elected", "took over"}
        if self._outputs and not has_worked:
            log.warning("this node was never a Runner, so it wrote nothing to %s", ", ".join(map(mask, self._outputs)))
        stats, kinds = await last_stats(frontier, asyncio.get_running_loop().time() + _CLOSE_TIMEOUT)
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


async def _close_in_time(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(ShoalError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await close()


class ZookeeperCrawler(Node):
    """A node whose coordinator is ZooKeeper::

    ZookeeperCrawler(Books, runner=3, backup=2, name="crawler_1", zk_hosts="localhost:2181").run()
    """

    def __init__(
        self,
        spider: Spider | type[Spider],
        config: Config | Resolved | Mapping[str, object] | None = None,
        *,
        runner: int,
        backup: int,
        name: str,
        zk_hosts: str = "localhost:2181",
        **options: Unpack[NodeOptions],
    ) -> None:
        """``zk_hosts``: ``host:port``, several separated by commas. The other arguments are those of `Node`."""
        if "://" in zk_hosts:
            raise ConfigError(f"zk_hosts must be host:port, several separated by commas, not {zk_hosts!r}")
        super().__init__(
            spider, config, runner=runner, backup=backup, name=name, coordinator=f"zookeeper://{zk_hosts}", **options
        )
