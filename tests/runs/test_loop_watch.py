"""A thread notices that the event loop is blocked, says by what, and says when it runs again."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from shoal import Config, Spider
from shoal.config import ScopeSettings
from shoal.crawling.callbacks import Callbacks
from shoal.crawling.files import FileChains
from shoal.crawling.stats import Counters
from shoal.http import Request, Response
from shoal.ports import Store
from shoal.runs import recorder
from shoal.runs.recorder import LoopWatch, what_runs
from shoal.urls.normalize import Scope


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_EVERY": 0.02, "_REPORTED_AFTER": 0.1, "_LOGGED_AFTER": 0.2}.items():
        monkeypatch.setattr(recorder, name, seconds)


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(10):
        while text not in caplog.text:
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("impatient")
async def test_a_blocked_loop_is_logged_once_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    watches = [LoopWatch("", _no_report) for _ in range(2)]  # two runs of a server
    for watch in watches:
        watch.start()
    await asyncio.sleep(0.3)
    assert watches[0].age < 0.3
    assert (watches[0].blocked_by, caplog.text) == ("", "")
    for _ in range(2):
        time.sleep(0.5)  # noqa: ASYNC251 - that is what it should see
        await asyncio.sleep(0.1)
    await until_logged(caplog, "the event loop runs again")
    for watch in watches:
        watch.stop()
    blocked = [record.getMessage() for record in caplog.records if "has been blocked" in record.getMessage()]
    assert len(blocked) == 2
    assert "that is what it should see" in blocked[0]


@pytest.mark.usefixtures("impatient")
async def test_a_blocked_loop_is_reported_on_another_connection() -> None:
    reported: list[tuple[float, str]] = []

    async def report(store: Store, age: float, by: str) -> None:
        assert await store.run_state("none") is None
        reported.append((age, by))

    watch = LoopWatch("memory:", report)
    watch.start()
    time.sleep(0.5)  # noqa: ASYNC251 - it blocks the loop
    watch.stop()
    assert len(reported) > 1
    assert all(age >= 0.1 for age, _ in reported)
    assert "test_a_blocked_loop_is_reported_on_another_connection (" in reported[0][1]


async def _no_report(store: Store, age: float, by: str) -> None:
    raise AssertionError


async def test_the_callback_and_its_page_are_named() -> None:
    seen: list[str] = []

    class Pages(Spider):
        name = "pages"

        async def details(self, response: Response) -> None:
            seen.append(what_runs(sys._getframe()))

        def parse(self, response: Response) -> list[object]:
            seen.append(what_runs(sys._getframe()))
            return []

    spider = Pages()
    callbacks = Callbacks(spider, Counters(), FileChains(Config(), Scope(ScopeSettings()), spider.stats))
    request = Request("http://a.example/1")
    response = Response(request.url, request=request)
    await callbacks.call(None, request, response)
    await callbacks.call("details", request, response)
    assert seen == ["parse of http://a.example/1", "details of http://a.example/1"]
    assert what_runs(None) == "unknown code"
