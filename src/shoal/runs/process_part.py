"""A worker process of a crawl with ``--processes``. It fetches and parses, and reports to the process that started it.

It has a connection to that process, and sends a report over it twice a second. If it receives the word ``stop``, it
shuts down. If the connection ends for any reason, it exits at once, so no worker is left behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import msgspec

from shoal.config import Resolved
from shoal.config.checks import frontier_kind
from shoal.crawling.stats import Counters, Latency
from shoal.errors import RunError
from shoal.frontier import share_store
from shoal.frontier.local.processes import name_process
from shoal.monitoring.recorder import RecordedProcess
from shoal.ports import Run, Sink, Store
from shoal.runs.crawl import Crawl, run_blocking
from shoal.runs.plan import Plan
from shoal.runs.process_fork import inherited
from shoal.selector.usage import QueryUsage
from shoal.spider import Spider

_VARIABLE = "_SHOAL_PART"
_REPORT_EVERY = 0.5
_LAST_REPORT = 2.0
"""Seconds that the last report may take."""
_ABORT_AFTER = 5.0
"""Seconds after the end of the connection at which the process is ended by force."""
_OUTPUT_TIMEOUT = 1.2
_NUMBERS = tuple(name for name in Counters.__slots__ if name not in Counters.NOT_ADDED | {"latency"})


class ProcessPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process should do. A forked process receives it over its connection. A process that was started as
    a program receives it in its environment, and its standard input is the connection."""

    frontier: str
    run_id: str
    concurrency: int
    relayed: bool
    """Whether another process reads what this one writes to standard error, line by line."""

    def environ(self) -> dict[str, str]:
        return {_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def of_this_process(cls) -> tuple[ProcessPart, socket.socket] | None:
        """The part of this process and its connection. None if it is not a worker process of a crawl."""
        text = os.environ.pop(_VARIABLE, None)
        if text is not None:
            connection = socket.socket(fileno=os.dup(0))
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)  # programs that the spider starts must not hold the connection
            os.close(nothing)
            return msgspec.json.decode(text, type=cls), connection
        forked = inherited()
        return None if forked is None else (msgspec.json.decode(forked.line, type=cls), forked.connection)


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process did so far. One line of JSON."""

    in_flight: int = 0
    numbers: dict[str, int] = {}
    errors: dict[str, int] = {}
    drop_reasons: dict[str, int] = {}
    latency: tuple[list[int], float] | None = None
    own: dict[str, int] = {}
    """What the spider counted with ``self.stats.inc``."""
    error: str = ""
    """Why it ended early."""
    is_last: bool = False
    matched: list[str] = []
    """In the last report: the queries that found something, and those that did not, with the number of pages."""
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
            latency=(list(counters.latency.counts), counters.latency.seconds),
        )

    def add_to(self, total: Counters) -> None:
        """Add these counters to those of all processes."""
        own = Counters()
        for name, value in self.numbers.items():
            setattr(own, name, value)
        own.errors = Counter(self.errors)
        own.drop_reasons = Counter(self.drop_reasons)
        if self.latency is not None:
            own.latency = Latency()
            own.latency.counts, own.latency.seconds = self.latency
        total.add(own)


class CrawlPart(Crawl):
    """Fetches and parses pages of a run. Another process seeds it, writes its outputs, and ends it."""

    def __init__(self, spider: Spider, resolved: Resolved, part: ProcessPart) -> None:
        """``resolved`` is complete: the command line is above the settings of the spider, also where it names a
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
            source=None, resumes=False, watches=True, is_private=False, keep_items=True,
            output_timeout=_OUTPUT_TIMEOUT, near=frontier_kind(self._part.frontier) in ("local", "sqlite"),
            process=RecordedProcess(self._worker_id, "worker", address=self._part.frontier),
        )  # fmt: skip

    @property
    def queries(self) -> QueryUsage:
        return QueryUsage() if self._life is None else self._life.queries

    def abort(self) -> None:
        """Stop now. Pages in flight are released."""
        self._stop_asked = True
        if self._life is not None:
            self._life.abort()


class _Tether:
    """The connection to the process that started this one."""

    def __init__(self, crawl: CrawlPart, connection: socket.socket) -> None:
        self._crawl = crawl
        self._socket = connection
        self._ended = threading.Event()
        self._reporting = threading.Thread(target=self._report, daemon=True)

    async def run(self, crawl: CrawlPart) -> None:
        """Start to send reports and to receive commands. Runs on the event loop of the crawl."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive_commands, args=(loop,), daemon=True).start()
        self._reporting.start()

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
        if self._reporting.is_alive():
            self._reporting.join(_LAST_REPORT)
        queries = self._crawl.queries
        matched, unmatched = sorted(queries.matched), queries.unmatched()
        report = msgspec.structs.replace(PartReport.of(self._crawl), in_flight=0, error=error, is_last=True)
        self._send(msgspec.structs.replace(report, matched=matched, unmatched=unmatched))


def run_part(part: ProcessPart, connection: socket.socket, spider: Spider, resolved: Resolved) -> int:
    """Work as a worker process until the run is finished, or this process is stopped. Returns the exit code."""
    name_process("shoal-worker")
    made = CrawlPart(spider, resolved, part)
    tether = _Tether(made, connection)
    error = ""
    try:
        run_blocking(made, tether.run)
        error = "" if made.error is None else str(made.error)
    except BaseException as exc:
        error = str(exc) or type(exc).__name__
        raise
    finally:
        tether.end(error)
    return 1 if error else 0


def total_of(reports: Sequence[PartReport]) -> Counters:
    """The counters of all worker processes together."""
    total = Counters()
    for report in reports:
        report.add_to(total)
    return total


def unmatched_by_all(reports: Sequence[PartReport]) -> dict[str, int]:
    """The queries that matched in no process, with the number of pages, most pages first."""
    matched = {query for report in reports for query in report.matched}
    missed: Counter[str] = Counter()
    for report in reports:
        missed.update(report.unmatched)
    return {query: pages for query, pages in missed.most_common() if query not in matched}
