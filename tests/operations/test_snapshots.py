"""Snapshots of a store's runs."""

from __future__ import annotations

import time

import msgspec
import pytest

from shoal.api.dashboard.run_screens import hosts_age, with_counts
from shoal.config import Config
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.operations.snapshot import RunSnapshot, SnapshotTaker
from shoal.ports import Completion, FrontierOptions, Run, RunState, Stats
from shoal.runs.reports import ProcessReport, process_key
from shoal.runs.samples import RunSample, SampleHistory

pytestmark = pytest.mark.asyncio

NOW = 1_700_000_000.0


async def test_a_snapshot_has_the_active_runs_with_speed_outputs_and_what_ended_last() -> None:
    store = MemoryStore()
    states: dict[str, RunState] = {"old": "finished", "batch": "running", "new": "running"}
    for name, state in states.items():
        spider = "batch" if name == "batch" else "books"
        await store.create_run(Run(run_id=name, spider=spider, state=state, created_at=time.time()))
    frontier = await store.frontier("new", FrontierOptions(concurrency_per_host=100))
    await frontier.push([Request(f"http://a.example/{i}") for i in range(10)])
    taker = SnapshotTaker(store, Config(), without=["batch"])
    first = await taker.take(NOW)
    assert [each.run.run_id for each in first.runs] == ["new"]
    assert [run.run_id for run in first.recent] == ["old"]
    assert (first.runs[0].pages_per_second, first.runs[0].seconds_left) == (0.0, None)

    claim = await frontier.claim("sink:books.jsonl", 60)
    assert claim is not None
    leased = await frontier.lease(4, 60)
    await frontier.complete([Completion(lease=lease, items=[b"1", b"2"]) for lease in leased.leases])
    assert await frontier.advance(claim, msgspec.msgpack.encode((3, b"")), 60)
    second = (await taker.take(NOW + 8)).runs[0]
    assert (second.pages_per_second, second.items_per_second, second.seconds_left) == (0.5, 1.0, 12.0)
    assert (second.outputs[0].name, second.outputs[0].written, second.outputs[0].lag) == ("books.jsonl", 3, 5)
    assert second.hosts[0].host == "a.example"
    assert second.changed_at == NOW + 8
    later = (await taker.take(NOW + 100)).runs[0]
    assert later.changed_at == NOW + 8
    assert (await taker.take(NOW + 131)).runs[0].pages_per_second == 0.0


async def test_a_process_that_sends_no_heartbeats_is_counted_by_its_report() -> None:
    """A crawl, or a server, that has its store alone."""
    store = MemoryStore()
    await store.create_run(Run(run_id="a", spider="books", state="running", created_at=NOW))
    taker = SnapshotTaker(store, Config())
    assert (await taker.take(NOW)).runs[0].processes == 0
    for name, ended, at in (("one", False, NOW), ("over", True, NOW), ("gone", False, NOW - 1000)):
        report = ProcessReport(name=name, role="server", started_at=NOW - 2000, at=at, ended=ended)
        content = msgspec.msgpack.encode(report)
        assert await store.put_document(process_key("a", name), content, replaces=b"", version=b"1" * 16)
    found = (await taker.take(NOW + 1)).runs[0]  # at once, as the run is new
    assert (found.workers, found.processes) == ((), 1)


async def test_many_runs_are_read_less_often_and_a_change_of_state_at_once() -> None:
    store = MemoryStore()
    names = [f"r{number}" for number in range(20)]
    for name in names:
        await store.create_run(Run(run_id=name, spider="books", state="running", created_at=NOW))
    taker = SnapshotTaker(store, Config())
    await taker.take(NOW)
    for name in names:
        await (await store.frontier(name, FrontierOptions())).push([Request(f"http://a.example/{name}")])
    await store.transition("r7", "paused")
    soon = {each.run.run_id: each for each in (await taker.take(NOW + 3)).runs}
    assert [name for name in names if soon[name].stats.ready] == ["r7"]
    assert all(each.stats.ready for each in (await taker.take(NOW + 4.1)).runs)
    await store.delete_run("r3")
    assert len((await taker.take(NOW + 9)).runs) == 19


async def test_the_first_snapshot_has_the_speed_of_the_last_half_minute() -> None:
    """From the history of the run. Older samples do not count."""
    store = MemoryStore()
    await store.create_run(Run(run_id="a", spider="books", state="running", created_at=NOW))
    frontier = await store.frontier("a", FrontierOptions(concurrency_per_host=100))
    await frontier.push([Request(f"http://a.example/{i}") for i in range(50)])
    leased = await frontier.lease(40, 60)
    await frontier.complete([Completion(lease=lease) for lease in leased.leases])
    for at, done in ((NOW - 60, 0), (NOW - 20, 10), (NOW - 10, 30)):
        await SampleHistory(store, "a").add(RunSample(at, 50, 50 - done, 0, 0, done, 0, 0, 0, 0), "taker")
    found = (await SnapshotTaker(store, Config()).take(NOW)).runs[0]
    assert (found.pages_per_second, found.seconds_left) == (1.5, pytest.approx(10 / 1.5))


async def test_the_screen_of_a_run_has_the_time_left_of_the_counts_that_it_shows() -> None:
    run = Run(run_id="one", spider="books", state="running", created_at=NOW)
    old = RunSnapshot(run=run, at=NOW, stats=Stats(pushed=100, ready=90, done=10), pages_per_second=2.0)
    stats = Stats(pushed=100, ready=62, done=38)
    shown = with_counts([old], run, stats)
    assert shown is not None
    assert shown.seconds_left == stats.remaining / 2.0
    assert with_counts([old], Run(run_id="two", spider="books", state="running", created_at=NOW), stats) is None


async def test_the_overview_knows_how_old_its_numbers_of_hosts_are() -> None:
    store = MemoryStore()
    await store.create_run(Run(run_id="one", spider="books", state="running", created_at=NOW - 100))
    taker = SnapshotTaker(store, Config())
    assert hosts_age(await taker.take(NOW)) == 0
    assert hosts_age(await taker.take(NOW + 3)) == 3
    assert hosts_age(await taker.take(NOW + 6)) == 0
