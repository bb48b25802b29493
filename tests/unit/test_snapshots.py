"""Snapshots of a store's runs."""

from __future__ import annotations

import time

import msgspec
import pytest

from shoal.config import Config
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.monitoring.snapshot import SnapshotTaker
from shoal.ports import Completion, FrontierOptions, Run, RunState

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
