"""One page: fetched, handed to the spider, and what became of it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TypeAlias

from msgspec import Struct

from shoal.config import Config
from shoal.crawling.callbacks import Callbacks, Found, describe
from shoal.crawling.scheduler import Admitted, Scheduler
from shoal.crawling.stats import Counters
from shoal.errors import FetchError, RequestError, ShoalError, SpiderError, TooComplexError
from shoal.http import Request, Response
from shoal.middleware import Postponed
from shoal.middleware.retry import RetryPolicy
from shoal.ports import Completion, Failure, Fetch, Lease
from shoal.spider import Spider
from shoal.urls.normalize import host_of, join_url

log = logging.getLogger("shoal.engine")

_MAX_REASONS = 5  # of dropped items, in the history of a page

# Headers that say what a client is and understands. Anything else may be a secret (X-Api-Key, Private-Token,
# X-Amz-Security-Token ...): no list of secrets is ever complete, so this is the list of what is none.
_MAY_TRAVEL = frozenset(
    {"accept", "accept-charset", "accept-encoding", "accept-language", "cache-control", "dnt", "pragma", "priority",
     "save-data", "sec-gpc", "upgrade-insecure-requests", "user-agent"}
)  # fmt: skip
_OF_THE_BODY = frozenset({"content-type", "content-length", "content-encoding", "content-language"})


class Released(Struct):
    """A lease that goes back unused."""

    lease: Lease
    contacted: bool


class Parsed(Struct):
    """A page that was handled, with what the scheduler has to learn once it is committed."""

    completion: Completion
    admitted: Admitted


Settlement: TypeAlias = Parsed | Failure | Released


class Handler:
    """Turns leases into settlements, as many at the same time as there are callers."""

    def __init__(self, spider: Spider, config: Config, scheduler: Scheduler, fetch: Fetch, counters: Counters) -> None:
        self.counters = counters
        self._fetch = fetch
        self._scheduler = scheduler
        self._max_redirects = config.http.max_redirects
        self._retry = RetryPolicy(config.retry)
        self._handled = frozenset(spider.handle_statuses)
        self.callbacks = Callbacks(spider, counters)

    async def handle(self, lease: Lease) -> Settlement:
        """Whatever becomes of the page, for the frontier to be told. Only a cancellation comes through."""
        try:
            return await self._handle(lease)
        except Exception as exc:  # the end of a task: a bug here costs one request and says so
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
            return await self._callback_failed(lease, response, exc)  # something that the callback waited for
        except Exception as exc:  # whatever the user's code raises: it costs this page, and says where
            return await self._callback_failed(lease, response, exc)

    def _parsed(self, lease: Lease, response: Response, found: Found) -> Parsed:
        admitted = self._scheduler.admit(found.links, lease.request)
        self.counters.out_of_scope += admitted.out_of_scope
        note = _dropped(found.dropped) if found.dropped else ""
        if admitted.left_out:
            self.counters.left_out += admitted.left_out
            most = self._scheduler.scope.max_links
            left_out = f"{admitted.left_out} links were left out: at most {most} are taken (scope.max_links)"
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
        """A redirect is done, and its target a child: so scope, robots.txt and the host's delay hold for each hop."""
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
            note=f"redirected to {url}",
        )
        return Parsed(completion, Admitted([target]))

    # -- failures

    async def _failed(self, lease: Lease, error: FetchError) -> Failure:
        """Wait for another attempt, or die; the errback hears of a death."""
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
        except Exception as exc:  # the user's code again
            self.counters.errors["errback"] += 1
            log.error("errback failed url=%s %s", lease.request.url, describe(exc))

    async def _callback_failed(self, lease: Lease, response: Response, exc: BaseException) -> Failure:
        """The page is dead: nothing of it is stored. Once the spider is mended, `retry-failed` fetches it again."""
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


def meant_for(request: Request, url: str) -> tuple[dict[str, str], dict[str, str]]:
    """Headers and cookies of a request that may be sent to another URL too.

    The same host and port gets all of them. Another host, and the same one without encryption where there was some,
    gets only headers that are known to hold no secret, those that describe the body, and no cookies.
    """
    downgraded = request.url.startswith("https:") and not url.startswith("https:")
    if host_of(url) == host_of(request.url) and not downgraded:
        return request.headers, request.cookies
    return {name: value for name, value in request.headers.items() if name.lower() in _MAY_TRAVEL | _OF_THE_BODY}, {}


def redirected_request(request: Request, url: str, status: int) -> Request:
    """The request that a redirect leads to, as browsers make it: a POST becomes a GET unless the status forbids that,
    and another host is not told what was meant for this one."""
    trail = [*request.redirects, request.url]
    keeps_body = status in (307, 308) or request.method in ("GET", "HEAD")
    headers, cookies = meant_for(request, url)
    if not keeps_body:
        headers = {name: value for name, value in headers.items() if name.lower() not in _OF_THE_BODY}
    return request.replace(
        url=url,
        redirects=trail,
        method=request.method if keeps_body else "GET",
        body=request.body if keeps_body else b"",
        headers=headers,
        cookies=cookies,
        dont_filter=request.dont_filter or url in trail,  # a page may set a cookie and send back to itself
    )
