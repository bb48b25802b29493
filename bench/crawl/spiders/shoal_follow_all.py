"""Shoal, all links of a page as one batch."""

import os

from shoal import Spider


class Pages(Spider):
    name = "pages"
    start_urls = [os.environ["BENCH_URL"]]

    def parse(self, response):
        yield {
            "url": response.url,
            "title": response.css("title::text").get(),
            "h1": response.css("h1::text").get(),
            "links": len(response.css("a[href]")),
        }
        yield response.follow_all()
