"""Rendered pages and plain ones share the cookies of a run, and its logins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from shoal import Render, Request, Response, crawl
from shoal.config import BrowserSettings, HttpSettings
from shoal.fetch.browser.fetcher import BrowserFetcher
from shoal.fetch.http_fetcher import HttpFetcher
from shoal.fetch.layers import Postponed
from shoal.fetch.resolving import CaresResolver
from shoal.fetch.routing import RoutingFetcher
from shoal.fetch.sessions.cookies import Cookie
from shoal.fetch.sessions.session import SentCookies, Session
from tests.acceptance.fleets import SHOAL
from tests.browser.accounts import Account, Accounts
from tests.support import forking
from tests.support.fakes import eventually

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.asyncio(loop_scope="module")

FRAMES = """<iframe src="http://static.site.test:{port}/set?line=frame%3D1;HttpOnly;Path=/;Domain=site.test"></iframe>
<script>fetch("/set?line=xhr%3D1;HttpOnly;Path=/")</script>"""


class Site:
    """Sets the cookies that it is asked to set, and shows those that it gets."""

    def __init__(self) -> None:
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/wait":
            await asyncio.sleep(0.3)
        text = f"<p>{request.headers.get('Cookie', '')}</p>"
        if script := request.query.get("script"):
            text += f"<script>{script}</script>"
        if request.path == "/frames":
            text += FRAMES.format(port=request.url.port)
        response = web.Response(text=text, content_type="text/html")
        if request.path == "/redirect":
            response = web.Response(status=302, headers={"Location": "/show"})
        for line in request.query.getall("line", []):
            response.headers.add("Set-Cookie", line)
        return response


@asynccontextmanager
async def served(answer: Any) -> AsyncIterator[int]:
    """The port of a server."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    """At shop.site.test and all other names of that domain."""
    ask = CaresResolver.ask

    def ask_here(self: CaresResolver, host: str) -> Any:
        return ask(self, "127.0.0.1" if host.endswith("site.test") else host)

    CaresResolver.ask = ask_here  # type: ignore[method-assign]
    site = Site()
    async with served(site.answer) as port:
        site.url = f"http://shop.site.test:{port}"
        yield site
    CaresResolver.ask = ask  # type: ignore[method-assign]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fetcher() -> AsyncIterator[RoutingFetcher]:
    browser = BrowserFetcher(BrowserSettings(sandbox=False, page_timeout=60.0), "shoal-test")
    fetcher = RoutingFetcher(HttpFetcher(HttpSettings(), "shoal-test"), lambda: browser)
    yield fetcher
    await fetcher.close()


class Client:
    """Fetches pages of a site with a session."""

    def __init__(self, site: Site, fetcher: RoutingFetcher) -> None:
        self.site = site
        self.fetcher = fetcher
        self.session = Session()

    async def fetch(self, path: str, *, render: Any = False, **options: Any) -> Response:
        request = Request(self.site.url + path, render=render, **options)
        return await self.session(request, self.fetcher.fetch)

    async def cookies(self, path: str = "/show", *, render: Any = False, **options: Any) -> list[str]:
        """The cookies that the site gets."""
        response = await self.fetch(path, render=render, **options)
        return sorted(filter(None, response.css("p::text").get("").split("; ")))


@pytest.fixture
def client(site: Site, fetcher: RoutingFetcher, request: pytest.FixtureRequest) -> Client:
    fetcher._scope = request.node.name  # each test has contexts of its own
    return Client(site, fetcher)


async def test_a_cookie_of_a_domain_is_sent_once_and_removed_everywhere(client: Client) -> None:
    await client.fetch("/set?line=d%3D1;Domain=site.test;Path=/&line=h%3D1;HttpOnly&line=bad%3Da%09b")
    for _ in range(2):
        assert await client.cookies(render=True) == ["d=1", "h=1"]
    await client.fetch("/set?line=d%3D2;Domain=site.test;Path=/;Max-Age=99")
    assert await client.cookies(render=True) == ["d=2", "h=1"]
    await client.fetch("/set?line=d%3D;Domain=site.test;Path=/;Max-Age=0&line=h%3D2;Domain=shop.site.test")
    assert await client.cookies(render=True) == await client.cookies() == ["h=2"]
    await client.fetch("/set?line=h%3D;Domain=shop.site.test;Max-Age=0", render=True)
    assert await client.cookies() == []


async def test_what_scripts_frames_and_redirects_set_is_sent_by_plain_pages(client: Client) -> None:
    await client.fetch("/show?script=document.cookie='js=1;path=/'", render=True)
    assert await client.cookies() == ["js=1"]
    await client.fetch("/frames", render=True)
    assert await client.cookies() == ["frame=1", "js=1", "xhr=1"]
    jar = client.session.jars.jar("").cookies
    assert {(cookie.name, cookie.domain, cookie.host_only, cookie.http_only) for cookie in jar.all()} == {
        ("js", "shop.site.test", True, False), ("frame", "site.test", False, True),
        ("xhr", "shop.site.test", True, True),
    }  # fmt: skip
    assert all(cookie.expires is None for cookie in jar.all())
    await client.fetch("/redirect?line=r%3D1;Path=/", render=True)
    await client.fetch("/show?script=document.cookie='js=;path=/;max-age=0'", render=True)
    assert await client.cookies() == ["frame=1", "r=1", "xhr=1"]


async def test_a_page_in_a_callback_sets_a_cookie(client: Client) -> None:
    response = await client.fetch("/show", render=Render(page=True))
    assert response.page is not None
    await response.page.evaluate("document.cookie = 'late=1'")
    await response.release()
    assert await client.cookies() == ["late=1"]


async def test_the_plain_answer_of_a_page_that_is_then_rendered_counts(client: Client) -> None:
    shell = "/?script=document.body.append('x'.repeat(500))"
    await client.fetch(f"{shell}&line=first%3D1;Path=/", render="auto")
    assert await client.cookies() == ["first=1"]


async def test_cookies_of_a_request_override_those_of_the_jar_for_one_page(client: Client) -> None:
    await client.fetch("/set?line=a%3D1;Domain=site.test;Path=/&line=b%3D1;Path=/")
    assert await client.cookies(render=True, cookies={"a": "mine"}) == ["a=mine", "b=1"]
    assert await client.cookies(render=True, headers={"Cookie": "a=header"}) == ["a=header"]
    assert await client.cookies(render=True) == await client.cookies() == ["a=1", "b=1"]


async def test_named_jars_are_separate(client: Client) -> None:
    storage = "/show?script=localStorage.n=%2B(localStorage.n||0)%2B1;document.body.dataset.n=localStorage.n"
    for name in "ab":
        await client.fetch(f"/show?script=document.cookie='who={name};path=/'", render=True, meta={"cookiejar": name})
        page = await client.fetch(storage, render=True, meta={"cookiejar": name})
        assert page.css("body::attr(data-n)").get() == "1"
    for name in "ab":
        for render in (True, False):
            assert await client.cookies(render=render, meta={"cookiejar": name}) == [f"who={name}"]
    assert await client.cookies(render=True) == []


async def test_pages_that_share_a_context_lose_no_cookie(client: Client) -> None:
    rendered = [f"/wait?script=document.cookie='r{number}=1;path=/'" for number in range(6)]
    plain = [f"/wait?line=p{number}%3D1;Path=/" for number in range(6)]
    await asyncio.gather(
        *(client.fetch(path, render=True) for path in rendered), *(client.fetch(path) for path in plain)
    )
    every = sorted(f"{kind}{number}=1" for kind in "pr" for number in range(6))
    assert await client.cookies(render=True) == await client.cookies() == every


async def test_a_context_of_an_earlier_login_is_closed(client: Client) -> None:
    await client.fetch("/set?line=a%3D1;Path=/")
    for epoch in range(3):
        client.session.jars.jar("").epoch = epoch
        assert await client.cookies(render=True) == ["a=1"]
    browser = client.fetcher._browser()
    assert isinstance(browser, BrowserFetcher)
    assert browser._session is not None
    epochs = [key.epoch for key in browser._session.pages._contexts if key.scope == client.fetcher._scope]
    assert epochs == [2]


async def test_a_page_that_waited_while_there_was_a_login(client: Client) -> None:
    """It has the cookies of that login, so it must not see the storage of an earlier one."""
    storage = "/wait?script=document.body.dataset.n=localStorage.n||'none';localStorage.n=1"
    await client.fetch(storage, render=True)
    pages = [asyncio.create_task(client.fetch(storage, render=True)) for _ in range(8)]  # more than fit at once
    await eventually(lambda: client.fetcher.browser_status().startswith("4 pages open"))
    client.session.jars.jar("").epoch = 1
    answers = await asyncio.gather(*pages, return_exceptions=True)
    shown = [answer for answer in answers if not isinstance(answer, Postponed)]  # these had their context already
    seen = [answer.css("body::attr(data-n)").get() for answer in shown if not isinstance(answer, BaseException)]
    assert len(seen) == len(shown)
    assert "none" in seen


async def test_a_large_jar_is_not_put_into_each_context(client: Client) -> None:
    jars = client.session.jars
    for number in range(4000):
        jars.set(jars.jar(""), Cookie("a", "1", f"www.site{number}.test", "/", True), 0)
    await client.fetch("/set?line=a%3D1;Path=/")
    frames = SentCookies(jars, jars.jar(""), 0, client.site.url + "/", {})
    known = {("www.site7.test", "a", "/")}
    assert {cookie.domain for cookie in frames.wanted(known).values()} == {"shop.site.test", "www.site7.test"}


# -- logins


@pytest.mark.parametrize("form", [True, False])
async def test_sessions_that_end_while_pages_are_rendered(form: bool) -> None:
    class Rendered(Account):
        render = True

    accounts = Accounts(12, lasts=5)
    async with served(accounts.answer) as port:
        start = [f"http://127.0.0.1:{port}/home"]
        done = await crawl(Rendered, arguments={"start_urls": start, "form": form})
    assert done.summary is not None
    assert (done.summary.state, done.summary.stats.dead) == ("finished", 0)
    assert Counter(item["page"] for item in done.items) == {f"/account/{number}": 1 for number in range(12)}
    assert accounts.logins >= 3
    assert [item for item in done.items if item["before"] != item["sid"]] == []  # no storage of an earlier login


async def test_a_login_at_another_host() -> None:
    accounts = Accounts(3, shared=True)
    async with served(accounts.answer) as port:
        done = await crawl(Account, arguments={"start_urls": [f"http://127.0.0.1:{port}/home"]})
    assert (accounts.logins, len(done.items)) == (1, 3)


async def test_a_rendered_login_is_kept_through_a_kill(tmp_path: Path) -> None:
    accounts = Accounts(30, latency=0.1)
    async with served(accounts.answer) as port:
        (tmp_path / "spider.py").write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.browser.accounts import Account\n"
            f"class Mine(Account):\n    name = 'mine'\n    start_urls = ['http://127.0.0.1:{port}/home']\n"
        )
        command = [*SHOAL, "run", "spider.py", "--frontier", "sqlite:///s.db", "-o", "o.jsonl"]
        with forking.Popen(command, cwd=tmp_path) as first:
            await eventually(lambda: len(accounts.shown) > 8)
            os.kill(first.pid, signal.SIGKILL)
        await asyncio.to_thread(forking.run, command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    items = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert accounts.logins == 1
    assert Counter(item["page"] for item in items) == {f"/account/{number}": 1 for number in range(30)}
