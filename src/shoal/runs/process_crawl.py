"""A crawl on several processes of one machine.

The command (`ProcessCrawl`) seeds the run, writes its outputs and shows progress. Worker processes (`run_part`) fetch
and parse. With a frontier in memory or in a SQLite file, one more process owns it. The others use it over a socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import IO

import msgspec
from msgspec.structs import replace

from shoal.config import Config, Resolved
from shoal.config.checks import frontier_kind
from shoal.crawling.onion import make_fetcher
from shoal.crawling.stats import Counters, CrawlSnapshot, Latency, Summary, Vitals
from shoal.errors import FrontierError, RunError, ShoalError, StoreBusyError
from shoal.frontier import file_of, share_store
from shoal.frontier.local.places import name_process
from shoal.frontier.local.server import start_new_owner
from shoal.ports import Run, Sink, Store
from shoal.runs.crawl import Crawl, run_blocking
from shoal.runs.lifecycle import RunLifecycle
from shoal.runs.plan import Plan
from shoal.runs.process_fork import ForkedProcesses, start_worker
from shoal.runs.recorder import RecordedProcess
from shoal.runs.supervisor import Supervisor, WorkerProcess
from shoal.selector.selectors import QueryUsage
from shoal.spider import Spider
from shoal.system import threads

log = logging.getLogger("shoal.crawl")

_POLL = 0.25
"""Seconds between two checks whether the run or its workers have ended."""
_KILL_AFTER = 5.0
"""Seconds that a worker may take longer than its grace period."""
_EXIT_POLL = 0.002
"""Seconds between two checks for the exit of a worker that has closed its connection: it is about to end."""
_LONGEST_REPORT = 2**20
_REPORT_EVERY = 0.5
_LAST_REPORT = 2.0
"""Seconds that the last report may take."""
_ABORT_AFTER = 5.0
"""Seconds after the end of the connection. A process that still runs then is ended by force."""
_OUTPUT_TIMEOUT = 1.2
_NUMBERS = tuple(name for name in Counters.__slots__ if name not in Counters.NOT_ADDED | {"latency"})


# -- a worker process
#
# It sends a report to the command over a connection, twice a second. If it receives the word ``stop``, it shuts down.
# If the connection ends for any reason, it exits at once, so that no worker is left behind.


class ProcessPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process should do. This is the first line that it receives."""

    frontier: str
    run_id: str
    concurrency: int
    relayed: bool
    """Whether another process reads the worker's standard error line by line."""

    @classmethod
    def decode(cls, line: bytes) -> ProcessPart:
        return msgspec.json.decode(line, type=cls)


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process has done so far. One line of JSON."""

    in_flight: int = 0
    numbers: dict[str, int] = {}
    errors: dict[str, int] = {}
    drop_reasons: dict[str, int] = {}
    latency: Latency = msgspec.field(default_factory=Latency)
    own: dict[str, int] = {}
    """What the spider has counted with ``self.stats.inc``."""
    error: str = ""
    """Why it ended early."""
    is_last: bool = False
    matched: list[str] = []
    """In the last report: the queries that matched. ``unmatched``: those that did not, with the number of pages."""
    unmatched: dict[str, int] = {}

    @classmethod
    def of(cls, crawl: CrawlPart) -> PartReport:
        vitals = crawl.vitals()
        counters = vitals.counters
        return cls(
            own=dict(crawl.spider.stats.own),
            in_flight=vitals.in_flight,
            numbers={name: getattr(counters, name) for name in _NUMBERS},
            errors=dict(counters.errors),
            drop_reasons=dict(counters.drop_reasons),
            latency=counters.latency,
        )

    def add_to(self, total: Counters) -> None:
        """Add these counters to those of all processes."""
        for name, count in self.numbers.items():
            setattr(total, name, getattr(total, name) + count)
        total.errors.update(self.errors)
        total.drop_reasons.update(self.drop_reasons)
        total.latency += self.latency


class CrawlPart(Crawl):
    """Fetches and parses pages of a run. Another process seeds it, writes its outputs, and ends it."""

    def __init__(self, spider: Spider, resolved: Resolved, part: ProcessPart) -> None:
        """``resolved`` is complete: the command line has overridden the spider's settings, even where it names a
        default."""
        config = resolved.config.with_settings({"concurrency": part.concurrency})
        super().__init__(spider, Resolved(config, resolved.sources), collect=False)
        self._part = part

    async def _open_store(self, stack: AsyncExitStack) -> Store:
        store = await share_store(self._part.frontier)
        stack.push_async_callback(store.close)
        return store

    async def choose_run(self, store: Store) -> Run:
        run = await store.get_run(self._part.run_id)
        if run is None:
            raise RunError(f"there is no run {self._part.run_id}")
        return run

    def _plan(self, store: Store, collector: Sink | None) -> Plan:
        return msgspec.structs.replace(
            super()._plan(store, collector),
            source=None,
            resumes=False,
            watches=True,
            is_private=False,
            keep_items=True,
            output_timeout=_OUTPUT_TIMEOUT,
            near=frontier_kind(self._part.frontier) in ("local", "sqlite"),
            process=RecordedProcess(self._worker_id, "worker", address=self._part.frontier),
        )

    @property
    def queries(self) -> QueryUsage:
        return QueryUsage() if self._life is None else self._life.queries

    def abort(self) -> None:
        """Stop now, and release the pages in flight."""
        self._stop_asked = True
        if self._life is not None:
            self._life.abort()


class _Tether:
    """The connection to the process that started this one."""

    def __init__(self, crawl: CrawlPart, connection: socket.socket) -> None:
        self._crawl = crawl
        self._socket = connection
        self._ended = threading.Event()
        self._reporting: threading.Thread | None = None

    async def run(self, crawl: CrawlPart) -> None:
        """Start to send reports and receive commands. Call it on the event loop of the crawl."""
        loop = asyncio.get_running_loop()
        threads.start(partial(self._receive_commands, loop), "commands")
        self._reporting = threads.start(self._report, "reports")

    def _receive_commands(self, loop: asyncio.AbstractEventLoop) -> None:
        while words := self._receive():
            if b"stop" in words:
                loop.call_soon_threadsafe(self._crawl.stop)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._crawl.abort)
        if not self._ended.wait(_ABORT_AFTER):
            os._exit(1)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(4096)
        except OSError:
            return b""

    def _report(self) -> None:
        while not self._ended.wait(_REPORT_EVERY):
            self._send(PartReport.of(self._crawl))

    def _send(self, report: PartReport) -> None:
        with suppress(OSError):  # the other process has ended
            self._socket.sendall(msgspec.json.encode(report) + b"\n")

    def end(self, error: str) -> None:
        """Send the last report."""
        self._ended.set()
        if self._reporting is not None:
            self._reporting.join(_LAST_REPORT)
        queries = self._crawl.queries
        matched, unmatched = sorted(queries.matched), queries.unmatched()
        report = msgspec.structs.replace(PartReport.of(self._crawl), in_flight=0, error=error, is_last=True)
        self._send(msgspec.structs.replace(report, matched=matched, unmatched=unmatched))


def run_part(part: ProcessPart, connection: socket.socket, spider: Spider, resolved: Resolved) -> int:
    """Be a worker process until the run is finished or this process is stopped. Returns the exit code."""
    name_process("shoal-worker")
    crawl = CrawlPart(spider, resolved, part)
    tether = _Tether(crawl, connection)
    error = ""
    try:
        run_blocking(crawl, tether.run)
        error = "" if crawl.error is None else str(crawl.error)
    except BaseException as exc:
        error = str(exc) or type(exc).__name__
        raise
    finally:
        tether.end(error)
    return 1 if error else 0


def unmatched_by_all(reports: Sequence[PartReport]) -> dict[str, int]:
    """The queries that matched in no process, with the number of pages, most pages first."""
    matched = {query for report in reports for query in report.matched}
    unmatched: Counter[str] = Counter()
    for report in reports:
        unmatched.update(report.unmatched)
    return {query: pages for query, pages in unmatched.most_common() if query not in matched}


# -- the worker processes, seen from the command

_decode = msgspec.json.Decoder(PartReport).decode


class WorkerProcesses(Supervisor):
    """The worker processes of a crawl, and their reports."""

    killed_message = "worker process %(pid)d was killed by %(name)s; starting another one in %(pause)g s"

    def __init__(
        self, forked: Sequence[WorkerProcess], words: Sequence[str], *, on_line: Callable[[str], None] | None = None
    ) -> None:
        """``forked``: the first worker processes. ``words``: the command line of `shoal` for their successors.
        ``on_line``: called with each line that a worker writes to standard error. None: the workers share this
        process's standard error."""
        super().__init__(partial(start_worker, words, relays=on_line is not None))
        self._forked = list(forked)
        self._on_line = on_line
        self._part = b""
        self._reports: dict[int, PartReport] = {}
        self._running: dict[int, asyncio.StreamWriter] = {}
        self._ending = asyncio.Event()
        self.error = ""
        """The error of the first worker that failed."""

    def begin(self, part: ProcessPart) -> None:
        """Let all workers begin."""
        self._part = msgspec.json.encode(part) + b"\n"
        forked, self._forked = self._forked, []
        for process in forked:
            self.add(process).add_done_callback(lambda _: self._ending.set())

    @property
    def relays(self) -> bool:
        """Whether this process reads what the workers write to standard error."""
        return self._on_line is not None

    @property
    def have_ended(self) -> bool:
        """Whether all workers have ended, and none will be restarted."""
        return not self.working

    async def wait_for_end(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until a worker has ended, or reports that it ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._ending.wait()
        self._ending.clear()

    @property
    def in_flight(self) -> int:
        return sum(self._reports[pid].in_flight for pid in self._running if pid in self._reports)

    @property
    def reports(self) -> list[PartReport]:
        """The last report of each process, even of one that has ended."""
        return list(self._reports.values())

    @property
    def counters(self) -> Counters:
        """What all processes have done."""
        total = Counters()
        for report in self.reports:
            report.add_to(total)
        return total

    def stop(self) -> None:
        """Ask all workers to shut down. Sends no signal: that could end a worker before it sends its last report."""
        self._stopping.set()
        for writer in self._running.values():
            with suppress(OSError):
                writer.write(b"stop\n")

    def kill(self) -> None:
        """Kill all workers now."""
        for worker in self._forked:  # these wait for their first line, and exit without it
            worker.connection.close()
        super().kill()

    async def _watch(self, process: WorkerProcess) -> int:
        with suppress(OSError):  # the process was killed while it waited
            process.connection.sendall(self._part)
        reader, writer = await asyncio.open_connection(sock=process.connection, limit=_LONGEST_REPORT)
        self._running[process.pid] = writer
        if self._stopping.is_set():
            writer.write(b"stop\n")
        try:
            await asyncio.gather(self._read_reports(process.pid, reader), self._read_output(process.output))
            while (code := process.poll()) is None:
                await asyncio.sleep(_EXIT_POLL)
        finally:
            del self._running[process.pid]
            writer.close()
        if code > 0 and not self.error:
            report = self._reports.get(process.pid)
            self.error = report.error if report is not None and report.error else f"a worker ended with code {code}"
        return code

    async def _read_reports(self, pid: int, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                with suppress(msgspec.MsgspecError):
                    self._reports[pid] = report = _decode(line)
                    if report.is_last:
                        self._ending.set()

    async def _read_output(self, output: IO[bytes] | None) -> None:
        if output is None or self._on_line is None:
            return
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), output
        )
        try:
            while line := await lines.readline():
                self._on_line(line.decode(errors="replace").rstrip())
        finally:
            transport.close()


# -- the crawl


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
        self._supervising: asyncio.Task[None] | None = None

    # -- control

    def stop(self, grace: float | None = None) -> None:
        """Shut down the workers first, then the outputs."""
        if self._supervising is None:
            super().stop(grace)
        elif not self._stop_asked:
            self._stop_asked = True
            log.warning("stopping: pages in flight have %g s to end", self.config.shutdown_grace)
            self._workers.stop()

    async def snapshot(self) -> CrawlSnapshot | None:
        """The state of the whole run now. None before it begins."""
        snapshot = await super().snapshot()
        workers = self._workers
        return None if snapshot is None else replace(snapshot, in_flight=workers.in_flight, counters=workers.counters)

    def vitals(self) -> Vitals:
        """What the processes of the crawl know of themselves."""
        return replace(super().vitals(), in_flight=self._workers.in_flight, counters=self._workers.counters)

    # -- the crawl

    async def _execute(self, collector: Sink | None) -> Summary:
        try:
            summary = await super()._execute(collector)
            await self._workers.wait(self.config.shutdown_grace + _KILL_AFTER)
        finally:
            if self._supervising is not None:
                self._supervising.cancel()
            self._workers.kill()
        reports = self._workers.reports
        own_counters = Counter(summary.own_counters)
        for report in reports:
            own_counters.update(report.own)
        return replace(
            summary,
            counters=self._workers.counters,
            processes=self._processes,
            own_counters=dict(own_counters),
            unmatched=unmatched_by_all(reports),
        )

    async def _open_store(self, stack: AsyncExitStack) -> Store:
        kind = frontier_kind(self.address)
        if kind == "memory":
            path = await threads.call(self._owner.own(None, self.spider.spider_name()).wait)
            self.address = f"local:{path}"
        elif kind == "sqlite":
            await self._own_file()
        self._owner.close()
        store = await share_store(self.address)
        stack.push_async_callback(store.close)
        return store

    async def _own_file(self) -> None:
        """Start the process that owns the file. StoreBusyError if another process works on the file for seconds: one
        that was killed a moment ago may not have ended yet."""
        file = file_of(self.address)
        assert file is not None
        try:
            await threads.call(self._owner.own(file, "").wait)
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
            watches=True,
            output_timeout=None if is_local else plan.output_timeout,
            on_begin=partial(self._begin, plan.on_begin),
        )

    def _begin(self, on_begin: Callable[[], None]) -> None:
        """Start the workers. The run exists, and its outputs are open."""
        assert self._life is not None
        assert self._life.engine is not None
        self._life.engine.concurrency = 0  # this process leases nothing
        concurrency = -(-self.config.concurrency // self._processes)
        self._workers.begin(
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

    async def _check_limits(self, life: RunLifecycle) -> None:
        if self._workers.have_ended:
            await life.check_end()
        elif self.config.scope.max_bytes is not None:
            await life.check_limits(self._workers.counters)
        has_limit = self.config.scope.max_pages is not None or life.limit is not None
        if has_limit and (life.limit is None or self._workers.have_ended):  # workers that still run store pages
            await life.queue.next_requests(0)  # counts the pages of all workers

    async def _supervise(self) -> None:
        """Let the engine check whether the run has ended. Stop it when no worker is left."""
        life = self._life
        assert life is not None
        assert life.engine is not None
        while not life.stopping:
            await self._workers.wait_for_end(_POLL)
            try:
                await self._check_limits(life)
            except FrontierError as exc:
                log.debug("could not count the pages of the run: %s", exc)
            if self._workers.have_ended:
                if self._workers.error and not self._stop_asked:
                    life.error = life.error or ShoalError(self._workers.error)
                life.engine.stop(0.0)
                return
            life.engine.poll_now()
