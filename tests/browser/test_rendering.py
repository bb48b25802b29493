"""Rendering in a real Chromium: what is waited for, done, captured and returned."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from shoal import Render, Request, Response, Spider, crawl
from shoal.config import BrowserSettings
from shoal.errors import FetchError, RequestError
from shoal.fetch.browser.fetcher import BrowserFetcher
from shoal.fetch.browser.process import BrowserProcess
from shoal.fetch.routing import RoutingFetcher
from shoal.http.exchange import Exchange, captured
from shoal.http.rendering import Click, Evaluate, Fill, Press, Scroll, Wait, permit
from tests.acceptance.fleets import SHOAL
from tests.browser import shop
from tests.browser.processes import recorded, wait_until_gone
from tests.support import forking
from tests.support.databases import free_port

SETTINGS = BrowserSettings(sandbox=False, page_timeout=60.0)
pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = """<html><head><title>Form</title></head><body>
<input id=name><button onclick="document.getElementById('out').textContent = document.getElementById('name').value">
go</button><div id=out></div>
<script>
const field = document.getElementById("name");
field.addEventListener("keydown", e => { if (e.key === "Enter") document.title = "entered"; });
setTimeout(() => { document.body.appendChild(document.createElement("p")).id = "late"; }, 1500);
fetch("/data.json").then(r => r.json());
console.log("hello", 42);
</script></body></html>"""


LEADS = """<a id=open href=/next>open</a> <a id=deep href=/deep/moved>deep</a> <a id=secret href=/secret>secret</a>
<a id=blank target=_blank href=/next>blank</a>
<a target=window href=/next><b id=inner>inner</b></a> <button onclick="window.open('/next')">open</button>
<form id=form action=/next target=_blank><button>send</button></form>
<form id=hidden action=/secret target=_blank><button>send</button></form>"""


class Site:
    """A site with one of each kind of page."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: dict[str, dict[str, str]] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers[request.path] = dict(request.headers)
        match request.path:
            case "/robots.txt":
                return web.Response(text="User-agent: *\nDisallow: /secret")
            case "/leads":
                return web.Response(text=LEADS, content_type="text/html")
            case "/greedy":
                return web.Response(text="<script>fetch('/flood')</script>", content_type="text/html")
            case "/flood":
                return await flood(request)
            case "/data.json":
                return web.json_response({"secret": 7})
            case "/filled-late":
                fill = (
                    "document.body.innerHTML = '<h1>late</h1>'; fetch('/data.json').then(() => document.title = 'all')"
                )
                return web.Response(
                    text=f"<script>setTimeout(() => {{ {fill} }}, 400)</script>", content_type="text/html"
                )
            case "/empty":
                return web.Response(text="<title>none</title><img src=x>", content_type="text/html")
            case "/empty-with-script":
                return web.Response(text="<script>window.x = 1</script>", content_type="text/html")
            case "/shadow":
                script = "document.body.attachShadow({mode: 'open'}).innerHTML = '<p>inside</p>'"
                return web.Response(text=f"<body><script>{script}</script></body>", content_type="text/html")
            case "/missing":
                return web.Response(status=404, text="<h1>gone</h1>", content_type="text/html")
            case "/deep/moved":
                raise web.HTTPFound("page")
            case "/redirect":
                raise web.HTTPFound("/page")
            case "/moves":
                return web.Response(text="<script>location = '/page'</script>", content_type="text/html")
            case "/post":
                return web.Response(text=f"<p>{request.method} {await request.text()}</p>", content_type="text/html")
            case "/file.pdf":
                return web.Response(body=b"%PDF-1.4 not shown", content_type="application/pdf")
            case "/cookies":
                return web.Response(text=f"<p>{request.headers.get('Cookie', '')}</p>", content_type="text/html")
            case "/visits":
                script = "localStorage.n = +(localStorage.n || 0) + 1; document.body.textContent = localStorage.n"
                return web.Response(text=f"<body><script>{script}</script></body>", content_type="text/html")
        return web.Response(text=PAGE, content_type="text/html")


async def flood(request: web.Request) -> web.StreamResponse:
    """Send bytes until the client leaves."""
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(bytes(100_000))
            await asyncio.sleep(0.01)
    return response


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    served = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", served.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = "http://{}:{}".format(*runner.addresses[0][:2])
    yield served
    await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[BrowserFetcher]:
    fetcher = BrowserFetcher(SETTINGS, "shoal-test")
    yield fetcher
    await fetcher.close()


async def test_a_response_is_an_ordinary_one(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/page"), Render(capture=("*/data.json",)))
    assert (response.status, response.url) == (200, f"{site.url}/page")
    assert response.css("title::text").get() == "Form"
    assert [each.json() for each in response.captured] == [{"secret": 7}]
    assert list(response.console) == ["log: hello 42"]
    assert site.headers["/page"]["User-Agent"] == "shoal-test"


async def test_waiting_for_an_element(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/page"), Render(wait_for="#late"))
    assert response.css("#late")


async def test_an_element_that_never_appears(site: Site, browser: BrowserFetcher) -> None:
    with pytest.raises(FetchError, match="no element '#never' appeared within 10 s") as failure:
        await browser.fetch(Request(f"{site.url}/page", timeout=10.0), Render(wait_for="#never"))
    assert failure.value.kind == "wait_for"


async def test_actions(site: Site, browser: BrowserFetcher) -> None:
    actions = (
        Fill(selector="#name", text="Ada"), Click(selector="button"), Press(key="Enter", selector="#name"),
        Evaluate(script="document.body.dataset.done = 1"), Wait(wait_for="[data-done]"),
    )  # fmt: skip
    response = await browser.fetch(Request(f"{site.url}/page"), Render(actions=actions))
    assert response.css("#out::text").get() == "Ada"
    assert response.css("title::text").get() == "entered"


async def test_an_action_may_lead_to_another_page_of_the_host(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/leads"), Render(actions=(Click("#open"),)))
    assert (response.status, response.css("title::text").get()) == (200, "Form")


async def test_a_redirect_of_a_page_that_an_action_led_to(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/leads"), Render(actions=(Click("#deep"),)))
    assert response.location == f"{site.url}/deep/page"


@pytest.mark.parametrize("selector", ["#blank", "#inner", "button", "#form button"])
async def test_what_would_open_a_window_is_shown_in_the_page(
    site: Site, browser: BrowserFetcher, selector: str
) -> None:
    response = await browser.fetch(Request(f"{site.url}/leads"), Render(actions=(Click(selector),)))
    assert (response.status, response.css("title::text").get()) == (200, "Form")


async def test_the_next_page_gets_the_actions_that_are_left(site: Site, browser: BrowserFetcher) -> None:
    async def refuse(url: str) -> None:
        return None

    token = permit.set(refuse)
    try:
        actions = (Click("#open"), Scroll(times=2))
        response = await browser.fetch(Request(f"{site.url}/leads"), Render(wait_for="#open", actions=actions))
    finally:
        permit.reset(token)
    assert response.headers["Location"] == f"{site.url}/next"
    assert response.next_render == Render(actions=(Scroll(times=2),))


@pytest.mark.parametrize(("wait", "leads"), [(0.0, True), (1.0, True), (None, False), (3600.0, False)])
async def test_an_action_that_navigates_asks_first(
    site: Site, browser: BrowserFetcher, wait: float | None, leads: bool
) -> None:
    asked = []

    async def ask(url: str) -> float | None:
        asked.append(url)
        return wait

    site.headers.clear()
    token, began = permit.set(ask), time.monotonic()
    try:
        response = await browser.fetch(Request(f"{site.url}/leads"), Render(actions=(Click("#open"),)))
    finally:
        permit.reset(token)
    assert asked == [f"{site.url}/next"]
    assert ("/next" in site.headers) is leads
    assert response.status == (200 if leads else 302)
    assert time.monotonic() - began >= (wait or 0.0) or not leads


class Clicks(Spider):
    name = "clicks"
    settings = {"browser.sandbox": False, "download_delay": 0, "throttle.enabled": False, "browser.page_timeout": 60}

    def parse(self, response: Response) -> object:
        yield {"path": response.url.rpartition("/")[2], "title": response.css("title::text").get()}


@pytest.mark.parametrize(
    ("selector", "items", "dead"),
    [
        ("#open", [{"path": "leads", "title": "Form"}], {}),
        ("#secret", [], {"robots": 1}),
        ("#blank", [{"path": "leads", "title": "Form"}], {}),
        ("#hidden button", [], {"robots": 1}),
    ],
)
async def test_robots_txt_applies_to_what_actions_lead_to(
    site: Site, selector: str, items: list[dict[str, str]], dead: dict[str, int]
) -> None:
    site.headers.clear()
    spider = Clicks(start_urls=[f"{site.url}/leads"])
    spider.start = lambda: [Request(f"{site.url}/leads", render=Render(actions=(Click(selector),)))]  # type: ignore[method-assign]
    done = await crawl(spider)
    assert done.summary is not None
    assert (done.items, done.summary.dead_kinds) == (items, dead)
    assert "/secret" not in site.headers


async def test_an_action_on_a_missing_element(site: Site) -> None:
    fetcher = BrowserFetcher(BrowserSettings(sandbox=False, page_timeout=30.0), "shoal-test")
    try:
        with pytest.raises(FetchError, match=r"action 1 \(click\) failed: there is no element '#nothing'"):
            await fetcher.fetch(Request(f"{site.url}/page"), Render(actions=(Click(selector="#nothing"),)))
    finally:
        await fetcher.close()


async def test_scrolling_to_the_end(browser: BrowserFetcher) -> None:
    with shop.serve(35) as served:
        response = await browser.fetch(Request(f"{served.url}/scroll"), Render(actions=(Scroll(),)))
    assert len(response.css(".row")) == 35


async def test_pictures(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/page"), Render(screenshot=True, pdf=True))
    assert response.screenshot is not None
    assert response.screenshot.startswith(b"\x89PNG")
    assert response.pdf is not None
    assert response.pdf.startswith(b"%PDF")
    element = await browser.fetch(Request(f"{site.url}/page"), Render(screenshot="button"))
    assert element.screenshot is not None
    assert len(element.screenshot) < len(response.screenshot)


@pytest.mark.parametrize("path", ["/redirect", "/moves"])
async def test_a_redirect_is_left_to_the_frontier(site: Site, browser: BrowserFetcher, path: str) -> None:
    site.headers.pop("/page", None)
    response = await browser.fetch(Request(site.url + path), Render())
    assert response.status == 302
    assert response.urljoin(response.headers["Location"]) == f"{site.url}/page"
    assert "/page" not in site.headers


async def test_a_page_that_loads_too_much_costs_only_itself(site: Site) -> None:
    browser = BrowserFetcher(msgspec.structs.replace(SETTINGS, max_bytes=2_000_000), "shoal-test")
    try:
        greedy = asyncio.create_task(browser.fetch(Request(f"{site.url}/greedy"), Render(wait_for=50_000)))
        neighbour = asyncio.create_task(browser.fetch(Request(f"{site.url}/page"), Render(wait_for=8_000)))
        with pytest.raises(FetchError) as caught:
            await greedy
        assert caught.value.kind == "too large"
        assert not neighbour.done()  # it shared the context with a page that loaded more than both may
        assert (await neighbour).css("title::text").get() == "Form"
    finally:
        await browser.close()


async def test_a_status(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/missing"), Render())
    assert (response.status, response.css("h1::text").get()) == (404, "gone")


@pytest.mark.parametrize(
    ("path", "status", "source", "rendered"),
    [
        ("/page", 200, PAGE.encode(), b'id="late"'),
        ("/redirect", 302, None, None),
        ("/moves", 200, b"<script>location = '/page'</script>", None),
        ("/file.pdf", 200, b"%PDF-1.4 not shown", None),
    ],
)
async def test_what_an_archive_gets(
    site: Site, browser: BrowserFetcher, path: str, status: int, source: bytes | None, rendered: bytes | None
) -> None:
    exchanges: list[Exchange] = []
    token = captured.set(exchanges)
    try:
        request = Request(site.url + path, headers={"X-Mine": "1"})
        await browser.fetch(request, Render(wait_for="#late" if rendered else None))
    finally:
        captured.reset(token)
    (exchange,) = exchanges
    assert (exchange.url, exchange.status, exchange.truncated) == (site.url + path, status, source is None)
    assert exchange.body == (source or b"")
    assert (rendered is None) == (exchange.rendered is None)
    assert rendered is None or rendered in (exchange.rendered or b"")
    assert {name.lower(): value for name, value in exchange.sent}[b"x-mine"] == b"1"
    assert b"content-type" in {name.lower() for name, _ in exchange.received}


async def test_something_that_is_not_html(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/file.pdf"), Render())
    assert response.body == b"%PDF-1.4 not shown"
    assert response.headers["Content-Type"] == "application/pdf"


async def test_method_body_headers_and_cookies(site: Site, browser: BrowserFetcher) -> None:
    request = Request(f"{site.url}/post", form={"a": "1"}, headers={"X-Token": "t"})
    response = await browser.fetch(request, Render())
    assert response.css("p::text").get() == "POST a=1"
    assert site.headers["/post"]["X-Token"] == "t"
    with_cookie = Request(f"{site.url}/cookies", headers={"Cookie": "a=1; b=2"})
    response = await browser.fetch(with_cookie, Render())
    assert response.css("p::text").get() == "a=1; b=2"


async def test_a_header_of_the_request_stays_with_its_document(site: Site, browser: BrowserFetcher) -> None:
    site.headers.pop("/data.json", None)
    await browser.fetch(Request(f"{site.url}/page", headers={"X-Token": "t"}), Render())
    assert site.headers["/page"]["X-Token"] == "t"
    assert "X-Token" not in site.headers["/data.json"]


async def test_storage_is_kept_for_a_host_and_never_shared_between_scopes(site: Site, browser: BrowserFetcher) -> None:
    request = Request(f"{site.url}/visits")
    counts = [(await browser.fetch(request, Render(), scope)).css("body::text").get() for scope in "aab"]
    assert counts == ["1", "2", "1"]


async def test_a_dead_host(browser: BrowserFetcher) -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(FetchError, match=r"no connection to 127\.0\.0\.1") as failure:
        await browser.fetch(Request(url), Render())
    assert failure.value.kind == "connect"


# -- choosing


class Counting:
    """Counts what is fetched over HTTP."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.count = 0

    async def fetch(self, request: Request) -> Response:
        self.count += 1
        from shoal.config import HttpSettings
        from shoal.fetch.http_fetcher import HttpFetcher

        fetcher = HttpFetcher(HttpSettings(), "shoal-test")
        try:
            return await fetcher.fetch(request)
        finally:
            await fetcher.close()

    async def close(self) -> None: ...


async def test_auto_learns_what_pages_need(browser: BrowserFetcher) -> None:
    http = Counting(None)
    fetcher = RoutingFetcher(http, lambda: browser)
    with shop.serve(30) as served:
        names = []
        for number in range(5):
            response = await fetcher.fetch(Request(f"{served.url}/product/{number}", render="auto"))
            names.append(response.css("h1::text").get())
    assert names == [f"Product {number}" for number in range(5)]
    assert http.count == 2  # then it is known that products need a browser


async def test_auto_does_not_render_what_has_content(site: Site, browser: BrowserFetcher) -> None:
    http = Counting(None)
    fetcher = RoutingFetcher(http, lambda: browser)
    for number in range(4):
        response = await fetcher.fetch(Request(f"{site.url}/missing?{number}", render="auto"))
        assert response.status == 404
    assert http.count == 4


async def test_what_was_learned_is_shared_and_shown(tmp_path: Path) -> None:
    with shop.serve(12) as served:
        (tmp_path / "spider.py").write_text(
            "from shoal import Spider\nclass S(Spider):\n    name = 's'\n    render = 'auto'\n"
            f"    start_urls = ['{served.url}/product/%d' % n for n in range(6)]\n"
            "    settings = {'browser.sandbox': False, 'download_delay': 0, 'concurrency': 1}\n"
            "    def parse(self, response):\n        yield {'name': response.css('h1::text').get()}\n"
        )
        run = [*SHOAL, "run", "spider.py", "--frontier", "sqlite:///s.db", "-o", "o.jsonl"]
        await asyncio.to_thread(forking.run, run, cwd=tmp_path, check=True, capture_output=True, timeout=180)
        documents = [path for path in served.asked() if path.startswith("/product/")]
    names = [json.loads(line)["name"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert sorted(names) == [f"Product {number}" for number in range(6)]
    assert len(documents) == 6 + 2  # only the first two were fetched over HTTP too
    show = [*SHOAL, "hosts", "--frontier", "sqlite:///s.db"]
    shown = await asyncio.to_thread(forking.run, show, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pages that need a browser: /product/*" in shown.stdout


# -- in a crawl


async def test_a_callback_can_use_the_page(site: Site) -> None:
    class Live(Spider):
        name = "live"
        start_urls = [f"{site.url}/page"]
        render = Render(page=True)
        settings = {"browser.sandbox": False, "robots.obey": False, "browser.page_timeout": 60}

        async def parse(self, response: Response) -> object:
            assert response.page is not None
            await response.page.fill("#name", "live")
            await response.page.click("button")
            return [{"out": await response.page.text_content("#out")}]

    done = await crawl(Live)
    assert done.items == [{"out": "live"}]


async def test_a_page_that_a_timer_fills_is_waited_for(site: Site) -> None:
    fetcher = BrowserFetcher(BrowserSettings(sandbox=False, page_timeout=60.0, settle=50.0), "shoal-test")
    try:
        response = await fetcher.fetch(Request(f"{site.url}/filled-late"), Render())
    finally:
        await fetcher.close()
    assert (response.css("h1::text").get(), response.css("title::text").get()) == ("late", "all")


@pytest.mark.parametrize("path", ["/empty", "/shadow"])
async def test_a_page_that_nothing_will_fill_is_not_waited_for(site: Site, path: str) -> None:
    fetcher = BrowserFetcher(BrowserSettings(sandbox=False, page_timeout=30.0, settle=600.0), "shoal-test")
    try:
        assert (await fetcher.fetch(Request(site.url + path), Render())).ok  # a page that waits fails by its timeout
    finally:
        await fetcher.close()


async def test_a_page_that_stays_empty_is_taken_as_it_is(site: Site) -> None:
    fetcher = BrowserFetcher(BrowserSettings(sandbox=False, page_timeout=30.0, settle=0.5), "shoal-test")
    try:
        response = await fetcher.fetch(Request(f"{site.url}/empty-with-script"), Render())
    finally:
        await fetcher.close()
    assert response.css("body").get() == "<body></body>"


@pytest.mark.parametrize("path", ["/redirect", "/missing"])
async def test_a_page_that_reaches_no_callback_is_not_kept(site: Site, path: str) -> None:
    fetcher = BrowserFetcher(BrowserSettings(sandbox=False, page_timeout=60.0, max_pages=1), "shoal-test")
    try:
        response = await fetcher.fetch(Request(site.url + path), Render(page=True))
        assert response.page is None
        async with asyncio.timeout(50):  # less than the time that a callback may keep its page
            assert (await fetcher.fetch(Request(f"{site.url}/page"), Render())).ok
    finally:
        await fetcher.close()


async def test_a_spider_that_renders(tmp_path: Path) -> None:
    with shop.serve(12) as served:

        class Shop(Spider):
            name = "shop"
            start_urls = [f"{served.url}/"]
            render = True
            settings = {"browser.sandbox": False, "download_delay": 0, "browser.page_timeout": 60}

            def parse(self, response: Response) -> object:
                yield response.follow_all("a.product", self.product)
                yield response.follow_all("a.next")

            def product(self, response: Response) -> object:
                yield {"name": response.css("h1::text").get()}

        done = await crawl(Shop)
        asked = served.asked()
    assert {item["name"] for item in done.items} == {f"Product {number}" for number in range(12)}
    assert asked.count("/app.js") == 1  # the browser's cache works
    assert asked.count("/robots.txt") == 1


# -- bad input


@pytest.mark.parametrize("value", [3, "sometimes", {"wait": 1}, {"actions": [{"do": "dance"}]}])
async def test_invalid_options(value: object) -> None:
    with pytest.raises(RequestError, match="render"):
        Request("http://a.example/", render=value)  # type: ignore[arg-type]


async def test_options_as_data() -> None:
    request = Request("http://a.example/", render={"wait_for": "p", "actions": [{"do": "click", "selector": "a"}]})  # type: ignore[arg-type]
    assert request.render == Render(wait_for="p", actions=(Click(selector="a"),))


async def test_actions_as_data_within_options() -> None:
    written: list[dict[str, object]] = [{"do": "click", "selector": "a"}, {"do": "scroll"}]
    assert Render(actions=written) == Render(actions=(Click(selector="a"), Scroll()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actions": [{"do": "clik", "selector": "a"}]}, "there is no action 'clik'; .* did you mean click"),
        ({"actions": [{"do": "click"}]}, "actions: .*`selector`"),
        ({"mode": "aut"}, "mode: .*'aut'"),
        ({"wait_for": 2.5}, "wait_for: .*float"),
    ],
)
async def test_an_option_without_a_meaning_is_refused_where_it_is_written(options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Render(**options)


async def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(RequestError, match="no render option 'wait_fr'; did you mean wait_for"):
        Request("http://a.example/", render={"wait_fr": "p"})  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root cannot use the sandbox")
async def test_the_sandbox_is_never_disabled_silently(site: Site) -> None:
    fetcher = BrowserFetcher(BrowserSettings(), "shoal-test")
    with pytest.raises(FetchError, match=r"sandbox cannot start as root.*browser\.sandbox = false"):
        await fetcher.fetch(Request(f"{site.url}/page"), Render())
    await fetcher.close()


async def test_no_chromium(site: Site, tmp_path: Path) -> None:
    settings = BrowserSettings(sandbox=False, executable=str(tmp_path / "chromium"))
    fetcher = BrowserFetcher(settings, "shoal-test")
    with pytest.raises(FetchError, match=r"browser.executable.*not an executable file"):
        await fetcher.fetch(Request(f"{site.url}/page"), Render())
    await fetcher.close()


async def test_a_chromium_that_does_not_start(site: Site, tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    program.chmod(0o755)
    fetcher = BrowserFetcher(BrowserSettings(sandbox=False, executable=str(program)), "shoal-test")
    with pytest.raises(FetchError, match="does not start"):
        await fetcher.fetch(Request(f"{site.url}/page"), Render())
    await fetcher.close()


async def test_a_run_that_cannot_render_says_so_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(
        "from shoal import Spider\nclass S(Spider):\n    render = True\n    start_urls = ['http://127.0.0.1:9/']\n"
        f"    settings = {{'browser.executable': '{tmp_path}/none', 'browser.sandbox': False}}\n"
    )
    command = [*SHOAL, "run", "spider.py", "--frontier", "sqlite:///s.db"]
    done = await asyncio.to_thread(
        forking.run, command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert "browser.executable" in done.stderr
    assert "Traceback" not in done.stderr
    runs = [*SHOAL, "runs", "--frontier", "sqlite:///s.db", "--json"]
    listed = await asyncio.to_thread(forking.run, runs, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert listed.stdout == ""  # a start that fails leaves no run behind


async def test_each_process_has_a_browser_and_the_one_that_fetches_nothing_has_none(tmp_path: Path) -> None:
    with shop.serve(12, 0.3) as served:
        (tmp_path / "spider.py").write_text(
            "from shoal import Spider\nclass S(Spider):\n    name = 's'\n    render = True\n"
            f"    start_urls = ['{served.url}/product/%d' % n for n in range(12)]\n"
            "    settings = {'browser.sandbox': False, 'download_delay': 0, 'browser.page_timeout': 60}\n"
            "    def parse(self, response):\n        yield {'name': response.css('h1::text').get()}\n"
        )
        run = [*SHOAL, "run", "spider.py", "--processes", "2", "-o", "o.jsonl"]
        with (
            forking.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
            recorded(lambda: [process.pid]) as marks,
        ):
            said, _ = await asyncio.to_thread(process.communicate, timeout=120)
    assert process.returncode == 0, said
    assert len(marks) == 2
    assert wait_until_gone(marks) == []
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 12


async def test_no_profile_is_left_of_a_browser_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by its driver, which gets no time to remove the profile."""
    with tempfile.TemporaryDirectory(prefix="shoal-t-") as folder:  # the path of a socket must be short
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        process = BrowserProcess(SETTINGS)
        await process.launch()
        assert any(path.is_file() for path in Path(folder).rglob("*"))
        for pid in process._drivers:
            os.kill(pid, signal.SIGKILL)
        await process.kill()
        # Of the driver, an empty folder stays.
        assert [
            path.name for path in Path(folder).rglob("*") if not path.name.startswith("playwright-artifacts-")
        ] == []


APART = """
import asyncio, os, signal, sys
from shoal.fetch.browser import process as orphans
from shoal.fetch.browser.process import BrowserProcess
from shoal.config import BrowserSettings

async def work():
    process = BrowserProcess(BrowserSettings(sandbox=False))
    await process.launch()
    print(*process._groups, flush=True)
    if sys.argv[1] == "driver":
        for pid in process._drivers:
            os.kill(pid, signal.SIGKILL)
    elif sys.argv[1] == "chromium":
        os.kill(min(process._groups), signal.SIGKILL)  # the leader of the first group is its main process
    await process.kill()

child = os.fork()
if child:  # like the first process of a container: it inherits orphans, and reaps none of them
    orphans.adopt()
    ended = os.waitid(os.P_PID, child, os.WEXITED)
    assert ended is not None and ended.si_status == 0, ended
    print(*(orphans.group_of(pid) for pid in orphans.children() - {child}), flush=True)
else:
    asyncio.run(work())
"""


@pytest.mark.parametrize("killed", ["driver", "chromium", "none"])
async def test_no_zombie_is_left_where_nobody_reaps_orphans(killed: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", APART, killed, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors
    groups, left = out.decode().split("\n")[:2]
    assert groups
    assert not set(groups.split()) & set(left.split())
