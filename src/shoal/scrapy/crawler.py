"""The crawler of a spider: its settings, statistics and signals, and a little of Scrapy's engine."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.request import Request
from shoal.scrapy.signals import SignalManager
from shoal.scrapy.values import Given, Values
from shoal.spider import SpiderStats

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shoal.scrapy.settings import Settings
    from shoal.scrapy.spider import Spider

# The statistics of a crawl by the names that Scrapy gives them.


_LIVE = {
    "downloader/request_count": "fetched",
    "downloader/response_count": "fetched",
    "downloader/response_bytes": "bytes",
    "response_received_count": "fetched",
    "item_scraped_count": "items",
    "item_dropped_count": "dropped",
    "retry/count": "retried",
    "dupefilter/filtered": "duplicates",
}
"""Scrapy's names, and Shoal's counter for each of them."""


class StatsCollector:
    """The statistics of this process: the spider's own values, and the counters of the crawl.

    Numbers that a spider increases are also counters of the run's summary."""

    def __init__(self, shown: SpiderStats) -> None:
        self._shown = shown
        self._values: Values = {"start_time": datetime.now(UTC)}

    def get_value(self, key: str, default: object = None, spider: object = None) -> Any:
        if key in self._values:
            return self._values[key]
        return self._counted().get(key, default)

    def get_stats(self, spider: object = None) -> Values:
        return {**self._counted(), **self._values}

    def set_value(self, key: str, value: object, spider: object = None) -> None:
        self._values[key] = value
        if type(value) is int:
            self._shown.own[key] = value

    def set_stats(self, stats: Given, spider: object = None) -> None:
        self._values = dict(stats)

    def inc_value(self, key: str, count: int = 1, start: int = 0, spider: object = None) -> None:
        value = self._values.get(key, start) + count
        self._values[key] = value
        if type(count) is int:
            self._shown.inc(key, count if key in self._shown.own else value)

    def count(self, key: str, count: int = 1) -> None:
        """Increase a value that the summary does not show."""
        self._values[key] = self._values.get(key, 0) + count

    def max_value(self, key: str, value: Any, spider: object = None) -> None:
        self.set_value(key, max(self._values.get(key, value), value))

    def min_value(self, key: str, value: Any, spider: object = None) -> None:
        self.set_value(key, min(self._values.get(key, value), value))

    def clear_stats(self, spider: object = None) -> None:
        self._values.clear()

    def open_spider(self, spider: object = None) -> None:
        """Do nothing: it is here for projects that call it."""

    def close_spider(self, spider: object = None, reason: str = "") -> None:
        """Do nothing: it is here for projects that call it."""

    def _counted(self) -> Values:
        own = self._shown
        return {name: own[counter] for name, counter in _LIVE.items() if own.get(counter)}


log = logging.getLogger("shoal.scrapy")


class Crawler:
    """The attribute ``crawler`` of spiders, pipelines and middlewares."""

    def __init__(self, spidercls: type[Spider], settings: Settings, shown: SpiderStats) -> None:
        self.spidercls = spidercls
        self.settings = settings
        self.stats = StatsCollector(shown)
        self.signals = SignalManager()
        self.spider: Spider | None = None
        self.engine = EngineView()
        self.crawling = True
        self.extensions: object = None

    def stop(self) -> None:
        """End the crawl."""
        self.engine.close_spider(self.spider, "shutdown")


class EngineView:
    """The methods of Scrapy's engine that spiders call."""

    def __init__(self) -> None:
        self.on_close: Callable[[str], None] | None = None
        self.on_push: Callable[[Request], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self.spider: Spider | None = None
        self.running = True

    def close_spider(self, spider: object = None, reason: str = "cancelled") -> None:
        """End the crawl: pages in flight are finished."""
        if self.on_close is not None:
            self.on_close(reason)

    def stop(self) -> None:
        self.close_spider(reason="shutdown")

    close = stop

    def crawl(self, request: Request, spider: object = None) -> None:
        """Push a request to the frontier."""
        if self.on_push is None:
            log.error("crawler.engine.crawl() was called before the crawl began: %s is not fetched", request)
            return
        task = asyncio.ensure_future(self.on_push(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    schedule = crawl

    def download(self, request: Request, spider: object = None) -> NoReturn:
        """Not supported: a fetch inside a callback would ignore the delays."""
        raise NotSupported(
            f"engine.download({request}) is not supported: yield the request, and continue in its callback"
        )

    def pause(self) -> None:
        log.warning("crawler.engine.pause() has no effect: use `shoal pause RUN`")

    def unpause(self) -> None:
        log.warning("crawler.engine.unpause() has no effect: use `shoal resume RUN`")

    async def pushed(self) -> bool:
        """Wait until the requests of ``crawl`` are stored. Return whether there were any."""
        tasks = list(self._tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        return bool(tasks)
