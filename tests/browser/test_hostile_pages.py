"""Each hostile page costs only itself, within its deadline, and reaches no private address."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio

from shoal.config import BrowserSettings
from shoal.errors import FetchError
from shoal.fetch.browser.fetcher import BrowserFetcher
from shoal.fetch.guard import AddressGuard
from shoal.fetch.layers import Postponed
from shoal.http import Render, Request, Response
from tests.browser.hostile_site import SCRIPTS, serve
from tests.browser.processes import recorded, wait_until_gone

TIMEOUT = 5.0
LONGEST = 60.0
"""Seconds of one attempt: its deadline, and its wait for a place in the browser beside the others."""
SETTINGS = BrowserSettings(sandbox=False, page_timeout=TIMEOUT, settle=2.0, max_bytes=8_000_000, max_memory=900_000_000)
PATIENT = msgspec.structs.replace(SETTINGS, page_timeout=60.0)
RECYCLED = msgspec.structs.replace(SETTINGS, recycle_pages=15)
"""A browser may survive all pages. With this it is replaced while they are rendered."""
NUISANCES = ["alerts", "beforeunload", "history", "console", "windows", "storage", "/no-load"]
OTHERS = ["/never", "/no-load", "/to-trap", "/script-redirected", "/file", "/huge"]
PATHS = {**{name: f"/hostile?name={name}" for name in SCRIPTS}, **{path: path for path in OTHERS}}


@dataclass
class Outcome:
    """What became of a hostile page."""

    response: Response | None
    error: str
    seconds: float
    """The longest time of one attempt."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def outcomes() -> AsyncIterator[dict[str, Outcome]]:
    """Render all hostile pages, four at a time, while healthy pages are rendered beside them."""
    async with serve() as (url, _, trapped):
        fetcher = BrowserFetcher(RECYCLED, "shoal-test", AddressGuard(["127.0.0.1/32"]))
        found: dict[str, Outcome] = {}
        slots = asyncio.Semaphore(3)

        async def visit(name: str) -> None:
            async with slots:
                found[name] = await render(fetcher, f"{url}{PATHS[name]}")

        with recorded(lambda: [os.getpid()]) as marks:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(visit(name)) for name in PATHS]
                    healthy = group.create_task(beside(fetcher, f"{url}/leaf", tasks))
                found["healthy"] = healthy.result()
                found["trapped"] = Outcome(None, ", ".join(trapped), 0.0)
            finally:
                await fetcher.close()
        found["left"] = Outcome(None, str(wait_until_gone(marks)), len(marks))
        yield found


async def render(fetcher: BrowserFetcher, url: str) -> Outcome:
    slowest = 0.0
    for _ in range(6):  # a page that is released is rendered again, as the engine would
        started, response, failure = time.monotonic(), None, ""
        try:
            response = await fetcher.fetch(Request(url), Render())
        except FetchError as error:
            failure = f"{error.kind}: {error}"
        except Postponed:
            failure = "released again and again"
        slowest = max(slowest, time.monotonic() - started)
        if failure != "released again and again":
            return Outcome(response, failure, slowest)
    return Outcome(None, failure, slowest)


async def beside(fetcher: BrowserFetcher, url: str, tasks: list[asyncio.Task[None]]) -> Outcome:
    """Render a healthy page again and again. The first failure, if there is one."""
    number = 0
    while not all(task.done() for task in tasks):
        number += 1
        for _ in range(3):  # as the engine would: endless loops take their share of the machine
            outcome = await render(fetcher, f"{url}?beside={number}")
            if outcome.response is not None:
                break
        else:
            return outcome
    return Outcome(None, "", number)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", PATHS)
async def test_a_hostile_page_costs_only_itself(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.response is not None or outcome.error.partition(":")[0] in {
        "timeout", "browser crashed", "too many requests", "too large", "download", "connect", "address",
    }, outcome  # fmt: skip
    assert outcome.seconds < LONGEST, outcome


@pytest.mark.asyncio(loop_scope="module")
async def test_no_page_reaches_a_private_address(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["trapped"].error == ""


@pytest.mark.asyncio(loop_scope="module")
async def test_healthy_pages_are_rendered_beside_hostile_ones(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["healthy"].error == ""
    assert outcomes["healthy"].seconds > 3  # how many there were


@pytest.mark.asyncio(loop_scope="module")
async def test_no_process_is_left(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["left"].error == "[]"
    assert outcomes["left"].seconds > 1  # how many browsers there were


async def test_a_nuisance_is_no_obstacle() -> None:
    async with serve() as (url, _, _):
        fetcher = BrowserFetcher(PATIENT, "shoal-test", AddressGuard(["127.0.0.1/32"]))
        try:
            for name in NUISANCES:
                outcome = await render(fetcher, f"{url}{PATHS[name]}")
                response = outcome.response
                assert response is not None, f"{name}: {outcome.error}"
                assert response.css("h1::text").get() in ("hostile", "no load")
                assert name != "console" or len(response.console) == 100
        finally:
            await fetcher.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["/to-trap", "script goes to the trap", "form to the trap"])
async def test_a_navigation_elsewhere_is_a_redirect(outcomes: dict[str, Outcome], name: str) -> None:
    response = outcomes[name].response
    assert response is not None, outcomes[name]
    assert response.status == 302
    assert "127.0.0.2" in response.headers["Location"]


async def test_the_requests_of_a_page_do_not_count_for_the_next_one_in_its_tab() -> None:
    async with serve() as (url, _, _):
        fetcher = BrowserFetcher(SETTINGS, "shoal-test", AddressGuard(["127.0.0.1/32"]))
        try:
            for number in range(4):
                outcome = await render(fetcher, f"{url}{PATHS['requests without end']}&number={number}")
                assert outcome.error.startswith("too many requests")
                healthy = await render(fetcher, f"{url}/leaf?after={number}")
                assert healthy.response is not None, healthy
        finally:
            await fetcher.close()
