"""One page: fetched, handed to the callbacks of the spider, and turned into a settlement for the frontier."""

from __future__ import annotations

import asyncio
import logging
import os
import sysconfig
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from inspect import isawaitable
from types import GeneratorType
from typing import Any, TypeAlias

from msgspec import Struct

from shoal.config import Config
from shoal.crawling.scheduler import Admitted, Scheduler
from shoal.crawling.stats import Counters
from shoal.errors import DropItem, FetchError, ItemError, RequestError, ShoalError, SpiderError, TooComplexError
from shoal.http import LinkBatch, Request, Response
from shoal.item import encode_item, is_item
from shoal.middleware import Postponed
from shoal.middleware.retry import RetryPolicy
from shoal.ports import Completion, Failure, Fetch, Lease
from shoal.selector.usage import begin_page
from shoal.spider import Spider
from shoal.urls.normalize import host_of, join_url

log = logging.getLogger("shoal.engine")

# Headers that describe the client. All others may hold a secret (X-Api-Key, Private-Token, X-Amz-Security-Token ...):
# a list of secret headers is never complete, so this is the list of harmless ones.
_HARMLESS_HEADERS = frozenset(
    {"accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "dnt", "pragma", "priority",
     "save-data", "sec-gpc", "upgrade-insecure-requests", "user-agent"}
)  # fmt: skip
_BODY_HEADERS = frozenset({"content-type", "content-length", "content-encoding", "content-language"})
_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
"""Beginnings of file names that are not code of the user."""
_MAX_REASONS = 5  # of dropped items, in the history of a page
_MAX_REASON = 200  # characters of the reason why an item was dropped


class Released(Struct):
    """A lease that is released: its page was not handled."""

    lease: Lease
    contacted: bool


class Parsed(Struct):
    """A page that was handled, and the links that the scheduler remembers once the frontier has stored it."""

    completion: Completion
    admitted: Admitted


Settlement: TypeAlias = Parsed | Failure | Released


class Handler:
    """Turns leases into settlements. Many tasks may call it at the same time."""

    def __init__(self, spider: Spider, config: Config, scheduler: Scheduler, fetch: Fetch, counters: Counters) -> None:
        self.counters = counters
        self._fetch = fetch
        self._scheduler = scheduler
        self._max_redirects = config.http.max_redirects
        self._retry = RetryPolicy(config.retry)
        self._handled = frozenset(spider.handle_statuses)
        self.callbacks = Callbacks(spider, counters)

    async def handle(self, lease: Lease) -> Settlement:
        """Fetch and parse the page of a lease. Raises nothing but CancelledError: a failure is a settlement too."""
        try:
            return await self._handle(lease)
        except Exception as exc:  # a bug costs one request, and is logged
            self.counters.errors["internal error"] += 1
            log.exception("internal error url=%s", lease.request.url)
            return Failure(lease=lease, kind="internal error", reason=f"{type(exc).__name__}: {exc}")

    async def _handle(self, lease: Lease) -> Settlement:
        request = lease.request
        try:
            response = await self._fetch(request)
        except Postponed as postponed:
            return Released(lease, postponed.contacted)
        except FetchError as error:
            return await self._failed(lease, error)
        self.counters.fetched += 1
        self.counters.bytes += len(response.body)
        if response.from_cache:
            self.counters.from_cache += 1
        else:
            self.counters.latency.measured(response.elapsed)
        status = response.status
        if 300 <= status < 400 and "Location" in response.headers and status not in self._handled:
            return await self._redirected(lease, response)
        try:
            found = await self.callbacks.call(request.callback, request, response, **request.cb_kwargs)
            return self._parsed(lease, response, found)
        except TooComplexError as error:
            error.status = status
            return await self._failed(lease, error)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return await self._callback_failed(
                lease, response, exc
            )  # the callback awaited something that was cancelled
        except Exception as exc:  # the user's code may raise anything: it costs this page
            return await self._callback_failed(lease, response, exc)
        finally:
            if response.page is not None:
                await response.release()

    def _parsed(self, lease: Lease, response: Response, found: Found) -> Parsed:
        admitted = self._scheduler.admit(found.links, lease.request)
        self.counters.out_of_scope += admitted.out_of_scope
        note = _dropped(found.dropped) if found.dropped else ""
        if admitted.left_out:
            self.counters.left_out += admitted.left_out
            most = self._scheduler.scope.max_links
            left_out = f"{admitted.left_out} links were left out: the limit is {most} (scope.max_links)"
            log.warning("%s url=%s", left_out, lease.request.url)
            note = f"{note}; {left_out}" if note else left_out
        completion = Completion(
            lease=lease,
            items=found.items,
            children=admitted.children,
            status=response.status,
            duplicates=admitted.duplicates,
            contacted=not response.from_cache,
            note=note,
        )
        return Parsed(completion, admitted)

    async def _redirected(self, lease: Lease, response: Response) -> Settlement:
        """Complete a redirect with its target as the only child. So scope, robots.txt and delay apply to each hop."""
        request = lease.request
        trail = [*request.redirects, request.url]
        if len(trail) > self._max_redirects:
            message = f"more than {self._max_redirects} redirects, from {trail[0]}"
            return await self._failed(lease, FetchError(message, kind="redirects", retryable=False))
        try:
            url = join_url(request.url, response.headers["Location"])
        except RequestError as exc:
            return await self._failed(lease, FetchError(f"redirect: {exc}", kind="redirects", retryable=False))
        reason = self._scheduler.scope.refuses(url)
        if reason is not None:
            self.counters.out_of_scope += 1
            message = f"redirects to {url}, which is {reason}"
            return await self._failed(lease, FetchError(message, kind="scope", retryable=False))
        target = redirected_request(request, url, response.status)
        self.counters.redirected += 1
        completion = Completion(
            lease=lease,
            children=[target],
            status=response.status,
            contacted=not response.from_cache,
            redirected=True,
            note=f"redirected to {url}",
        )
        return Parsed(completion, Admitted([target]))

    # -- failures

    async def _failed(self, lease: Lease, error: FetchError) -> Failure:
        """Record a failed attempt. If no attempt is left, call the errback."""
        self.counters.errors[error.kind] += 1
        retry_in = self._retry.retry_in(error, lease.attempt)
        failure = Failure(
            lease=lease,
            kind=error.kind,
            reason=str(error),
            retry_in=retry_in,
            status=error.status,
            contacted=error.contacted,
        )
        if retry_in is not None:
            self.counters.retried += 1
            log.info("retry in %.1f s url=%s attempt=%d %s", retry_in, lease.request.url, lease.attempt, error)
            return failure
        level = logging.DEBUG if error.kind == "robots" else logging.WARNING
        log.log(level, "gave up url=%s %s", lease.request.url, error)
        if lease.request.errback is not None:
            await self._errback(lease, error, failure)
        return failure

    async def _errback(self, lease: Lease, error: ShoalError, failure: Failure) -> None:
        try:
            request = lease.request
            found = await self.callbacks.call(request.errback, request, request, error)
            failure.items = found.items
            failure.children = self._scheduler.admit(found.links, request).children
        except Exception as exc:  # the user's code may raise anything
            self.counters.errors["errback"] += 1
            log.error("errback failed url=%s %s", lease.request.url, describe(exc))

    async def _callback_failed(self, lease: Lease, response: Response, exc: BaseException) -> Failure:
        """The page is dead, and none of its items is stored. After a fix, `shoal retry-failed` fetches it again."""
        self.counters.errors["callback"] += 1
        reason = describe(exc)
        self.counters.callback_error = self.counters.callback_error or reason
        log.error("callback failed url=%s %s", response.url, reason, exc_info=log.isEnabledFor(logging.DEBUG))
        failure = Failure(lease=lease, kind="callback", reason=reason, status=response.status)
        if lease.request.errback is not None:
            await self._errback(lease, SpiderError(reason), failure)
        return failure


def _dropped(reasons: list[str]) -> str:
    """What a page's history says about the items that pipelines dropped."""
    counted = Counter(reasons).most_common(_MAX_REASONS)
    return "items dropped: " + ", ".join(f"{count} ({reason})" for reason, count in counted)


def headers_for(request: Request, url: str) -> tuple[dict[str, str], dict[str, str]]:
    """The headers and cookies of a request that may also be sent to ``url``.

    The same host and port gets all of them. Another host, or the same host without TLS after a request with TLS, gets
    only harmless headers and those that describe the body, and no cookies.
    """
    downgraded = request.url.startswith("https:") and not url.startswith("https:")
    if host_of(url) == host_of(request.url) and not downgraded:
        return request.headers, request.cookies
    return {
        name: value for name, value in request.headers.items() if name.lower() in _HARMLESS_HEADERS | _BODY_HEADERS
    }, {}


def redirected_request(request: Request, url: str, status: int) -> Request:
    """The request that follows a redirect, as browsers make it: a POST becomes a GET unless the status is 307 or 308,
    and another host gets no secrets."""
    trail = [*request.redirects, request.url]
    keeps_body = status in (307, 308) or request.method in ("GET", "HEAD")
    headers, cookies = headers_for(request, url)
    if not keeps_body:
        headers = {name: value for name, value in headers.items() if name.lower() not in _BODY_HEADERS}
    return request.replace(
        url=url,
        redirects=trail,
        method=request.method if keeps_body else "GET",
        body=request.body if keeps_body else b"",
        headers=headers,
        cookies=cookies,
        dont_filter=request.dont_filter or url in trail,  # a page may set a cookie and redirect to itself
    )


# -- the code of the user


class Found(Struct):
    """The output of a callback: encoded items that passed the pipelines, and links."""

    items: list[bytes]
    links: list[Request | LinkBatch]
    dropped: list[str] = []
    """The reasons of the items that pipelines dropped."""


class Callbacks:
    """Calls the methods of the spider. Their exceptions are passed on. An item that cannot be stored is left out,
    counted and logged; it does not fail its page."""

    def __init__(self, spider: Spider, counters: Counters) -> None:
        self._spider = spider
        self._counters = counters
        self._fields = dict.fromkeys(spider.fields)
        self.pipelines: list[Callable[..., Any]] = [
            each() if isinstance(each, type) else each for each in spider.pipelines
        ]
        for pipeline in self.pipelines:
            if not callable(pipeline):
                name = type(pipeline).__name__
                raise SpiderError(f"the pipeline {name} is not callable: use a function, or a class with __call__")

    async def call(self, name: str | None, request: Request, /, *arguments: object, **named: object) -> Found:
        """Call the method ``name`` and collect its output. ``request`` is the request that it handles."""
        found = Found([], [])
        begin_page()
        for output in await _collect(self._spider.callback(name)(*arguments, **named)):
            if isinstance(output, (LinkBatch, Request)):
                self._check(output)
                found.links.append(output)
            elif output is not None and (encoded := await self._encode(output, request, found)) is not None:
                found.items.append(encoded)
        return found

    def _check(self, link: Request | LinkBatch) -> None:
        """SpiderError if a new request names a callback that the spider does not have."""
        for name in (link.callback, link.errback):
            if name is not None:
                self._spider.callback(name)

    async def _encode(self, item: object, request: Request, found: Found) -> bytes | None:
        try:
            for pipeline in self.pipelines:
                item = pipeline(item, self._spider)
                if isawaitable(item):
                    item = await item
                if item is None:
                    name = getattr(pipeline, "__name__", type(pipeline).__name__)
                    raise ItemError(f"the pipeline {name} returned None: return the item, or raise DropItem")
            if self._fields and type(item) is dict:
                item = self._fields | item
            return encode_item(item)
        except DropItem as dropped:
            reason = str(dropped)[:_MAX_REASON] or "no reason"
            self._counters.drop(reason)
            found.dropped.append(reason)
            log.debug("item dropped url=%s reason=%s", request.url, dropped)
        except ItemError as error:
            self._counters.item_errors += 1
            log.error("item not stored url=%s %s", request.url, error)
        return None


async def _collect(result: object) -> list[object]:
    """The output of any kind of callback: generator, coroutine, async generator, list, or a single value."""
    if isinstance(result, GeneratorType):
        return list(result)
    if isawaitable(result):
        result = await result
    if result is None:
        return []
    if isinstance(result, AsyncIterator):
        return [output async for output in result]
    if isinstance(result, (str, LinkBatch, Request)) or is_item(result) or not isinstance(result, Iterable):
        return [result]
    return list(result)


def describe(exc: BaseException) -> str:
    """The exception, and the last line of the user's own files in its traceback."""
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(exc).__name__}: {exc}{place}"
