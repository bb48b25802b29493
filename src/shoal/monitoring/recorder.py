"""Records a run while a process works on it: samples of its counters, and the report of the process.

Nothing here disturbs the crawl: if the store is away or an error occurs, only a record is missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct

from shoal.crawling.outcome import NOT_COUNTED
from shoal.crawling.stats import CodeError, Counters, FailingHost, Vitals
from shoal.errors import ItemError, ShoalError
from shoal.item import Record, decode_item
from shoal.monitoring.loop_watch import LoopWatch
from shoal.monitoring.reports import (
    IDLE_EVERY,
    MAX_HOSTS,
    RECENT,
    REPORTED_EVERY,
    SHORT,
    CodeErrors,
    FieldCounts,
    ProcessReport,
    ProcessRole,
    RecentItems,
    fold_reports,
    process_key,
    recent_items_key,
)
from shoal.monitoring.samples import RunSample, SampleHistory
from shoal.ports import Stats, Store

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
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``stats``: the counters of the whole run."""
        self._store = store
        self._run_id = run_id
        self._process = process
        self._vitals = vitals
        self._stats = stats
        self._clock = clock
        self._history = SampleHistory(store, run_id)
        self._report = _OwnDocument(store, process_key(run_id, process.name))
        self._items = _OwnDocument(store, recent_items_key(run_id, process.name))
        self._started_at = clock()
        self._fields = FieldCounts()
        self._recent: deque[str] = deque(maxlen=_MAX_ITEMS)
        self._has_new_items = False
        self._pages = _Window(_RATE_SECONDS)
        self._callback_errors, self._item_errors, self._forbidden = (_Window(RECENT, begins=0) for _ in range(3))
        self._forbidden_lately = _Window(SHORT, begins=0)
        self._next_sample = self._next_items = self._next_report = 0.0
        self._reported = (-1, -1, -1)
        self._next_fold = clock() + _FOLD_EVERY * random.uniform(0.5, 1.5)
        self._reporting = threading.Lock()
        self.loop_watch = LoopWatch(process.address, self.record_blocked)

    async def run(self) -> None:
        self._count_items()  # from now on
        await asyncio.sleep(random.uniform(*_FIRST))
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await self.record()
            except (ShoalError, OSError) as exc:  # the store is away
                log.debug("could not record run %s: %s", self._run_id, exc)
            except Exception:  # a defect must not end the crawl
                log.exception("could not record run %s", self._run_id)
            await asyncio.sleep(REPORTED_EVERY * random.uniform(0.9, 1.1))

    async def close(self) -> None:
        """Write the last sample and the last report. This does not wait for a store that does not answer."""
        try:
            async with asyncio.timeout(_LAST_TIMEOUT):
                await self.record(last=True)
        except (ShoalError, OSError) as exc:  # the store is away
            log.debug("could not record the end of run %s: %s", self._run_id, exc)
        except Exception:  # a defect must not fail the crawl
            log.exception("could not record the end of run %s", self._run_id)

    async def record(self, *, last: bool = False) -> None:
        """Write what is due now."""
        now = self._clock()
        is_due = last or self._has_news() or not self._next_report - IDLE_EVERY <= now < self._next_report
        if not is_due and now < self._next_sample:
            return
        if await self._store.run_state(self._run_id) is None:
            return  # it was deleted: leave nothing behind
        self._count_items()
        if is_due:
            await self._report.write(self._make_report(now, ended=last))
            self._reported, self._next_report = _done(self._vitals()), now + IDLE_EVERY
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
            await _OwnDocument(store, process_key(self._run_id, self._process.name)).write(report)
            self._reported = (-1, -1, -1)

    def _has_news(self) -> bool:
        return _done(self._vitals()) != self._reported

    async def _sample(self, now: float, *, last: bool) -> None:
        stats = await self._stats()
        sample = RunSample.of(stats, now)
        taken = await self._history.add(sample, self._process.name, final=last and stats.finished)
        self._next_sample = 0.0 if taken else now + random.uniform(*_STANDBY)
        if taken and not last and now >= self._next_fold:
            self._next_fold = now + _FOLD_EVERY
            await fold_reports(self._store, self._run_id, now - _SILENT)

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
    return dict(failing[:MAX_HOSTS])


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
        content, version = _encode(value), os.urandom(16)
        if not await self._store.put_document(self._key, content, replaces=self._version, version=version):
            # A write was stored although its answer was lost, or the store went back in time.
            found = await self._store.get_document(self._key)
            replaces = b"" if found is None else found.version
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
