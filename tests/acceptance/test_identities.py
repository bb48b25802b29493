"""Identities: a site that blocks addresses is crawled through real proxies, each with an address of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shoal import Response, Spider, crawl
from tests.acceptance.blocking import BlockingSite, LyingProxy
from tests.acceptance.crawls import ended
from tests.servers import ProxyServer
from tests.socks_server import SocksServer

SETTINGS: dict[str, Any] = {
    "download_delay": 0,
    "concurrency_per_host": 4,
    "retry.base_delay": 0.01,
    "http.connect_timeout": 5,
    "http.read_timeout": 5,
    "identities.rest": 1.0,
    "identities.give_up_after": 50,
    "shutdown_grace": 1,
}


class Links(Spider):
    name = "links"

    def parse(self, response: Response) -> Any:
        yield {"url": response.url, "h1": response.css("h1::text").get()}
        yield response.follow_all("a")


@pytest.fixture
async def proxies() -> AsyncIterator[list[ProxyServer | SocksServer]]:
    """One of each kind. The site sees them as 127.0.0.11, .12 and .13."""
    async with AsyncExitStack() as stack:
        made = [
            ProxyServer("127.0.0.11", "ann:s3cret"),
            SocksServer({"bob": "s3cret"}, "127.0.0.12"),
            ProxyServer("127.0.0.13"),
        ]
        yield [await stack.enter_async_context(proxy) for proxy in made]  # type: ignore[arg-type]


def urls_of(proxies: list[Any]) -> list[str]:
    return [proxy.address("bob") if isinstance(proxy, SocksServer) else proxy.address for proxy in proxies]


async def crawled(site: BlockingSite, proxies: list[str], spider: type[Spider] = Links, **settings: Any) -> Any:
    made = crawl(spider, {**SETTINGS, **settings, "proxies": proxies}, arguments={"start_urls": [site.url + "/"]})
    return await ended(made)


@pytest.mark.parametrize("delay", [0.0, 0.01])
async def test_a_site_that_blocks_is_crawled_completely(proxies: list[Any], delay: float) -> None:
    async with BlockingSite(60) as site:
        items, summary = await crawled(site, urls_of(proxies), download_delay=delay)
    assert (summary.state, summary.stats.dead) == ("finished", 0)
    assert {item["h1"] for item in items} == site.paths
    assert len(items) == len(site.paths)
    assert {visit.address for visit in site.log} == {"127.0.0.11", "127.0.0.12", "127.0.0.13"}  # nothing directly
    assert len(site.blocks()) >= 3
    late = site.during_rest(0.95)
    if delay:  # one request at a time
        assert late == []
    else:  # those that were on their way
        assert all(visit.status == 429 for visit in late)
        assert len(late) <= 3 * len(site.blocks())
