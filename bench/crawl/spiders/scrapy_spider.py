"""Scrapy, as its tutorial writes a spider. Settings come from the command line."""

import os

import scrapy

NO_PAGES = ("mailto:", "javascript:", "tel:")  # Scrapy would log an error for each one


class Pages(scrapy.Spider):
    name = "pages"

    async def start(self):
        yield scrapy.Request(os.environ["BENCH_URL"])  # start_urls are not deduplicated: `/` would be fetched twice

    def parse(self, response):
        links = response.css("a[href]")
        yield {
            "url": response.url,
            "title": response.css("title::text").get(),
            "h1": response.css("h1::text").get(),
            "links": len(links),
        }
        yield from response.follow_all(link for link in links if not link.attrib["href"].startswith(NO_PAGES))
