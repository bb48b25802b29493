"""Crawls that a program starts: ``CrawlerProcess`` and ``CrawlerRunner``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Self

from shoal.scrapy import project
from shoal.scrapy.crawler import Crawler
from shoal.scrapy.deferred import Deferred
from shoal.scrapy.project import CrawlStartReached, RecordedRun, spider_classes
from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import Spider

if TYPE_CHECKING:
    from shoal.scrapy.adapter import ScrapyAdapter

log = logging.getLogger("shoal.scrapy")


class _Crawls:
    """Several crawls that run at the same time, or one after the other, on one event loop."""

    def __init__(self, runs: list[RecordedRun], *, together: bool) -> None:
        from shoal.runs.crawl import Crawl

        self._together = together
        self._crawls = [Crawl(_adapter(run), collect=False) for run in runs]

    def stop(self) -> None:
        for crawl in self._crawls:
            crawl.stop()

    def __await__(self) -> Generator[object, None, None]:
        return self._run().__await__()

    async def _run(self) -> None:
        if self._together:
            await asyncio.gather(*self._crawls)
        else:
            for crawl in self._crawls:
                await crawl


class CrawlerRunner:
    """Collects crawls. ``reactor.run()`` of this package runs them, one after the other."""

    _together = False
    waiting: list[CrawlerRunner] = []
    """Runners whose crawls have not run yet."""

    def __init__(self, settings: Mapping[str, object] | None = None, **options: object) -> None:
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        self._runs: list[RecordedRun] = []
        self._ended: list[Deferred] = []
        self.crawlers: set[Crawler] = set()
        self.bootstrap_failed = False

    @property
    def spider_loader(self) -> SpiderLoader:
        """The spiders of the project."""

        return SpiderLoader(self.settings)

    def crawl(self, crawler_or_spidercls: type[Spider] | str | Crawler, *args: object, **kwargs: object) -> Deferred:
        """Plan a crawl of a spider class, or of the project's spider with this name."""
        run = RecordedRun(self._spider_class(crawler_or_spidercls), dict(kwargs), self.settings)
        recording = project.current()
        if recording is not None:
            recording.runs.append(run)
        self._runs.append(run)
        self._ended.append(Deferred())
        if self not in self.waiting:
            self.waiting.append(self)
        return self._ended[-1]

    def create_crawler(self, crawler_or_spidercls: type[Spider] | str | Crawler) -> Crawler:
        """A crawler for ``crawl``."""
        from shoal.spider import SpiderStats

        return Crawler(self._spider_class(crawler_or_spidercls), self.settings, SpiderStats())

    def _spider_class(self, given: type[Spider] | str | Crawler) -> type[Spider]:
        if isinstance(given, Crawler):
            return given.spidercls
        if isinstance(given, str):
            from shoal.scrapy.project import find_spider_class

            return find_spider_class(self.settings, given, "the project")
        return given

    def join(self) -> Deferred:
        """Return a Deferred that has its result when all crawls have ended."""
        deferred = Deferred()
        self._ended.append(deferred)
        return deferred

    def run_all(self) -> None:
        """Run the crawls to their end."""
        if project.current() is not None:
            raise CrawlStartReached
        from shoal.runs.crawl import run_blocking

        runs, self._runs = self._runs, []
        if self in self.waiting:
            self.waiting.remove(self)
        run_blocking(_Crawls(runs, together=self._together))
        for ended in self._ended:
            ended.callback(None)


class CrawlerProcess(CrawlerRunner):
    """Collects crawls, and runs them at the same time in this process."""

    _together = True

    def __init__(
        self, settings: Mapping[str, object] | None = None, install_root_handler: bool = True, **options: object
    ) -> None:
        super().__init__(settings)
        if install_root_handler and project.current() is None:
            configure_logging(self.settings)

    def start(self, stop_after_crawl: bool = True, install_signal_handlers: bool = True) -> None:
        """Run the crawls to their end."""
        self.run_all()

    def stop(self) -> Deferred:
        """Do nothing: crawls run only inside ``start``."""
        return Deferred()


class AsyncCrawlerProcess(CrawlerProcess):
    """The same as CrawlerProcess: every crawl of Shoal is asynchronous."""


def _adapter(run: RecordedRun) -> ScrapyAdapter:
    from shoal.scrapy.adapter import adapt
    from shoal.scrapy.names import install

    install()
    return adapt(run.kind, run.settings)(**run.arguments)


def configure_logging(settings: Mapping[str, object] | None = None, install_root_handler: bool = True) -> None:
    """Log to standard error, with the level and format of the settings, unless the program logs already."""
    chosen = settings if isinstance(settings, Settings) else Settings(settings)
    if install_root_handler and chosen.getbool("LOG_ENABLED", True):
        logging.basicConfig(
            level=chosen.get("LOG_LEVEL", "INFO") if chosen.source("LOG_LEVEL") else "INFO",
            format=chosen.get("LOG_FORMAT"), datefmt=chosen.get("LOG_DATEFORMAT"),
        )  # fmt: skip


# The spiders of a project by name, for programs that run all of them.


class SpiderLoader:
    """Finds the spiders in SPIDER_MODULES. It imports their modules on first use."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._found: dict[str, type[Spider]] | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(settings)

    def _classes(self) -> dict[str, type[Spider]]:
        if self._found is None:
            self._found = spider_classes(self._settings)
        return self._found

    def list(self) -> list[str]:
        """The names of all spiders."""
        return list(self._classes())

    def load(self, spider_name: str) -> type[Spider]:
        """The class of a spider. KeyError if there is none with this name."""
        try:
            return self._classes()[spider_name]
        except KeyError:
            raise KeyError(f"Spider not found: {spider_name}") from None
