"""Functions that are connected with PyDispatcher, as older projects do."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.scrapy import signals
from shoal.scrapy import signals as dispatcher
from shoal.scrapy.spiders import Spider
from tests.scrapy.crawling import SITE, crawl


@pytest.mark.parametrize("disconnects", [False, True])
async def test_a_receiver_of_all_crawls(disconnects: bool) -> None:
    class Own(Spider):
        name = "own"
        start_urls = [f"{SITE}/"]

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.heard: list[str] = []
            dispatcher.connect(self.ended, signals.spider_closed)
            dispatcher.connect(self.scraped, signal=signals.item_scraped)
            if disconnects:
                dispatcher.disconnect(self.scraped, signals.item_scraped)

        def parse(self, response: Any, **options: Any) -> Any:
            yield {"url": response.url}

        def scraped(self, item: Any) -> None:
            self.heard.append(item["url"])

        def ended(self, spider: Any, reason: str) -> None:
            if spider is self:
                self.heard.append(reason)
                dispatcher.disconnect(self.ended, signals.spider_closed)
                dispatcher.disconnect(self.scraped, signals.item_scraped)

    outcome = await crawl(Own, {"/": "<p>page</p>"})
    assert outcome.adapter.spider.heard == (["finished"] if disconnects else [f"{SITE}/", "finished"])
    assert not signals.SignalManager.of_all_crawls.has_receivers(signals.spider_closed)
