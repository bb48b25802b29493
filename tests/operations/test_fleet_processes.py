"""The processes of all active runs of a store."""

from __future__ import annotations

import time

import msgspec

from shoal.config import Config
from shoal.frontier.memory import MemoryStore
from shoal.operations.snapshot import FleetProcess, SnapshotTaker, read_fleet
from shoal.ports import Run
from shoal.runs.reports import ProcessReport, process_key

NOW = time.time()


async def read(*reports: ProcessReport) -> list[FleetProcess]:
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="books", state="running", created_at=NOW))
    for each in reports:
        key = process_key("run", each.name)
        assert await store.put_document(key, msgspec.msgpack.encode(each), replaces=b"", version=bytes(16))
    return await read_fleet(store, await SnapshotTaker(store, Config()).take(NOW))


def runner(name: str, epoch: int) -> ProcessReport:
    return ProcessReport(
        name=name, role="runner", slot="books/0", epoch=epoch, started_at=NOW - 9, at=NOW - 2, pages_per_second=4.0
    )


async def test_runner_that_was_replaced_is_lost_at_once() -> None:
    working, lost = await read(runner("a", 3), runner("b", 4))
    assert (working.run_id, working.name, working.state, working.pages_per_second) == ("run", "b", "working", 4.0)
    assert (working.cluster, working.slot_number) == ("books", "0")
    assert (lost.name, lost.state, lost.pages_per_second) == ("a", "lost", 0.0)


async def test_what_ended_long_ago_is_left_out() -> None:
    ages = {"now": 1.0, "before": 600.0, "yesterday": 86400.0}
    reports = [
        ProcessReport(name=name, role="worker", started_at=0.0, at=NOW - age, ended=name != "now")
        for name, age in ages.items()
    ]
    found = await read(*reports)
    assert [(each.name, each.state, each.cluster) for each in found] == [
        ("now", "working", ""),
        ("before", "ended", ""),
    ]
