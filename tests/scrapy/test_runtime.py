"""What a spider finds at run time: logger, settings, statistics, signals, the end of the crawl."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy import signals
from shoal.scrapy.exceptions import CloseSpider, DontCloseSpider
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, Answer, crawl

PAGES = {f"/{number}": f"page {number}" for number in range(30)}


class Numbers(scrapy.Spider):
    name = "numbers"
    start_urls = [f"{SITE}/0"]

    def parse(self, response: Any, **named: Any) -> Any:
        number = int(response.url.rpartition("/")[2])
        yield {"n": number}
        yield Request(f"{SITE}/{number + 1}")


async def test_the_logger_and_log(caplog: pytest.LogCaptureFixture) -> None:
    class Own(scrapy.Spider):
        name = "talkative"
        start_urls = [f"{SITE}/0"]

        def parse(self, response: Any, **named: Any) -> None:
            self.logger.warning("careful: %s", response.url)
            self.log("quiet", level=logging.ERROR)

    await crawl(Own, PAGES)
    found = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("talkative", "WARNING", f"careful: {SITE}/0") in found
    assert ("talkative", "ERROR", "quiet") in found


async def test_settings_and_statistics() -> None:
    class Own(scrapy.Spider):
        name = "own"
        start_urls = [f"{SITE}/0"]
        custom_settings = {"CONCURRENT_REQUESTS": "3", "MINE": "a,b"}

        def parse(self, response: Any, **named: Any) -> Any:
            stats = self.crawler.stats
            stats.inc_value("mine/pages")
            stats.inc_value("mine/pages", 2)
            stats.set_value("mine/name", "x")
            stats.max_value("mine/max", 5)
            stats.max_value("mine/max", 3)
            settings = self.settings
            yield {
                "int": settings.getint("CONCURRENT_REQUESTS"), "list": settings.getlist("MINE"),
                "bool": self.crawler.settings.getbool("COOKIES_ENABLED"), "missing": settings.get("NONE", "default"),
                "pages": stats.get_value("mine/pages"), "max": stats.get_value("mine/max"),
                "none": stats.get_value("nothing", 7),
            }  # fmt: skip

    done = await crawl(Own, PAGES)
    assert done.items == [
        {"int": 3, "list": ["a", "b"], "bool": True, "missing": "default", "pages": 3, "max": 5, "none": 7}
    ]
    assert done.stats["mine/name"] == "x"
    assert done.stats["item_scraped_count"] == 1
    assert done.stats["finish_reason"] == "finished"
    assert done.crawl.summary is not None
    assert done.crawl.summary.own_counters["mine/pages"] == 3, "the summary shows it"


async def test_signals_and_closed() -> None:
    calls: list[str] = []

    class Own(Numbers):
        @classmethod
        def from_crawler(cls, crawler: Any, *args: Any, **kwargs: Any) -> Any:
            made = super().from_crawler(crawler, *args, **kwargs)
            for signal in (signals.spider_opened, signals.spider_closed, signals.item_scraped, signals.spider_idle):
                crawler.signals.connect(getattr(made, f"on_{signal.name}"), signal=signal)
            return made

        def on_spider_opened(self, spider: Any) -> None:
            calls.append(f"opened {spider.name}")

        async def on_spider_closed(self, spider: Any, reason: str) -> None:
            calls.append(f"closed signal {reason}")

        def on_item_scraped(self, item: Any, response: Any, spider: Any) -> None:
            calls.append(f"item {item['n']} of {response.url[-1]}")

        def on_spider_idle(self) -> None:
            calls.append("idle")

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"n": 1}

        def closed(self, reason: str) -> None:
            calls.append(f"closed {reason}")

    await crawl(Own, PAGES)
    assert calls == ["opened numbers", "item 1 of 0", "idle", "closed finished", "closed signal finished"]


async def test_a_handler_of_idle_may_push_more() -> None:
    class Own(scrapy.Spider):
        name = "own"
        start_urls = [f"{SITE}/0"]
        left = 2

        @classmethod
        def from_crawler(cls, crawler: Any, *args: Any, **kwargs: Any) -> Any:
            made = super().from_crawler(crawler, *args, **kwargs)
            crawler.signals.connect(made.more, signals.spider_idle)
            return made

        def more(self) -> None:
            if self.left:
                self.left -= 1
                self.crawler.engine.crawl(Request(f"{SITE}/{10 + self.left}", self.parse))
                raise DontCloseSpider

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"n": response.url.rpartition("/")[2]}

    assert [each["n"] for each in (await crawl(Own, PAGES)).items] == ["0", "11", "10"]


async def test_close_spider_ends_the_crawl() -> None:
    reasons: list[str] = []

    class Own(Numbers):
        def parse(self, response: Any, **named: Any) -> Any:
            yield from super().parse(response)
            if response.url.endswith("/3"):
                raise CloseSpider("enough")

        def closed(self, reason: str) -> None:
            reasons.append(reason)

    done = await crawl(Own, PAGES)
    assert [each["n"] for each in done.items] == [0, 1, 2, 3], "what it yielded before is kept"
    assert reasons == ["enough"]
    assert done.stats["finish_reason"] == "enough"
    assert done.crawl.error is None


async def test_the_engine_can_close_the_spider() -> None:
    class Own(Numbers):
        def parse(self, response: Any, **named: Any) -> Any:
            yield from super().parse(response)
            self.crawler.engine.close_spider(self, "by hand")

    done = await crawl(Own, PAGES)
    assert (len(done.items), done.stats["finish_reason"]) == (1, "by hand")


@pytest.mark.parametrize(
    ("setting", "limit", "reason"),
    [
        ("CLOSESPIDER_ITEMCOUNT", 4, "closespider_itemcount"),
        ("CLOSESPIDER_PAGECOUNT", 4, "closespider_pagecount"),
    ],
)
async def test_limits_that_close_the_spider(setting: str, limit: int, reason: str) -> None:
    done = await crawl(Numbers, PAGES, settings={setting: limit})
    assert (len(done.items), done.stats["finish_reason"]) == (4, reason)


async def test_errors_that_close_the_spider() -> None:
    class Own(Numbers):
        def parse(self, response: Any, **named: Any) -> Any:
            yield from super().parse(response)
            raise ValueError("x")

    done = await crawl(Own, PAGES, settings={"CLOSESPIDER_ERRORCOUNT": 2})
    assert (len(done.items), done.stats["finish_reason"]) == (2, "closespider_errorcount")


async def test_a_time_limit_closes_the_spider() -> None:
    class Own(Numbers):
        async def parse(self, response: Any, **named: Any) -> Any:
            import asyncio

            await asyncio.sleep(0.05)
            for each in super().parse(response):
                yield each

    done = await crawl(Own, PAGES, settings={"CLOSESPIDER_TIMEOUT": 0.2})
    assert done.stats["finish_reason"] == "closespider_timeout"
    assert 0 < len(done.items) < 30


class Watching:
    """An extension."""

    def __init__(self, stats: Any) -> None:
        self.stats = stats

    @classmethod
    def from_crawler(cls, crawler: Any) -> Watching:
        made = cls(crawler.stats)
        crawler.signals.connect(made.opened, signal=signals.spider_opened)
        crawler.signals.connect(made.response, signal=signals.response_received)
        crawler.signals.connect(made.dropped, signal=signals.item_dropped)
        return made

    def opened(self, spider: Any) -> None:
        self.stats.set_value("watching", spider.name)

    def response(self, response: Any, request: Any) -> None:
        self.stats.inc_value(f"watched/{response.status}")

    def dropped(self, item: Any, exception: Exception) -> None:
        self.stats.set_value("dropped", str(exception))


class DropAll:
    def process_item(self, item: Any, spider: Any) -> Any:
        from shoal.scrapy.exceptions import DropItem

        raise DropItem("all")


async def test_extensions_listen_to_signals() -> None:
    settings = {"EXTENSIONS": {Watching: 1}, "ITEM_PIPELINES": {DropAll: 1}, "DEPTH_LIMIT": 1}
    done = await crawl(Numbers, PAGES, settings=settings)
    assert (done.stats["watching"], done.stats["watched/200"], done.stats["dropped"]) == ("numbers", 2, "all")


async def test_a_handler_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Numbers):
        @classmethod
        def from_crawler(cls, crawler: Any, *args: Any, **kwargs: Any) -> Any:
            made = super().from_crawler(crawler, *args, **kwargs)
            crawler.signals.connect(made.broken, signals.spider_opened)
            crawler.signals.connect(made.broken, signals.bytes_received)
            return made

        def broken(self) -> None:
            raise ValueError("handler")

    done = await crawl(Own, {"/0": Answer("", 404)})
    assert done.crawl.error is None
    assert "a handler of <signal spider_opened> failed" in caplog.text
    assert "the signal bytes_received, which Shoal does not send" in caplog.text


def test_items_as_json() -> None:
    import json
    from datetime import date
    from decimal import Decimal

    from shoal.scrapy.exporters import ScrapyJSONEncoder
    from shoal.scrapy.item import Field, Item

    class Book(Item):
        title = Field()

    found = json.dumps([Book(title="T"), date(2020, 1, 2), Decimal("1.5"), {1}], cls=ScrapyJSONEncoder)
    assert found == '[{"title": "T"}, "2020-01-02", "1.5", [1]]'
