"""What a page may not do, and how much of it is kept: downloads, permissions, captured responses, pictures, proxies."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from shoal import Render, Request, Response, Spider, crawl
from shoal.config import BrowserSettings, Config
from shoal.crawling.onion import make_renderer
from shoal.errors import FetchError
from shoal.fetch.browser import devtools
from shoal.fetch.browser.fetcher import BrowserFetcher
from shoal.fetch.guard import AddressGuard
from shoal.http.rendering import Click

SETTINGS = BrowserSettings(sandbox=False, page_timeout=60.0)
pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKS = """<p id=out></p><script>
const names = ["geolocation", "notifications", "camera", "microphone", "clipboard-read", "midi"];
const states = names.map(async name => [name, (await navigator.permissions.query({name})).state]);
const worker = navigator.serviceWorker.register("/worker.js").catch(() => 0)
    .then(() => navigator.serviceWorker.getRegistrations()).then(all => all.length);
const place = new Promise(done => navigator.geolocation.getCurrentPosition(() => done("found"), () => done("refused")));
Promise.all([Promise.all(states), worker, place]).then(([states, worker, place]) => {
    const found = {...Object.fromEntries(states), worker, place, asked: confirm("sure?"), name: prompt("who?", "me")};
    document.getElementById("out").textContent = JSON.stringify(found);
    document.body.className = "done";
});
</script>"""
NOISE = """<style>body { margin: 0 }</style><canvas width=1200 height=700></canvas><script>
const context = document.querySelector("canvas").getContext("2d"), image = context.createImageData(1200, 700);
for (let i = 0; i < image.data.length; i++) image.data[i] = i % 4 == 3 ? 255 : Math.random() * 256;
context.putImageData(image, 0, 0);
</script>"""
PAGES = {
    "/asks": ASKS,
    "/noise": NOISE,
    "/tall": "<style>body { margin: 0 } #inner { width: 800px; height: 200000px }</style><div id=inner></div>",
    "/wide": "<style>body { margin: 0; width: 50000px; height: 5000px }</style>",
    "/many": "<script>for (let i = 0; i < 250; i++) fetch('/data?' + i);</script>",
    "/heavy": "<script>for (let i = 0; i < 5; i++) fetch('/megabytes?' + i);</script>",
    "/shop/list": '<a id=item href=items/1>one</a> <a id=gone href=/gone>gone</a> <button onclick="history.pushState('
    "{}, '', '/shop/other/')\">other</button> <a href=x>x</a>",
    "/shop/items/1": "<title>One</title><a href=2>two</a><form><input name=q value=1></form>",
}


class Site:
    """Serves the pages, and records what it was asked for."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        match request.path:
            case "/file":
                headers = {"Content-Disposition": 'attachment; filename="x.bin"'}
                return web.Response(body=b"the bytes", headers=headers, content_type="application/octet-stream")
            case "/worker.js":
                return web.Response(text="self.onfetch = () => {}", content_type="text/javascript")
            case "/data":
                return web.json_response({"query": request.query_string})
            case "/megabytes":
                return web.Response(body=b"x" * 4_000_000, content_type="text/plain")
            case "/gone":
                return web.Response(status=404, text="<h1>gone</h1>", content_type="text/html")
            case path if path in PAGES:
                return web.Response(text=PAGES[path], content_type="text/html")
        return web.Response(status=404)


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


async def test_permissions_dialogs_and_service_workers_are_refused(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/asks"), Render(wait_for="body.done"))
    found = json.loads(response.css("#out::text").get() or "")
    assert found == {
        "geolocation": "denied", "notifications": "denied", "camera": "denied", "microphone": "denied",
        "clipboard-read": "denied", "midi": "denied", "worker": 0, "place": "refused", "asked": False,
        "name": None,
    }  # fmt: skip
    assert "/worker.js" not in site.asked


# -- downloads


async def test_a_download_is_refused(site: Site, browser: BrowserFetcher) -> None:
    with pytest.raises(FetchError, match=r"browser\.downloads") as failure:
        await browser.fetch(Request(f"{site.url}/file"), Render())
    assert (failure.value.kind, failure.value.retryable) == ("download", False)


async def test_a_download_is_saved_as_a_file_of_an_item(site: Site, tmp_path: Path) -> None:
    class Files(Spider):
        name = "files"
        start_urls = [f"{site.url}/file"]
        render = True
        settings = {
            "browser.sandbox": False, "browser.page_timeout": 60, "browser.downloads": "save", "robots.obey": False,
            "files.store": str(tmp_path / "files"),
        }  # fmt: skip

        def parse(self, response: Response) -> object:
            yield {"file": response.save()}

    (item,) = (await crawl(Files)).items
    assert (tmp_path / "files" / item["file"]["path"]).read_bytes() == b"the bytes"


# -- how much is kept


async def test_many_captured_responses(site: Site, browser: BrowserFetcher, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal.browser"):
        response = await browser.fetch(Request(f"{site.url}/many"), Render(capture=("*/data*",)))
    assert len({each.url for each in response.captured}) == len(response.captured) == 200
    assert sum("not captured" in line for line in caplog.messages) == 1


async def test_large_captured_responses(site: Site, browser: BrowserFetcher, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal.browser"):
        response = await browser.fetch(Request(f"{site.url}/heavy"), Render(capture=("*/megabytes*",)))
    assert [len(each.body) for each in response.captured] == [4_000_000] * 4
    assert sum(len(each.body) for each in response.captured) <= devtools.MAX_CAPTURED_BYTES
    assert sum("not captured" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("options", [Render(screenshot=True), Render(screenshot="canvas"), Render(pdf=True)])
async def test_a_picture_that_is_too_large(site: Site, options: Render) -> None:
    fetcher = BrowserFetcher(msgspec.structs.replace(SETTINGS, max_bytes=500_000), "shoal-test")
    try:
        with pytest.raises(FetchError, match=r"its screenshot or its PDF is larger than 500000 bytes") as failure:
            await fetcher.fetch(Request(f"{site.url}/noise"), options)
        assert failure.value.kind == "too large"
        assert (await fetcher.fetch(Request(f"{site.url}/noise"), Render())).ok
    finally:
        await fetcher.close()


@pytest.mark.parametrize(
    ("path", "screenshot", "size"),
    [
        ("/tall", "full", (1280, 16384)),
        ("/wide", "full", (16384, 1280)),
        ("/tall", "#inner", (800, 1280 * 16384 // 800)),
        ("/tall", True, (1280, 720)),
    ],
)
async def test_a_huge_page_has_a_picture_of_its_beginning(
    site: Site, browser: BrowserFetcher, path: str, screenshot: bool | str, size: tuple[int, int]
) -> None:
    """Chromium would crash."""
    response = await browser.fetch(Request(site.url + path), Render(screenshot=screenshot))
    assert response.screenshot is not None
    assert struct.unpack(">II", response.screenshot[16:24]) == size


# -- proxies behind a guard


async def test_a_guarded_browser_uses_only_proxies_of_the_operator(site: Site) -> None:
    config = Config(browser=SETTINGS)
    fetcher = make_renderer(config, AddressGuard(["127.0.0.1/32"]))
    try:
        with pytest.raises(FetchError, match=r"would bypass the address guard \(serve\.allow\)") as failure:
            await fetcher.fetch(Request(f"{site.url}/noise"), Render(), upstream="http://127.0.0.1:9/")
        assert (failure.value.kind, failure.value.retryable) == ("proxy", False)
    finally:
        await fetcher.close()


# -- the page that actions lead to


async def test_the_status_is_that_of_the_page_that_is_shown(site: Site, browser: BrowserFetcher) -> None:
    response = await browser.fetch(Request(f"{site.url}/shop/list"), Render(actions=(Click("#gone"),)))
    assert (response.status, response.css("h1::text").get()) == (404, "gone")


async def test_links_refer_to_the_page_that_is_shown(site: Site, browser: BrowserFetcher) -> None:
    request = Request(f"{site.url}/shop/list")
    response = await browser.fetch(request, Render(actions=(Click("#item"),)))
    assert (response.url, response.shown_url) == (request.url, f"{site.url}/shop/items/1")
    assert response.links() == [f"{site.url}/shop/items/2"]
    assert response.form().submit().url == f"{site.url}/shop/items/1?q=1"
    moved = await browser.fetch(request, Render(actions=(Click("button"),)))  # by a script, without a request
    assert f"{site.url}/shop/other/x" in moved.links()
    assert (await browser.fetch(request, Render())).links()[0] == f"{site.url}/shop/items/1"


async def test_the_scope_applies_to_what_actions_lead_to(site: Site) -> None:
    class Clicks(Spider):
        name = "clicks"
        settings = {
            "browser.sandbox": False, "browser.page_timeout": 60, "robots.obey": False, "scope.deny": ["/items/"],
        }  # fmt: skip

        def start(self) -> object:
            yield Request(f"{site.url}/shop/list", render=Render(actions=(Click("#item"),)))

        def parse(self, response: Response) -> object:
            yield {"title": response.css("title::text").get()}

    site.asked.clear()
    done = await crawl(Clicks)
    assert done.summary is not None
    assert (done.items, done.summary.dead_kinds) == ([], {"scope": 1})
    assert "/shop/items/1" not in site.asked
