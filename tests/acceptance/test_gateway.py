"""Real Chromium behind the gateway: it reaches what is allowed, and nothing else by any way out of a page."""

from __future__ import annotations

import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web
from playwright.async_api import Browser, async_playwright

from shoal.fetch.browser.gateway import Gateway
from shoal.fetch.guard import AddressGuard
from tests.support.socks_server import SocksServer

PAGE = """<!doctype html><title>Ways out</title><body><script>
const outcome = {};
const attempt = async (name, work) => {
  try { outcome[name] = await Promise.race([work(), new Promise(r => setTimeout(() => r('no answer'), 8000))]); }
  catch (error) { outcome[name] = 'failed'; }
};
const socket = url => new Promise((done, fail) => {
  const made = new WebSocket(url);
  made.onopen = () => made.send('hello');
  made.onmessage = event => done(event.data);
  made.onerror = fail;
});
const worker = url => new Promise((done, fail) => {
  const code = `fetch('${url}', {mode: 'no-cors'}).then(() => postMessage('reached'), () => postMessage('failed'))`;
  new Worker(URL.createObjectURL(new Blob([code]))).onmessage = event => done(event.data);
});
const frame = url => new Promise(done => {
  const made = document.createElement('iframe');
  made.onload = () => done('loaded');
  made.src = url;
  document.body.append(made);
});
const ways = async (name, http, ws) => {
  await attempt(name + ' fetch', async () => (await (await fetch(http, {mode: 'cors'})).text()));
  await attempt(name + ' socket', () => socket(ws));
  await attempt(name + ' worker', () => worker(http));
  await attempt(name + ' frame', () => frame(http));
  await attempt(name + ' beacon', async () => navigator.sendBeacon(http, 'x') ? 'sent' : 'failed');
};
</script>"""


class Shop:
    """Has a page that uses all ways out of it, and counts the visits of each path."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()
        app = web.Application()
        app.router.add_route("*", "/socket", self._socket)
        app.router.add_route("*", "/{path:.*}", self._page)
        self._runner = web.AppRunner(app)

    async def start(self, tls: ssl.SSLContext | None = None) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        return int(self._runner.addresses[-1][1])

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        self.visits[request.path] += 1
        headers = {"Cache-Control": "max-age=600"} if request.path == "/cached" else {}
        text = PAGE if request.path == "/" else f"{request.method} {request.path}"
        if request.path == "/large":
            text *= 1_000_000
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        answer = web.WebSocketResponse()
        await answer.prepare(request)
        async for message in answer:
            if message.type == WSMsgType.TEXT:
                await answer.send_str(message.data.upper())
        return answer


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    made = Shop()
    yield made
    await made.close()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        sandbox = os.geteuid() != 0  # it can't start as root
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", chromium_sandbox=sandbox)
        yield browser
        await browser.close()


@pytest.fixture
def forbidden() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        listening.setblocking(False)
        yield listening


async def test_no_way_out_of_a_page_leads_past_the_guard(
    shop: Shop, browser: Browser, forbidden: socket.socket
) -> None:
    own, other = await shop.start(), forbidden.getsockname()[1]
    gateway = Gateway(AddressGuard(["127.0.0.1"]))
    listener = await gateway.open(None)
    context = await browser.new_context(proxy={"server": listener.url})
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{own}/")
    found = await page.evaluate(
        f"""(async () => {{
            await ways('own', 'http://127.0.0.1:{own}/data', 'ws://127.0.0.1:{own}/socket');
            await ways('refused', 'http://127.0.0.2:{other}/data', 'ws://127.0.0.2:{other}/socket');
            await ways('secure', 'https://127.0.0.2:{other}/data', 'wss://127.0.0.2:{other}/socket');
            return outcome;
        }})()"""
    )
    assert found["own fetch"] == "GET /data"
    assert found["own socket"] == "HELLO"
    assert found["own worker"] == "reached"
    assert [found[f"{name} {way}"] for name in ("refused", "secure") for way in ("fetch", "socket")] == ["failed"] * 4
    with pytest.raises(BlockingIOError):
        forbidden.accept()
    assert listener.refused["address"] >= 8
    failure = listener.failure("127.0.0.2", other)
    assert failure is not None
    assert str(failure) == "127.0.0.2 is a loopback address, which may not be contacted (serve.allow)"
    answer = await page.goto(f"http://127.0.0.2:{other}/")
    assert answer is not None
    assert (answer.status, answer.headers["proxy-status"]) == (403, "shoal; error=address")
    await context.close()
    await gateway.close()


async def test_the_cache_of_the_browser_works(shop: Shop, browser: Browser) -> None:
    port = await shop.start()
    gateway = Gateway(None)
    listener = await gateway.open(None)
    context = await browser.new_context(proxy={"server": listener.url})
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{port}/")
    for _ in range(3):
        assert await page.evaluate("fetch('/cached').then(answer => answer.text())") == "GET /cached"
        assert await page.evaluate("fetch('/other').then(answer => answer.text())") == "GET /other"
    assert (shop.visits["/cached"], shop.visits["/other"]) == (1, 3)
    await context.close()
    await gateway.close()


async def test_https_and_secure_sockets(shop: Shop, browser: Browser, certificate: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    port = await shop.start(tls)
    gateway = Gateway(None)
    listener = await gateway.open(None)
    context = await browser.new_context(proxy={"server": listener.url}, ignore_https_errors=True)
    page = await context.new_page()
    await page.goto(f"https://127.0.0.1:{port}/")
    assert await page.evaluate(f"socket('wss://127.0.0.1:{port}/socket')") == "HELLO"
    before = listener.received
    await page.evaluate("fetch('/large').then(answer => answer.text())")
    assert listener.received - before > 1_000_000
    assert await page.evaluate("fetch('/small').then(answer => answer.text())") == "GET /small"
    await context.close()
    await gateway.close()


async def test_each_context_has_its_own_proxy(shop: Shop, browser: Browser) -> None:
    port = await shop.start()
    gateway = Gateway(AddressGuard([]))
    async with SocksServer({"ann": "a b", "bob": "b"}) as proxy:
        for user in ("ann", "bob"):
            listener = await gateway.open(proxy.address(user))
            context = await browser.new_context(proxy={"server": listener.url})
            page = await context.new_page()
            await page.goto(f"http://{user}.shop.test:{port}/")
            assert await page.title() == "Ways out"
            assert await page.evaluate(f"socket('ws://{user}.shop.test:{port}/socket')") == "HELLO"
            await context.close()
        assert {(each.user, each.host) for each in proxy.connects} == {
            ("ann", "ann.shop.test"),
            ("bob", "bob.shop.test"),
        }
    await gateway.close()
