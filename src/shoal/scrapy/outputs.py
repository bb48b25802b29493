"""Converts the results of callbacks for the engine: requests, batches of links, and items."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from inspect import isawaitable
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING

from shoal import http
from shoal.errors import RequestError, describe
from shoal.item import is_item
from shoal.scrapy import signals
from shoal.scrapy.conversion import Conversion
from shoal.scrapy.media import MediaPipelines
from shoal.scrapy.request import Request
from shoal.scrapy.scope import OffsiteFilter
from shoal.scrapy.values import NotStorableError

if TYPE_CHECKING:
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.settings import Settings

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
            made = self._conversion.outgoing(request, depth, referer)
        except RequestError as error:
            self._refuse(request, error, place)
            return None
        sent = self._crawler.signals
        if sent.has_receivers(signals.request_scheduled):
            sent.send_catch_log(signals.request_scheduled, request=request, spider=self._crawler.spider)
        return made

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
            made = converter._request(output, self._parent.depth + 1, self._referer, place)
            if made is not None:
                self._links.append(made)
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
        for each in links:
            if isinstance(each, http.LinkBatch):
                each.hrefs.reverse()
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
