"""A node of a cluster: a worker while it has a slot, a Backup Runner while it has none."""

from __future__ import annotations

import asyncio
import logging
import re
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Self, TypedDict, Unpack

from shoal.config import Config, Resolved, config_for, mask
from shoal.crawling.onion import preload
from shoal.crawling.stats import Counters, CrawlSnapshot, Standing, Summary, Vitals
from shoal.errors import ConfigError, RunError, ShoalError
from shoal.frontier import share_store
from shoal.ports import Coordinator, Counts, Frontier, Holder, Run, Store
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.candidate import Candidate
from shoal.runs.cluster.election import Role
from shoal.runs.cluster.membership import Membership
from shoal.runs.cluster.slots import FrontierWatch, NodeSlot
from shoal.runs.crawl import run_blocking
from shoal.runs.lifecycle import GRACE
from shoal.runs.run_end import last_stats, limit_of, read_outcome
from shoal.runs.start import default_run_id, ensure_run, find_run
from shoal.runs.worker import Worker, WorkerOptions
from shoal.runs.worker_session import machine_of, new_worker_id
from shoal.spider import Spider
from shoal.system import clock, threads

log = logging.getLogger("shoal.cluster")

_MAX_NAME_LENGTH = 200
_CLOSE_TIMEOUT = 1.0
"""Seconds that closing may take, and reading the statistics of the summary."""


class NodeOptions(TypedDict, total=False):
    """Further keyword arguments of a `Node`. All are optional."""

    run_id: str | None
    """A run that exists. Default: the first node creates a run, named like the cluster or the spider."""
    cluster: str | None
    """The name of the cluster. Default: that of the run."""
    session: float
    """Seconds without a heartbeat after which a node is dead. Default: ``cluster.session`` of the config."""
    outputs: Sequence[str]
    """Where this node writes items while it is a Runner."""
    keep_alive: bool
    """Stay after the run is finished, because it may get more requests."""
    allow_changed: bool
    """Work even if the spider's file has changed since the run started."""
    grace: float
    """Seconds that pages in flight have when the node stops."""
    command: str
    """The command that starts such a node, as its reports show it."""


class Node:
    """One process of a cluster: a Runner while it holds a slot, otherwise a Backup Runner.

    ``run()`` joins the cluster and works until the run is finished. In a program with an event loop, use
    ``await node``. To know the role before that, call ``join()``, or use the node in a ``with`` statement.
    """

    def __init__(
        self,
        spider: Spider | type[Spider] | None = None,
        config: Config | Resolved | Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        runner: int | None = None,
        backup: int | None = None,
        coordinator: str | None = None,
        **options: Unpack[NodeOptions],
    ) -> None:
        """``name`` is unique in the cluster. The number at its end is its rank in elections. ``<index>`` in it becomes
        the first free number. ``runner`` nodes crawl, and ``backup`` nodes stand by. ``coordinator`` is a URL. These
        three and the session default to ``config.cluster``, and the coordinator then to the frontier's server.
        ``options``: see `NodeOptions`. You can also pass ``spider`` to `register` or `run`."""
        if unknown := options.keys() - NodeOptions.__annotations__.keys():
            raise TypeError(f"Node has no option {min(unknown)!r}")
        settings = {"runner": runner, "backup": backup, "coordinator": coordinator, "session": options.get("session")}
        self._settings = {f"cluster.{key}": value for key, value in settings.items() if value is not None}
        self._given_config = config
        self._options = options
        self._name = new_worker_id() if name is None else name
        self._use(spider)
        self.cluster = options.get("cluster") or self.run_id or self.config.project_name
        self.counts = Counts(self.config.cluster.runner, self.config.cluster.backup)
        self.coordinator = self.config.cluster.coordinator or self.config.frontier
        self.session = self.config.cluster.session
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        self._candidate: Candidate | None = None
        self._member: Membership | None = None
        self._slot: NodeSlot | None = None
        self._frontier: Frontier | None = None
        self._stop_asked = False
        self._is_closed = False
        if spider is not None:
            self._check_frontier()
        self._check_names()

    def _check_names(self) -> None:
        if self.coordinator.partition(":")[0] in ("memory", "sqlite"):
            raise ConfigError("no coordinator configured: pass --coordinator URL, such as zookeeper://host:2181")
        for what, text in (("node", self._name), ("cluster", self.cluster)):
            if not text.strip() or len(text) > _MAX_NAME_LENGTH or "\0" in text:
                raise ConfigError(
                    f"the name of a {what} must have 1 to {_MAX_NAME_LENGTH} characters and no NUL, not {text[:50]!r}"
                )

    def _check_frontier(self) -> None:
        if self.config.frontier.startswith("memory:"):
            raise ConfigError(
                "nodes cannot share a frontier in memory; set it (--frontier) to redis://host or "
                "postgresql://host/database, or to sqlite:///file for nodes on one machine"
            )

    # -- spider

    @property
    def spider(self) -> Spider:
        """The spider of the node. ConfigError if it has none yet."""
        if self._spider is None:
            raise ConfigError("the node has no spider: pass a Spider class to run() or register()")
        return self._spider

    def register(self, spider: Spider | type[Spider]) -> None:
        """Set the spider that `run` crawls with."""
        self._use(spider)
        self._check_frontier()

    def _use(self, spider: Spider | type[Spider] | None) -> None:
        instance = self._spider = spider() if isinstance(spider, type) else spider
        settings, source = ({}, "") if instance is None else (instance.settings, type(instance).__name__)
        self.config = config_for(self._given_config, settings, source).with_settings(self._settings)
        default = "" if instance is None else default_run_id(instance, self.config)
        self.run_id = self._options.get("run_id") or self._options.get("cluster") or default

    @property
    def _outputs(self) -> tuple[str, ...]:
        return self.spider.with_outputs(self._options.get("outputs", ()))

    @property
    def _keep_alive(self) -> bool:
        return self._options.get("keep_alive", False)

    @property
    def _allow_changed(self) -> bool:
        return self._options.get("allow_changed", False)

    # -- control

    def join(self) -> None:
        """Join the cluster before `run`, and wait until the role is decided. A thread sends the heartbeats.

        The node leaves at the end of `run`, with `close`, when this object is deleted, or when the process ends.
        CoordinatorError if the coordinator cannot be used or reached. NameTakenError if another node has this name."""
        if self._is_closed:
            raise self._closed()
        if self._candidate is None:
            candidate = Candidate(self.coordinator, self.cluster, self.session, self.counts)
            candidate.join(self._name)
            self._candidate, self._member = candidate, None
            weakref.finalize(self, candidate.close_soon).atexit = False  # the candidate has its own atexit

    def run(self, spider: Spider | type[Spider] | None = None) -> Summary:
        """Work and stand by until the run is finished. SIGINT and SIGTERM shut the node down. If you have registered a
        spider, omit ``spider``."""
        if spider is not None:
            self.register(spider)
        run_blocking(self)
        assert self.summary is not None
        return self.summary

    def stop(self) -> None:
        """Release the leases and leave the cluster. Call it in the node's event loop."""
        self._stop_asked = True
        if self._member is not None:
            self._member.over.set()

    def close(self) -> None:
        """Leave the cluster. While the node runs, call `stop` instead."""
        self._is_closed = True
        if self._candidate is not None:
            self._candidate.close()

    def _closed(self) -> RunError:
        return RunError(f"{self.name} is closed: create another node")

    def __enter__(self) -> Self:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name, unique in the cluster. A name with ``<index>`` is final once the node is a member."""
        member = self._member or self._candidate
        return self._name if member is None else member.name

    @property
    def role(self) -> Role | None:
        """The current role. None while the node is not a member."""
        member = self._member or self._candidate
        return None if member is None else member.role

    @property
    def event_counts(self) -> Counter[str]:
        """How often the node was elected, took over, retired, was lost or fenced."""
        slot = self._slot or (None if self._candidate is None else self._candidate.slot)
        return Counter() if slot is None else slot.event_counts

    async def snapshot(self) -> CrawlSnapshot | None:
        """The state of the crawl now. None while this node is not a Runner."""
        running = None if self._slot is None else self._slot.running
        return None if running is None else await running.worker.snapshot()

    @property
    def address(self) -> str:
        """Where other processes find the frontier."""
        return self.config.frontier

    def vitals(self) -> Vitals:
        """What the node knows of itself, without a call to the store."""
        worker = None if self._slot is None else self._slot.worker
        vitals = None if worker is None else worker.vitals()
        return Vitals(
            worker=self.name,
            run_id=self.run_id,
            spider=self.spider.spider_name(),
            counters=self._counters(),
            in_flight=0 if vitals is None else vitals.in_flight,
            looped_at=None if vitals is None else vitals.looped_at,
            frontier=self._frontier,
            standing=Standing(cluster=self.cluster, role=self.role, events=self.event_counts),
        )

    def _counters(self) -> Counters:
        return Counters() if self._slot is None else self._slot.counters

    def __await__(self) -> Generator[object, None, Summary]:
        return self._execute().__await__()

    # -- work

    async def _execute(self) -> Summary:
        if self._is_closed:
            raise self._closed()
        started, spider = clock.monotonic(), self.spider
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_candidacy)
            store = await share_store(self.config.frontier)
            stack.push_async_callback(_close_in_time, store.close)
            await self._make_run(store)
            project = self.config.project_name
            run, _ = await find_run(store, self.run_id, spider, project, allow_changed=self._allow_changed)
            frontier = self._frontier = await store.frontier(run.run_id)
            coordinator = await self._open_coordinator()
            stack.push_async_callback(_close_in_time, coordinator.close)
            if run.state == "finished" and not self._keep_alive:
                log.warning("run %s is finished; start another run with a new --run-id", run.run_id)
            else:
                await self._take_part(coordinator, store, frontier)
            self.summary = await self._summarize(store, run, frontier, clock.monotonic() - started)
        return self.summary

    async def _open_coordinator(self) -> Coordinator:
        if self._candidate is not None:
            return self._candidate.coordinator
        return await open_coordinator(self.coordinator, self.cluster, ttl=self.session)

    async def _end_candidacy(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            await threads.call(candidate.close)

    async def _take_part(self, coordinator: Coordinator, store: Store, frontier: Frontier) -> None:
        watch = FrontierWatch(store, self.run_id, max(1.0, coordinator.ttl / 2), keep_alive=self._keep_alive)
        preload()
        held_slot, earlier = None, None
        try:
            if self._candidate is not None:
                held_slot, earlier = self._candidate.slot, await self._candidate.hand_over()
            slot = self._slot = NodeSlot(self.cluster, coordinator, frontier, watch, self._make_worker, held_slot)
            member = Membership(self._name, self.cluster, self.counts, coordinator, watch, slot)
            if earlier is not None:
                member.continue_from(earlier)
            self._member = member
            if self._stop_asked:
                member.over.set()
            await member.live()
            self.error = slot.error
        except ShoalError as exc:
            self.error = exc

    async def _make_run(self, store: Store) -> None:
        """Create the run, unless another node has created it."""
        if self._options.get("run_id") is None:
            await ensure_run(store, self.spider, self.config, self.run_id)

    def _make_worker(self, holder: Holder, may_work: Callable[[], bool]) -> Worker:
        options = WorkerOptions(
            keep_alive=self._keep_alive,
            allow_changed=self._allow_changed,
            grace=self._options.get("grace", GRACE),
            holder=holder,
            may_work=may_work,
            command=self._options.get("command", ""),
        )
        return Worker(self.spider, self.config, self.run_id, outputs=self._outputs, options=options)

    async def _summarize(self, store: Store, run: Run, frontier: Frontier, elapsed: float) -> Summary:
        has_worked = self.event_counts.keys() & {"elected", "took over"}
        if self._outputs and not has_worked:
            log.warning("this node was never a Runner, so it wrote nothing to %s", ", ".join(map(mask, self._outputs)))
        stats, kinds = await last_stats(frontier, asyncio.get_running_loop().time() + _CLOSE_TIMEOUT)
        state = "finished" if stats.finished else "limit" if await _is_at_limit(store, run.run_id) else "stopped"
        outcome = None
        with suppress(ShoalError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                stored = await store.get_run(run.run_id)
                outcome = None if stored is None else await read_outcome(store, stored, frontier, self.config.outcome)
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
            outcome=outcome if self.error is None else None,
        )


async def _is_at_limit(store: Store, run_id: str) -> bool:
    with suppress(ShoalError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            run = await store.get_run(run_id)
            return run is not None and await limit_of(store, run) is not None
    return False


async def _close_in_time(close: Callable[[], Awaitable[None]]) -> None:
    with suppress(ShoalError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await close()


class ZookeeperCrawler(Node):
    """A node of a cluster on ZooKeeper. It takes part in the election when it is created::

    crawler = ZookeeperCrawler(runner=3, backup=2, name="crawler_<index>", zk_hosts="localhost:2181")
    print(crawler.name, crawler.role)
    crawler.run(Books)
    """

    _has_own_file = False

    def __init__(
        self,
        spider: Spider | type[Spider] | None = None,
        config: Config | Resolved | Mapping[str, object] | None = None,
        *,
        runner: int,
        backup: int,
        name: str = "crawler_<index>",
        zk_hosts: str = "localhost:2181",
        **options: Unpack[NodeOptions],
    ) -> None:
        """``zk_hosts``: ``host:port``, several separated by commas. The other arguments are those of `Node`. Raises the
        errors of `Node.join`. If you configure no frontier, the nodes of one machine share a SQLite file in the working
        directory, named like the cluster."""
        if "://" in zk_hosts:
            raise ConfigError(f"zk_hosts must be host:port, several separated by commas, not {zk_hosts!r}")
        super().__init__(
            spider, config, runner=runner, backup=backup, name=name, coordinator=f"zookeeper://{zk_hosts}", **options
        )
        self.join()

    def join(self) -> None:
        super().join()
        self._check_machines()

    def _check_frontier(self) -> None:
        """If no frontier is configured, use a file: the nodes of one machine then need only ZooKeeper."""
        if self.config.frontier == Config().frontier:
            self.config = self.config.with_settings({"frontier": f"sqlite:///{_as_file(self.cluster)}.db"})
            self._has_own_file = True
            log.warning("no frontier is configured: the nodes of this machine share %s", self.config.frontier)
            self._check_machines()
        super()._check_frontier()

    def _check_machines(self) -> None:
        """Raise ConfigError if a member is on another machine, which has another file."""
        if not self._has_own_file or self._candidate is None:
            return
        here = machine_of(new_worker_id())
        others = [member for member in self._candidate.members if machine_of(member.where) != here]
        if others:
            self.close()
            raise ConfigError(
                f"{others[0].name} runs on another machine ({others[0].where}), which cannot use the file of this one; "
                "set the frontier to redis://host or postgresql://host/database"
            )


def _as_file(name: str) -> str:
    """The name of a cluster without the characters that are special in a path or a URL."""
    return re.sub(r"[^\w.-]", "_", name)
