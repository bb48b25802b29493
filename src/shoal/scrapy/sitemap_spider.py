"""``SitemapSpider``: crawls the pages that sitemaps list, with the names and hooks of Scrapy."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from urllib.parse import urljoin

from shoal.config.patterns import CompiledPattern, compile_pattern, linear
from shoal.errors import SitemapError
from shoal.scrapy.http import Request, Response, XmlResponse
from shoal.scrapy.shared_types import Function, Values
from shoal.scrapy.spider import Spider
from shoal.sitemaps import SitemapEntry, SitemapReader, sitemaps_in_robots

log = logging.getLogger("shoal.scrapy")

_GZIP = b"\x1f\x8b"


class SitemapSpider(Spider):
    """Starts at ``sitemap_urls`` (sitemaps, or a robots.txt) and requests the pages that match ``sitemap_rules``.

    The first rule whose pattern matches a URL sets its callback. ``sitemap_follow`` has patterns for the URLs of
    sitemaps in an index: those that match one of them are followed.
    """

    sitemap_urls: Sequence[str] = ()
    sitemap_rules: Sequence[tuple[str | re.Pattern[str], str | Function]] = [("", "parse")]
    sitemap_follow: Sequence[str | re.Pattern[str]] = [""]
    sitemap_alternate_links: bool = False
    """Whether to request the pages in other languages too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cbs: list[tuple[CompiledPattern, Function]] = [
            (_compiled(pattern), getattr(self, callback) if isinstance(callback, str) else callback)
            for pattern, callback in self.sitemap_rules
        ]
        self._follow = [_compiled(pattern) for pattern in self.sitemap_follow]

    def start_requests(self) -> Iterator[Request]:
        for url in self.sitemap_urls:
            yield Request(url, self._parse_sitemap)

    async def start(self) -> AsyncIterator[Request]:
        for request in self.start_requests():
            yield request

    def sitemap_filter(self, entries: Iterable[Values]) -> Iterable[Values]:
        """Choose or change entries: dicts with ``loc`` and, if the sitemap has them, ``lastmod``, ``alternate`` ..."""
        yield from entries

    def _parse_sitemap(self, response: Response) -> Iterator[Request]:
        if response.url.endswith("/robots.txt"):
            for url in sitemaps_in_robots(response.body.decode("utf-8", "replace")):
                yield Request(urljoin(response.url, url), callback=self._parse_sitemap)
            return
        body = self._get_sitemap_body(response)
        if not body:
            log.warning("ignored %s: it is not a sitemap", response)
            return
        try:
            yield from self._requests(response, SitemapReader(body))
        except SitemapError as exc:
            log.warning("stopped reading the sitemap %s: %s", response, exc)

    def _requests(self, response: Response, reader: SitemapReader) -> Iterator[Request]:
        entries = iter(reader)
        first = list(next(([each] for each in entries), []))  # the format is known after it
        if reader.format not in ("urlset", "sitemapindex"):
            raise SitemapError(f"its format is {reader.format}")
        for url in self._urls(self.sitemap_filter(map(_as_dict, chain(first, entries)))):
            if reader.format == "sitemapindex":
                if any(each.search(url) for each in self._follow):
                    yield Request(url, callback=self._parse_sitemap)
                continue
            for pattern, callback in self._cbs:
                if pattern.search(url):
                    yield Request(url, callback=callback)
                    break

    def _urls(self, entries: Iterable[Values]) -> Iterator[str]:
        for entry in entries:
            if entry["loc"]:
                yield entry["loc"]
            if self.sitemap_alternate_links:
                yield from entry.get("alternate", ())

    def _get_sitemap_body(self, response: Response) -> bytes | None:
        """Return the content of a sitemap, compressed or not; None for any other page."""
        is_named_so = response.url.endswith((".xml", ".xml.gz"))
        is_sitemap = isinstance(response, XmlResponse) or response.body.startswith(_GZIP) or is_named_so
        return response.body if is_sitemap else None


def _as_dict(entry: SitemapEntry) -> Values:
    found: Values = {"loc": entry.loc, **entry.fields}
    if entry.alternates:
        found["alternate"] = [each.url for each in entry.alternates]
    return found


def with_linear_patterns(kind: type[Spider], arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a spider. Regular expressions for sitemaps are marked: others may have written them, in a
    schedule or a stored run."""
    changed = dict(arguments)
    if issubclass(kind, SitemapSpider):
        if isinstance(follow := arguments.get("sitemap_follow"), list | tuple):
            changed["sitemap_follow"] = [_marked(pattern) for pattern in follow]
        if isinstance(rules := arguments.get("sitemap_rules"), list | tuple):
            changed["sitemap_rules"] = [(_marked(pattern), callback) for pattern, callback in rules]
    return changed


def _marked(pattern: object) -> object:
    return linear([pattern])[0] if isinstance(pattern, str) else pattern


def _compiled(pattern: str | re.Pattern[str]) -> CompiledPattern:
    return compile_pattern(pattern) if isinstance(pattern, str) else pattern
