"""The little of Twisted that spiders, pipelines and extensions use."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy import names, signals
from shoal.scrapy.deferred import Deferred, DeferredList, LoopingCall, deferLater, inlineCallbacks, reactor, succeed
from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, crawl

names.install()


class Home(scrapy.Spider):
    name = "home"
    start_urls = [f"{SITE}/"]

    def parse(self, response: Any) -> Any:
        yield {"title": response.css("h1::text").get()}


class ThreadPipeline:
    """Writes in a thread, as pipelines with a blocking database do."""

    def process_item(self, item: Any, spider: Any) -> Any:
        from twisted.internet.threads import deferToThread

        return deferToThread(self.write, item)

    def write(self, item: Any) -> Any:
        return {**item, "in_thread": threading.current_thread() is not threading.main_thread()}


class InlinePipeline:
    def process_item(self, item: Any, spider: Any) -> Any:
        from twisted.internet import defer

        @defer.inlineCallbacks
        def process() -> Any:
            first = yield defer.succeed(1)
            second = yield deferLater(reactor, 0, lambda: 2)
            defer.returnValue({**item, "sum": first + second})

        return process()


async def test_pipelines_that_return_deferreds() -> None:
    settings = {"ITEM_PIPELINES": {ThreadPipeline: 1, InlinePipeline: 2}}
    done = await crawl(Home, {"/": "<h1>T</h1>"}, settings=settings)
    assert done.items == [{"title": "T", "in_thread": True, "sum": 3}]


async def test_a_deferred_in_a_callback() -> None:
    class Own(Home):
        async def parse(self, response: Any) -> Any:
            waiting = Deferred()
            waiting.addCallback(lambda value: value + 1).addErrback(lambda failure: None)
            reactor.callLater(0, waiting.callback, 1)
            both = await DeferredList([waiting, succeed(5)])
            yield {"both": both}

    assert (await crawl(Own, {"/": ""})).items == [{"both": [[True, 2], [True, 5]]}]


class Heartbeat:
    """An extension that does something again and again."""

    def __init__(self, stats: Any) -> None:
        self.stats = stats
        self.call = LoopingCall(self.beat)

    @classmethod
    def from_crawler(cls, crawler: Any) -> Heartbeat:
        made = cls(crawler.stats)
        crawler.signals.connect(made.opened, signal=signals.spider_opened)
        crawler.signals.connect(made.closed, signal=signals.spider_closed)
        return made

    def opened(self, spider: Any) -> None:
        self.call.start(0.01)

    def closed(self, spider: Any) -> None:
        self.call.stop()

    def beat(self) -> None:
        self.stats.inc_value("beats")


async def test_a_looping_call_of_an_extension() -> None:
    class Slow(Home):
        async def parse(self, response: Any) -> Any:
            while self.crawler.stats.get_value("beats", 0) < 3:
                await asyncio.sleep(0.01)
            yield {"done": True}

    done = await crawl(Slow, {"/": ""}, settings={"EXTENSIONS": {Heartbeat: 1}})
    assert done.items == [{"done": True}]


def test_inline_callbacks_outside_of_an_event_loop() -> None:
    @inlineCallbacks
    def three() -> Any:
        one = yield succeed(1)
        return one + 2

    assert three()._result == 3


async def test_the_engine_does_not_fetch_inside_of_a_callback() -> None:
    class Own(Home):
        def parse(self, response: Any) -> Any:
            with pytest.raises(NotSupported, match="yield the request, and continue in its callback"):
                self.crawler.engine.download(Request(SITE))
            yield {"engine": self.crawler.engine.spider is self}

    assert (await crawl(Own, {"/": ""})).items == [{"engine": True}]
