"""What is read beside a snapshot, and the log of user actions."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec
import pytest

from shoal.config import Config
from shoal.crawling.stats import CodeError, FailingHost
from shoal.fetch.sessions.login import LoginState, login_state
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.operations.actions import MAX_ACTIONS, ActionLog
from shoal.operations.facts import FactReader
from shoal.operations.problems import default_limits, find_problems
from shoal.operations.snapshot import SnapshotTaker
from shoal.ports import Completion, Document, Failure, FrontierOptions, Run
from shoal.ports.documents import MAX_DOCUMENT
from shoal.runs.reports import CodeErrors, ProcessReport, process_key

pytestmark = pytest.mark.asyncio


class Runs:
    """A store with runs, read as the watcher does."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.taker = SnapshotTaker(self.store, Config(), without=["batch"])
        self.reader = FactReader(self.store, Config(), default_limits, without=["batch"])
        self.since = time.time() - 1

    async def run(
        self, name: str, *, done: int = 0, dead: int = 0, kind: str = "http 500", spider: str = "books"
    ) -> None:
        """A running run with one item for each page."""
        created = Run(run_id=name, spider=spider, state="running", created_at=time.time())
        await self.store.create_run(created)
        frontier = await self.store.frontier(name, FrontierOptions(concurrency_per_host=1000))
        await frontier.push([Request(f"http://a.example/{i}") for i in range(done + dead)])
        leases = (await frontier.lease(1000, 60)).leases
        await frontier.complete([Completion(lease=lease, items=[b"1"]) for lease in leases[:done]])
        await frontier.fail([Failure(lease=lease, kind=kind, reason="") for lease in leases[done:]])

    async def report(self, run_id: str, name: str = "w1", *, age: float = 0.0, fields: Any = None, **more: Any) -> None:
        counted = {"item": 10} if fields else {}
        report = ProcessReport(
            name=name, machine="m", pid=1, role="worker", started_at=0.0, at=time.time() - age, items_counted=counted,
            fields={"item": fields} if fields else {}, **more,
        )  # fmt: skip
        key, version = process_key(run_id, name), os.urandom(8)
        found = await self.store.get_document(key)
        replaces = b"" if found is None else found.version
        assert await self.store.put_document(key, msgspec.msgpack.encode(report), replaces=replaces, version=version)

    async def kinds(self, **options: Any) -> list[str]:
        snapshot = await self.taker.take()
        facts = await self.reader.read(snapshot, since=self.since, **options)
        return [f"{problem.kind}/{problem.run_id}" for problem in find_problems(snapshot, facts=facts)]


async def test_the_last_good_run_is_the_measure() -> None:
    runs = Runs()
    await runs.run("r1", done=10)
    await runs.report("r1", ended=True, fields={"title": 10})
    await runs.run("r2", done=1)
    await runs.run("r3", done=2)
    await runs.report("r3", ended=True, fields={"title": 1})
    for name in ("r1", "r2", "r3"):
        await runs.store.transition(name, "finished")
    # Compared with r2, which is bad, r3 would be fine.
    assert await runs.kinds(bad={"r2"}) == [
        "finished/r3", "few_items/r3", "low_coverage/r3", "finished/r2", "few_items/r2", "finished/r1"
    ]  # fmt: skip


async def test_an_end_counts_when_all_processes_have_written_their_last_report() -> None:
    runs = Runs()
    await runs.run("r1", done=1)
    await runs.report("r1", ended=False)
    await runs.store.transition("r1", "finished")
    assert await runs.kinds() == []
    await runs.report("r1", ended=True)
    assert await runs.kinds() == ["finished/r1"]
    await runs.store.delete_run("r1")
    assert await runs.kinds() == []


async def test_a_process_that_was_killed_delays_the_end_only_for_a_while() -> None:
    runs = Runs()
    await runs.run("r1", done=1)
    await runs.report("r1", age=41, ended=False)
    await runs.store.transition("r1", "finished")
    assert await runs.kinds() == ["finished/r1"]


async def test_errors_of_processes_and_processes_that_stopped_reporting() -> None:
    runs = Runs()
    await runs.run("r1", done=1)
    await runs.report("r1", "ended", age=3600, ended=True)
    await runs.report("r1", "works", age=10)
    assert await runs.kinds() == []
    runs.since -= 3600
    await runs.report("r1", "silent", age=70)
    await runs.report("r1", "failed", ended=True, error="disk full")
    assert sorted(await runs.kinds()) == ["failed/r1", "worker_lost/r1"]
    await runs.report("r1", "silent")
    assert await runs.kinds() == ["failed/r1"]


@pytest.mark.parametrize(("kind", "found"), [("http 500", ["failure_rate/r1"]), ("robots", [])])
async def test_pages_that_robots_txt_forbids_are_no_failures(kind: str, found: list[str]) -> None:
    runs = Runs()
    await runs.run("r1", done=40, dead=60, kind=kind)
    assert await runs.kinds() == found


async def test_runs_of_batches_and_of_other_projects_are_left_out() -> None:
    runs = Runs()
    await runs.run("b1", done=1, spider="batch")
    await runs.store.transition("b1", "finished")
    other = Run(
        run_id="o1", spider="books", state="finished", created_at=time.time(), ended_at=time.time(), project="o"
    )
    await runs.store.create_run(other)
    assert await runs.kinds() == []


async def test_errors_of_callbacks_are_those_that_were_not_retried() -> None:
    runs = Runs()
    await runs.run("r1", done=3, dead=2, kind="callback")
    assert await runs.kinds() == []
    error = CodeErrors(total=2, last=CodeError(time.time() - 3600, "KeyError: 'price'", "http://a.example/1"))
    await runs.report("r1", callback_errors=error)
    assert await runs.kinds() == ["callback_errors/r1"]
    frontier = await runs.store.frontier("r1", FrontierOptions())
    await frontier.retry_dead()
    runs.taker = SnapshotTaker(runs.store, Config())
    assert await runs.kinds() == []


async def test_the_requests_that_wait_for_a_failing_host() -> None:
    runs = Runs()
    await runs.run("r1", done=3)
    now = time.time()
    hosts = {"a.example": FailingHost(now - 400, now - 300, {"http 503": 5})}
    await runs.report("r1", hosts=hosts)
    assert await runs.kinds() == []  # nothing waits for it
    frontier = await runs.store.frontier("r1", FrontierOptions())
    await frontier.push([Request(f"http://a.example/more/{i}") for i in range(7)])
    runs.taker = SnapshotTaker(runs.store, Config())
    assert await runs.kinds() == ["host_failing/r1"]


# -- actions


async def test_actions_newest_first() -> None:
    log = ActionLog(MemoryStore(), "shoal")
    assert await log.recent() == []
    for number in range(3):
        await log.add("ann (127.0.0.1)", "pause", f"r{number}", "why not")
    assert [each.target for each in await log.recent()] == ["r2", "r1", "r0"]
    assert [each.target for each in await log.recent(1)] == ["r2"]
    assert await log.recent(0) == []
    found = (await log.recent())[0]
    assert (found.who, found.what, found.detail) == ("ann (127.0.0.1)", "pause", "why not")


class SlowStore(MemoryStore):
    """Other tasks run between a read and a write, as with a server."""

    async def get_document(self, key: str) -> Document | None:
        found = await super().get_document(key)
        await asyncio.sleep(0)
        return found


async def test_actions_at_the_same_time_are_all_kept_and_projects_have_their_own() -> None:
    store = SlowStore()
    await asyncio.gather(*(ActionLog(store, "shoal").add("a", "pause", str(number)) for number in range(10)))
    assert len(await ActionLog(store, "shoal").recent()) == 10
    assert await ActionLog(store, "other").recent() == []


async def test_the_log_is_bounded_and_its_texts_are_printable() -> None:
    store = MemoryStore()
    log = ActionLog(store, "shoal")
    hostile = "\x1b[2J\n\u202e\ud800" + "\U0001f41f" * 5000
    for _ in range(MAX_ACTIONS + 5):
        await log.add(hostile, hostile, hostile, hostile)
    await log.add("a", "last", "r1")
    found = await log.recent(10_000)
    assert len(found) == MAX_ACTIONS
    assert found[0].what == "last"
    assert not {"\x1b", "\n", "\u202e", "\ud800"} & set(found[1].who + found[1].target + found[1].detail)
    document = await store.get_document("actions/shoal")
    assert document is not None
    assert len(document.value) < MAX_DOCUMENT


async def test_a_login_that_fails_is_read_until_one_succeeds() -> None:
    runs = Runs()
    await runs.run("r1", done=1)
    login = login_state(runs.store, "r1", "#alice/b")
    await login.change(lambda _: LoginState(logins=1))
    assert await runs.kinds() == []
    await login.change(lambda _: LoginState(failures=1, reason="no", failed_at=time.time()))
    assert await runs.kinds() == ["login_failed/r1"]
    await login.change(lambda _: LoginState(logins=2))
    assert await runs.kinds() == []
