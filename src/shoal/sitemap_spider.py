"""SitemapSpider: crawl the pages that a site lists in its sitemaps."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

from shoal.config.checks import CompiledPattern, check_regexes, compile_pattern, linear
from shoal.errors import RequestError, SitemapError, SpiderError
from shoal.http import LinkBatch, Request, Response
from shoal.http.response import charset_in
from shoal.http.sitemaps import Alternate as Alternate
from shoal.http.sitemaps import SitemapEntry, SitemapReader, read_since, sitemaps_in_robots
from shoal.http.sitemaps import SitemapLimits as SitemapLimits
from shoal.spider import Spider
from shoal.urls.normalize import host_of, join_url, origin_of

Pattern: TypeAlias = str | re.Pattern[str]
Rule: TypeAlias = tuple[Pattern, str | Callable[..., object]]

MAX_BODY = "http.max_body_bytes"
_SETTINGS: Mapping[str, object] = {MAX_BODY: 50 * 1024 * 1024}
"""The standard allows sitemaps of 50 MB."""
_MAX_LEVEL = 5  # indexes within indexes
_PAUSE_AFTER = 500  # entries, so that other pages do not wait


class SitemapSpider(Spider):
    """Reads sitemaps, and requests the pages that they list. Set ``sitemap_urls``, and write ``parse``.

    Each sitemap is a page of the run: polite, retried, resumed and counted as all others. Indexes are followed.
    XML sitemaps, text files and feeds can be compressed, and in any encoding.
    """

    settings: ClassVar[Mapping[str, object]] = _SETTINGS
    sitemap_urls: Sequence[str] = ()
    """URLs of sitemaps, of indexes, or of robots.txt files that name sitemaps."""
    rules: Sequence[Rule] = (("", "parse"),)
    """Pairs of a regular expression and a callback. The first one that is found in a URL decides its callback. URLs
    without a match are not requested."""
    follow: Pattern | Sequence[Pattern] = ()
    """Read only those sitemaps of an index whose URL matches one of these regular expressions; empty: all."""
    since: datetime | date | str | None = None
    """Skip pages and sitemaps that have not changed since then, by their date. Those without a date are kept."""
    alternate_links: bool = False
    """Request the pages in other languages too (``<xhtml:link rel="alternate">``)."""
    max_sitemaps: int = 100_000
    """How many sitemaps are read below one of ``sitemap_urls``. An index divides what is left among its sitemaps."""
    links_per_page: int = 50_000
    """A sitemap with more URLs is fetched again for each further portion of this size. Keep it below
    ``scope.max_links``."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).get("settings")
        if isinstance(own, Mapping) and not _sets_body_limit(own):
            cls.settings = {**_SETTINGS, **own}

    def start(self) -> Iterator[Request | str]:
        """Request the sitemaps, then ``start_urls``."""
        urls = [self.sitemap_urls] if isinstance(self.sitemap_urls, str) else self.sitemap_urls
        if not urls:
            raise SpiderError(
                f"{type(self).__name__} has no sitemap_urls: set them to sitemaps or robots.txt files, such as "
                '["https://example.com/robots.txt"]'
            )
        _ = self._choice  # errors of the rules are reported before anything is fetched
        yield from (Request(url, "parse_sitemap", render=False) for url in urls)
        yield from [self.start_urls] if isinstance(self.start_urls, str) else self.start_urls

    def sitemap_filter(self, entries: Iterable[SitemapEntry]) -> Iterable[SitemapEntry]:
        """Override this to leave out or change entries: pages and sitemaps that ``since`` does not exclude."""
        return entries

    def page_request(self, url: str, entry: SitemapEntry) -> object:
        """What to yield for a page: the request with the callback of the first rule that matches, or None. Override it
        to set a priority or ``meta``."""
        for pattern, callback in self._choice.rules:
            if pattern.search(url):
                return Request(url, callback)
        return None

    async def parse_sitemap(
        self, response: Response, level: int = 0, budget: int | None = None, skip: int = 0
    ) -> AsyncIterator[object]:
        """Request the pages and sitemaps that a sitemap lists. ``level``: the number of indexes above it. ``budget``:
        how many sitemaps may be read below it. ``skip``: how many of its entries were read before."""
        budget = self._choice.max_sitemaps if budget is None else budget
        portion = _Portion(self._choice, response, skip)
        children: dict[str, None] = {}
        for count, entry in enumerate(self.sitemap_filter(portion)):
            if count % _PAUSE_AFTER == 0:
                await asyncio.sleep(0)
            for loc in self._locs(entry):
                try:
                    url = join_url(response.url, loc)
                    if entry.is_sitemap:
                        if self._choice.follows(url):
                            children[url] = None
                    elif (output := self.page_request(url, entry)) is not None:
                        yield output
                except RequestError as error:
                    portion.skipped += 1
                    self.log.debug("sitemap entry skipped url=%s: %s", response.url, error)
        self._report(response, portion)
        for request in self._requests(response, list(children), level, budget):
            yield request
        if portion.next_skip is not None:
            rest = {"level": level, "budget": max(0, budget - len(children)), "skip": portion.next_skip}
            yield response.request.replace(cb_kwargs=rest, dont_filter=True, redirects=[])

    def _locs(self, entry: SitemapEntry) -> Iterator[str]:
        yield entry.loc
        if self._choice.alternates:
            yield from (alternate.url for alternate in entry.alternates)

    def _requests(self, response: Response, urls: list[str], level: int, budget: int) -> Iterator[Request]:
        """Yield the requests for the sitemaps of an index. They share the rest of the budget, so that indexes that list
        new indexes forever come to an end, whichever workers read them."""
        if level >= _MAX_LEVEL or len(urls) > budget:
            allowed = 0 if level >= _MAX_LEVEL else budget
            self.log.warning(
                "%d sitemaps are not read url=%s: it is nested %d levels deep, and only %d more sitemaps are allowed",
                len(urls) - allowed, response.url, level, budget,
            )  # fmt: skip
            self.stats.inc("sitemaps not read", len(urls) - allowed)
            urls = urls[:allowed]
        share = (budget - len(urls)) // len(urls) if urls else 0
        for url in urls:
            yield Request(url, "parse_sitemap", cb_kwargs={"level": level + 1, "budget": share}, render=False)

    def _report(self, response: Response, portion: _Portion) -> None:
        """Count what was read. SitemapError if nothing could be read."""
        if portion.error is not None:
            if not portion.count:
                raise portion.error
            self.log.warning("sitemap read in part url=%s: %s", response.url, portion.error)
            self.stats.inc("sitemaps read in part")
        if is_robots(response.url):
            return
        self.stats.inc("sitemaps", 0 if portion.first else 1)
        self.stats.inc("sitemap entries", portion.count)
        if portion.skipped:
            self.stats.inc("sitemap entries skipped", portion.skipped)

    @cached_property
    def _choice(self) -> _Choice:
        """Check the attributes. Those of the command line are text. SpiderError if one is wrong."""
        patterns = [self.follow] if isinstance(self.follow, str | re.Pattern) else self.follow
        alternates = str(self.alternate_links).lower() not in ("false", "no", "off", "0", "")
        with self._checks("rules", "write pairs of a regular expression and a callback"):
            if any(isinstance(rule, str) or len(rule) != 2 for rule in self.rules):
                raise ValueError(f"{self.rules!r:.80} are not pairs")
            compiled = self._compiled("rules", [pattern for pattern, _ in self.rules])
            rules = list(zip(compiled, [_name_of(callback) for _, callback in self.rules], strict=True))
        with self._checks("follow", "write regular expressions"):
            follow = self._compiled("follow", patterns)
        with self._checks("since"):
            since = None if self.since is None else read_since(self.since)
        with self._checks("max_sitemaps or links_per_page", "write a number"):
            numbers = int(self.max_sitemaps), max(2, int(self.links_per_page))
        for _, callback in rules:
            self.callback(callback)
        return _Choice(rules, follow, since, alternates, *numbers)

    def _compiled(self, attribute: str, patterns: Sequence[Pattern]) -> Sequence[CompiledPattern]:
        """ValueError or TypeError for an invalid one. Those of others are searched in linear time."""
        if attribute not in self._arguments_of_others:
            return [re.compile(pattern) for pattern in patterns]
        marked = linear([str(pattern) for pattern in patterns])
        if (problem := check_regexes(marked)) is not None:
            raise ValueError(problem)
        return [compile_pattern(pattern) for pattern in marked]

    @contextmanager
    def _checks(self, attribute: str, advice: str = "") -> Iterator[None]:
        """Raise SpiderError, with the name of the attribute, if reading it fails."""
        try:
            yield
        except (re.error, TypeError, ValueError) as exc:
            raise SpiderError(
                f"{type(self).__name__}: invalid {attribute}: {exc}{f'; {advice}' if advice else ''}"
            ) from exc


class _Choice(NamedTuple):
    """The settings of a SitemapSpider, checked and compiled."""

    rules: Sequence[tuple[CompiledPattern, str]]
    follow: Sequence[CompiledPattern]
    since: datetime | None
    alternates: bool
    max_sitemaps: int
    links_per_page: int

    def follows(self, url: str) -> bool:
        return not self.follow or any(pattern.search(url) for pattern in self.follow)


class _Portion:
    """The entries of a sitemap that one page of the run handles. They end at an error, which is reported later."""

    def __init__(self, choice: _Choice, response: Response, skip: int) -> None:
        self._choice = choice
        self._response = response
        self.first = skip
        self.count = 0
        """Entries that were read, including those that are too old."""
        self.skipped = 0
        self.error: SitemapError | None = None
        self.next_skip: int | None = None
        """Where the next portion begins. None: this is the last one."""

    def __iter__(self) -> Iterator[SitemapEntry]:
        choice = self._choice
        room = choice.links_per_page - 1  # one is for the request of the next portion
        reader = _read(self._response)
        try:
            for number, entry in enumerate(reader):
                if number < self.first:
                    continue
                if room <= 0:
                    self.next_skip = number
                    return
                self.count += 1
                if choice.since is None or entry.may_be_newer_than(choice.since):
                    room -= 1 + (len(entry.alternates) if choice.alternates else 0)
                    yield entry
        except SitemapError as error:
            self.error = error
        self.skipped += reader.skipped if isinstance(reader, SitemapReader) else 0


def _read(response: Response) -> SitemapReader | list[SitemapEntry]:
    if not response.ok:
        raise SitemapError(f"the server answered {response.status}")
    if is_robots(response.url):
        text = response.body.decode("utf-8-sig", "replace")
        return [SitemapEntry(url, is_sitemap=True) for url in sitemaps_in_robots(text)]
    return SitemapReader(response.body, charset_in(response.headers.get("Content-Type", "")))


def is_robots(url: str) -> bool:
    return url == origin_of(url) + "/robots.txt"


def _name_of(callback: object) -> str:
    name = callback if isinstance(callback, str) else getattr(callback, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(f"{callback!r:.80} is not a callback; write the name of a method")
    return name


def _sets_body_limit(settings: Mapping[str, object]) -> bool:
    http = settings.get("http")
    return MAX_BODY in settings or (
        http is not None and not (isinstance(http, Mapping) and "max_body_bytes" not in http)
    )


# The spiders of `shoal map`: they list the URLs of a site, and fetch only what that needs.

SETTINGS = {"scope.max_depth": 3, "scope.max_pages": 1000, MAX_BODY: 50 * 1024 * 1024}
"""Limits for a site that may be endless. A sitemap counts as a page."""
_SITEMAP_FILE = re.compile(r"\.(xml|xml\.gz|gz|txt|rss|atom)$", re.IGNORECASE)


class MapSpider(SitemapSpider):
    """Yields the URL and the date of each entry of a site's sitemaps: those of its robots.txt, or else /sitemap.xml."""

    name = "map"
    settings: ClassVar[Mapping[str, object]] = SETTINGS
    handle_statuses = (400, 401, 403, 404, 410)  # a site without robots.txt or sitemap is no failure
    site = ""
    """A page of the site, or one of its sitemaps."""

    def start(self) -> Iterator[Request | str]:
        if _SITEMAP_FILE.search(self.site.partition("?")[0]) and not is_robots(self.site):
            yield Request(self.site, "parse_sitemap", render=False)
        else:
            yield Request(origin_of(self.site) + "/robots.txt", "parse_robots", render=False)

    async def parse_robots(self, response: Response) -> AsyncIterator[object]:
        has_sitemap = False
        if response.ok:
            async for request in self.parse_sitemap(response):
                has_sitemap = True
                yield request
        if not has_sitemap:
            yield Request(origin_of(response.url) + "/sitemap.xml", "parse_sitemap", render=False)

    async def parse_sitemap(
        self, response: Response, level: int = 0, budget: int | None = None, skip: int = 0
    ) -> AsyncIterator[object]:
        try:
            async for output in super().parse_sitemap(response, level, budget, skip):
                yield output
        except SitemapError as error:
            self.log.info("sitemap not read url=%s: %s", response.url, error)

    def page_request(self, url: str, entry: SitemapEntry) -> object:
        """Return an item instead of a request: the page is not fetched."""
        lastmod = entry.lastmod
        return {"url": url, "lastmod": None if lastmod is None else lastmod.isoformat()}


class LinkSpider(Spider):
    """Yields the URL of each link of a site, for sites without sitemaps. `link_spider` makes one."""

    name = "links"
    settings: ClassVar[Mapping[str, object]] = SETTINGS

    def parse(self, response: Response) -> Iterator[dict[str, object] | LinkBatch]:
        if "html" not in response.headers.get("Content-Type", "html").lower():
            return
        (domain,) = self.allowed_domains
        yield {"url": response.url, "lastmod": None}
        for url in response.links():
            if f".{host_of(url)}".endswith(f".{domain}"):
                yield {"url": url, "lastmod": None}
        yield response.follow_all()


def link_spider(site: str) -> LinkSpider:
    """``site`` is a URL in normal form. Subdomains of its host belong to the site."""
    return LinkSpider(start_urls=[site], allowed_domains=[host_of(site).removeprefix("www.")])
