"""Crawls of sitemaps: from robots.txt to the pages, on every frontier, with kills, and with hostile sitemaps."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import Response, SitemapSpider, crawl
from tests.acceptance.crawls import QUICK, ended
from tests.acceptance.fleets import InProcessFleet, frontier_url
from tests.acceptance.mapped_site import MappedSite, index, urlset
from tests.support import forking
from tests.support.forking import SHOAL

SETTINGS = {**QUICK, "http.max_body_bytes": 50 << 20}
PAGES = 300
SPIDER = """
from shoal import SitemapSpider

class Pages(SitemapSpider):
    name = "pages"
    settings = {"download_delay": 0, "concurrency": 8, "retry.max_attempts": 50, "throttle.enabled": False}
    links_per_page = 50

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
"""


class Pages(SitemapSpider):
    name = "pages"

    def parse(self, response: Response) -> Iterator[dict[str, Any]]:
        yield {"path": "/" + response.url.split("/", 3)[3]}


def spread() -> dict[str, bytes | str | None]:
    """A site whose robots.txt names an index and a feed. The index lists three sitemaps, one of them in UTF-16, one
    compressed; together they have all pages, some of them several times."""
    numbers = [f"/p/{n}" for n in range(PAGES)]
    feed = "".join(f"<item><link>{{site}}{path}</link></item>" for path in numbers[250:])
    return {
        "/robots.txt": "User-agent: *\nDisallow: /private\nSitemap: {site}/index.xml\nSitemap: {site}/feed.xml",
        "/index.xml": index("/a.xml", "/b.xml.gz", "/c.txt", "/index.xml"),
        "/a.xml": urlset(*numbers[:120], "/private/1").encode("utf-16"),
        "/b.xml.gz": gzip.compress(urlset(*numbers[100:200]).encode()),
        "/c.txt": "\n".join("{site}" + path for path in numbers[190:260]),
        "/feed.xml": f"<rss><channel>{feed}</channel></rss>",
    }


async def test_from_robots_txt_to_the_pages() -> None:
    async with MappedSite(spread()) as site:
        settings = {**SETTINGS, "robots.obey": True}
        items, summary = await ended(crawl(Pages(sitemap_urls=[site.url + "/robots.txt"]), settings))
        assert sorted(item["path"] for item in items) == sorted(f"/p/{n}" for n in range(PAGES))
        assert summary.dead_kinds == {"robots": 1}
        assert summary.own_counters["sitemaps"] == 5
        assert set(site.visits().values()) == {1} | {site.visits()["/robots.txt"]}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "postgresql"])
async def test_fifty_thousand_urls_on_every_frontier(kind: str, tmp_path: Path) -> None:
    """Every second URL needs quoting, which costs far more than the others."""
    urls = [f"/p/{n}" if n % 2 else f"/p/{n}?q=%E6%9C%AC" for n in range(50_000)]
    if kind in ("memory", "sqlite"):
        frontier = "memory:" if kind == "memory" else f"sqlite:///{tmp_path}/crawl.db"
    else:
        frontier = frontier_url(kind)
    settings = {**SETTINGS, "scope.max_pages": 5, "frontier": frontier, "concurrency": 1}
    async with MappedSite({"/map.xml.gz": gzip.compress(urlset(*urls).encode())}) as site:
        async with asyncio.timeout(120):
            done = await crawl(Pages(sitemap_urls=[site.url + "/map.xml.gz"]), settings)
    assert done.summary is not None
    assert done.summary.stats.pushed == 50_001
    assert done.summary.stats.balanced
    assert done.summary.state == "limit"


async def test_cyclic_and_endless_indexes_have_an_end() -> None:
    """``/cycle`` lists itself and another index that lists it. ``/endless/N`` always lists two new indexes."""

    class Endless(MappedSite):
        def _log(self, request: Any) -> Any:
            if request.path.startswith("/endless"):
                self.bodies[request.path] = index(request.path + "0", request.path + "1", "/cycle")
            return super()._log(request)

    async with Endless({"/cycle": index("/cycle", "/back"), "/back": index("/cycle") + urlset("/a")}) as site:
        spider = Pages(sitemap_urls=[site.url + "/cycle", site.url + "/endless"], max_sitemaps=100)
        items, _ = await ended(crawl(spider, SETTINGS))
        assert items == [{"path": "/a"}]
        visits = site.visits()
    assert visits["/cycle"] == visits["/back"] == 1
    assert 10 < len(visits) <= 104


async def test_hostile_sitemaps_do_not_stop_the_others() -> None:
    bomb = zlib.compressobj(9, wbits=31)
    huge = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(200)) + bomb.flush()
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    bodies: dict[str, bytes | str | None] = {
        "/bomb.gz": huge,
        "/laughs.xml": f'<!DOCTYPE x [<!ENTITY l0 "lol">{laughs}]>' + urlset("/l?&l9;", "/after-laughs"),
        "/long.xml": urlset("/" + "x" * (1 << 20), "/after-long"),
        "/html": "<html>Not found</html>",
        "/gone.xml": None,
        "/broken.gz": gzip.compress(b"x" * 10_000)[:50],
        "/wrong.xml": urlset("/caf\xe9").encode("latin-1"),
        "/healthy.xml": urlset("/healthy"),
    }
    async with MappedSite(bodies) as site:
        spider = Pages(sitemap_urls=[site.url + path for path in bodies])
        async with asyncio.timeout(60):
            done = await crawl(spider, SETTINGS)
    assert {item["path"] for item in done.items} == {
        "/l?&l9;", "/after-laughs", "/after-long", "/caf%E9", "/healthy",
    }  # fmt: skip
    assert done.summary is not None
    assert done.summary.dead_kinds == {"callback": 3, "http 404": 1}
    assert done.summary.stats.balanced


def paths_of(file: Path, site: MappedSite) -> Counter[str]:
    return Counter(json.loads(line)["url"].removeprefix(site.url) for line in file.read_text().splitlines())


EVERY_PAGE = Counter(f"/p/{n}" for n in range(PAGES))


@pytest.mark.timeout(180)
async def test_killed_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    async with MappedSite(spread(), delay=0.03) as site:
        command = [
            *SHOAL, "run", "spider.py", "-a", f"sitemap_urls={site.url}/robots.txt",
            "--frontier", f"sqlite:///{tmp_path}/crawl.db", "-o", str(tmp_path / "out.jsonl"), "-q",
        ]  # fmt: skip
        for visits in (4, 15, 150):  # at the first sitemaps, between portions, and among the pages
            crawling = forking.Popen(command, cwd=tmp_path)
            while len(site.requests) < visits:
                await asyncio.sleep(0.005)
            crawling.send_signal(signal.SIGKILL)
            assert await asyncio.to_thread(crawling.wait, 60) == -signal.SIGKILL
        assert (await asyncio.to_thread(forking.run, command, cwd=tmp_path)).returncode == 0
        assert paths_of(tmp_path / "out.jsonl", site) == EVERY_PAGE


@pytest.mark.timeout(180)
async def test_a_fleet_with_a_killed_worker(tmp_path: Path) -> None:
    async with MappedSite(spread(), delay=0.03) as site:
        with InProcessFleet(tmp_path, frontier_url("redis"), SPIDER) as fleet:
            arguments = ("-a", f"sitemap_urls={site.url}/robots.txt")
            done = await asyncio.to_thread(fleet.shoal, "start", "spider.py", *arguments, "--set=worker.session=3")
            fleet.run_id = json.loads(done.stdout)["run_id"]
            first = fleet.worker()
            while len(site.requests) < 6:
                await asyncio.sleep(0.005)
            os.kill(first.pid, signal.SIGKILL)
            fleet.worker()
            fleet.worker()
            await asyncio.to_thread(fleet.wait, 120)
            await asyncio.to_thread(fleet.shoal, "export", fleet.run_id, "-o", "out.jsonl")
        assert paths_of(tmp_path / "out.jsonl", site) == EVERY_PAGE
