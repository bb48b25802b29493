"""Shoal, one request object per link, as in Scrapy."""

import os

from shoal import Spider


class Pages(Spider):
    name = "pages"
    start_urls = [os.environ["BENCH_URL"]]

    def parse(self, response):
        links = response.css("a[href]")
        yield {
            "url": response.url,
            "title": response.css("title::text").get(),
            "h1": response.css("h1::text").get(),
            "links": len(links),
        }
        for link in links:
            yield response.follow(link)
