"""The test servers cause the faults that their names say. Otherwise other tests would prove nothing."""

import asyncio
import base64
import json
import re
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import brotli
import pytest
import zstandard
from examples.bookshop import BOOKS, CATEGORIES, Bookshop

from tests.support.servers import CHARSETS, PLAIN, MisbehavingServer, ProxyServer, SiteServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


@pytest.fixture
async def bad() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


@pytest.fixture
async def shop() -> AsyncIterator[Bookshop]:
    async with Bookshop(crawl_delay=0.5, slow=0.05) as server:
        yield server


async def read(client: aiohttp.ClientSession, url: str) -> str:
    async with client.get(url) as response:
        assert response.status == 200
        return await response.text()


def hrefs(page: str) -> list[str]:
    return re.findall(r'href="(/[^"]*)"', page)


async def crawl(client: aiohttp.ClientSession, url: str, follow: Callable[[str], bool]) -> dict[str, int]:
    """Every path reachable from `/` through links that `follow` likes, with its status."""
    statuses: dict[str, int] = {}
    queue = ["/"]
    while queue:
        path = queue.pop()
        if path in statuses:
            continue
        async with client.get(url + path, allow_redirects=False) as response:
            statuses[path] = response.status
            queue += filter(follow, hrefs(await response.text()))
    return statuses


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_bookshop_is_whole(shop: Bookshop, client: aiohttp.ClientSession) -> None:
    statuses = await crawl(client, shop.url, lambda path: not path.startswith("/calendar/2"))
    assert {book.path for book in BOOKS} <= statuses.keys()
    assert {f"/category/{name}/" for name in CATEGORIES} <= statuses.keys()
    assert {path: status for path, status in statuses.items() if status != 200} == {
        "/missing": 404,
        "/old-offers": 301,
        "/flaky": 503,
    }
    assert len(BOOKS) == 60
    assert len(shop.log) == len(statuses)
    assert all(visit.ended is not None and visit.ended >= visit.arrived for visit in shop.log)


async def test_bookshop_corners(shop: Bookshop, client: aiohttp.ClientSession) -> None:
    robots = await read(client, shop.url + "/robots.txt")
    assert robots == f"User-agent: *\nDisallow: /admin/\nCrawl-delay: 0.5\nSitemap: {shop.url}/sitemap.xml\n"
    answers = []
    for _ in range(3):
        async with client.get(shop.url + "/flaky") as response:
            answers.append((response.status, response.headers.get("Retry-After")))
    assert answers == [(503, "1"), (503, None), (200, None)]
    assert "/calendar/2027/01/" in await read(client, shop.url + "/calendar/2026/12/")
    assert "/calendar/-1/12/" in await read(client, shop.url + "/calendar/0/01/")
    async with client.post(shop.url + "/", data=b"x") as response:
        assert response.status == 405
    async with client.head(shop.url + "/") as response:
        assert int(response.headers["Content-Length"]) > 1000


@pytest.mark.parametrize(
    ("path", "decode"),
    [
        ("/gzip", lambda data: zlib.decompress(data, 31)),
        ("/deflate-raw", lambda data: zlib.decompress(data, -15)),
        ("/deflate-zlib", zlib.decompress),
        ("/br", brotli.decompress),
        ("/zstd", zstandard.decompress),
        ("/unknown-encoding", bytes),
    ],
)
async def test_encodings(
    bad: MisbehavingServer, client: aiohttp.ClientSession, path: str, decode: Callable[[bytes], bytes]
) -> None:
    async with client.get(bad.url + path) as response:
        assert decode(await response.read()) == PLAIN


@pytest.mark.parametrize("path", ["/bad-gzip", "/truncated-gzip"])
async def test_broken_gzip(bad: MisbehavingServer, client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(bad.url + path) as response:
        body = await response.read()
    with pytest.raises(zlib.error):
        zlib.decompress(body, 31)


async def test_gzip_bomb_expands_a_thousandfold(bad: MisbehavingServer, client: aiohttp.ClientSession) -> None:
    unpacker = zlib.decompressobj(31)
    expanded = 0
    async with client.get(bad.url + "/gzip-bomb") as response:
        assert int(response.headers["Content-Length"]) < 11_000_000
        while expanded < 50_000_000:
            expanded += len(unpacker.decompress(await response.content.read(4096)))
    assert bad.sent["/gzip-bomb"] < 5_000_000


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/reset", aiohttp.ClientOSError),
        ("/half", aiohttp.ClientPayloadError),
        ("/half-chunked", aiohttp.ClientPayloadError),
        ("/endless-headers", aiohttp.ClientError),
        ("/huge-header", aiohttp.ClientError),
        ("/junk", aiohttp.ClientError),
        ("/redirect-loop", aiohttp.TooManyRedirects),
        ("/redirect-bad", aiohttp.InvalidURL),
        ("/hang", TimeoutError),
        ("/hang-body", TimeoutError),
        ("/slow-drip", TimeoutError),
    ],
)
async def test_faults(bad: MisbehavingServer, client: aiohttp.ClientSession, path: str, error: type[Exception]) -> None:
    timeout = aiohttp.ClientTimeout(total=0.3 if error is TimeoutError else 10)

    async def fetch() -> None:
        async with client.get(bad.url + path, timeout=timeout) as response:
            await response.read()

    with pytest.raises(error):
        await fetch()
    assert bad.requests[0].path == path
    await until(lambda: bad.requests[-1].end)


@pytest.mark.parametrize("path", ["/huge", "/huge-declared"])
async def test_huge_stops_with_the_client(bad: MisbehavingServer, client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(bad.url + path) as response:
        await response.content.readexactly(1_000_000)
        response.close()
    await until(lambda: bad.requests[0].end)
    assert 1_000_000 < bad.sent[path] < 50_000_000


async def test_leaving_does_not_wait_for_a_client_that_stopped_reading() -> None:
    async with asyncio.timeout(5):
        async with MisbehavingServer() as bad:
            _reader, writer = await asyncio.open_connection("127.0.0.1", int(bad.url.rpartition(":")[2]))
            writer.write(b"GET /huge HTTP/1.1\r\n\r\n")
            await until(lambda: bad.sent["/huge"])
        writer.transport.abort()


@pytest.mark.parametrize("name", CHARSETS)
async def test_charsets(bad: MisbehavingServer, client: aiohttp.ClientSession, name: str) -> None:
    page = CHARSETS[name]
    async with client.get(f"{bad.url}/charset/{name}") as response:
        assert f"<h1>{page.text}</h1>" in (await response.read()).decode(page.encoding)


async def test_redirects(bad: MisbehavingServer, client: aiohttp.ClientSession) -> None:
    async with client.get(bad.url + "/redirect/3") as response:
        assert len(response.history) == 3
    async with client.get(bad.url + "/redirect-no-location") as response:
        assert response.status == 302
    out = "http://other.test/x?y=1"
    async with client.get(bad.url + "/redirect-out", params={"to": out}, allow_redirects=False) as response:
        assert response.headers["Location"] == out


async def test_statuses(bad: MisbehavingServer, client: aiohttp.ClientSession) -> None:
    async with client.get(bad.url + "/status/429?retry_after=7") as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
    for path, status in {"/status/204": 204, "/status/599": 599, "/status/x": 400, "/nothing": 404}.items():
        async with client.get(bad.url + path) as response:
            assert response.status == status


async def test_pages(bad: MisbehavingServer, client: aiohttp.ClientSession) -> None:
    assert hrefs(await read(client, bad.url + "/links/12")) == [f"/leaf/{i}" for i in range(12)]
    assert await read(client, bad.url + "/leaf/3") == "<h1>Leaf 3</h1>"
    assert await read(client, bad.url + "/empty") == ""
    assert "crossed" in await read(client, bad.url + "/broken-html")


async def test_cookies(bad: MisbehavingServer) -> None:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        await read(client, bad.url + "/set-cookie")
        assert await read(client, bad.url + "/show-cookie") == "flavour=oat"


@pytest.mark.parametrize("chunked", [None, True])
async def test_echo(bad: MisbehavingServer, client: aiohttp.ClientSession, chunked: bool | None) -> None:
    async with client.post(
        bad.url + "/echo?a=1", data=b"\x00body", headers={"X-One": "1"}, chunked=chunked
    ) as response:
        heard = await response.json()
    assert (heard["method"], heard["path"]) == ("POST", "/echo?a=1")
    assert ["X-One", "1"] in heard["headers"]
    assert base64.b64decode(heard["body"]) == b"\x00body"


@pytest.mark.parametrize(("pages", "links"), [(1, 1), (7, 2), (200, 10), (30, 100)])
async def test_site_is_reachable(client: aiohttp.ClientSession, pages: int, links: int) -> None:
    async with SiteServer(pages, links) as site:
        statuses = await crawl(client, site.url, lambda path: True)
        assert statuses == dict.fromkeys(site.paths, 200)
        assert site.hits == dict.fromkeys(site.paths, 1)
        assert f"<h1>Page {pages - 1}</h1>" in await read(client, f"{site.url}/p/{pages - 1}")


async def test_site_latency_keeps_order_of_pipelined_requests() -> None:
    async with SiteServer(3, latency=0.05) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(site.url.rpartition(":")[2]))
        writer.write(b"GET /p/2 HTTP/1.1\r\nHost: a.test\r\n\r\nGET /p/1 HTTP/1.1\r\nConnection: close\r\n\r\n")
        data = await reader.read()
        assert re.findall(rb"<h1>(.*?)</h1>", data) == [b"Page 2", b"Page 1"]
        writer.close()
        await writer.wait_closed()
        assert [(visit.host, visit.path) for visit in site.log] == [("a.test", "/p/2"), ("", "/p/1")]
        assert all(visit.end is not None and visit.end - visit.start >= 0.045 for visit in site.log)


async def test_site_robots(client: aiohttp.ClientSession) -> None:
    async with SiteServer(3, robots="User-agent: *\nDisallow: /p/1\n") as site:
        assert "Disallow: /p/1" in await read(client, site.url + "/robots.txt")
    async with SiteServer(3) as site, client.get(site.url + "/robots.txt") as response:
        assert response.status == 404


@pytest.mark.parametrize("module", ["tests.support.servers", "examples.bookshop"])
async def test_processes(client: aiohttp.ClientSession, module: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, "--port", "0", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip().removeprefix("bookshop: ").rstrip("/")
        await read(client, url + "/")
        if module == "tests.support.servers":
            assert json.loads(await read(client, url + "/-/hits")) == {"/": 1}
            [[host, path, start, end]] = json.loads(await read(client, url + "/-/log"))
            assert (url, path) == (f"http://{host}", "/")
            assert start <= end
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_proxy_forwards(bad: MisbehavingServer, client: aiohttp.ClientSession) -> None:
    async with ProxyServer() as proxy:
        async with client.post(bad.url + "/echo?a=1", data=b"body", proxy=proxy.url) as response:
            heard = await response.json()
        assert (heard["path"], base64.b64decode(heard["body"])) == ("/echo?a=1", b"body")
        async with client.get("http://far.test/", proxy=proxy.url) as response:
            assert response.status == 403
        async with client.get("http://127.0.0.1:1/", proxy=proxy.url) as response:
            assert response.status == 502
        paths = [visit.path for visit in proxy.requests]
        assert paths == [bad.url + "/echo?a=1", "http://far.test/", "http://127.0.0.1:1/"]


async def test_proxy_passes_on_that_the_client_left(bad: MisbehavingServer, client: aiohttp.ClientSession) -> None:
    async with ProxyServer() as proxy:
        with pytest.raises(TimeoutError):
            await client.get(bad.url + "/hang", proxy=proxy.url, timeout=aiohttp.ClientTimeout(total=0.2))
        await until(lambda: bad.requests[0].end and proxy.requests[0].end)


async def test_proxy_tunnels(bad: MisbehavingServer) -> None:
    async with ProxyServer() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        target = bad.url.removeprefix("http://")
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET /leaf/1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"<h1>Leaf 1</h1>")
        writer.close()
        await writer.wait_closed()
        assert [visit.path for visit in proxy.requests] == [target]
