"""``CrawlSpider`` and ``Rule``: follow links by rules."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

from shoal.http import Duplicates
from shoal.scrapy.http import HtmlResponse, Request, Response, TextResponse
from shoal.scrapy.item import Item
from shoal.scrapy.linkextractors import Link, LinkExtractor
from shoal.scrapy.spider import Spider
from shoal.scrapy.values import Function, Given, Values

if TYPE_CHECKING:
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.failure import Failure

# Iterates over the result of a callback: nothing, one output, or many.


_SINGLE = (dict, Item, str, bytes)


def each_result(result: object) -> Iterable[object]:
    """Return the outputs in the result of a callback. A dict and an item are one output each."""
    if result is None:
        return ()
    return (result,) if isinstance(result, _SINGLE) or not hasattr(result, "__iter__") else result


log = logging.getLogger("shoal.scrapy")


T = TypeVar("T")


class Extractor(Protocol):
    """Finds the links of a page. `LinkExtractor` is one."""

    def extract_links(self, response: TextResponse) -> list[Link]: ...


LinkFilter: TypeAlias = Callable[[list[Link]], Iterable[Link] | None]
RequestFilter: TypeAlias = Callable[..., Request | None]


class Rule:
    """Which links to follow, and what to do with their pages.

    Functions may be given as names of the spider's methods. By default, the links of the pages are followed too if the
    rule has no callback. ``follow`` overrides that.
    """

    def __init__(
        self,
        link_extractor: Extractor | None = None,
        callback: Function | str | None = None,
        cb_kwargs: Given | None = None,
        follow: bool | None = None,
        process_links: LinkFilter | str | None = None,
        process_request: RequestFilter | str | None = None,
        errback: Function | str | None = None,
    ) -> None:
        self.link_extractor = link_extractor if link_extractor is not None else LinkExtractor()
        self.callback = callback
        self.cb_kwargs = dict(cb_kwargs or {})
        self.follow = follow if follow is not None else not callback
        self.process_links = process_links
        self.process_request = process_request
        self.errback = errback

    def bound_to(self, spider: CrawlSpider) -> Rule:
        """Return a copy whose names are replaced by the methods of this spider."""
        rule = copy.copy(self)
        for part in ("callback", "process_links", "process_request", "errback"):
            setattr(rule, part, _method(spider, getattr(self, part), part))
        # Spiders with a `_requests_to_follow` of their own call both.
        rule.process_links = rule.process_links or _unchanged
        rule.process_request = _with_response(rule.process_request) if callable(rule.process_request) else _unchanged
        return rule


class CrawlSpider(Spider):
    """Follows the links of each page by its ``rules``. The first rule that finds a link handles it."""

    rules: Sequence[Rule] = ()
    _follow_links = True
    _rules: list[Rule]
    _is_known: Callable[[str], bool] | None = None
    """Whether the frontier has the page of a URL. Links to such pages are only counted. None: make all requests,
    because a middleware or a method of the project sees them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._compile_rules()

    @classmethod
    def from_crawler(cls, crawler: Crawler, *args: Any, **options: Any) -> Self:
        spider = super().from_crawler(crawler, *args, **options)
        spider._follow_links = crawler.settings.getbool("CRAWLSPIDER_FOLLOW_LINKS", True)
        return spider

    def _skip_known(self, is_known: Callable[[str], bool]) -> None:
        """Make no requests for pages that the frontier has, unless the spider overrides a method that sees the
        requests."""
        kind = type(self)
        if all(getattr(kind, name) is getattr(CrawlSpider, name) for name in _STEPS):
            self._is_known = is_known

    def _compile_rules(self) -> None:
        self._rules = [rule.bound_to(self) for rule in self.rules]

    def parse_start_url(self, response: Response, **options: Any) -> Any:
        """Handle the pages of the start URLs. Their links are always followed."""
        return []

    def process_results(self, response: Response, results: Iterable[Any]) -> Iterable[Any]:
        """Change what a callback returned."""
        return results

    def _parse(self, response: Response, **options: object) -> object:
        return _plain(self._parse_response(response, self.parse_start_url, options, True))

    parse = _parse  # the callback of start requests in older projects

    def _callback(self, response: Response, **options: object) -> object:
        rule = self._rules[response.meta["rule"]]
        return _plain(self._parse_response(response, rule.callback, {**rule.cb_kwargs, **options}, rule.follow))

    def _response_downloaded(self, response: Response, **options: object) -> object:
        """The name that ``_callback`` has in older projects."""
        return self._callback(response, **options)

    def _errback(self, failure: Failure) -> Iterator[object]:
        assert failure.request is not None
        errback = self._rules[failure.request.meta["rule"]].errback
        if callable(errback):
            yield from each_result(errback(failure))

    def _parse_response(
        self, response: Response, callback: Function | str | None, cb_kwargs: Values, follow: bool = True
    ) -> object:
        return self.parse_with_rules(response, callback, cb_kwargs, follow)

    def parse_with_rules(
        self, response: Response, callback: Function | str | None, cb_kwargs: Values, follow: bool = True
    ) -> object:
        """Return what the callback returns, and then the requests for the links of the page."""
        results: Any = (callback(response, **cb_kwargs) or ()) if callable(callback) else None
        if isinstance(results, AsyncIterator | Awaitable):
            return self._later(response, results, follow)
        return _Outputs(self._now(response, results, follow))

    def _now(self, response: Response, results: Iterable[object] | None, follow: bool) -> Iterator[object]:
        if results is not None:
            yield from each_result(self.process_results(response, results))
        if follow and self._follow_links:
            yield from self._requests_to_follow(response) or ()

    async def _later(
        self, response: Response, results: AsyncIterator[object] | Awaitable[Iterable[object]], follow: bool
    ) -> AsyncIterator[object]:
        outputs = [output async for output in results] if isinstance(results, AsyncIterator) else await results
        for output in self._now(response, outputs, follow):
            yield output

    def _requests_to_follow(self, response: Response) -> Iterator[Request | Duplicates]:
        if not isinstance(response, HtmlResponse):
            return
        seen: dict[str, list[Link]] = {}
        duplicates = 0
        for number, rule in enumerate(self._rules):
            links = rule.link_extractor.extract_links(response)
            if number:
                links = [link for link in links if link not in seen.get(link.url, ())]
            is_known = self._is_known if rule.process_request is _unchanged else None
            filter_links, change = rule.process_links, rule.process_request
            assert callable(filter_links)
            assert callable(change)
            for link in filter_links(links) or ():
                seen.setdefault(link.url, []).append(link)
                if is_known is not None and is_known(link.url):
                    duplicates += 1
                    continue
                request = change(self._build_request(number, link), response)
                if request is not None:
                    yield request
        if duplicates:
            yield Duplicates(duplicates)

    def _build_request(self, rule: int, link: Link) -> Request:
        return Request(
            url=link.url, callback=self._callback, errback=self._errback, meta={"rule": rule, "link_text": link.text}
        )


_STEPS = (
    "_parse", "_callback", "_response_downloaded", "_parse_response", "parse_with_rules", "_requests_to_follow",
    "_build_request",
)  # fmt: skip
"""The methods that see the requests."""


class _Outputs:
    """Outputs that work with ``for`` and with ``async for``. Which one a project uses depends on its version of
    Scrapy."""

    def __init__(self, outputs: Iterator[object]) -> None:
        self._outputs = outputs

    def __iter__(self) -> Iterator[object]:
        return self._outputs

    async def __aiter__(self) -> AsyncIterator[object]:
        for output in self._outputs:
            yield output


def _plain(outputs: object) -> object:
    """Return the generator itself, which works without an event loop."""
    return outputs._outputs if type(outputs) is _Outputs else outputs


def _unchanged(value: T, response: Response | None = None) -> T:
    return value


def _method(spider: CrawlSpider, value: object, part: str) -> object:
    if not isinstance(value, str):
        return value
    method = getattr(spider, value, None)
    if method is None:
        log.warning("%s: a rule has the %s %r, but the spider has no such method", spider.name, part, value)
    return method


def _with_response(function: RequestFilter) -> RequestFilter:
    """Return a function that takes a request and its response. That of an older project may take only the request."""
    try:
        kinds = [parameter.kind for parameter in signature(function).parameters.values()]
    except (TypeError, ValueError):
        return function
    positional = [kind for kind in kinds if kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    if len(positional) == 1 and Parameter.VAR_POSITIONAL not in kinds:
        return lambda request, *_: function(request)
    return function
