"""The spiders of `shoal map`: they list the URLs of a site, and fetch only what that needs."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import ClassVar

from shoal.errors import SitemapError
from shoal.http import LinkBatch, Request, Response
from shoal.sitemaps.entry import SitemapEntry
from shoal.sitemaps.spider import MAX_BODY, SitemapSpider, is_robots
from shoal.spider import Spider
from shoal.urls.normalize import host_of, origin_of

SETTINGS = {"scope.max_depth": 3, "scope.max_pages": 1000, MAX_BODY: 50 * 1024 * 1024}
"""Limits for a site that may be endless. A sitemap counts as a page."""
_SITEMAP_FILE = re.compile(r"\.(xml|xml\.gz|gz|txt|rss|atom)$", re.IGNORECASE)


class MapSpider(SitemapSpider):
    """Yields the URL and the date of each entry of a site's sitemaps: those of its robots.txt, or else /sitemap.xml."""

    name = "map"
    settings: ClassVar[Mapping[str, object]] = SETTINGS
    handle_statuses = (400, 401, 403, 404, 410)  # a site without robots.txt or sitemap is no failure
    site = ""
    """A page of the site, or one of its sitemaps."""

    def start(self) -> Iterator[Request | str]:
        if _SITEMAP_FILE.search(self.site.partition("?")[0]) and not is_robots(self.site):
            yield Request(self.site, "parse_sitemap", render=False)
        else:
            yield Request(origin_of(self.site) + "/robots.txt", "parse_robots", render=False)

    async def parse_robots(self, response: Response) -> AsyncIterator[object]:
        has_sitemap = False
        if response.ok:
            async for request in self.parse_sitemap(response):
                has_sitemap = True
                yield request
        if not has_sitemap:
            yield Request(origin_of(response.url) + "/sitemap.xml", "parse_sitemap", render=False)

    async def parse_sitemap(
        self, response: Response, level: int = 0, budget: int | None = None, skip: int = 0
    ) -> AsyncIterator[object]:
        try:
            async for found in super().parse_sitemap(response, level, budget, skip):
                yield found
        except SitemapError as error:
            self.log.info("sitemap not read url=%s: %s", response.url, error)

    def page_request(self, url: str, entry: SitemapEntry) -> object:
        """Return an item instead of a request: the page is not fetched."""
        lastmod = entry.lastmod
        return {"url": url, "lastmod": None if lastmod is None else lastmod.isoformat()}


class LinkSpider(Spider):
    """Yields the URL of each link of a site, for sites without sitemaps. `link_spider` makes one."""

    name = "links"
    settings: ClassVar[Mapping[str, object]] = SETTINGS

    def parse(self, response: Response) -> Iterator[dict[str, object] | LinkBatch]:
        if "html" not in response.headers.get("Content-Type", "html").lower():
            return
        (domain,) = self.allowed_domains
        yield {"url": response.url, "lastmod": None}
        for url in response.links():
            if f".{host_of(url)}".endswith(f".{domain}"):
                yield {"url": url, "lastmod": None}
        yield response.follow_all()


def link_spider(site: str) -> LinkSpider:
    """``site`` is a URL in normal form. Subdomains of its host belong to the site."""
    return LinkSpider(start_urls=[site], allowed_domains=[host_of(site).removeprefix("www.")])
