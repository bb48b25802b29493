"""The URLs of a site, from its sitemaps or its links: `shoal map`."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import aclosing

from msgspec import Struct

from shoal.config import Resolved
from shoal.crawling.stats import CrawlSnapshot, Summary
from shoal.errors import ShoalError
from shoal.runs.crawl import Crawl
from shoal.sitemaps.entry import read_since
from shoal.sitemaps.mapping import MapSpider, link_spider
from shoal.spider import Spider
from shoal.urls.normalize import url_fingerprint


class SiteUrl(Struct, frozen=True):
    """A URL of a site. ``lastmod`` is when its sitemap says that it changed, in ISO 8601."""

    url: str
    lastmod: str | None = None


class SiteMap:
    """Lists the URLs of a site, each once: those in its sitemaps, or if there is none, those that its pages link to.

    It crawls in memory, in one or two parts, and stops at ``limit``. It is awaitable once. ``summary`` is that of the
    last part."""

    def __init__(
        self,
        site: str,
        resolved: Resolved,
        on_url: Callable[[SiteUrl], None],
        *,
        match: re.Pattern[str] | None = None,
        since: str | None = None,
        limit: int | None = None,
    ) -> None:
        """``site`` is a normalized URL. ``since``: leave out URLs with an earlier date; ValueError if it is no date.
        ``on_url`` is called with each URL as it is found."""
        self._site = site
        own = {
            "frontier": "memory:", "mode": "standalone", "robots.noindex": False, "robots.nofollow": False,
            "shutdown_grace": 0,
        }  # fmt: skip
        self._resolved = Resolved(resolved.config.with_settings(own), resolved.sources)
        self._on_url = on_url
        self._match = match
        self._since = None if since is None else read_since(since)
        self._limit = limit
        self._seen: set[bytes] = set()
        self._crawl: Crawl | None = None
        self._stopped = False
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        self.sitemaps = 0
        """How many sitemaps were read."""
        self.entries = 0
        """How many entries they have. 0: the URLs are links of pages."""

    @property
    def count(self) -> int:
        """How many URLs were found."""
        return len(self._seen)

    @property
    def limit_reached(self) -> bool:
        return self._limit is not None and self.count >= self._limit

    def __await__(self) -> Generator[object, None, SiteMap]:
        return self._work().__await__()

    async def _work(self) -> SiteMap:
        spider = MapSpider(site=self._site, since=self._since)
        await self._list(spider)
        self.sitemaps, self.entries = spider.stats.own["sitemaps"], spider.stats.own["sitemap entries"]
        if not self.entries and not self._stopped and self.error is None:
            await self._list(link_spider(self._site))
        return self

    async def _list(self, spider: Spider) -> None:
        crawl = self._crawl = Crawl(spider, self._resolved)
        try:
            async with aclosing(aiter(crawl)) as items:
                async for item in items:
                    self._found(item["url"], item["lastmod"])
                    if self.limit_reached or self._stopped:
                        break
        except ShoalError as error:
            self.error = error
        self.summary = crawl.summary

    def _found(self, url: str, lastmod: str | None) -> None:
        fingerprint = url_fingerprint(url)
        if fingerprint not in self._seen and (self._match is None or self._match.search(url)):
            self._seen.add(fingerprint)
            self._on_url(SiteUrl(url, lastmod))

    def stop(self) -> None:
        """Stop soon."""
        self._stopped = True
        if self._crawl is not None:
            self._crawl.stop(0)

    async def snapshot(self) -> CrawlSnapshot | None:
        return None if self._crawl is None else await self._crawl.snapshot()
