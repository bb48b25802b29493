"""The crawler of a spider: its settings, statistics and signals, and a little of Scrapy's engine."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn

from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.request import Request
from shoal.scrapy.signals import SignalManager
from shoal.scrapy.stats import StatsCollector

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shoal.scrapy.settings import Settings
    from shoal.scrapy.spider import Spider
    from shoal.spider import SpiderStats

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
