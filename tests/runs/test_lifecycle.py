"""One process's part in a run: its states, its outputs, stops, pauses, and the summary."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.crawling.seeder import start_requests
from shoal.crawling.stats import LimitReached, Summary
from shoal.errors import FetchError, SinkError, StoreAwayError
from shoal.frontier.memory import MemoryStore
from shoal.http import Request, Response
from shoal.operations.dead_requests import DeadFilter, retry_failed
from shoal.ports import Frontier, FrontierOptions, Holder, Run, RunState
from shoal.runs import lifecycle
from shoal.runs.lifecycle import RunLifecycle
from shoal.runs.plan import Plan
from shoal.runs.recorder import RecordedProcess
from shoal.runs.run_end import limit_of
from shoal.spider import Spider
from tests.support.fakes import CONFIG, SITE, SharedMemoryStore, Web, eventually, memory_store, seed

OPTIONS = FrontierOptions(concurrency_per_host=100)


class Pages(Spider):
    name = "pages"
    start_urls = [SITE]

    def parse(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}
        yield response.follow_all()


class Written:
    """An output that notes how it was ended. It may fail, or never answer."""

    role = ""

    def __init__(self, error: Exception | None = None, *, hangs: bool = False) -> None:
        self.ended: list[bool] = []
        self.abandoned = asyncio.Event()
        self._error = error
        self._hangs = hangs

    def nudge(self) -> None: ...

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def start_over(self) -> None: ...

    async def finish(self, *, finished: bool) -> None:
        if self._hangs:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        self.ended.append(finished)

    def hurry(self) -> None: ...

    async def abandon(self) -> None:
        self.abandoned.set()


class Life:
    """A lifecycle with a web in memory, one output, and the states to which it moved its run."""

    def __init__(self, store: MemoryStore, output: Written, web: Web, *, seeds: bool = True, **plan: Any) -> None:
        self.store, self.output, self.web = store, output, web
        self.states: list[str] = []
        self._seeds = seeds
        self._plan = plan
        self.life: RunLifecycle

    @classmethod
    async def make(cls, state: str = "running", **plan: Any) -> Life:
        store = await memory_store(state, plan.pop("kind", MemoryStore))
        made = cls(store, plan.pop("output", None) or Written(), Web(), **plan)
        settings = made._plan.pop("settings", {})
        config, spider = CONFIG.with_settings(settings), Pages()

        async def open_outputs(frontier: Frontier) -> list[Written]:
            return [made.output]

        run = await made.store.get_run("run")
        assert run is not None
        options: dict[str, Any] = {
            "spider": spider,
            "config": config,
            "options": OPTIONS,
            "open_outputs": open_outputs,
            "source": (lambda: start_requests(spider)) if made._seeds else None,
            "fetcher": made.web,
            "on_state": made.states.append,
        }
        made.life = RunLifecycle(made.store, run, Plan(**{**options, **made._plan}))
        return made

    async def work(self) -> Summary:
        async with asyncio.timeout(30):
            return await self.life.work()

    async def state(self) -> str | None:
        return await self.store.run_state("run")

    async def frontier(self) -> Frontier:
        return await self.store.frontier("run", OPTIONS)


# -- the end of a run


async def test_a_run_that_is_finished() -> None:
    life = await Life.make("queued", output_names=("books.jsonl",))
    life.web.pages[""] = "<a href=/a>a</a>"
    summary = await life.work()
    assert (summary.state, summary.error, summary.run_id, summary.outputs) == ("finished", "", "run", ("books.jsonl",))
    assert (summary.stats.done, summary.counters.fetched, summary.lost) == (2, 2, 0)
    assert life.output.ended == [True]
    assert life.states == ["running", "finished"]
    assert await life.state() == "finished"
    assert not life.web.closed  # it belongs to the caller


async def test_a_run_at_its_page_limit_is_over() -> None:
    life = await Life.make(settings={"scope.max_pages": 1})
    life.web.pages[""] = "<a href=/a>a</a>"
    summary = await life.work()
    assert (summary.state, summary.stats.ready) == ("limit", 1)
    assert life.output.ended == [True]
    assert await life.state() == "finished"


class RetriedMeanwhile(Written):
    """An output that takes its time: meanwhile somebody retries the failed requests."""

    life: Life
    starts = 0

    async def start_over(self) -> None:
        self.starts += 1

    async def finish(self, *, finished: bool) -> None:
        await super().finish(finished=finished)
        if len(self.ended) == 1:
            self.life.web.pages.clear()
            run = await self.life.store.get_run("run")
            assert run is not None
            assert run.state == "running"
            result = await retry_failed(self.life.store, run, await self.life.frontier(), DeadFilter())
            assert (result.count, result.reopened) == (1, False)


async def test_requests_that_are_retried_while_the_run_ends() -> None:
    """Otherwise the run would be finished with requests in its queue, and nobody would fetch them."""
    output = RetriedMeanwhile()
    life = output.life = await Life.make(output=output, settings={"retry.max_attempts": 1})
    life.web.pages[""] = FetchError("no", kind="timeout", retryable=True)
    summary = await life.work()
    assert (summary.state, summary.stats.done, summary.stats.dead) == ("finished", 1, 0)
    assert (life.output.ended, output.starts) == ([True, True], 1)
    assert life.states == ["finished", "running", "finished"]
    assert life.web.fetched == ["", ""]
    assert life.life.is_over


async def test_the_limit_is_stored_before_the_run_is_finished() -> None:
    process = RecordedProcess("p", "crawl")
    life = await Life.make(settings={"scope.max_pages": 1}, process=process)
    life.web.pages[""] = "<a href=/a>a</a>"
    stored: list[LimitReached | None] = []
    transition = life.store.transition

    async def watched(run_id: str, state: RunState, **options: Any) -> Run:
        run = await life.store.get_run(run_id)
        assert run is not None
        assert await limit_of(life.store, run) is None  # it has not ended yet
        stored.append(await limit_of(life.store, replace(run, state="finished")))
        return await transition(run_id, state, **options)

    life.store.transition = watched  # type: ignore[method-assign]
    await life.work()
    (limit,) = stored
    assert str(limit) == "stopped at the limit scope.max_pages=1 with 1 request left"


async def test_another_process_still_has_a_page_at_the_limit() -> None:
    """Its page may come back, so the run is not over for its outputs."""
    life = await Life.make(settings={"scope.max_pages": 2}, seeds=False)
    frontier = await life.frontier()
    await seed(frontier, "1", "2", "3")
    await frontier.lease(1, 600)
    summary = await life.work()
    assert (summary.stats.done, summary.stats.leased) == (1, 1)
    assert life.output.ended == [False]
    assert await life.state() == "running"


async def test_an_output_that_fails_leaves_the_run_unfinished() -> None:
    life = await Life.make(output=Written(SinkError("disk full")))
    summary = await life.work()
    assert (summary.state, summary.error) == ("failed", "disk full")
    assert life.life.error is not None
    assert await life.state() == "running"


# -- states


@pytest.mark.parametrize(("resumes", "pages"), [(True, 1), (False, 0)])
async def test_who_resumes_a_paused_run(resumes: bool, pages: int) -> None:
    life = await Life.make("paused", resumes=resumes)
    work = asyncio.create_task(life.work())
    await eventually(lambda: life.life.engine is not None)
    if not resumes:
        await asyncio.sleep(0.1)
        life.life.stop(0)
    summary = await work
    assert summary.stats.done == pages
    assert await life.state() == ("finished" if resumes else "paused")


async def test_a_finished_run_with_new_requests_is_running_again() -> None:
    life = await Life.make("finished", seeds=False)
    frontier = await life.frontier()
    await seed(frontier, "more")
    await life.work()
    assert life.states == ["running", "finished"]


async def test_a_pause_and_its_end_are_followed() -> None:
    life = await Life.make()
    life.web.gate.clear()
    life.web.pages[""] = "<a href=/a>a</a>"
    work = asyncio.create_task(life.work())
    await eventually(lambda: life.web.in_flight == [""])
    await life.store.transition("run", "paused")
    await life.life.poll_state()
    life.web.gate.set()
    await eventually(lambda: not life.web.in_flight)
    await asyncio.sleep(0.05)
    assert life.web.fetched == [""]
    await life.store.transition("run", "running")
    await life.life.poll_state()
    assert (await work).state == "finished"
    assert life.web.fetched == ["", "a"]


@pytest.mark.parametrize("removed", [False, True])
async def test_a_run_that_is_cancelled_or_removed_ends_here(removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_POLL", 0.01)
    life = await Life.make(watches=True, grace=0)
    life.web.gate.clear()
    work = asyncio.create_task(life.work())
    await eventually(lambda: life.web.in_flight == [""])
    if removed:
        await life.store.delete_run("run")
    else:
        await life.store.transition("run", "cancelled")
    summary = await work
    assert summary.stats.done == 0
    assert life.life.stopping
    assert await life.state() == (None if removed else "cancelled")


async def test_a_run_that_is_cancelled_while_its_work_begins_stays_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_POLL", 0.01)
    life = await Life.make("queued", watches=True, grace=0)
    life.web.gate.clear()
    read = life.store.run_state

    async def cancelled_meanwhile(run_id: str) -> RunState | None:
        state = await read(run_id)
        if state == "queued":
            await life.store.transition(run_id, "cancelled")
        return state

    life.store.run_state = cancelled_meanwhile  # type: ignore[method-assign]
    await life.work()
    assert await life.state() == "cancelled"


async def test_a_process_that_stays_shows_when_the_run_has_more() -> None:
    life = await Life.make(stays=True)
    work = asyncio.create_task(life.work())
    frontier = await life.frontier()
    async with asyncio.timeout(30):
        while not (await frontier.stats()).finished:
            await asyncio.sleep(0.001)
    await life.life.poll_state()
    assert await life.state() == "finished"
    life.web.gate.clear()
    await frontier.push([Request(SITE + "late")])
    await life.life.poll_state()
    assert await life.state() == "running"
    assert life.states == ["finished", "running"]
    life.life.stop(0)
    await work


async def test_an_unseeded_run_is_reported() -> None:
    reports = 0

    async def on_unseeded() -> None:
        nonlocal reports
        reports += 1

    life = await Life.make(seeds=False, stays=True, on_unseeded=on_unseeded)
    frontier = await life.frontier()
    claim = await frontier.claim("seed", 600)
    assert claim is not None
    work = asyncio.create_task(life.work())
    await eventually(lambda: life.life.engine is not None)
    for _ in range(2 * lifecycle._SEEDING_POLLS):
        await life.life.poll_state()
    assert reports == 0  # a process is seeding
    await frontier.relinquish(claim)
    for _ in range(lifecycle._SEEDING_POLLS):
        await life.life.poll_state()
    assert reports == 1
    life.life.stop(0)
    await work


# -- stopping


@pytest.mark.parametrize("is_private", [False, True])
async def test_a_stopped_run_stays_open_unless_it_ends_with_its_process(is_private: bool) -> None:
    life = await Life.make(is_private=is_private)
    life.web.gate.clear()
    work = asyncio.create_task(life.work())
    await eventually(lambda: life.web.in_flight == [""])
    life.life.stop(0)
    summary = await work
    assert (summary.state, summary.stats.leased, summary.stats.ready) == ("stopped", 0, 1)
    assert life.output.ended == [is_private]
    assert await life.state() == "running"


async def test_a_stop_before_the_work_fetches_nothing() -> None:
    life = await Life.make(grace=0)
    life.life._stop_asked.set()
    summary = await life.work()
    assert summary.state == "stopped"
    assert life.web.fetched == []


async def test_a_stop_before_the_store_answers_gives_up() -> None:
    life = await Life.make(kind=SharedMemoryStore)
    life.life.stop()
    with pytest.raises(StoreAwayError):
        await life.work()


async def test_a_stopped_process_does_not_wait_for_an_output_that_hangs() -> None:
    life = await Life.make(output=Written(hangs=True), output_timeout=0.05)
    work = asyncio.create_task(life.work())
    await eventually(lambda: life.web.fetched == [""])
    await asyncio.sleep(0.2)
    assert not work.done()  # a process that was not stopped waits
    life.life.stop()
    summary = await work
    assert summary.stats.done == 1
    assert await life.state() == "running"
    async with asyncio.timeout(5):  # the process may live on, and another one needs the output
        await life.output.abandoned.wait()


# -- clusters


async def test_leases_of_the_last_holder_of_a_slot_are_released_first() -> None:
    life = await Life.make(seeds=False, holder=Holder("slot-1", 2))
    before = await life.store.frontier("run", OPTIONS, Holder("slot-1", 1))
    await seed(before, "1")
    await before.lease(1, 600)
    summary = await life.work()
    assert (summary.stats.done, summary.state) == (1, "finished")
