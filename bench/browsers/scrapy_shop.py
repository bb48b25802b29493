"""scrapy-playwright: a context for each host, four pages at a time. Usage: scrapy_shop.py URL OUTPUT CHROMIUM"""

import sys
from urllib.parse import urlsplit

from scrapy.crawler import CrawlerProcess
from scrapy_playwright.page import PageMethod

import scrapy

url, output, chromium = sys.argv[1:]


class Shop(scrapy.Spider):
    name = "shop"
    custom_settings = {
        "DOWNLOAD_HANDLERS": {"http": "scrapy_playwright.handler.ScrapyPlaywrightDownloadHandler"},
        "TWISTED_REACTOR": "twisted.internet.asyncioreactor.AsyncioSelectorReactor",
        "PLAYWRIGHT_LAUNCH_OPTIONS": {"executable_path": chromium, "args": ["--no-sandbox"]},
        "PLAYWRIGHT_MAX_PAGES_PER_CONTEXT": 4,
        "CONCURRENT_REQUESTS": 4,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 4,
        "DOWNLOAD_DELAY": 0,
        "ROBOTSTXT_OBEY": False,
        "LOG_LEVEL": "ERROR",
        "FEEDS": {output: {"format": "jsonlines"}},
    }

    async def start(self):
        yield self.request(url, self.parse, "a.product")

    def request(self, link, callback, wait_for):
        meta = {
            "playwright": True,
            "playwright_context": urlsplit(link).netloc,
            "playwright_page_methods": [PageMethod("wait_for_selector", wait_for)],
        }
        return scrapy.Request(link, callback=callback, meta=meta)

    def parse(self, response):
        for href in response.css("a.product::attr(href)").getall():
            yield self.request(response.urljoin(href), self.product, "h1")
        for href in response.css("a.next::attr(href)").getall():
            yield self.request(response.urljoin(href), self.parse, "a.product")

    def product(self, response):
        yield {"url": response.url, "name": response.css("h1::text").get()}


process = CrawlerProcess()
process.crawl(Shop)
process.start()
