"""What a process records of a run: its report, its items, and the samples. And that this never disturbs the crawl."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

import msgspec
import pytest

from shoal.crawling.stats import CodeError, Counters, PickedItems, Vitals
from shoal.errors import StoreAwayError
from shoal.frontier.memory import MemoryStore
from shoal.item import encode_item
from shoal.ports import Holder, Stats
from shoal.ports.documents import StoredValue
from shoal.runs import recorder as recorder_module
from shoal.runs.recorder import RecordedProcess, RunRecorder, recording
from shoal.runs.reports import (
    EARLIER,
    IDLE_EVERY,
    MAX_FIELDS,
    OTHER_FIELDS,
    FieldCounts,
    ProcessReport,
    field_coverage,
    fold_reports,
    process_key,
    read_processes,
    read_recent_items,
)
from shoal.runs.samples import read_history
from shoal.testing import FakeClock
from tests.support.fakes import memory_store


class Process:
    """A process that is recorded, with a clock that a test advances."""

    def __init__(self, store: MemoryStore, name: str = "a", clock: FakeClock | None = None, **vitals: Any) -> None:
        self.clock = clock or FakeClock()
        self.counters = Counters()
        self.stats = Stats()
        self.vitals = vitals
        self.asked = 0
        recorded = RecordedProcess(name, "worker")
        self.recorder = RunRecorder(store, "run", recorded, self._vitals, self._stats, self.clock)

    def _vitals(self) -> Vitals:
        return Vitals(worker="a", run_id="run", spider="x", counters=self.counters, **self.vitals)

    async def _stats(self) -> Stats:
        self.asked += 1
        return self.stats

    def store_items(self, *items: object) -> None:
        if self.counters.picked.room:
            self.counters.picked.offer([encode_item(item) for item in items])
        self.counters.items += len(items)

    async def record(self, seconds: float = 5.0, *, last: bool = False) -> None:
        self.clock.advance(seconds)
        await self.recorder.record(last=last)


async def only_report(store: MemoryStore) -> ProcessReport:
    (report,) = await read_processes(store, "run")
    return report


# -- the report


async def test_the_report_of_a_process() -> None:
    store = await memory_store()
    process = Process(store, holder=Holder("slot/1", 3), browser="2 pages open", tor="ready")
    await process.record()
    process.counters.fetched = 40
    process.counters.errors["timeout"] = 5
    process.counters.retried = 3
    await process.record(10)
    report = await only_report(store)
    assert (report.name, report.machine, report.pid) == ("a", socket.gethostname(), os.getpid())
    assert (report.role, report.slot, report.epoch) == ("worker", "slot/1", 3)
    assert (report.browser, report.tor) == ("2 pages open", "ready")
    assert (report.pages, report.failed, report.pages_per_second) == (40, 2, 4.0)
    assert report.at == process.clock.now
    assert report.at - report.started_at == 15
    assert report.memory > 1_000_000
    assert not report.ended
    await process.record(1, last=True)
    assert (await only_report(store)).ended


async def test_the_speed_is_that_of_the_last_minute() -> None:
    store = await memory_store()
    process = Process(store)
    for number in range(100):
        process.counters.fetched += 50 if number < 50 else 5
        await process.record()
    assert (await only_report(store)).pages_per_second == 1.0


async def test_a_report_whose_answer_was_lost_is_written_again() -> None:
    store = await memory_store()
    process = Process(store)
    await process.record()
    found = await store.get_document("run/run/process/a")
    assert found is not None
    await store.put_document("run/run/process/a", b"other", replaces=found.version, version=b"z" * 16)
    process.clock.advance(IDLE_EVERY)
    await process.record()
    assert (await only_report(store)).at == process.clock.now


async def test_a_process_with_nothing_new_reports_less_often() -> None:
    store = await memory_store()
    await Process(store, "sampler").record()
    process = Process(store)
    await process.record()
    first = await store.get_document("run/run/process/a")
    await process.record()
    assert await store.get_document("run/run/process/a") == first
    process.store_items({"title": "new"})
    await process.record()
    second = await store.get_document("run/run/process/a")
    assert second != first
    process.clock.advance(IDLE_EVERY)
    await process.record()
    assert await store.get_document("run/run/process/a") != second


# -- items


async def test_fields_and_the_last_items() -> None:
    store = await memory_store()
    process = Process(store)
    await process.record()
    process.store_items(*({"title": f"t{n}", "price": n or None, "tags": [], "zero": 0} for n in range(30)))
    await process.record()
    report = await only_report(store)
    assert report.items_counted == {"item": 30}
    assert report.fields == {"item": {"title": 30, "price": 29, "tags": 0, "zero": 30}}
    items = await read_recent_items(store, "run")
    assert len(items) == 20
    assert msgspec.json.decode(items[0]) == {"title": "t29", "price": 29, "tags": [], "zero": 0}
    coverage = {each.field: each.share for each in field_coverage([report])}
    assert coverage == {"price": pytest.approx(29 / 30), "tags": 0.0, "title": 1.0, "zero": 1.0}


async def test_item_types_are_counted_apart() -> None:
    class Book(msgspec.Struct):
        title: str

    store = await memory_store()
    process = Process(store)
    await process.record()
    process.store_items(Book("a"), Book(""), {"title": "b"})
    await process.record()
    coverage = [(each.type, each.field, each.filled, each.items) for each in field_coverage([await only_report(store)])]
    assert coverage == [("Book", "title", 1, 2), ("item", "title", 1, 1)]


async def test_long_items_are_cut() -> None:
    store = await memory_store()
    process = Process(store)
    await process.record()
    process.store_items({"text": "é" * 100_000})
    await process.record()
    (item,) = await read_recent_items(store, "run")
    assert 2000 <= len(item) <= 2010
    assert item.endswith("...")


def test_field_names_are_bounded() -> None:
    counts = FieldCounts()
    for number in range(1000):
        counts.count("item", {f"field {number}": 1, "x" * 5000: 1})
    assert len(counts.fields["item"]) == MAX_FIELDS + 1
    assert counts.fields["item"][OTHER_FIELDS] == 1000 + 1 - MAX_FIELDS
    assert max(map(len, counts.fields["item"])) < 200


def test_item_types_are_bounded() -> None:
    counts = FieldCounts()
    for number in range(1000):
        counts.count(f"Type{number}", {"a": 1})
    assert len(counts.items) == MAX_FIELDS + 1
    assert sum(counts.items.values()) == 1000


def test_only_some_items_are_picked() -> None:
    picked = PickedItems()
    picked.offer([b"before anybody asked"])
    assert picked.take() == []
    picked.offer([b"x"] * 1000)
    assert picked.room == 0
    assert len(picked.take()) == 250
    picked.offer([b"x" * 200_000] * 100)
    assert len(picked.take()) == 6
    picked.offer([b"x" * 300_000, b"small"])
    assert picked.take() == [b"small"]


async def test_the_items_of_a_short_crawl_are_counted() -> None:
    store = await memory_store()
    process = Process(store)
    async with recording(process.recorder):
        await asyncio.sleep(0)
        process.store_items({"a": 1})
    assert (await only_report(store)).items_counted == {"item": 1}


# -- samples


async def test_samples_are_taken_every_five_seconds() -> None:
    store = await memory_store()
    process = Process(store)
    for number in range(20):
        process.stats = Stats(pushed=100, ready=100 - number, done=number)
        await process.record()
    found = await read_history(store, "run")
    assert [each.done for each in found] == list(range(20))
    assert found[-1].at == process.clock.now


async def test_of_many_processes_one_takes_the_samples() -> None:
    """The others ask for the counters only now and then."""
    store, clock = await memory_store(), FakeClock()
    processes = [Process(store, f"p{number}", clock) for number in range(20)]
    for _ in range(60):  # five minutes
        clock.advance(5)
        for process in processes:
            await process.recorder.record()
    assert len(await read_history(store, "run")) == 60
    assert sum(process.asked > 11 for process in processes) == 1
    assert len(await read_processes(store, "run")) == 20


async def test_another_process_takes_over() -> None:
    store, clock = await memory_store(), FakeClock()
    first, second = Process(store, "a", clock), Process(store, "b", clock)
    await first.record()
    for _ in range(20):
        await second.record()
    found = await read_history(store, "run")
    assert 8 <= len(found) <= 20
    assert max(late.at - early.at for early, late in zip(found, found[1:], strict=False)) <= 65


async def test_the_end_of_a_run_is_in_its_history() -> None:
    store, clock = await memory_store(), FakeClock()
    first, second = Process(store, "a", clock), Process(store, "b", clock)
    await first.record()
    for process in (first, second):
        process.stats = Stats(pushed=1, done=1)
    await second.record(1, last=True)
    await first.record(0.1, last=True)
    assert [each.done for each in await read_history(store, "run")] == [0, 1]


# -- what goes wrong


async def test_a_store_that_is_away_costs_a_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        away = True
        asked = 0

        async def run_state(self, run_id: str) -> Any:
            Away.asked += 1
            if Away.away:
                raise StoreAwayError("gone")
            return await super().run_state(run_id)

    monkeypatch.setattr("shoal.runs.reports.REPORTED_EVERY", 0.01)
    monkeypatch.setattr(recorder_module, "_FIRST", (0, 0))
    caplog.set_level(logging.INFO)
    store = await memory_store(kind=Away)
    async with recording(Process(store).recorder):
        async with asyncio.timeout(10):
            while Away.asked < 3:
                await asyncio.sleep(0.01)
            Away.away = False
            while not await read_processes(store, "run"):
                await asyncio.sleep(0.01)
        Away.away = True
    assert caplog.records == []


async def test_a_store_that_hangs_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(MemoryStore):
        async def run_state(self, run_id: str) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr(recorder_module, "_LAST_TIMEOUT", 0.05)
    async with asyncio.timeout(10), recording(Process(await memory_store(kind=Hangs)).recorder):
        await asyncio.sleep(0)


async def test_a_deleted_run_leaves_nothing() -> None:
    store = await memory_store()
    process = Process(store)
    await process.record()
    await store.delete_run("run")
    process.store_items({"a": 1})
    await process.record(last=True)
    assert await store.list_documents("") == []


# -- old reports


async def put_report(store: MemoryStore, number: int) -> None:
    report = ProcessReport(
        name=f"p{number:03}", machine="m", pid=1, role="worker", started_at=0, at=float(number), pages=1, items=2,
        failed=3, items_counted={"item": 2}, fields={"item": {"a": 1}},
    )  # fmt: skip
    await StoredValue(store, process_key("run", report.name), ProcessReport).change(lambda _: report)


async def sums(store: MemoryStore) -> tuple[int, int, int, int, int]:
    found = await read_processes(store, "run")
    (coverage,) = field_coverage(found)
    totals = (sum(each.pages for each in found), sum(each.items for each in found), sum(each.failed for each in found))
    return *totals, coverage.filled, coverage.items


async def test_very_many_reports_are_added_up() -> None:
    store = await memory_store()
    for number in range(300):
        await put_report(store, number)
    assert await fold_reports(store, "run", 1000) == 0
    for number in range(300, 400):
        await put_report(store, number)
    before = await sums(store)
    assert await fold_reports(store, "run", 380) == 250
    assert await sums(store) == before == (400, 800, 1200, 400, 800)
    names = {each.name for each in await read_processes(store, "run")}
    assert names == {EARLIER, *(f"p{number:03}" for number in range(250, 400))}
    assert len(await store.list_documents("run/run/process/")) == 151


async def test_adding_up_can_be_interrupted() -> None:
    class Dies(MemoryStore):
        deletes = 10

        async def put_document(self, key: str, value: bytes | None, **words: Any) -> bool:
            if value is None:
                self.deletes -= 1
                if self.deletes < 0:
                    raise StoreAwayError("gone")
            return await super().put_document(key, value, **words)

    store = await memory_store(kind=Dies)
    assert isinstance(store, Dies)
    for number in range(400):
        await put_report(store, number)
    with pytest.raises(StoreAwayError):
        await fold_reports(store, "run", 1000)
    assert await sums(store) == (400, 800, 1200, 400, 800)
    store.deletes = 10_000
    await fold_reports(store, "run", 1000)
    assert await sums(store) == (400, 800, 1200, 400, 800)
    assert len(await store.list_documents("run/run/process/")) == 151


# -- what needs attention


async def test_a_report_has_the_errors_of_the_last_minutes_and_the_hosts_that_fail() -> None:
    store = await memory_store()
    process = Process(store)
    counters = process.counters
    counters.errors.update({"callback": 3, "robots": 4, "http 503": 9})
    counters.last_callback_error = CodeError(1.0, "KeyError: 'price'", "http://a/1")
    counters.item_errors = 2
    for number in range(12):
        for _ in range(number + 1):
            counters.host_failed(f"h{number}", "robots unavailable", 503)
    counters.host_failed("h11", "timeout", 0)
    counters.host_failed("h11", "too large", 0)  # says nothing of the host
    counters.host_failed("h11", "too complex", 200)
    await process.recorder.record()
    (report,) = await read_processes(store, "run")
    assert (report.callback_errors.total, report.callback_errors.recent) == (3, 3)
    assert report.callback_errors.last == counters.last_callback_error
    assert (report.item_errors.total, report.item_errors.last, report.forbidden) == (2, None, 4)
    assert len(report.hosts) == 10
    assert (report.hosts["h11"].kinds, report.hosts["h11"].attempts) == ({"http 503": 12, "timeout": 1}, 13)
    process.clock.advance(590)
    counters.errors["callback"] += 1
    await process.recorder.record()
    (report,) = await read_processes(store, "run")
    assert (report.callback_errors.total, report.callback_errors.recent) == (4, 4)
    process.clock.advance(11)
    counters.errors["callback"] += 1
    await process.recorder.record()
    (report,) = await read_processes(store, "run")
    assert (report.callback_errors.total, report.callback_errors.recent) == (5, 2)


async def test_a_thread_reports_a_blocked_loop_until_the_loop_reports_itself() -> None:
    store = await memory_store()
    process = Process(store)
    await process.recorder.record()
    await process.recorder.record_blocked(store, 7.04, "parse of http://a/1")
    (report,) = await read_processes(store, "run")
    assert (report.loop_age, report.blocked_by) == (7.0, "parse of http://a/1")
    await process.recorder.record()  # nothing else is new
    (report,) = await read_processes(store, "run")
    assert (report.loop_age, report.blocked_by) == (0.0, "")


def test_hosts_that_failed_longest_ago_are_forgotten() -> None:
    counters = Counters()
    for number in range(1001):
        counters.host_failed(f"h{number}", "dns", 0)
        counters.host_failed("h0", "dns", 0)
    assert len(counters.failing_hosts) == 1000
    assert "h0" in counters.failing_hosts
    assert "h1" not in counters.failing_hosts
