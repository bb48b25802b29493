"""The queue of a run as its engine sees it: it filters links before they enter the frontier, and leases requests."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct

from shoal.config import Config
from shoal.errors import FrontierError, RequestError
from shoal.http import LinkBatch, Request
from shoal.ports import Frontier, FrontierOptions, Leased
from shoal.spider import Spider
from shoal.urls.normalize import Scope, folder_of, origin_of, resolve_within_limits

# A cache of the links that the frontier of a run already has.


_MAX_HREF = 500
"""Longer ones are not remembered."""
_RELATIVE_START = re.compile(r"[\w.\-~][^:]*\Z", re.ASCII)
"""An href that is relative to the folder of its page. One with a colon may have a scheme."""
_NONE: frozenset[str] = frozenset()


class KnownLinks:
    """Links that the frontier of a run already has: raw hrefs, so that most of them need not be resolved, and URLs.

    Absolute ones mean the same everywhere, ``/path`` on every page of its origin, and ``page.html`` or ``../page`` on
    every page of their folder. Very long ones are left out. Links are added only after the frontier has stored them.
    The cache is bounded: when full, it is cleared.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._size = 0
        self._absolute: set[str] = set()
        self._by_place: dict[str, set[str]] = {}
        """The hrefs by origin, or by folder if they are relative to it."""

    def unknown(self, base: str, hrefs: Sequence[str]) -> list[str]:
        """Return the hrefs that are not in the cache, without duplicates."""
        known = self._by_place.get(origin_of(base), _NONE)
        if known.issuperset(hrefs):  # as on most pages of a site
            return []
        here, absolute = self._by_place.get(folder_of(base), _NONE), self._absolute
        if here or absolute:
            unknown = [href for href in hrefs if href not in known and href not in here and href not in absolute]
        else:
            unknown = [href for href in hrefs if href not in known]
        return list(dict.fromkeys(unknown))

    def new(self, urls: Iterable[str]) -> list[str]:
        """Return the URLs that are not in the cache."""
        known = self._absolute
        return [url for url in urls if url not in known]

    def has(self, url: str) -> bool:
        """Whether this URL is in the cache."""
        return url in self._absolute

    def learn(self, base: str, hrefs: Iterable[str]) -> None:
        """Add hrefs of the page ``base`` that the frontier has stored."""
        fixed: list[str] = []
        relative: list[str] = []
        absolute: list[str] = []
        for href in hrefs:
            if len(href) <= _MAX_HREF:
                if href[:1] == "/":
                    fixed.append(href)
                elif href[:7] == "http://" or href[:8] == "https://":
                    absolute.append(href)
                elif _RELATIVE_START.match(href):
                    relative.append(href)
        if fixed:
            self._add_to(origin_of(base), fixed)
        if relative:
            self._add_to(folder_of(base), relative)
        if absolute:
            self.learn_urls(absolute)

    def learn_urls(self, urls: Iterable[str]) -> None:
        """Add absolute URLs that the frontier has stored."""
        urls = [url for url in urls if len(url) <= _MAX_HREF]
        self._make_room(urls)
        before = len(self._absolute)
        self._absolute.update(urls)
        self._size += len(self._absolute) - before

    def _add_to(self, place: str, hrefs: list[str]) -> None:
        self._make_room(hrefs)
        known = self._by_place.setdefault(place, set())
        before = len(known)
        known.update(hrefs)
        self._size += len(known) - before

    def _make_room(self, hrefs: list[str]) -> None:
        del hrefs[self._limit :]
        if self._size + len(hrefs) > self._limit:
            self._by_place.clear()
            self._absolute.clear()
            self._size = 0


log = logging.getLogger("shoal.scheduler")

_encode = msgspec.msgpack.Encoder().encode


class AdmittedLinks(Struct):
    """The links of a page: the requests to push, and counts of the rest."""

    children: list[Request]
    duplicates: int = 0
    out_of_scope: int = 0
    too_deep: int = 0
    """How many of the links out of scope are deeper than ``scope.max_depth``."""
    left_out: int = 0
    """Links beyond ``scope.max_links``."""
    hrefs: list[tuple[str, list[str]]] = []
    """(page, raw hrefs) that the frontier will know once the children are pushed."""


class RunQueue:
    """The queue and the filter of a run, in batches. Its user settles leases with the frontier.

    Every method may raise StoreAwayError: the server of the frontier cannot be reached. Nothing was changed then.
    """

    logger = log
    """Logs each URL that is pushed, at DEBUG."""

    def __init__(
        self,
        frontier: Frontier,
        scope: Scope,
        *,
        ttl: float = 300.0,
        max_pages: int | None = None,
        shared: bool = False,
    ) -> None:
        """``max_pages`` is for the whole run: earlier pages count, failed ones do not. ``shared``: other processes work
        on the run too, so the pages are counted again before each lease."""
        self._shared = shared
        self.frontier = frontier
        self.scope = scope
        self._ttl = ttl
        self._max_pages = max_pages
        self._left: int | None = None
        """How many pages may still be leased. None: not counted yet, or no limit."""
        self._pending = False
        """Whether fewer pages than the limit were done at the last count."""
        self._is_ended = False
        self._nonce, self._asked = b"", 0
        """The nonce of the last lease under a page limit, and how many requests it asked for."""
        self._known = KnownLinks()

    def admit(self, links: Iterable[Request | LinkBatch], parent: Request) -> AdmittedLinks:
        """Resolve, filter and deduplicate the links of a page. Nothing is recorded before ``learn``.

        RequestError if one of them cannot be stored. Here that fails one page; later it would fail a whole batch.
        """
        admitted = AdmittedLinks([])
        depth = parent.depth + 1
        if self.scope.too_deep(depth):
            admitted.too_deep = count_links(links)
            admitted.out_of_scope = admitted.too_deep
            return admitted
        for link in links:
            if isinstance(link, LinkBatch):
                self._admit_batch(link, depth, admitted)
            elif is_plain(link) and self._known.has(link.url):
                admitted.duplicates += 1
            elif self.scope.refuses(link.url):
                admitted.out_of_scope += 1
            elif len(admitted.children) >= self.scope.max_links:
                admitted.left_out += 1
            else:
                _check_storable(link)
                link.depth = depth
                admitted.children.append(link)
        return admitted

    def is_known(self, url: str) -> bool:
        """Whether the frontier surely has the page of this URL, which is in normal form. False if that is not known."""
        return self._known.has(url)

    def _admit_batch(self, batch: LinkBatch, depth: int, admitted: AdmittedLinks) -> None:
        if batch.dont_filter:
            hrefs = batch.hrefs
        else:
            hrefs = self._known.unknown(batch.base, batch.hrefs)
            admitted.duplicates += len(batch.hrefs) - len(hrefs)
        if not hrefs:  # as on most pages of a site
            return
        room = self.scope.max_links - len(admitted.children)
        if len(hrefs) > room:
            admitted.left_out += len(hrefs) - room
            hrefs = hrefs[:room]
        _check_storable(batch)
        urls, complete = resolve_within_limits(batch.base, hrefs)
        if not batch.dont_filter:
            if complete:
                admitted.hrefs.append((batch.base, hrefs))
            new = self._known.new(urls)
            admitted.duplicates += len(urls) - len(new)
            urls = new
        for url in urls:
            if self.scope.refuses(url):
                admitted.out_of_scope += 1
                continue
            child = batch.request(url)
            child.depth = depth
            admitted.children.append(child)

    def learn(self, admitted: AdmittedLinks) -> None:
        """Remember these children and their hrefs: the frontier has stored them."""
        for base, hrefs in admitted.hrefs:
            self._known.learn(base, hrefs)
        if admitted.children:
            self._known.learn_urls([child.url for child in admitted.children if is_plain(child)])

    def forget(self) -> None:
        """Drop everything learned from the frontier: it went back in time."""
        self._known = KnownLinks()
        self._left = None
        self._pending = False

    async def enqueue_requests(self, requests: Sequence[Request]) -> int:
        """Push the requests that are in scope. Returns how many were new. QueueFullError: none was recorded."""
        inside = [request for request in requests if not self._outside(request)]
        if not inside:
            return 0
        duplicates = await self.look_up(inside)
        added = (await self.frontier.push(inside)).added
        await self.log_pushed(inside, duplicates)
        return added

    @property
    def logs_urls(self) -> bool:
        """Whether each URL that is pushed is logged, at the cost of a lookup: if ``shoal.scheduler`` logs DEBUG."""
        return log.isEnabledFor(logging.DEBUG)

    async def look_up(self, requests: Sequence[Request]) -> list[bool]:
        """For the log: which of these requests are duplicates. Empty if they are not logged."""
        duplicates, fingerprints = list[bool](), set[bytes]()
        if not self.logs_urls:
            return duplicates
        with suppress(FrontierError):
            for request in requests:
                fingerprint = request.fingerprint()
                duplicates.append(fingerprint in fingerprints or await self.is_duplicate(request))
                if not request.dont_filter:
                    fingerprints.add(fingerprint)
        return duplicates

    async def log_pushed(
        self, requests: Sequence[Request], duplicates: Sequence[bool], *, refused: bool = False
    ) -> None:
        """Log each URL that was pushed. ``duplicates``: the answer of ``look_up`` before the push. ``refused``: some of
        them did not fit into the queue."""
        if not duplicates:
            return
        with suppress(FrontierError):
            size = await self.size()
            for request, duplicate in zip(requests, duplicates, strict=False):
                word = "duplicate" if duplicate else "enqueued"
                if refused and not duplicate:
                    history = await self.frontier.find(request, exact=True)
                    word = "refused" if history is not None and history.state == "dead" else word
                log.debug("%s %s (priority %g, %d in the queue)", word, request.url, request.priority, size)

    async def next_requests(self, limit: int, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        """Lease up to ``limit`` requests that may be fetched now; none when the page limit is reached.

        For ``counts_attempt`` and ``nonce`` see ``Queue.lease``."""
        if self._is_ended:
            return await self._lease_none()
        if self._max_pages is None:
            return await self.frontier.lease(limit, self._ttl, counts_attempt=counts_attempt, nonce=nonce)
        if nonce and nonce == self._nonce:  # a repeat: its own leases must not count as pages of others
            return await self.frontier.lease(self._asked, self._ttl, counts_attempt=counts_attempt, nonce=nonce)
        if self._left is None or self._shared:
            stats = await self.frontier.stats()
            self._left = max(0, self._max_pages - stats.done - stats.leased)
            self._pending = stats.done < self._max_pages
        if not self._left:
            if self._pending and self._shared:
                await self.frontier.lease(0, self._ttl)  # release expired leases: their pages may be fetched here
            return Leased([], None)
        self._nonce, self._asked = nonce, min(limit, self._left)
        leased = await self.frontier.lease(self._asked, self._ttl, counts_attempt=counts_attempt, nonce=nonce)
        self._left -= len(leased.leases)
        return leased

    async def _lease_none(self) -> Leased:
        if self._shared:
            self._pending = (await self.frontier.stats()).leased > 0
            if self._pending:
                await self.frontier.lease(0, self._ttl)  # release expired leases
        return Leased([], None)

    def end(self) -> None:
        """Lease nothing more: the run ends, although requests are left."""
        if not self._is_ended:
            self._is_ended, self._pending = True, self._shared

    @property
    def limit_reached(self) -> bool:
        """Whether no further page may be fetched: the page limit is reached, or the run was ended. False while other
        processes have pages: they may fail."""
        return (self._is_ended or self._left == 0) and not (self._shared and self._pending)

    def uncount(self, count: int) -> None:
        """Do not count ``count`` leases for the page limit: they ended without a page."""
        if self._left is not None:
            self._left += count

    async def size(self) -> int:
        """How many requests are in the queue: ready, or waiting for another attempt. Leased ones are not."""
        stats = await self.frontier.stats()
        return stats.remaining - stats.leased

    async def is_duplicate(self, request: Request) -> bool:
        """Whether the run already has this request. Nothing is recorded. A request with ``dont_filter`` never is."""
        return not request.dont_filter and await self.frontier.find(request, exact=True) is not None

    def _outside(self, request: Request) -> bool:
        return self.scope.too_deep(request.depth) or self.scope.refuses(request.url) is not None


def frontier_options(config: Config) -> FrontierOptions:
    """The settings that a frontier needs."""
    return FrontierOptions(
        max_attempts=config.retry.max_attempts,
        delay=config.download_delay,
        concurrency_per_host=config.concurrency_per_host,
        weight=config.weight,
        max_queue_size=config.queue.max_size,
        overflow=config.queue.overflow,
        in_memory=config.queue.in_memory,
    )


def make_run_queue(spider: Spider, config: Config, frontier: Frontier, *, shared: bool) -> RunQueue:
    """The queue of a run."""
    return RunQueue(
        frontier,
        Scope(config.scope, spider.allowed_domains),
        ttl=config.lease.ttl,
        max_pages=config.scope.max_pages,
        shared=shared,
    )


def _check_storable(link: Request | LinkBatch) -> None:
    """``meta`` and ``cb_kwargs`` can have any values; the rest was checked when the request was made."""
    for name in ("meta", "cb_kwargs"):
        if values := getattr(link, name):
            try:
                _encode(values)
            except (TypeError, ValueError, OverflowError, RecursionError) as exc:
                raise RequestError(f"{name} {values!r:.80} cannot be stored: {exc}") from exc


def count_links(links: Iterable[Request | LinkBatch]) -> int:
    return sum(len(link) if isinstance(link, LinkBatch) else 1 for link in links)


def is_plain(request: Request) -> bool:
    """Whether the URL alone identifies the request, and a second one is a duplicate."""
    return request.method == "GET" and not request.body and not request.dont_filter
