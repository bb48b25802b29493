"""The order of requests: the spider's priority first, then depth, and within a page the last one first."""

from __future__ import annotations

from typing import Any

from shoal import scrapy
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, crawl

ONE = {"CONCURRENT_REQUESTS": 1}
PAGES = {f"/{name}": "" for name in ("1", "2", "a", "b", "c", "a1", "b1", "first", "last")}


class Tree(scrapy.Spider):
    name = "tree"
    links: dict[str, list[tuple[str, int]]] = {}

    def start_requests(self) -> Any:
        for name, priority in self.links["start"]:
            yield Request(f"{SITE}/{name}", priority=priority)

    def parse(self, response: Any, **named: Any) -> Any:
        for name, priority in self.links.get(response.url.rpartition("/")[2], []):
            yield Request(f"{SITE}/{name}", priority=priority)


def tree(**links: list[tuple[str, int]]) -> type[Tree]:
    return type("Tree", (Tree,), {"links": links})


async def test_deeper_pages_come_first_and_the_last_link_of_a_page() -> None:
    spider = tree(start=[("1", 0)], **{"1": [("a", 0), ("b", 0)], "a": [("a1", 0)], "b": [("b1", 0)]})
    done = await crawl(spider, PAGES, settings=ONE)
    assert done.web.paths == ["/1", "/b", "/b1", "/a", "/a1"], "as Scrapy does with one request at a time"


async def test_the_priority_of_the_spider_counts_more_than_the_depth() -> None:
    spider = tree(start=[("1", 0), ("last", -1)], **{"1": [("a", 0), ("first", 5)], "first": [("a1", 0)]})
    done = await crawl(spider, PAGES, settings=ONE)
    assert done.web.paths == ["/1", "/first", "/a1", "/a", "/last"]


async def test_breadth_first_with_a_depth_priority() -> None:
    spider = tree(start=[("1", 0), ("2", 0)], **{"1": [("a", 0)], "a": [("a1", 0)], "2": [("b", 0)]})
    done = await crawl(spider, PAGES, settings={**ONE, "DEPTH_PRIORITY": 1})
    assert done.web.paths == ["/1", "/2", "/a", "/b", "/a1"]


async def test_start_requests_keep_their_order() -> None:
    done = await crawl(tree(start=[("1", 0), ("2", 0), ("a", 0)]), PAGES, settings=ONE)
    assert done.web.paths == ["/1", "/2", "/a"]


async def test_the_spider_reads_its_own_priority() -> None:
    class Own(scrapy.Spider):
        name = "own"
        start_urls = [f"{SITE}/1"]

        def parse(self, response: Any, **named: Any) -> Any:
            for name, priority in (("a", 10), ("b", -3), ("c", 0)):
                yield Request(f"{SITE}/{name}", self.leaf, priority=priority)

        def leaf(self, response: Any) -> Any:
            yield {"name": response.url[-1], "priority": response.request.priority}

    done = await crawl(Own, PAGES)
    assert {each["name"]: each["priority"] for each in done.items} == {"a": 10, "b": -3, "c": 0}
