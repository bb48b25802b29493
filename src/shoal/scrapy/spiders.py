"""The spiders of Scrapy: the module ``scrapy.spiders``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.scrapy.crawl_spider import CrawlSpider as CrawlSpider
from shoal.scrapy.crawl_spider import Rule as Rule
from shoal.scrapy.feed_spiders import CSVFeedSpider as CSVFeedSpider
from shoal.scrapy.feed_spiders import XMLFeedSpider as XMLFeedSpider
from shoal.scrapy.spider import Spider as Spider

if TYPE_CHECKING:
    from shoal.scrapy.sitemap_spider import SitemapSpider as SitemapSpider

__all__ = ["CSVFeedSpider", "CrawlSpider", "Rule", "SitemapSpider", "Spider", "XMLFeedSpider"]


def __getattr__(name: str) -> type[SitemapSpider]:
    if name == "SitemapSpider":  # most projects do not need the reader of sitemaps
        from shoal.scrapy.sitemap_spider import SitemapSpider

        return SitemapSpider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
