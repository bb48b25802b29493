"""Helpers for the tests of bad input and of fetching: fast settings, a spider, and checks after every crawl."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from shoal import Crawl, Request, Response, Spider, crawl
from shoal.crawling.stats import Summary
from tests.support.servers import MisbehavingServer

QUICK: dict[str, Any] = {
    "download_delay": 0,
    "robots.obey": False,
    "throttle.enabled": False,
    "retry.max_attempts": 1,
    "retry.base_delay": 0.01,
    "http.connect_timeout": 10,
    "http.read_timeout": 10,
    "http.total_timeout": 20,
    "http.max_body_bytes": 1_000_000,
    "shutdown_grace": 1,
}


class Pages(Spider):
    """Yields one item per page. ``handle`` gets the page under test, ``parse`` the healthy page."""

    name = "pages"

    def start(self) -> Iterator[Request]:
        for url in self.start_urls:
            yield Request(url, callback=self.parse if url.endswith("/healthy") else self.handle)

    def parse(self, response: Response) -> Any:
        yield {"url": response.url, "h1": response.css("h1::text").get()}

    def handle(self, response: Response) -> Any:
        return self.parse(response)


async def crawl_beside(
    server: MisbehavingServer, *targets: str, spider: type[Spider] = Pages, **settings: Any
) -> tuple[list[dict[str, Any]], Summary]:
    """Crawl URLs, or paths of the server, and a healthy page. Returns the items without that of the healthy page.

    Checks that the crawl ends by itself, that nothing is lost, and that the healthy page has its item.
    """
    healthy = f"{server.url}/leaf/healthy"
    urls = [target if target.startswith("http") else server.url + target for target in targets]
    made = crawl(spider, QUICK | settings, arguments={"start_urls": [*urls, healthy]})
    items, summary = await ended(made)
    assert summary.state == "finished"
    assert summary.stats.remaining == 0
    assert {"url": healthy, "h1": "Leaf healthy"} in items
    return [item for item in items if item.get("url") != healthy], summary


async def ended(made: Crawl) -> tuple[list[dict[str, Any]], Summary]:
    """The items and the summary of a crawl, which must end by itself with balanced counters."""
    async with asyncio.timeout(15):
        done = await made
    summary = done.summary
    assert summary is not None
    assert summary.stats.balanced
    assert summary.lost == 0
    assert summary.stats.leased == 0
    return done.items, summary
