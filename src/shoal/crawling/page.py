"""One page: fetched, handed to the callbacks of the spider, and turned into a settlement for the frontier.

`PageDirectives` applies what a page says to crawlers: nofollow and noindex, in its links, its meta tags and its
X-Robots-Tag headers. `robots.nofollow` and `robots.noindex` turn it on. Both are off by default, and cost nothing then.
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from shoal.config import Config, RobotsSettings
from shoal.crawling.callbacks import CallbackOutput, Callbacks
from shoal.crawling.files import FileChains
from shoal.crawling.outcome import BROKEN_LINK, GONE
from shoal.crawling.run_queue import AdmittedLinks, RunQueue, count_links
from shoal.crawling.stats import CodeError, Counters
from shoal.errors import (
    FetchError,
    FileStoreError,
    FileTooLargeError,
    PartialOutputError,
    RequestError,
    ShoalError,
    SpiderError,
    TooComplexError,
    describe,
    text_of,
)
from shoal.fetch.layers import Postponed, Replaced, current_attempt
from shoal.fetch.layers.throttle import RetryPolicy
from shoal.http import LinkBatch, Request, Response
from shoal.http.exchange import Exchange, captured, redirected_request
from shoal.http.files import FILE_CALLBACK
from shoal.ports import Completion, Failure, Fetch, Lease
from shoal.spider import Spider
from shoal.system import clock
from shoal.urls.normalize import LinkJoiner, join_url, resolve

log = logging.getLogger("shoal.engine")

_MAX_REASONS = 5  # of dropped items, in the history of a page


class ReleasedLease(Struct):
    """A lease to release: its page was not handled."""

    lease: Lease
    contacted: bool


class ParsedPage(Struct):
    """A handled page. The queue remembers its links once the frontier has stored the page."""

    completion: Completion
    admitted: AdmittedLinks
    exchange: Exchange | None = None
    """What was sent and received, if an archive wants it."""


Settlement: TypeAlias = ParsedPage | Failure | ReleasedLease


def _is_robots(exchange: Exchange, lease: Lease) -> bool:
    """Whether an exchange fetched robots.txt, not the page."""
    return exchange.url != lease.request.url and urlsplit(exchange.url).path == "/robots.txt"


class PageHandler:
    """Turns leases into settlements. Many tasks may call it at the same time."""

    def __init__(
        self,
        spider: Spider,
        config: Config,
        queue: RunQueue,
        fetch: Fetch,
        counters: Counters,
        *,
        captures: bool = False,
        on_store_failure: Callable[[FileStoreError], None] = lambda error: None,
    ) -> None:
        """``captures``: add to each settlement the exchange of its page. ``on_store_failure``: called when the file
        store fails. Pages that need the store are released."""
        self.counters = counters
        self._captures = captures
        self._on_store_failure = on_store_failure
        self._fetch = fetch
        self._queue = queue
        self._max_redirects = config.http.max_redirects
        self._retry = RetryPolicy(config.retry)
        self._handled = frozenset(spider.handle_statuses)
        self._directives: PageDirectives | None = None
        if config.robots.nofollow or config.robots.noindex:
            self._directives = PageDirectives(config.robots, config.user_agent, counters)
        self._has_quit = False
        """Whether the user has quit a debugger. Then no callback begins: it might stop there again."""
        self.files = FileChains(config, queue.scope, spider.stats)
        self.callbacks = Callbacks(spider, counters, self.files)

    async def handle(self, lease: Lease) -> Settlement:
        """Fetch and parse the page of a lease. A failure is a settlement too: only what ends the task or the process
        is raised."""
        try:
            return await (self._capture(lease) if self._captures else self._handle(lease))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a bug, or a library that panics, costs only this request
            self.counters.errors["internal error"] += 1
            log.exception("internal error url=%s", lease.request.url)
            return Failure(lease=lease, kind="internal error", reason=f"{type(exc).__name__}: {text_of(exc)}")

    async def _capture(self, lease: Lease) -> Settlement:
        """Handle a lease, and add the exchange of its page. A page from the cache has none."""
        exchanges: list[Exchange] = []
        captured.set(exchanges)  # for this task, which handles one page
        settlement = await self._handle(lease)
        if isinstance(settlement, ParsedPage) and settlement.completion.contacted:
            settlement.exchange = next(
                (exchange for exchange in reversed(exchanges) if not _is_robots(exchange, lease)), None
            )
        return settlement

    async def _handle(self, lease: Lease) -> Settlement:
        request = lease.request
        current_attempt.set(lease.attempt)
        try:
            stored = await self.files.known(request) if request.callback == FILE_CALLBACK else None
            response = stored or await self._fetch(request)
        except Postponed as postponed:
            return ReleasedLease(lease, postponed.contacted)
        except Replaced as replaced:
            if too_many := self._too_many_redirects(replaced.request.redirects):
                return await self._failed(lease, too_many)
            return self._moved(lease, replaced.request, str(replaced), contacted=replaced.contacted)
        except FetchError as error:
            return await self._failed(lease, error)
        except FileStoreError as error:
            return self._store_failed(lease, error, contacted=False)
        self.counters.fetched += 1
        self.counters.bytes += len(response.body)
        if response.from_cache:
            self.counters.from_cache += 1
        else:
            self.counters.latency.measured(response.elapsed)
            if self.counters.failing_hosts:
                self.counters.failing_hosts.pop(lease.host, None)
        status = response.status
        if 300 <= status < 400 and status not in self._handled and (location := response.location) is not None:
            return await self._redirected(lease, response, location)
        if self._has_quit:
            return ReleasedLease(lease, not response.from_cache)
        try:
            collected = await self.callbacks.call(request.callback, request, response, **request.cb_kwargs)
            return self._parsed(lease, response, collected)
        except (TooComplexError, FileTooLargeError) as error:
            error.status = status
            return await self._failed(lease, error)
        except FileStoreError as error:
            return self._store_failed(lease, error, contacted=not response.from_cache)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The callback awaited something that was cancelled.
            return await self._callback_failed(lease, response, exc)
        except Exception as exc:  # the user's code may raise anything: it costs this page
            return await self._callback_failed(lease, response, exc)
        finally:
            if response.page is not None:
                await response.release()

    def _parsed(self, lease: Lease, response: Response, collected: CallbackOutput) -> ParsedPage:
        notes = [_dropped(collected.dropped)] if collected.dropped else []
        if self._directives is not None and lease.request.callback != FILE_CALLBACK:  # a file's item is its page's
            notes += filter(None, [self._directives.apply(response, collected)])
        notes += response.flags
        admitted = self._queue.admit(collected.links, lease.request)
        admitted.children += collected.files
        self.counters.out_of_scope += admitted.out_of_scope
        self.counters.too_deep += admitted.too_deep
        if admitted.left_out:
            self.counters.left_out += admitted.left_out
            most = self._queue.scope.max_links
            left_out = f"{admitted.left_out} links were left out: the limit is {most} (scope.max_links)"
            log.warning("%s url=%s", left_out, lease.request.url)
            notes.append(left_out)
        if log.isEnabledFor(logging.DEBUG):
            counts = len(collected.items), len(admitted.children)
            log.debug("crawled url=%s status=%d items=%d requests=%d", response.url, response.status, *counts)
        completion = Completion(
            lease=lease,
            items=collected.items,
            children=admitted.children,
            status=response.status,
            duplicates=admitted.duplicates + collected.duplicates,
            contacted=not response.from_cache,
            note="; ".join(notes),
            item_errors=collected.errors,
        )
        return ParsedPage(completion, admitted)

    async def _redirected(self, lease: Lease, response: Response, location: str) -> Settlement:
        """Complete a redirect with its target as the only child, so that scope, robots.txt and delay apply to it."""
        request = lease.request
        trail = [*request.redirects, request.url]
        if too_many := self._too_many_redirects(trail):
            return await self._failed(lease, too_many)
        try:
            url = join_url(request.url, location)
        except RequestError as exc:
            return await self._failed(lease, FetchError(f"redirect: {exc}", kind="redirects", retryable=False))
        reason = self._queue.scope.refuses(url)
        if reason is not None:
            self.counters.out_of_scope += 1
            message = f"redirects to {url}, which is {reason}"
            return await self._failed(lease, FetchError(message, kind="scope", retryable=False))
        target = redirected_request(request, url, response.status)
        if response.next_render is not None:
            target = target.replace(render=response.next_render)
        contacted = not response.from_cache
        return self._moved(lease, target, f"redirected to {url}", contacted=contacted, status=response.status)

    def _too_many_redirects(self, trail: Sequence[str]) -> FetchError | None:
        if len(trail) <= self._max_redirects:
            return None
        return FetchError(
            f"more than {self._max_redirects} redirects, from {trail[0]}", kind="redirects", retryable=False
        )

    def _moved(self, lease: Lease, target: Request, note: str, *, contacted: bool, status: int = 0) -> ParsedPage:
        """Complete a page with another request as its only child."""
        self.counters.redirected += 1
        completion = Completion(
            lease=lease, children=[target], status=status, contacted=contacted, redirected=True, note=note
        )
        return ParsedPage(completion, AdmittedLinks([target]))

    # -- failures

    async def _failed(self, lease: Lease, error: FetchError) -> Failure | ParsedPage:
        """Record a failed attempt. If no attempt is left, call the errback. A file is completed instead,
        with an item that says what failed. After a retry, that item could not be stored again."""
        is_broken = error.status in GONE and lease.request.depth > 0
        kind = BROKEN_LINK if is_broken else error.kind
        self.counters.errors[kind] += 1
        if error.contacted or error.kind == "dns":
            self.counters.host_failed(lease.host, error.kind, error.status)
        retry_in = self._retry.retry_in(error, lease.attempt)
        failure = Failure(
            lease=lease,
            kind=kind,
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
        if lease.request.callback == FILE_CALLBACK:
            collected = CallbackOutput([], [])
            collected.add(await self.files.failed(lease.request, str(error)))
            return ParsedPage(
                Completion(
                    lease=lease, items=collected.items, children=collected.files, status=error.status,
                    contacted=error.contacted, note=f"file failed: {error}",
                ),
                AdmittedLinks(collected.files),
            )  # fmt: skip
        if lease.request.errback is not None:
            await self._errback(lease, error, failure)
        return failure

    async def _errback(self, lease: Lease, error: ShoalError, failure: Failure) -> None:
        request = lease.request
        try:
            try:
                collected = await self.callbacks.call(request.errback, request, request, error)
            except PartialOutputError as partial:
                self._errback_failed(failure, partial.__cause__ or partial)
                collected = await self.callbacks.take(partial.outputs, request)
            failure.items = [*failure.items, *collected.items]
            failure.item_errors += collected.errors
            admitted = self._queue.admit(collected.links, request)
            failure.children = [*failure.children, *admitted.children, *collected.files]
        except Exception as exc:  # the user's code may raise anything
            self._errback_failed(failure, exc)

    def _errback_failed(self, failure: Failure, exc: BaseException) -> None:
        """Count the page as one whose callback failed, whatever failed before."""
        request = failure.lease.request
        reason = describe(exc, request.errback)
        failure.kind, failure.reason = "callback", f"{reason}; the page had failed: {failure.reason}"
        self.counters.errors["errback"] += 1
        self.counters.last_callback_error = CodeError(clock.time(), reason, request.url)
        log.error("errback failed url=%s %s", request.url, reason)

    def _store_failed(self, lease: Lease, error: FileStoreError, *, contacted: bool) -> ReleasedLease:
        """Release the page. It did not fail, so it loses no attempt."""
        log.info("released url=%s %s", lease.request.url, error)
        self._on_store_failure(error)
        return ReleasedLease(lease, contacted)

    async def _callback_failed(self, lease: Lease, response: Response, exc: BaseException) -> Settlement:
        """Give up the page. Its items are dropped, unless the spider keeps partial output. After a fix,
        `shoal retry-failed` fetches the page again."""
        cause = exc.__cause__ if isinstance(exc, PartialOutputError) else None
        if _is_debugger_quit(cause or exc):
            self._has_quit = True
            signal.raise_signal(signal.SIGINT)
            return ReleasedLease(lease, not response.from_cache)
        self.counters.errors["callback"] += 1
        reason = describe(cause or exc, lease.request.callback or "parse")
        self.counters.last_callback_error = CodeError(clock.time(), reason, response.url)
        log.error("callback failed url=%s %s", response.url, reason, exc_info=log.isEnabledFor(logging.DEBUG))
        failure = Failure(lease=lease, kind="callback", reason=reason, status=response.status)
        if isinstance(exc, PartialOutputError):
            try:
                collected = await self.callbacks.take(exc.outputs, lease.request, response)
            except FileTooLargeError as error:
                return await self._failed(lease, error)
            except FileStoreError as error:
                return self._store_failed(lease, error, contacted=not response.from_cache)
            if self._directives is not None:
                self._directives.apply(response, collected)
            failure.items, failure.item_errors = collected.items, collected.errors
            failure.children = [*self._queue.admit(collected.links, lease.request).children, *collected.files]
        if lease.request.errback is not None:
            await self._errback(lease, SpiderError(reason), failure)
        return failure


def _is_debugger_quit(exc: BaseException) -> bool:
    """Whether the user quit a debugger in the callback. That stops the crawl like Ctrl-C. The page has not failed."""
    bdb = sys.modules.get("bdb")
    return bdb is not None and isinstance(exc, bdb.BdbQuit)


def _dropped(reasons: list[str]) -> str:
    """The note in a page's history about the items that pipelines dropped."""
    counts = Counter(reasons).most_common(_MAX_REASONS)
    return "items dropped: " + ", ".join(f"{count} ({reason})" for reason, count in counts)


_MARKED = frozenset({"nofollow", "ugc", "sponsored"})
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
_AGENT = re.compile(r"\s*([A-Za-z*][\w.*-]*)\s*:(.*)", re.DOTALL)
_WEEKDAY = re.compile(r"\s*(mon|tue|wed|thu|fri|sat|sun)[a-z]*\s*", re.IGNORECASE)
_WORD = re.compile("[a-z][a-z0-9_-]*")
_UNSPECIFIC = frozenset({"mozilla", "compatible", "robots"})
"""Words of a user agent that name no crawler."""
_MAX_TEXT = 5000  # characters of a header or a meta tag
_MAX_META = 200
_MAX_MARKED = 20_000  # links; beyond it, nofollow wins even if another link to the same URL has none
_HEADER = "X-Robots-Tag"


class PageDirectives:
    """Removes from a callback's output what the page forbids."""

    def __init__(self, config: RobotsSettings, user_agent: str, counters: Counters) -> None:
        self._config = config
        """At least one of the two settings is on."""
        self._names = frozenset(_WORD.findall(user_agent.lower())) - _UNSPECIFIC
        self._counters = counters

    def apply(self, response: Response, collected: CallbackOutput) -> str:
        """Remove items and links. Returns a note for the page's history."""
        if not collected.links and not collected.items and not collected.files:
            return ""
        directives, notes = self._directives(response), []
        dropped = len(collected.items) + len(collected.files)  # a request for a file carries its item
        if self._config.noindex and dropped and "noindex" in directives:
            for _ in range(dropped):
                self._counters.drop("noindex")
            notes.append(f"{dropped} items were dropped: {directives['noindex']} (robots.noindex)")
            collected.items, collected.files = [], []
        if self._config.nofollow and collected.links:
            count, why = self._unfollow(response, collected, directives.get("nofollow"))
            if count:
                self._counters.not_followed += count
                notes.append(f"{count} links were not followed: {why} (robots.nofollow)")
        return "; ".join(notes)

    def _directives(self, response: Response) -> dict[str, str]:
        """``nofollow`` and ``noindex``, if the page says them, each with the place where it does."""
        now = datetime.fromtimestamp(clock.time(), UTC)
        places: dict[str, str] = {}
        headers = response.headers.getall(_HEADER, ())
        for name in read_directives(headers, self._names, now):
            places[name] = f"{_HEADER} says {name}"
        if _is_html(response):
            for name in read_directives(self._meta_tags(response), self._names, now):
                places.setdefault(name, f"a meta tag says {name}")
        return places

    def _meta_tags(self, response: Response) -> list[str]:
        """The contents of the meta tags for all crawlers, or for this one."""
        names = self._names | {"robots"}
        tags = response._tree.select("meta[name][content]")[:_MAX_META]
        return [tag.attr("content") or "" for tag in tags if (tag.attr("name") or "").strip().lower() in names]

    def _unfollow(self, response: Response, collected: CallbackOutput, page_says: str | None) -> tuple[int, str]:
        """Remove links. Return how many, and why."""
        if page_says is not None:
            count = count_links(collected.links)
            collected.links = []
            return count, page_says
        if not _is_html(response):
            return 0, ""
        marked = _MarkedLinks(response)
        if not marked:
            return 0, ""
        before = count_links(collected.links)
        collected.links = [allowed for link in collected.links if (allowed := marked.without(link)) is not None]
        return before - count_links(collected.links), "rel says nofollow"


class _MarkedLinks:
    """The links of a page that have rel=nofollow, ugc or sponsored, unless another link to the same URL has none."""

    def __init__(self, response: Response) -> None:
        marked: dict[str, None] = {}
        plain: dict[str, None] = {}
        links = response._tree.select("a[href], area[href]")
        hrefs, rels = (response._attributes.values(links, name) for name in ("href", "rel"))
        for href, rel in zip(hrefs, rels, strict=True):
            is_marked = rel is not None and not _MARKED.isdisjoint(rel[:_MAX_TEXT].lower().split())
            (marked if is_marked else plain)[href or ""] = None
        self._known = plain.keys() - marked.keys()
        self._hrefs: set[str] = set()
        self._urls: set[str] = set()
        if not marked:
            return
        followed = set(resolve(response.base_url, plain))
        joiner = LinkJoiner(response.base_url)
        for number, href in enumerate(marked):
            with suppress(RequestError):
                try:
                    url = joiner.join(href) if number < _MAX_MARKED else href
                except TooComplexError:
                    url = href
                if url not in followed:
                    self._hrefs.add(href)
                    self._urls.add(url)

    def __bool__(self) -> bool:
        return bool(self._hrefs)

    def without(self, link: Request | LinkBatch) -> Request | LinkBatch | None:
        """The link, or the part of a batch, that may be followed."""
        if isinstance(link, Request):
            return None if link.url in self._urls else link
        joiner = LinkJoiner(link.base)
        link.hrefs = [href for href in link.hrefs if not self._has(joiner, href)]
        return link if link.hrefs else None

    def _has(self, joiner: LinkJoiner, href: str) -> bool:
        if href in self._hrefs or href in self._urls:
            return True
        if href in self._known:
            return False
        try:
            return joiner.join(href) in self._urls
        except RequestError:
            return False
        except TooComplexError:  # such links are never followed
            return True


def read_directives(texts: Iterable[str], names: frozenset[str], now: datetime) -> set[str]:
    """Which of ``nofollow`` and ``noindex`` these texts say to all crawlers, or to a crawler with one of these names.

    ``none`` means both. ``unavailable_after`` means noindex from its date on. A crawler's name applies to the rest of
    its text.
    """
    directives: set[str] = set()
    for text in texts:
        is_ours = True
        parts = text[:_MAX_TEXT].split(",")
        for number, part in enumerate(parts):
            name, value = part.strip().lower(), ""
            while match := _AGENT.fullmatch(part):
                name, value = match[1].lower(), match[2]
                if name in _WITH_VALUE:
                    break
                is_ours = name == "*" or name in names
                part, name, value = value, value.strip().lower(), ""
            if not is_ours:
                continue
            if name == "none":
                directives |= {"nofollow", "noindex"}
            elif name in ("nofollow", "noindex"):
                directives.add(name)
            elif name == "unavailable_after":
                from shoal.http.sitemaps import read_period  # few pages need it

                if _WEEKDAY.fullmatch(value):  # "Friday, 25-Jun-10 15:00:00 GMT"
                    value = "".join(parts[number + 1 : number + 2])
                period = read_period(value)
                if period is not None and period[0] <= now:
                    directives.add("noindex")
    return directives


def _is_html(response: Response) -> bool:
    return "html" in response.headers.get("Content-Type", "text/html").lower()
