"""A Scrapy spider as the engine sees it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import GeneratorType
from typing import ClassVar

from shoal import http
from shoal.errors import PartialOutputError, ShoalError, SpiderError
from shoal.scrapy import signals
from shoal.scrapy.chain import make_layer
from shoal.scrapy.components import load_components
from shoal.scrapy.conversion import ERRBACK, Conversion, LiveObjects
from shoal.scrapy.crawler import Crawler
from shoal.scrapy.downloader import FinalResponse, page_of
from shoal.scrapy.exceptions import CloseSpider, DontCloseSpider
from shoal.scrapy.failure import Failure, ScrapyFetchError, exception_of
from shoal.scrapy.outputs import OutputConverter, PageOutputs, SpiderMiddlewares, each_output, place_of
from shoal.scrapy.pipelines import ItemPipelines, MediaPipelines
from shoal.scrapy.request import Request
from shoal.scrapy.response import Response
from shoal.scrapy.scope import OffsiteFilter
from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import Spider as ScrapySpider
from shoal.scrapy.spiders import with_linear_patterns
from shoal.scrapy.translation import USED_BY_ADAPTER, Translated, filters_nothing, translate, unused_settings
from shoal.scrapy.values import Function
from shoal.spider import RunControl, Spider

log = logging.getLogger("shoal.scrapy")

HAS_HERE = frozenset({"scrapy.pipelines.files.FilesPipeline", "scrapy.pipelines.images.ImagesPipeline"})
"""Components of Scrapy that Shoal has. Settings name them by these paths."""
command_line: dict[str, str] = {}
"""The settings of Scrapy on the command line (``-s NAME=VALUE``). They are the same for all spiders of a process."""
_REASONS = {"limit": "closespider_pagecount", "stopped": "shutdown"}
"""Scrapy's names for the reasons why a crawl ends."""


class ScrapyAdapter(Spider):
    """Runs one Scrapy spider. `adapt` makes a subclass for each spider class."""

    spider_class: ClassVar[type[ScrapySpider]]
    scrapy_settings: ClassVar[Settings]
    translated: ClassVar[Translated]
    own_arguments: ClassVar[Mapping[str, object]] = {}
    """The arguments of the spider, if its file starts the crawl itself."""

    def __init__(self, **given: object) -> None:
        super().__init__()
        self.arguments = given
        arguments = {**self.own_arguments, **with_linear_patterns(self.spider_class, given)}
        settings = self.scrapy_settings
        self.crawler_view = crawler = Crawler(self.spider_class, settings, self.stats)
        self.spider = make_spider(self.spider_class, crawler, arguments)
        self.conversion = Conversion(
            self.spider, settings.getint("DEPTH_PRIORITY"), filters_nothing=filters_nothing(settings)
        )
        self.offsite = OffsiteFilter(None if _no_offsite(settings) else getattr(self.spider, "allowed_domains", None))
        self.offsite.warn(self.spider_name())
        self.current_response: ContextVar[Response | None] = ContextVar("current_response", default=None)
        self._outputs = OutputConverter(self.conversion, crawler, self.offsite, settings)
        self._spider_middlewares = SpiderMiddlewares(self)
        self.extensions = load_components(_project_components(settings, "EXTENSIONS"), "EXTENSIONS", crawler)
        self.middlewares = [make_layer(self)]
        pipelines = load_components(_project_components(settings, "ITEM_PIPELINES"), "ITEM_PIPELINES", crawler)
        self._outputs.media = MediaPipelines(pipelines)
        self._items = ItemPipelines(self, pipelines)
        self.pipelines = [self._items]
        self._run: RunControl | None = None
        self._close_reason = ""
        self._scraped = self._errors = 0
        self._item_limit = settings.getint("CLOSESPIDER_ITEMCOUNT")
        self._error_limit = settings.getint("CLOSESPIDER_ERRORCOUNT")

    @classmethod
    def other_settings(cls) -> list[str]:
        """List the settings of the project, one per line: those that the adapter uses, and those that only the spider
        reads."""
        settings = cls.scrapy_settings
        used = [name for name in settings if settings.source(name) and name in USED_BY_ADAPTER]
        lines = [f"{name:<28} {str(settings[name])[:44]:<44} used; {settings.source(name)}" for name in used]
        return lines + [
            f"{name:<28} {str(settings[name])[:44]:<44} kept for self.settings; {source}"
            for name, source in unused_settings(settings)
        ]

    def with_outputs(self, given: Sequence[str]) -> tuple[str, ...]:
        outputs = super().with_outputs(given)
        for spec in self.outputs:
            if "://" not in spec and (folder := os.path.dirname(spec)):
                os.makedirs(folder, exist_ok=True)
        if jobdir := self.scrapy_settings.get("JOBDIR"):
            os.makedirs(str(jobdir), exist_ok=True)
        return outputs

    # -- the life of the crawl

    def joined(self, run: RunControl) -> None:
        self._run = run
        self.conversion.is_known = run.is_known
        sees_all = self._spider_middlewares.active or self.conversion.filters_nothing
        if not sees_all and hasattr(self.spider, "_skip_known"):  # a CrawlSpider
            self.spider._skip_known(run.is_known)
        if run.is_private:
            self.conversion.live = LiveObjects()
            self.conversion.is_in_scope = run.is_in_scope
        _share_log()
        engine = self.crawler_view.engine
        engine.on_close = self.close_run
        engine.on_push = self._push

    async def opened(self) -> None:
        for note in self.translated.notes:
            log.info("%s", note)
        for warning in self.translated.warnings:
            log.warning("%s", warning)
        if seconds := self.scrapy_settings.getfloat("CLOSESPIDER_TIMEOUT"):
            asyncio.get_running_loop().call_later(seconds, self.close_run, "closespider_timeout")
        await self._send(signals.engine_started)
        await self._send(signals.spider_opened)

    async def idle(self) -> bool:
        if self._close_reason:
            return False
        try:
            await self.crawler_view.signals.send(signals.spider_idle, DontCloseSpider, spider=self.spider)
        except DontCloseSpider:
            await self.crawler_view.engine.pushed()
            return not self._close_reason
        return await self.crawler_view.engine.pushed()

    async def closed(self, reason: str) -> None:
        """Close the pipelines, then the spider: in this order, as in Scrapy."""
        reason = self._close_reason or _REASONS.get(reason, reason)
        self.crawler_view.stats.set_value("finish_reason", reason)
        try:
            await self._items.close(self)
        finally:
            async for _ in each_output(self.spider.close(self.spider, reason)):
                log.warning("closed() returned a value, which is ignored")
            await self._send(signals.spider_closed, reason=reason)
            await self._send(signals.engine_stopped)

    async def _send(self, signal: signals.Signal, **arguments: object) -> None:
        if self.crawler_view.signals.has_receivers(signal):
            await self.crawler_view.signals.send(signal, spider=self.spider, **arguments)

    def close_run(self, reason: str) -> None:
        """End the crawl: pages in flight are finished."""
        if not self._close_reason:
            self._close_reason = reason
            log.info("closing the spider: %s", reason)
            if self._run is not None:
                self._run.stop()

    def scraped(self) -> None:
        """Count an item that passed the pipelines."""
        self._scraped += 1
        if self._item_limit and self._scraped >= self._item_limit:
            self.close_run("closespider_itemcount")

    @property
    def login(self) -> tuple[str, str, str | None] | None:
        """User, password and domain for HTTP authentication, from the spider or the settings; None if neither sets
        them."""
        settings, spider = self.scrapy_settings, self.spider
        user = getattr(spider, "http_user", "") or settings.get("HTTPAUTH_USER", "")
        password = getattr(spider, "http_pass", "") or settings.get("HTTPAUTH_PASS", "")
        domain = getattr(spider, "http_auth_domain", None) or settings.get("HTTPAUTH_DOMAIN")
        return (user, password, domain) if user or password else None

    # -- requests of the spider

    def start(self) -> AsyncIterator[http.Request]:
        return self._start()

    async def _start(self) -> AsyncIterator[http.Request]:
        async for output in self._spider_middlewares.start(start_of(self.spider)):
            if not isinstance(output, Request):
                log.error(
                    "start() yielded a %s, which is not a request, and is ignored: yield items in a callback",
                    type(output).__name__,
                )
            elif (converted := self._outputs.start(output)) is not None:
                yield converted

    async def _push(self, request: Request) -> None:
        converted = self._outputs.start(request)
        if converted is not None and self._run is not None:
            await self._run.push([converted])

    # -- callbacks

    def callback(self, name: str | None) -> Function:
        if name is not None and name.startswith(ERRBACK):
            return self._failed
        return self._called

    async def _called(self, response: http.Response, /, **cb_kwargs: object) -> list[object]:
        """Call the callback of a page. If it raises an error, the outputs before it are kept."""
        page = self._page(response)
        request = page.request
        assert request is not None
        self.current_response.set(page)
        self._count(page)
        callback = request.callback or self.spider._parse
        function = self.conversion.method(callback) if isinstance(callback, str) else callback
        outputs = self._outputs.page(response.request)
        try:
            await self._collect(partial(function, page, **request.cb_kwargs), outputs, page)
        finally:
            self.conversion.handled(response.request)
        return outputs.all()

    async def _failed(self, request: http.Request, error: ShoalError, /) -> list[object]:
        """Call the errback of a page that was not fetched. Errors of callbacks are not passed to it, as in Scrapy."""
        outputs = self._outputs.page(request)
        scrapy_request = error.request if isinstance(error, ScrapyFetchError) else None
        failed = scrapy_request or self.conversion.incoming(request)
        try:
            if failed.errback is not None and not isinstance(error, SpiderError):
                errback = self.conversion.method(failed.errback) if isinstance(failed.errback, str) else failed.errback
                await self._collect(partial(errback, Failure(exception_of(error), failed)), outputs, None)
        finally:
            self.conversion.handled(request)
        return outputs.all()

    async def _collect(self, function: Callable[[], object], outputs: PageOutputs, page: Response | None) -> None:
        result: object = None

        def place() -> str:
            return place_of(function, result)

        try:
            if page is not None and self._spider_middlewares.active:
                async for output in self._spider_middlewares.page(page, function):
                    outputs.add(output, lambda: place_of(function, None))
                return
            result = function()
            if isinstance(result, GeneratorType):  # most callbacks
                for output in result:
                    outputs.add(output, place)
                return
            async for output in each_output(result):
                outputs.add(output, place)
        except CloseSpider as closing:
            self.close_run(closing.reason)
        except Exception as exc:  # the user's code may raise anything
            await self._record_error(exc, page)
            raise PartialOutputError(outputs.all()) from exc

    async def _record_error(self, exc: Exception, page: Response | None) -> None:
        self._errors += 1
        self.crawler_view.stats.count(f"spider_exceptions/{type(exc).__name__}")
        if self.crawler_view.signals.has_receivers(signals.spider_error):
            request = None if page is None else page.request
            await self._send(signals.spider_error, failure=Failure(exc, request), response=page)
        if self._error_limit and self._errors >= self._error_limit:
            self.close_run("closespider_errorcount")

    def _page(self, response: http.Response) -> Response:
        """The spider's view of a page."""
        if isinstance(response, FinalResponse) and response.scrapy is not None:
            return response.scrapy
        return page_of(response, self.conversion.incoming(response.request))

    def _count(self, page: Response) -> None:
        stats = self.crawler_view.stats
        stats.count(f"downloader/response_status_count/{page.status}")
        sent = self.crawler_view.signals
        if sent.has_receivers(signals.response_received):
            sent.send_catch_log(signals.response_received, response=page, request=page.request, spider=self.spider)


def make_spider(kind: type[ScrapySpider], crawler: Crawler, arguments: Mapping[str, object]) -> ScrapySpider:
    """Create the user's spider."""
    spider = kind.from_crawler(crawler, **arguments)
    if getattr(spider, "crawler", None) is None:
        spider._set_crawler(crawler)
    if not hasattr(spider, "state"):
        spider.state = {}
    crawler.spider = crawler.engine.spider = spider
    return spider


def adapt(kind: type[ScrapySpider], settings: Settings) -> type[ScrapyAdapter]:
    """The class that runs a Scrapy spider class with the settings of its project."""
    own = settings.copy()
    kind.update_settings(own)
    for attribute in ("download_delay", "download_timeout", "download_maxsize"):  # older spiders have these
        if isinstance(value := getattr(kind, attribute, None), int | float):
            own.set(attribute.upper(), value, "spider", f"{attribute} of {kind.__name__}")
    own.setdict(command_line, "cmdline", "-s")
    name = str(getattr(kind, "name", None) or kind.__name__.lower())
    own.set("_SPIDER_NAME", name, "default")
    translated = translate(own, getattr(kind, "user_agent", None))
    return type(
        kind.__name__,
        (ScrapyAdapter,),
        {
            "__doc__": kind.__doc__,
            "__module__": kind.__module__,
            "name": name,
            "spider_class": kind,
            "scrapy_settings": own,
            "translated": translated,
            "settings": translated.settings,
            "setting_sources": translated.sources,
            "outputs": translated.outputs,
        },
    )


def start_of(spider: ScrapySpider) -> object:
    """Return the start requests, from ``start_requests`` or ``start``: from the one that the most derived class
    defines. A class that defines both has ``start`` for newer versions of Scrapy, with the same requests."""
    for kind in type(spider).__mro__:
        for name in ("start_requests", "start"):
            if kind is not ScrapySpider and callable(vars(kind).get(name)) and callable(getattr(spider, name, None)):
                return getattr(spider, name)()
    return ScrapySpider.start(spider)


def _share_log() -> None:
    """Let the loggers of the project write to Shoal's log, if they have no handlers of their own."""
    root, handlers = logging.getLogger(), logging.getLogger("shoal").handlers
    if handlers and not root.handlers:
        root.handlers[:] = handlers
        root.setLevel(logging.getLogger("shoal").getEffectiveLevel())
        for name in ("asyncio", "aiohttp"):
            logging.getLogger(name).setLevel(logging.WARNING)


def _project_components(settings: Settings, name: str) -> dict[object, float | None]:
    """The components of the project. Scrapy's own are left out: Shoal has them built in, or does not need them."""
    components = settings.getdictorlist(name)
    if not isinstance(components, dict):
        components = {key: 500 + index for index, key in enumerate(components)}
    return {
        key: order for key, order in components.items() if str(key) in HAS_HERE or not str(key).startswith("scrapy.")
    }


def _no_offsite(settings: Settings) -> bool:
    middlewares = {**settings.getdict("SPIDER_MIDDLEWARES"), **settings.getdict("DOWNLOADER_MIDDLEWARES")}
    return any(str(key).endswith("offsite.OffsiteMiddleware") and order is None for key, order in middlewares.items())
