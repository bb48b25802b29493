"""What the web really sends and expects: URLs go out as they were written, and odd answers are read leniently."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shoal import Response, SitemapSpider, Spider, crawl
from shoal.config import Config
from shoal.frontier import open_store
from shoal.operations.url_report import Agent, report_url
from shoal.ports import FrontierOptions
from tests.support.loops import only_uvloop as event_loop_policy

__all__ = ["event_loop_policy"]

FAST: dict[str, Any] = {"download_delay": 0, "retry": {"max_attempts": 1}}


class RawSite:
    """Answers each request target, byte for byte, with prepared bytes, and closes the connection."""

    def __init__(self) -> None:
        self.url = ""
        self.targets: list[str] = []
        self.answers: dict[str, bytes] = {}

    def page(self, target: str, body: str, kind: str = "text/html") -> None:
        self.answers[target] = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n{body}".encode()

    def redirect(self, target: str, location: str) -> None:
        self.answers[target] = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\n\r\n".encode()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        target = head.split(b" ")[1].decode()
        self.targets.append(target)
        writer.write(self.answers.get(target, b"HTTP/1.1 404 Not Found\r\n\r\n"))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def raw_site() -> AsyncIterator[RawSite]:
    site = RawSite()
    server = await asyncio.start_server(site.converse, "127.0.0.1", 0)
    site.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield site
    finally:
        server.close()
        await server.wait_closed()


class Pages(Spider):
    name = "pages"

    def parse(self, response: Response) -> Any:
        yield {"url": response.url, "redirects": response.redirects, "flags": list(response.flags)}
        yield response.follow_all("a")


async def crawled(site: RawSite, **options: Any) -> list[Mapping[str, Any]]:
    done = await crawl(Pages, {**FAST, **options}, arguments={"start_urls": [site.url + "/"]})
    return list(done.items)


SIGNED = "/get?u=http%3A%2F%2Fx%2Fy&s=%7E%27"
ODD = "/%zz/%3a%40%28?a=%2B+%20&b[0]=|{c}"


async def test_links_are_fetched_as_the_page_wrote_them() -> None:
    async with raw_site() as site:
        site.page("/", f'<a href="{SIGNED}">a</a><a href="{ODD}">b</a><a href="/é x">c</a><a href="/%c3%a9%20x">c</a>')
        for target in (SIGNED, ODD, "/%C3%A9%20x"):
            site.page(target, "<p>")
        items = await crawled(site)
    targets = ["/", SIGNED, ODD, "/%C3%A9%20x"]
    assert sorted(item["url"] for item in items) == sorted(site.url + target for target in targets)
    assert sorted(site.targets) == sorted(["/robots.txt", *targets])


async def test_a_redirect_to_another_spelling_of_the_url_is_followed() -> None:
    async with raw_site() as site:
        site.page("/", '<a href="/%7Eann">a</a>')
        site.redirect("/%7Eann", "/~ann")
        site.redirect("/~ann", "/~ann?")
        site.page("/~ann?", "<p>")
        items = await crawled(site)
    assert [(item["url"], item["redirects"]) for item in items[1:]] == [
        (site.url + "/~ann?", [site.url + "/%7Eann", site.url + "/~ann"])
    ]


async def test_rules_of_scope_and_robots_see_the_normal_form() -> None:
    async with raw_site() as site:
        site.page("/robots.txt", "User-agent: *\nDisallow: /~ann\n", "text/plain")
        site.page("/", '<a href="/%7Eann">a</a><a href="/%7Ebob">b</a><a href="/%7Ecarl">c</a>')
        site.page("/%7Ecarl", "<p>")
        await crawled(site, scope={"deny": ["/~bob"]})
    assert site.targets == ["/robots.txt", "/", "/%7Ecarl"]


async def test_urls_of_a_sitemap_are_fetched_as_they_are_written() -> None:
    class Mapped(SitemapSpider):
        name = "mapped"

        def parse(self, response: Response) -> Any:
            yield {"url": response.url}

    async with raw_site() as site:
        loc = site.url + SIGNED.replace("&", "&amp;")
        site.page("/sitemap.xml", f"<urlset><url><loc>{loc}</loc></url></urlset>", "text/xml")
        site.page(SIGNED, "<p>")
        done = await crawl(Mapped, FAST, arguments={"sitemap_urls": [site.url + "/sitemap.xml"]})
    assert list(done.items) == [{"url": site.url + SIGNED}]
    assert site.targets[-1] == SIGNED


# -- odd answers


async def test_odd_answers_are_pages_and_why_says_what_was_odd(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
    packed = gzip.compress(b"<p>" + bytes(range(256)) * 20)[:-30]
    odd = {
        "/coding": head + b"Content-Encoding: utf-8\r\n\r\n<p>",
        "/truncated": head + b"Content-Encoding: gzip\r\n\r\n" + packed,
        "/lengths": head + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n<p>",
        "/both": head + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n<p>\r\n0\r\n\r\n",
        "/cr": head + b"Server: a\rb\r\nContent-Length: 3\r\n\r\n<p>",
        "/space": head + b"Server : a\r\nContent-Length: 3\r\n\r\n<p>",
        "/headers": head + b"X: 1\r\n" * 500 + b"\r\n<p>",
    }
    async with raw_site() as site:
        site.answers |= odd
        site.page("/", "".join(f"<a href={path}>x</a>" for path in odd))
        items = await crawled(site, frontier=f"sqlite:///{tmp_path}/run.db")
        store = await open_store(f"sqlite:///{tmp_path}/run.db")
        flags = {item["url"].removeprefix(site.url): item["flags"] for item in items}
        (run,) = await store.list_runs()
        frontier = await store.frontier(run.run_id, FrontierOptions())
        report = await report_url(frontier, f"{site.url}/truncated", Config(), Agent("t"))
        await store.close()
    assert flags.keys() == {"/", *odd}
    assert (flags["/"], flags["/headers"]) == ([], [])
    assert flags["/coding"] == ["unknown content encoding 'utf-8'"]
    assert flags["/truncated"] == ["truncated gzip"]
    assert all(flags[path][0].startswith("odd HTTP: ") for path in ("/lengths", "/both", "/cr", "/space"))
    assert report is not None
    assert [event.detail for event in report.history.events if event.kind == "note"] == ["truncated gzip"]
