"""What `render="auto"` learns, from what, and for how long."""

from __future__ import annotations

import pytest

from shoal.errors import FetchError
from shoal.fetch import routing
from shoal.fetch.routing import PageNeeds, RoutingFetcher, kind_of, learned_needs
from shoal.http import Render, Request, Response
from shoal.ports import Frontier
from shoal.selector import selectors
from tests.support.fakes import memory_frontier

pytestmark = pytest.mark.asyncio

HOST = "shop.example"
SHELL = b"<body><div id=app></div><script src=app.js></script></body>"
FULL = b"<body><h1>Tea</h1>" + b"<p>It has a lot of text.</p>" * 30 + b"<script></script></body>"
HTML = {"Content-Type": "text/html"}


class FakeTime:
    """The clock that `page_needs` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_700_000_000.0
        monkeypatch.setattr(routing, "clock", self)

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Web:
    """Answers over HTTP with one page, and counts."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self.body = body
        self.status = status
        self.count = 0

    async def fetch(self, request: Request) -> Response:
        self.count += 1
        return Response(request.url, status=self.status, headers=HTML, body=self.body, request=request)

    async def close(self) -> None: ...


class FakeBrowser:
    """Renders every page to the same one. Without a page, it fails."""

    def __init__(self, body: bytes | None = FULL, status: int = 200) -> None:
        self.body = body
        self.web = Web(body or b"", status)

    async def open(self) -> None: ...

    async def fetch(self, request: Request, options: Render, scope: str = "", upstream: str | None = None) -> Response:
        if self.body is None:
            self.web.count += 1
            raise FetchError("the page crashed", kind="browser crashed", retryable=True)
        return await self.web.fetch(request)

    def forget(self, scope: str) -> None: ...

    def status(self) -> str:
        return ""

    async def close(self) -> None: ...


@pytest.fixture
async def frontier() -> Frontier:
    return await memory_frontier()


async def visit(web: Web, browser: FakeBrowser, frontier: Frontier, times: int = 4) -> None:
    fetcher = RoutingFetcher(web, lambda: browser, hosts=frontier)
    for number in range(times):
        failure = None
        try:
            await fetcher.fetch(Request(f"http://{HOST}/product/{number}", render="auto"))
        except FetchError as error:
            failure = error
        assert failure is None or failure.contacted  # the page was asked for over HTTP


async def test_two_pages_teach_the_whole_fleet(frontier: Frontier) -> None:
    web, browser = Web(SHELL), FakeBrowser()
    await visit(web, browser, frontier)
    assert (web.count, browser.web.count) == (2, 4)
    assert await learned_needs(frontier, HOST) == {"/product/*": "browser"}
    other, its_browser = Web(SHELL), FakeBrowser()
    await visit(other, its_browser, frontier)
    assert (other.count, its_browser.web.count) == (0, 4)


async def test_pages_with_content_need_no_browser(frontier: Frontier) -> None:
    web, browser = Web(FULL), FakeBrowser()
    await visit(web, browser, frontier)
    assert (web.count, browser.web.count) == (4, 0)
    assert await learned_needs(frontier, HOST) == {"/product/*": "http"}


@pytest.mark.parametrize("status", [404, 403, 429, 500, 302])
async def test_a_failed_fetch_teaches_nothing(frontier: Frontier, status: int) -> None:
    web, browser = Web(SHELL, status), FakeBrowser()
    await visit(web, browser, frontier)
    assert (web.count, browser.web.count) == (4, 0)
    assert await learned_needs(frontier, HOST) == {}


@pytest.mark.parametrize("browser", [FakeBrowser(None), FakeBrowser(status=500), FakeBrowser(status=403)])
async def test_a_browser_that_fails_teaches_nothing(frontier: Frontier, browser: FakeBrowser) -> None:
    web = Web(SHELL)
    await visit(web, browser, frontier)
    assert (web.count, browser.web.count) == (4, 4)
    assert await learned_needs(frontier, HOST) == {}


async def test_a_shell_that_scripts_do_not_fill_needs_no_browser(frontier: Frontier) -> None:
    web, browser = Web(SHELL), FakeBrowser(SHELL)
    await visit(web, browser, frontier)
    assert (web.count, browser.web.count) == (4, 2)


async def test_pages_that_differ_teach_nothing(frontier: Frontier) -> None:
    needs = PageNeeds(frontier)
    for need in ("http", "browser", "http", "browser"):
        await needs.learn(f"http://{HOST}/product/1", need)  # type: ignore[arg-type]
    assert await learned_needs(frontier, HOST) == {}


@pytest.mark.parametrize("stored", [True, False])
async def test_each_kind_is_checked_again_after_a_day(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """Although other kinds of the host are learned meanwhile."""
    clock, needs = FakeTime(monkeypatch), PageNeeds(frontier if stored else None)
    for hour in range(0, 24, 6):
        clock.now = 1_700_000_000.0 + 3600 * hour
        for _ in range(2):
            await needs.learn(f"http://{HOST}/kind{hour}/", "browser")
    assert await needs.known(f"http://{HOST}/kind0/") == "browser"
    clock.now += 6 * 3600 + 10
    assert await needs.known(f"http://{HOST}/kind0/") is None
    assert await needs.known(f"http://{HOST}/kind6/") == "browser"


async def test_kinds() -> None:
    assert kind_of("http://a.example/product/17?x=1") == kind_of("http://a.example/product/tea") == "/product/*"
    assert kind_of("http://a.example/") != kind_of("http://a.example/product/")


async def test_its_own_queries_are_not_reported_as_those_of_the_spider() -> None:
    queries = selectors.QueryUsage()
    counting = selectors.current.set(queries)
    try:
        await visit(Web(SHELL), FakeBrowser(), await memory_frontier(), 1)
    finally:
        selectors.current.reset(counting)
    assert queries.unmatched() == {}
    assert queries.matched == set()
