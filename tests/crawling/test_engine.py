"""The loop: what it leases, how many pages it has in flight, how it settles them, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from shoal.crawling.engine import Drain, Engine, Participation
from shoal.crawling.onion import make_onion
from shoal.crawling.run_queue import make_run_queue
from shoal.crawling.seeder import start_requests
from shoal.errors import FetchError, RunError, SinkError, SpiderError, StoreAwayError, StoreRewoundError
from shoal.http import Request, Response
from shoal.ports import Completion, Fetch, Lease, Rewind
from shoal.spider import Spider
from shoal.testing import FakeClock
from tests.support.fakes import CONFIG, SITE, Calls, Web, eventually, memory_frontier
from tests.support.loops import event_loop_policy

__all__ = ["event_loop_policy"]


class Pages(Spider):
    name = "pages"

    def parse(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}
        yield response.follow_all()


class Drained:
    """A drain that counts how often it was nudged, and may fail."""

    role = ""

    def __init__(self, error: Exception | None = None) -> None:
        self.nudged = 0
        self.started_over = 0
        self._error = error

    def nudge(self) -> None:
        self.nudged += 1

    async def run(self) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    async def start_over(self) -> None:
        self.started_over += 1


def engine_of(
    frontier: Any,
    web: Web,
    *,
    spider: Spider | None = None,
    drains: Sequence[Drain] = (),
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    config = CONFIG.with_settings(settings or {})
    spider = spider or Pages(start_urls=[SITE])
    part = Participation(spider=spider, config=config, source=lambda: start_requests(spider), **options)
    queue = make_run_queue(spider, config, frontier, shared=part.shared)
    return Engine(part, queue, make_onion(spider, config, frontier, web, part.may_work), drains)


async def finished(engine: Engine) -> None:
    async with asyncio.timeout(30):
        await engine.run()


def links(count: int) -> str:
    return "".join(f"<a href=/{number}>x</a>" for number in range(count))


# -- crawling


@pytest.mark.parametrize(("shared", "near"), [(False, False), (True, False), (True, True)])
async def test_every_page_is_fetched_once(shared: bool, near: bool) -> None:
    frontier, web = await memory_frontier(), Web({"": links(30), "7": links(40)})
    drain = Drained()
    engine = engine_of(frontier, web, drains=[drain], shared=shared, near=near)
    await finished(engine)
    assert sorted(web.fetched) == sorted(["", *map(str, range(40))])
    stats = await frontier.stats()
    assert (stats.done, stats.items, stats.remaining, stats.finished) == (41, 41, 0, True)
    assert engine.counters.items == 41
    assert drain.nudged > 0


async def test_pages_in_flight_are_limited() -> None:
    web = Web({"": links(20)})
    await finished(engine_of(await memory_frontier(), web, settings={"concurrency": 3}))
    assert len(web.fetched) == 21
    assert web.most_in_flight == 3


async def test_pages_of_a_shared_store_are_settled_together() -> None:
    """A round trip for each page would be the main cost of a crawl."""
    frontier, web = Calls(await memory_frontier()), Web({"": links(200)})
    web.delay = lambda path: 0.001 * (hash(path) % 7)
    await finished(engine_of(frontier, web, settings={"concurrency": 16}, shared=True))
    assert (await frontier.inner.stats()).done == 201
    assert frontier.count("complete") <= 40
    assert frontier.count("lease") <= 60


async def test_pages_are_settled_and_leased_in_one_round_trip_to_another_process() -> None:
    frontier, web = Calls(await memory_frontier()), Web({"": links(40)})
    answered: list[str] = []
    leased = asyncio.Event()

    async def complete(completions: Any) -> Any:
        result = await frontier.inner.complete(completions)
        leased.clear()
        async with asyncio.timeout(10):
            await leased.wait()  # the engine does not wait for this answer before it leases
        answered.append("complete")
        return result

    async def lease(*arguments: Any, **options: Any) -> Any:
        leased.set()
        return await frontier.inner.lease(*arguments, **options)

    frontier.replaced.update(complete=complete, lease=lease)
    await finished(engine_of(frontier, web, settings={"concurrency": 8}, shared=True, near=True))
    assert (await frontier.inner.stats()).done == 41
    assert 0 < len(answered) <= 20


@pytest.mark.parametrize("failing", ["complete", "lease"])
async def test_an_error_in_one_of_two_calls_loses_nothing_of_the_other(failing: str) -> None:
    frontier, web = Calls(await memory_frontier()), Web()
    web.delay = lambda path: 0.0 if path == "first" else 60.0
    both: set[str] = set()

    async def complete(completions: Any) -> Any:
        await asyncio.sleep(0.01)
        both.add("complete")
        if failing == "complete":
            raise RunError("no such run")
        return await frontier.inner.complete(completions)

    async def lease(*arguments: Any, **options: Any) -> Any:
        if failing == "lease" and web.fetched:
            raise RunError("no such run")
        both.add("lease")
        return await frontier.inner.lease(*arguments, **options)

    frontier.replaced.update(complete=complete, lease=lease)
    await frontier.inner.push([Request(SITE + "first")])
    with pytest.raises(RunError):
        await finished(engine_of(frontier, web, settings={"concurrency": 1}, shared=True, near=True))
    stats = await frontier.inner.stats()
    assert both == {"complete", "lease"}
    if failing == "lease":
        assert (stats.done, stats.leased) == (1, 0)
    else:
        assert (stats.done, stats.leased) == (0, 1)  # only the page that could not be stored


async def test_failed_pages_are_tried_again_and_then_dead() -> None:
    frontier = await memory_frontier(max_attempts=3)
    web = Web({"": links(2), "1": FetchError("no answer", kind="timeout", retryable=True)})
    await finished(engine_of(frontier, web))
    assert web.fetched.count("1") == 3
    assert (await frontier.stats()).dead == 1
    assert await frontier.dead_kinds() == {"timeout": 1}


async def test_failures_do_not_count_for_the_page_limit() -> None:
    frontier = await memory_frontier()
    web = Web({"": links(9), "0": FetchError("gone", kind="http 410", retryable=False)})
    await finished(engine_of(frontier, web, settings={"scope.max_pages": 4, "concurrency": 1}))
    stats = await frontier.stats()
    assert (stats.done, stats.dead, stats.leased, stats.ready) == (4, 1, 0, 5)


async def test_the_engine_stays_until_it_is_stopped() -> None:
    frontier, web = await memory_frontier(), Web()
    engine = engine_of(frontier, web, stays=True)
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: web.fetched == [""])
    await frontier.push([Request(SITE + "late")])
    engine.poll_now()
    await eventually(lambda: web.fetched == ["", "late"])
    assert not task.done()
    engine.stop()
    await task


# -- stopping and pausing


async def test_a_spider_may_keep_a_finished_run_open() -> None:
    frontier, web = await memory_frontier(), Web({"": links(2), "late": ""})

    class Open(Pages):
        asked = 0

        async def idle(self) -> bool:
            self.asked += 1
            if self.asked == 1:
                await frontier.push([Request(SITE + "late")])
                engine.poll_now()
            return self.asked == 1

    spider = Open(start_urls=[SITE])
    engine = engine_of(frontier, web, spider=spider)
    await finished(engine)
    assert (spider.asked, web.fetched[-1]) == (2, "late")


async def test_a_stop_lets_pages_in_flight_end_and_leases_nothing_more() -> None:
    frontier, web = await memory_frontier(), Web()
    web.gate.clear()
    spider = Pages(start_urls=[f"{SITE}{number}" for number in range(20)])
    engine = engine_of(frontier, web, spider=spider, settings={"concurrency": 2}, shared=True)
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: len(web.in_flight) == 2)
    before = list(web.fetched)
    engine.stop(grace=20)
    await asyncio.sleep(0.05)
    assert not task.done()
    web.gate.set()
    await task
    stats = await frontier.stats()
    assert web.fetched == before
    assert stats.done == len(before)
    assert (stats.leased, stats.waiting) == (0, 0)


async def test_pages_that_outlast_the_grace_period_are_released() -> None:
    frontier, web = await memory_frontier(), Web()
    web.gate.clear()
    engine = engine_of(frontier, web)
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: web.in_flight == [""])
    engine.stop(grace=0.02)
    await task
    stats = await frontier.stats()
    assert (stats.ready, stats.leased, stats.done) == (1, 0, 0)
    (lease,) = (await frontier.lease(1, 60)).leases
    assert lease.attempt == 1  # the stop cost it nothing


async def test_an_abort_does_not_wait() -> None:
    frontier, web = await memory_frontier(), Web()
    web.gate.clear()
    engine = engine_of(frontier, web, settings={"shutdown_grace": 600})
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: web.in_flight == [""])
    engine.abort()
    await task
    assert (await frontier.stats()).ready == 1


async def test_a_page_that_is_cancelled_before_it_begins_is_leased_again(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier, web = await memory_frontier(), Web()
    engine = engine_of(frontier, web)
    fill, cancelled = engine._fill, list[int]()

    def fill_and_cancel() -> None:
        fill()
        if engine.in_flight and not cancelled:
            cancelled.append(engine.in_flight)
            engine._cancel_active()

    monkeypatch.setattr(engine, "_fill", fill_and_cancel)
    await finished(engine)
    stats = await frontier.stats()
    assert (cancelled, web.fetched, stats.done, stats.finished) == ([1], [""], 1, True)


class Panic(BaseException):
    """What a library written in Rust raises."""


class Silent(Exception):
    def __str__(self) -> str:
        raise self


@pytest.mark.parametrize("error", [Panic("the library panicked"), Silent()])
async def test_a_page_that_raises_anything_is_dead(error: BaseException) -> None:
    class Raising(Pages):
        def parse(self, response: Response) -> Iterator[object]:
            if response.url == f"{SITE}1":
                raise error
            return super().parse(response)

    frontier, web = await memory_frontier(), Web({"": links(3)})
    await finished(engine_of(frontier, web, spider=Raising(start_urls=[SITE])))
    stats = await frontier.stats()
    assert (stats.done, stats.dead, stats.leased, stats.finished) == (3, 1, 0, True)


async def test_a_page_that_ends_the_process_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    frontier, web = await memory_frontier(), Web()
    engine, calls = engine_of(frontier, web), list[str]()
    handle = engine.handler.handle

    async def broken(lease: Lease) -> Any:
        calls.append(lease.request.url)
        if len(calls) == 1:
            raise GeneratorExit  # stands for SystemExit, which would end the event loop of this test
        return await handle(lease)

    monkeypatch.setattr(engine.handler, "handle", broken)
    await finished(engine)
    stats = await frontier.stats()
    assert (len(calls), stats.done, stats.finished) == (2, 1, True)


async def test_a_paused_engine_leases_nothing() -> None:
    frontier, web = Calls(await memory_frontier()), Web()
    web.gate.clear()
    spider = Pages(start_urls=[f"{SITE}{number}" for number in range(20)])
    engine = engine_of(frontier, web, spider=spider, settings={"concurrency": 4}, shared=True)
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: len(web.in_flight) == 4)
    engine.halt(True)
    async with asyncio.timeout(30):
        while (await frontier.inner.stats()).leased > 4:  # those that have not begun are released
            await asyncio.sleep(0.001)
    fetched, leased = len(web.fetched), frontier.count("lease")
    web.gate.set()
    await eventually(lambda: not web.in_flight)
    await asyncio.sleep(0.1)
    assert (len(web.fetched), frontier.count("lease")) == (fetched, leased)
    assert (await frontier.inner.stats()).leased == 0
    engine.halt(False)
    await task
    assert len(web.fetched) == 20


# -- leases


async def test_without_the_right_to_work_no_page_begins() -> None:
    began: list[str] = []
    allowed = True

    async def layer(request: Request, fetch: Fetch) -> Response:
        began.append(request.url.removeprefix(SITE))
        return await fetch(request)

    class Layered(Pages):
        middlewares = (layer,)

    frontier, web = await memory_frontier(), Web({"": links(3)})
    web.gate.clear()
    spider = Layered(start_urls=[SITE])
    engine = engine_of(frontier, web, spider=spider, settings={"concurrency": 1}, may_work=lambda: allowed)
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: web.in_flight == [""])
    allowed = False
    web.gate.set()
    await eventually(lambda: not web.in_flight)
    await asyncio.sleep(0.05)
    assert began == [""]
    allowed = True
    await task
    assert sorted(web.fetched) == ["", "0", "1", "2"]


async def test_no_page_begins_while_the_store_is_away() -> None:
    """It may come back older. Then every host has a rest, also from pages that were leased ahead."""
    frontier, web = Calls(await memory_frontier()), Web({"": links(40)})
    away = False

    async def complete(completions: Sequence[Completion]) -> object:
        if away:
            raise StoreAwayError("the server is away")
        return await frontier.inner.complete(completions)

    frontier.replaced["complete"] = complete
    engine = engine_of(frontier, web, settings={"concurrency": 4, "concurrency_per_host": 40}, shared=True)
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: len(web.fetched) > 1)
    web.gate.clear()
    await eventually(lambda: len(web.in_flight) == 4 and len(engine._ahead) > 0)
    away = True
    call = asyncio.create_task(engine._persist(lambda: complete([])))
    await eventually(lambda: engine.away)
    web.gate.set()
    await eventually(lambda: not web.in_flight)
    before = len(web.fetched)
    await asyncio.sleep(0.1)
    assert (len(web.fetched), len(engine._ahead) > 0) == (before, True)
    away = False
    await call
    await task
    assert sorted(web.fetched) == sorted(["", *map(str, range(40))])


async def test_work_on_a_lost_lease_is_dropped() -> None:
    frontier, web = Calls(await memory_frontier()), Web()
    lost: list[Lease] = []

    async def renew(leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        lost.extend(leases)
        return [None for _ in leases]

    frontier.replaced["renew"] = renew
    web.gate.clear()
    engine = engine_of(frontier, web, settings={"lease.ttl": 0.4})
    task = asyncio.create_task(finished(engine))
    await eventually(lambda: len(lost) > 0 and web.fetched.count("") > 1)  # released, and leased again
    web.gate.set()
    frontier.replaced.clear()
    await task
    assert (await frontier.inner.stats()).done == 1


async def test_a_request_that_may_kill_its_worker_is_alone_on_its_last_attempt() -> None:
    clock = FakeClock()
    frontier = await memory_frontier(clock, max_attempts=2)
    await frontier.push([Request(f"{SITE}{number}") for number in range(8)])
    (suspect,) = (await frontier.lease(1, 60)).leases
    clock.advance(61)  # its worker died
    web = Web()
    spider = Pages(start_urls=[])
    await finished(engine_of(frontier, web, spider=spider, settings={"retry.max_attempts": 2}))
    path = suspect.request.url.removeprefix(SITE)
    assert sorted(web.fetched) == [str(number) for number in range(8)]
    assert path not in web.together
    assert len(web.together) > 1  # the others were together


# -- failures


async def test_a_failed_drain_ends_the_crawl() -> None:
    frontier, web = await memory_frontier(), Web({"": links(50)})
    engine = engine_of(frontier, web, drains=[Drained(SinkError("disk full"))])
    with pytest.raises(SinkError, match="disk full"):
        await finished(engine)
    assert (await frontier.stats()).leased == 0


async def test_pages_before_a_failure_of_start_are_crawled() -> None:
    class Failing(Pages):
        async def start(self) -> AsyncIterator[str]:  # type: ignore[override]
            yield SITE + "a"
            yield SITE + "b"
            raise ValueError("no more")

    frontier, web = await memory_frontier(), Web()
    with pytest.raises(SpiderError, match="no more"):
        await finished(engine_of(frontier, web, spider=Failing()))
    assert sorted(web.fetched) == ["a", "b"]
    stats = await frontier.stats()
    assert (stats.done, stats.finished) == (2, False)


async def test_the_engine_starts_over_when_the_store_went_back_in_time() -> None:
    frontier, web = Calls(await memory_frontier()), Web({"": links(5)})
    drain = Drained()
    recovered = 0

    async def complete(completions: Any) -> Any:
        raise StoreRewoundError("the store went back in time")

    async def recover() -> Rewind | None:
        nonlocal recovered
        recovered += 1
        frontier.replaced.pop("complete", None)
        return Rewind(at=0.0)

    frontier.replaced.update(complete=complete, recover=recover)
    await finished(engine_of(frontier, web, drains=[drain]))
    assert (recovered, drain.started_over) == (1, 1)
    stats = await frontier.inner.stats()
    assert (stats.done, stats.leased) == (6, 0)
    assert web.fetched.count("") == 2  # its completion was lost, so it was fetched again
