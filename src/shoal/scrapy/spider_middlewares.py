"""The spider middlewares of a project: hooks around callbacks and around the start requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from shoal.scrapy.components import hooks_of, load_components
from shoal.scrapy.outputs import each_output
from shoal.scrapy.request import Request

if TYPE_CHECKING:
    from shoal.scrapy.adapter import ScrapyAdapter
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.response import Response
    from shoal.scrapy.spider import Spider


class BaseSpiderMiddleware:
    """A base class for middlewares of a project. Its methods handle one request or one item, and return None to drop
    it."""

    def __init__(self, crawler: Crawler) -> None:
        self.crawler = crawler

    @classmethod
    def from_crawler(cls, crawler: Crawler) -> Self:
        return cls(crawler)

    async def process_start(self, start: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for each in start:
            if (processed := self._processed(each, None)) is not None:
                yield processed

    def process_spider_output(
        self, response: Response, result: Iterable[Any], spider: Spider | None = None
    ) -> Iterator[Any]:
        for each in result:
            if (processed := self._processed(each, response)) is not None:
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
        named = adapter.scrapy_settings.getdict("SPIDER_MIDDLEWARES")
        own = {key: order for key, order in named.items() if not str(key).startswith("scrapy.")}
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
                requests = [each async for each in requests]
            for hook in self._start_requests:
                requests = await hook(start_requests=requests)
        for hook in self._start:
            requests = hook.call(start=_as_async(requests))
        async for each in each_output(requests):
            yield each

    async def page(self, response: Response, callback: Callable[[], object]) -> AsyncIterator[object]:
        """The outputs of a callback as the middlewares pass them on. Outputs before an error are kept."""
        for hook in self._input:
            await hook(response=response)
        found: list[object] = []
        failure: Exception | None = None
        try:
            async for each in each_output(callback()):
                found.append(each)  # noqa: PERF401 - what comes before an error is kept
        except Exception as exc:  # the user's code may raise anything
            failure = exc
        result: object = found
        for hook in self._output:
            result = hook.call(response=response, result=_as_async(result) if hook.is_async_generator else result)
            if hasattr(result, "__aiter__"):
                result = [each async for each in result]
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
    async for each in each_output(requests):
        yield each
