"""Converts the results of callbacks for the engine: requests, batches of links, and items."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from inspect import isawaitable
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, Self

from shoal import http
from shoal.errors import RequestError, describe
from shoal.item import is_item
from shoal.scrapy import signals
from shoal.scrapy.components import hooks_of, load_components
from shoal.scrapy.conversion import Conversion
from shoal.scrapy.pipelines import MediaPipelines
from shoal.scrapy.request import Request
from shoal.scrapy.scope import OffsiteFilter
from shoal.scrapy.values import NotStorableError

if TYPE_CHECKING:
    from shoal.scrapy.adapter import ScrapyAdapter
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.response import Response
    from shoal.scrapy.settings import Settings
    from shoal.scrapy.spider import Spider

log = logging.getLogger("shoal.scrapy")

_MAX_DOMAINS = 10_000


class OutputConverter:
    """Converts the outputs of a spider's callbacks."""

    def __init__(self, conversion: Conversion, crawler: Crawler, offsite: OffsiteFilter, settings: Settings) -> None:
        self._conversion = conversion
        self._crawler = crawler
        self._offsite = offsite
        self._sends_referer = settings.getbool("REFERER_ENABLED") and settings.get("REFERRER_POLICY") != "no-referrer"
        self._max_depth = settings.getint("DEPTH_LIMIT")
        self._refused_domains: set[str] = set()
        self.media = MediaPipelines(())
        """Pipelines that download files for items."""

    def start(self, request: Request) -> http.Request | None:
        """Convert a start request. None if it is dropped."""
        return self._request(request, 0, "", lambda: "start")

    def page(self, parent: http.Request) -> PageOutputs:
        """Return the collector for the outputs of a page's callback."""
        referer = parent.url if self._sends_referer else ""
        return PageOutputs(self, parent, referer)

    def allows(self, request: Request) -> bool:
        """Whether a request stays on the allowed domains. Other requests are counted."""
        if request.dont_filter or self._offsite.allows(request.url):
            return True
        if request._meta and request._meta.get("allow_offsite"):
            return True
        domain = request.url.split("/", 3)[2]
        stats = self._crawler.stats
        stats.count("offsite/filtered")
        if domain not in self._refused_domains and len(self._refused_domains) < _MAX_DOMAINS:
            self._refused_domains.add(domain)
            stats.count("offsite/domains")
            log.debug("filtered offsite request to %r: %s", domain, request)
        return False

    def _request(self, request: Request, depth: int, referer: str, place: Callable[[], str]) -> http.Request | None:
        if not self.allows(request):
            return None
        if self._max_depth and depth > self._max_depth:
            return http.Request(request.url)  # the engine counts it as too deep
        try:
            converted = self._conversion.outgoing(request, depth, referer)
        except RequestError as error:
            self._refuse(request, error, place)
            return None
        sent = self._crawler.signals
        if sent.has_receivers(signals.request_scheduled):
            sent.send_catch_log(signals.request_scheduled, request=request, spider=self._crawler.spider)
        return converted

    def _refuse(self, request: Request, error: RequestError, place: Callable[[], str]) -> None:
        self._crawler.stats.inc_value("requests left out")
        name = getattr(request.callback, "__name__", request.callback) or "parse"
        if isinstance(error, NotStorableError):
            log.error(
                "%s is left out: %s, which this frontier cannot store (callback %s; %s). Pass plain data or items, or "
                "run with the frontier in memory", request, error, name, place(),
            )  # fmt: skip
        else:
            log.error("%s is left out: %s (callback %s; %s)", request, error, name, place())


class PageOutputs:
    """Collects the outputs of one page. Plain links with the same callback become one batch."""

    def __init__(self, converter: OutputConverter, parent: http.Request, referer: str) -> None:
        self._converter = converter
        self._parent = parent
        self._referer = referer
        self._found: list[object] = []
        self._links: list[object] = []
        self._duplicates = 0
        self._batches: dict[tuple[str | None, str | None, int], http.LinkBatch] = {}

    def add(self, output: object, place: Callable[[], str]) -> None:
        """Add one output. ``place`` returns the line of the spider that made it."""
        if output is None:
            return
        if not isinstance(output, Request):
            self._add_item(output)
            return
        converter = self._converter
        try:
            link = converter._conversion.as_link(output)
        except RequestError as error:
            converter._refuse(output, error, place)
            return
        if link is None and converter._conversion.is_duplicate(output):
            self._duplicates += 1
        elif link is None:
            request = converter._request(output, self._parent.depth + 1, self._referer, place)
            if request is not None:
                self._links.append(request)
        elif converter.allows(output):
            self._batch(link).hrefs.append(output.url)

    def _add_item(self, item: object) -> None:
        """Add an item, or its files. If a media pipeline fails, this item is left out."""
        media = self._converter.media
        try:
            files = media.files_of(item) if media else []
        except Exception as exc:  # the user's code may raise anything
            log.error("an item of %s is left out: get_media_requests failed: %s", self._parent.url, describe(exc))
            self._converter._crawler.stats.inc_value("items left out")
            return
        self._found.extend(files or [item])

    def _batch(self, link: tuple[str | None, str | None, int]) -> http.LinkBatch:
        batch = self._batches.get(link)
        if batch is None:
            callback, errback, priority = link
            batch = self._batches[link] = http.LinkBatch(
                base=self._parent.url, hrefs=[], callback=callback, errback=errback,
                priority=self._converter._conversion.priority(priority, self._parent.depth + 1),
                headers={"Referer": self._referer} if self._referer else {},
            )  # fmt: skip
            self._links.append(batch)
        return batch

    def all(self) -> list[object]:
        """Return all outputs for the engine: the items in their order, and the requests in reverse order, because
        Scrapy sends the last one first."""
        links, self._links = self._links[::-1], []
        for link in links:
            if isinstance(link, http.LinkBatch):
                link.hrefs.reverse()
        self._found += links
        return [*self._found, http.Duplicates(self._duplicates)] if self._duplicates else self._found


async def each_output(result: object) -> AsyncIterator[object]:
    """The outputs of any kind of callback, one by one."""
    if isinstance(result, GeneratorType):
        for output in result:
            yield output
        return
    if isawaitable(result):
        result = await result
    if hasattr(result, "__aiter__"):
        async for output in result:
            yield output
    elif result is None:
        return
    elif isinstance(result, (Request, str, bytes)) or is_item(result) or not isinstance(result, Iterable):
        yield result
    else:
        for output in result:
            yield output


def place_of(function: object, result: object) -> str:
    """The line at which a callback yields, or the line where it begins."""
    frame = None
    if isinstance(result, GeneratorType):
        frame = result.gi_frame
    elif isinstance(result, AsyncGeneratorType):
        frame = result.ag_frame
    if frame is not None:
        return f"{frame.f_code.co_filename}, line {frame.f_lineno}"
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return "an unknown line" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


# The spider middlewares of a project: hooks around callbacks and around the start requests.


class BaseSpiderMiddleware:
    """A base class for middlewares of a project. Its methods handle one request or one item, and return None to drop
    it."""

    def __init__(self, crawler: Crawler) -> None:
        self.crawler = crawler

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        return cls(crawler)

    async def process_start(self, start: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in start:
            if (processed := self._processed(request, None)) is not None:
                yield processed

    def process_spider_output(
        self, response: Response, result: Iterable[Any], spider: Spider | None = None
    ) -> Iterator[Any]:
        for output in result:
            if (processed := self._processed(output, response)) is not None:
                yield processed

    def _processed(self, output: object, response: Response | None) -> object:
        if isinstance(output, Request):
            return self.get_processed_request(output, response)
        return self.get_processed_item(output, response)

    def get_processed_request(self, request: Request, response: Response | None) -> Request | None:
        """The request as the engine gets it. ``response`` is None for a start request."""
        return request

    def get_processed_item(self, item: Any, response: Response | None) -> Any:
        """The item as the pipelines get it. ``response`` is None for an item of ``start``."""
        return item


class SpiderMiddlewares:
    """Calls ``process_spider_input``, ``process_spider_output``, ``process_spider_exception``, ``process_start`` and
    ``process_start_requests`` in Scrapy's order. Scrapy's own middlewares are part of the adapter."""

    def __init__(self, adapter: ScrapyAdapter) -> None:
        middlewares = adapter.scrapy_settings.getdict("SPIDER_MIDDLEWARES")
        own = {key: order for key, order in middlewares.items() if not str(key).startswith("scrapy.")}
        components = load_components(own, "SPIDER_MIDDLEWARES", adapter.crawler_view)
        spider = adapter.spider
        self.active = bool(components)
        self._input = hooks_of(components, "process_spider_input", spider)
        self._output = hooks_of(components, "process_spider_output", spider)[::-1]
        self._exception = hooks_of(components, "process_spider_exception", spider)[::-1]
        self._start = hooks_of(components, "process_start", spider)[::-1]
        self._start_requests = hooks_of(components, "process_start_requests", spider)[::-1]

    async def start(self, requests: object) -> AsyncIterator[object]:
        """The start requests as the middlewares pass them on."""
        if self._start_requests:
            if hasattr(requests, "__aiter__"):
                requests = [request async for request in requests]
            for hook in self._start_requests:
                requests = await hook(start_requests=requests)
        for hook in self._start:
            requests = hook.call(start=_as_async(requests))
        async for output in each_output(requests):
            yield output

    async def page(self, response: Response, callback: Callable[[], object]) -> AsyncIterator[object]:
        """The outputs of a callback as the middlewares pass them on. Outputs before an error are kept."""
        for hook in self._input:
            await hook(response=response)
        outputs: list[object] = []
        failure: Exception | None = None
        try:
            async for each in each_output(callback()):
                outputs.append(each)  # noqa: PERF401 - what comes before an error is kept
        except Exception as exc:  # the user's code may raise anything
            failure = exc
        result: object = outputs
        for hook in self._output:
            result = hook.call(response=response, result=_as_async(result) if hook.is_async_generator else result)
            if hasattr(result, "__aiter__"):
                result = [output async for output in result]
        async for each in each_output(result):
            yield each
        if failure is None:
            return
        for hook in self._exception:
            handled = await hook(response=response, exception=failure)
            if handled is not None:
                for each in handled:
                    yield each
                return
        raise failure


async def _as_async(requests: object) -> AsyncIterator[object]:
    async for output in each_output(requests):
        yield output
