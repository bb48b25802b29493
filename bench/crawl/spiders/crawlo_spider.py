"""Crawlo, standalone: memory queue, memory filter, aiohttp downloader. It has no support for robots.txt."""

import asyncio
import os

from crawlo.crawler import CrawlerProcess
from crawlo.items import Field, Item
from crawlo.spider import Spider

NO_PAGES = ("mailto:", "javascript:", "tel:")
CONCURRENCY = int(os.environ["BENCH_CONCURRENCY"])


class Page(Item):
    url = Field()
    title = Field()
    h1 = Field()
    links = Field()


class Pages(Spider):
    name = "pages"
    start_urls = [os.environ["BENCH_URL"]]

    def parse(self, response):
        if response.status != 200:
            return
        hrefs = response.css("a::attr(href)").getall()
        yield Page(
            url=response.url,
            title=response.css("title::text").get(),
            h1=response.css("h1::text").get(),
            links=len(hrefs),
        )
        for href in hrefs:
            if href.startswith(NO_PAGES):
                continue
            yield response.follow(href, callback=self.parse)


SETTINGS = {
    "PROJECT_NAME": "bench",
    "RUN_MODE": "standalone",
    "QUEUE_TYPE": "memory",
    "FILTER_CLASS": "crawlo.filters.MemoryFilter",
    "FILTER_DEBUG": False,
    "DOWNLOADER": "crawlo.downloader.AioHttpDownloader",
    "CONCURRENCY": CONCURRENCY,
    "CONNECTION_POOL_LIMIT": CONCURRENCY,
    "CONNECTION_POOL_LIMIT_PER_HOST": CONCURRENCY,
    "DOWNLOAD_DELAY": 0,
    "RANDOMNESS": False,
    "PIPELINES": {
        "crawlo.pipelines.ConsolePipeline": None,  # on by default; it formats each item even if the log is off
        "crawlo.pipelines.JsonLinesPipeline": 100,
    },
    "JSON_FILE": os.environ["BENCH_OUTPUT"],
    "LOG_LEVEL": "WARNING",
}

asyncio.run(CrawlerProcess(SETTINGS).crawl(Pages))
