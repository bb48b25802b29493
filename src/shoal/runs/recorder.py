"""Records a run while a process works on it: samples of its counters, and the report of the process.

Nothing here disturbs the crawl: if the store is away or an error occurs, only a record is missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import FrameType
from typing import ClassVar

import msgspec
from msgspec import Struct

from shoal.crawling.callbacks import Callbacks
from shoal.crawling.outcome import NOT_COUNTED
from shoal.crawling.stats import CodeError, Counters, FailingHost, Vitals
from shoal.errors import ItemError, ShoalError
from shoal.frontier import share_store
from shoal.http import Request
from shoal.item import Record, decode_item
from shoal.ports import Stats, Store
from shoal.runs import reports
from shoal.runs.reports import CodeErrors, FieldCounts, ProcessReport, ProcessRole, RecentItems
from shoal.runs.samples import RunSample, SampleHistory
from shoal.system import chance, clock, threads

log = logging.getLogger("shoal.monitoring")

_FIRST = (0.5, 1.5)
"""Seconds until the first record, so that it does not delay the start. A shorter crawl is recorded at its end."""
_STANDBY = (30.0, 60.0)
"""Seconds until a process checks again whether another one still takes the samples."""
_ITEMS_EVERY = 10.0
_FOLD_EVERY = 600.0
_SILENT = 3600.0
"""Seconds after which the report of a process is old."""
_TIMEOUT = 20.0
_LAST_TIMEOUT = 0.5
_MAX_ITEMS = 20
_MAX_ITEM = 2000
_RATE_SECONDS = 60.0
_encode = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode


class RecordedProcess(Struct, frozen=True):
    """The process whose part in a run is recorded."""

    name: str
    role: ProcessRole
    user_agent: str = ""
    obeys_robots: bool = True
    command: str = ""
    address: str = ""
    """Where a thread of this process can open the store once more. Empty: the store is in this process."""


class RunRecorder:
    """Records the part of one process in one run. ``run`` until it is cancelled, then ``close``."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        process: RecordedProcess,
        vitals: Callable[[], Vitals],
        stats: Callable[[], Awaitable[Stats]],
        clock: Callable[[], float] = lambda: clock.time(),
    ) -> None:
        """``stats``: the counters of the whole run."""
        self._store = store
        self._run_id = run_id
        self._process = process
        self._vitals = vitals
        self._stats = stats
        self._clock = clock
        self._history = SampleHistory(store, run_id)
        self._report = _OwnDocument(store, reports.process_key(run_id, process.name))
        self._items = _OwnDocument(store, reports.recent_items_key(run_id, process.name))
        self._started_at = clock()
        self._fields = FieldCounts()
        self._recent: deque[str] = deque(maxlen=_MAX_ITEMS)
        self._has_new_items = False
        self._pages = _Window(_RATE_SECONDS)
        recent = (_Window(reports.RECENT, begins=0) for _ in range(3))
        self._callback_errors, self._item_errors, self._forbidden = recent
        self._forbidden_lately = _Window(reports.SHORT, begins=0)
        self._next_sample = self._next_items = self._next_report = 0.0
        self._reported = (-1, -1, -1)
        self._next_fold = clock() + _FOLD_EVERY * chance.uniform(0.5, 1.5)
        self._reporting = threading.Lock()
        self.loop_watch = LoopWatch(process.address, self.record_blocked)

    async def run(self) -> None:
        self._count_items()  # from now on
        await asyncio.sleep(chance.uniform(*_FIRST))
        while True:
            await self._try_to_record(_TIMEOUT)
            await asyncio.sleep(reports.REPORTED_EVERY * chance.uniform(0.9, 1.1))

    async def close(self) -> None:
        """Write the last sample and the last report. This does not wait for a store that does not answer."""
        await self._try_to_record(_LAST_TIMEOUT, last=True)

    async def _try_to_record(self, seconds: float, *, last: bool = False) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.record(last=last)
        except (ShoalError, OSError) as exc:  # the store is away
            log.debug("could not record run %s: %s", self._run_id, exc)
        except Exception:  # a defect must not end or fail the crawl
            log.exception("could not record run %s", self._run_id)

    async def record(self, *, last: bool = False) -> None:
        """Write what is due now."""
        now = self._clock()
        has_news = _done(self._vitals()) != self._reported
        is_due = last or has_news or not self._next_report - reports.IDLE_EVERY <= now < self._next_report
        if not is_due and now < self._next_sample:
            return
        if await self._store.run_state(self._run_id) is None:
            return  # it was deleted: leave nothing behind
        self._count_items()
        if is_due:
            await self._report.write(self._make_report(now, ended=last))
            self._reported, self._next_report = _done(self._vitals()), now + reports.IDLE_EVERY
        if self._has_new_items and (last or now >= self._next_items):
            self._has_new_items, self._next_items = False, now + _ITEMS_EVERY
            await self._items.write(RecentItems(now, list(self._recent)))
        if last or now >= self._next_sample:
            await self._sample(now, last=last)

    async def record_blocked(self, store: Store, age: float, by: str) -> None:
        """Report from another thread that the event loop is blocked. The next report of the loop replaces this."""
        if await store.run_state(self._run_id) is not None:
            report = self._make_report(self._clock(), ended=False)
            report = msgspec.structs.replace(report, loop_age=round(age, 1), blocked_by=by)
            await _OwnDocument(store, reports.process_key(self._run_id, self._process.name)).write(report)
            self._reported = (-1, -1, -1)

    async def _sample(self, now: float, *, last: bool) -> None:
        stats = await self._stats()
        sample = RunSample.of(stats, now)
        stored = await self._history.add(sample, self._process.name, final=last and stats.finished)
        self._next_sample = 0.0 if stored else now + chance.uniform(*_STANDBY)
        if stored and not last and now >= self._next_fold:
            self._next_fold = now + _FOLD_EVERY
            await reports.fold_reports(self._store, self._run_id, now - _SILENT)

    def _count_items(self) -> None:
        records = []
        for payload in self._vitals().counters.picked.take():
            try:
                kind, record = decode_item(payload)
            except ItemError as exc:
                log.debug("an item cannot be shown: %s", exc)
                continue
            self._fields.count(kind, record)
            records.append(record)
        self._recent.extend(map(_as_json, records[-_MAX_ITEMS:]))
        self._has_new_items = self._has_new_items or bool(records)

    def _make_report(self, now: float, *, ended: bool) -> ProcessReport:
        with self._reporting:
            return self._report_of(self._vitals(), now, ended=ended)

    def _report_of(self, vitals: Vitals, now: float, *, ended: bool) -> ProcessReport:
        counters, holder = vitals.counters, vitals.holder
        not_counted = sum(counters.errors[kind] for kind in NOT_COUNTED)
        return ProcessReport(
            name=self._process.name,
            machine=socket.gethostname(),
            pid=os.getpid(),
            role=self._process.role,
            slot="" if holder is None else holder.slot,
            epoch=0 if holder is None else holder.epoch,
            started_at=self._started_at,
            at=now,
            ended=ended,
            error=vitals.error[:_MAX_ITEM] if ended else "",
            pages=counters.fetched,
            items=counters.items,
            failed=max(0, counters.errors.total() - counters.retried),
            pages_per_second=0.0 if ended else round(self._pages.rate(now, counters.fetched), 2),
            memory=_resident_memory(),
            browser=vitals.browser,
            tor=vitals.tor,
            items_counted=self._fields.items,
            fields=self._fields.fields,
            user_agent=self._process.user_agent,
            obeys_robots=self._process.obeys_robots,
            command=self._process.command,
            hosts={} if ended else _failing_hosts(counters),
            callback_errors=_errors(
                self._callback_errors, now, counters.errors["callback"] + counters.errors["errback"],
                counters.last_callback_error,
            ),
            item_errors=_errors(self._item_errors, now, counters.item_errors, counters.last_item_error),
            forbidden=self._forbidden.increase(now, not_counted),
            forbidden_lately=self._forbidden_lately.increase(now, not_counted),
        )  # fmt: skip


class _Window:
    """How much a count grew in the last seconds."""

    def __init__(self, seconds: float, *, begins: int | None = None) -> None:
        """``begins``: the count before the first one, if that is known."""
        self._seconds = seconds
        self._begins = begins
        self._seen: deque[tuple[float, int]] = deque()

    def increase(self, now: float, count: int) -> int:
        seen = self._seen
        if seen and now < seen[-1][0]:  # the clock was set back
            seen.clear()
        if not seen and self._begins is not None:
            seen.append((now, self._begins))
        if len(seen) > 1 and now - seen[-2][0] < self._seconds / 100:
            seen.pop()
        seen.append((now, count))
        while len(seen) > 2 and now - seen[1][0] >= self._seconds:
            seen.popleft()
        return count - seen[0][1]

    def rate(self, now: float, count: int) -> float:
        """The growth per second."""
        grown = self.increase(now, count)
        return grown / (now - self._seen[0][0]) if now > self._seen[0][0] else 0.0


def _errors(window: _Window, now: float, total: int, last: CodeError | None) -> CodeErrors:
    if last is not None:
        last = CodeError(last.at, last.reason[:_MAX_ITEM], last.url[:_MAX_ITEM])
    return CodeErrors(total=total, recent=window.increase(now, total), last=last)


def _failing_hosts(counters: Counters) -> dict[str, FailingHost]:
    """Those with the most attempts."""
    failing = sorted(counters.failing_hosts.items(), key=lambda pair: -pair[1].attempts)
    return dict(failing[: reports.MAX_HOSTS])


def _done(vitals: Vitals) -> tuple[int, int, int]:
    """What a process did so far."""
    return vitals.counters.fetched, vitals.counters.items, vitals.counters.errors.total()


class _OwnDocument:
    """A document that only this process writes, so it need not be read first."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._version = b""

    async def write(self, value: Struct) -> None:
        content, version = _encode(value), chance.token_bytes(16)
        if not await self._store.put_document(self._key, content, replaces=self._version, version=version):
            # A write was stored although its answer was lost, or the store went back in time.
            document = await self._store.get_document(self._key)
            replaces = b"" if document is None else document.version
            if not await self._store.put_document(self._key, content, replaces=replaces, version=version):
                return
        self._version = version


def _as_json(record: Record) -> str:
    text = _encode_json(record).decode()
    return text if len(text) <= _MAX_ITEM else text[:_MAX_ITEM] + "..."


def _resident_memory() -> int:
    if sys.platform != "linux":
        return 0
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


@asynccontextmanager
async def recording(recorder: RunRecorder) -> AsyncIterator[None]:
    """Record while the block runs, and once more at its end. A thread watches the event loop meanwhile."""
    task = asyncio.create_task(recorder.run())
    recorder.loop_watch.start()
    try:
        yield
    finally:
        recorder.loop_watch.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await recorder.close()


# -- a blocked event loop
#
# A callback that computes, or waits without ``await``, blocks the event loop.
#
# While the loop is blocked, the process fetches nothing, renews no lease and writes no report. A thread sees that.
# It logs the stack once, and writes the report of the process, on a connection of its own. It keeps nothing alive
# that others should take over: leases are renewed by the event loop alone, so they end.


_EVERY = 1.0
"""Seconds between two signs of life of the loop."""
_REPORTED_AFTER = 5.0
"""Seconds after which a blocked loop is reported, and between two reports."""
_LOGGED_AFTER = 10.0
_FROZEN = 2.0
"""Seconds by which this thread wakes up too late if the whole process was frozen. Then no callback is to blame."""
_STORE_TIMEOUT = 10.0
_MAX_URL = 500
_DEBUGGERS = ("bdb", "pdb", "pydevd")


class LoopWatch:
    """Watches the event loop on which it is started, until ``stop``."""

    _watches: ClassVar[list[LoopWatch]] = []

    def __init__(self, address: str, report: Callable[[Store, float, str], Awaitable[None]]) -> None:
        """``address``: of the store, for a thread. Empty: the store is in this process, and its reports wait.
        ``report``: write a report to a store: for how long the loop has been blocked, and by what."""
        self._address = address
        self._report = report
        self._ran_at = clock.monotonic()
        self._stopping = threading.Event()
        self._thread_id = 0
        self._beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._thread_id = threading.get_ident()
        self._watches.append(self)
        self._note_beat(asyncio.get_running_loop())
        threads.start(self._watch, "loop-watch")

    def stop(self) -> None:
        self._stopping.set()
        self._watches.remove(self)
        if self._beat is not None:
            self._beat.cancel()

    def _note_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ran_at = clock.monotonic()
        self._beat = loop.call_later(_EVERY, self._note_beat, loop)

    @property
    def age(self) -> float:
        """Seconds since the loop last ran. Up to a second is normal."""
        return clock.monotonic() - self._ran_at

    @property
    def blocked_by(self) -> str:
        """What the loop does, if it did not run for some seconds; empty if it runs."""
        return "" if self.age < _REPORTED_AFTER else what_runs(sys._current_frames().get(self._thread_id))

    # -- for the thread

    def _watch(self) -> None:
        logged_at = reported_at = 0.0
        slept_at = clock.monotonic()
        while not self._stopping.wait(_EVERY):
            was_frozen = clock.monotonic() - slept_at > _EVERY + _FROZEN
            age, by = self.age, "" if was_frozen else self.blocked_by
            if not by:
                if logged_at > 0:
                    log.warning("the event loop runs again, after %.0f s", clock.monotonic() - logged_at)
                logged_at = reported_at = 0.0
            if by and age >= _LOGGED_AFTER and not logged_at and self._logs():
                logged_at = self._ran_at
                self._log(age, by)
            if by and self._address and age - reported_at >= _REPORTED_AFTER:
                reported_at = age
                with suppress(ShoalError, OSError):  # the store is away; also a timeout
                    asyncio.run(self._report_alone(age, by))
            slept_at = clock.monotonic()

    def _logs(self) -> bool:
        """Whether this is the one of several watches on the loop that logs."""
        return next((watch for watch in self._watches if watch._thread_id == self._thread_id), None) is self

    def _log(self, age: float, by: str) -> None:
        stack = traceback.extract_stack(sys._current_frames().get(self._thread_id))
        if any(frame.filename.rpartition("/")[2].partition(".")[0] in _DEBUGGERS for frame in stack):
            return
        log.warning(
            "the event loop has been blocked for %.0f s by %s: this process fetches nothing meanwhile. Use await, or "
            "asyncio.to_thread for work that blocks. Stack:\n%s", age, by, "".join(traceback.format_list(stack)),
        )  # fmt: skip

    async def _report_alone(self, age: float, by: str) -> None:
        async with asyncio.timeout(_STORE_TIMEOUT):
            store = await share_store(self._address)
            try:
                await self._report(store, age, by)
            finally:
                await store.close()


def what_runs(frame: FrameType | None) -> str:
    """What a thread does, for people: the callback and its page, or else the function."""
    innermost = frame
    while frame is not None:
        if frame.f_code is Callbacks.call.__code__ and isinstance(request := frame.f_locals.get("request"), Request):
            return f"{frame.f_locals.get('name') or 'parse'} of {request.url[:_MAX_URL]}"
        frame = frame.f_back
    if innermost is None:
        return "unknown code"
    code = innermost.f_code
    return f"{code.co_qualname} ({code.co_filename}, line {innermost.f_lineno})"
