"""The spider of `shoal crawl URL`, for crawls without code."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from msgspec import Struct

from shoal.config import Resolved
from shoal.crawling.stats import CrawlSnapshot, Summary
from shoal.errors import SelectorError, ShoalError, SpiderError, TooComplexError
from shoal.http import LinkBatch, Render, Response
from shoal.http.response import LinkFilter
from shoal.http.sitemaps import read_since
from shoal.runs.crawl import Crawl
from shoal.selector import Selector
from shoal.sitemap_spider import MapSpider, link_spider
from shoal.spider import Spider
from shoal.urls.normalize import host_of, typed_url, url_fingerprint

DEFAULTS = {"scope": {"max_depth": 3, "max_pages": 1000}}
"""Limits for a site that may be endless."""


_MAX_CHARACTERS = (1 << 20, 4)  # of all items of a page, or this multiple of the page's size if that is more
_ANY_PAGE = LinkFilter()


class PageSpider(Spider):
    """Yields one item per page, or per row of a page, with its URL and the chosen fields. Follows the links of all
    pages."""

    queries: Mapping[str, str] = {}
    """Name to CSS query. An element gives its text. Empty: title and text of the page, or the text of the row."""
    rows = ""
    """A CSS query: each element that it finds becomes an item. Empty: each page becomes an item."""
    items_on = _ANY_PAGE
    """The pages that yield items, by URL."""
    markdown = False
    """Take the text as Markdown."""
    screenshots: Path | None = None
    """The folder of the screenshots. None: there are none."""

    def take_screenshots(self, folder: str) -> None:
        """Render all pages, and write a picture of each. SpiderError if the folder cannot be created."""
        if self.render not in (None, True):
            raise SpiderError("--screenshots renders all pages: --no-render and --render-auto contradict it")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SpiderError(f"--screenshots {folder}: cannot create the folder: {exc.strerror}") from exc
        self.screenshots = Path(folder)
        self.render = Render(screenshot="full")

    def parse(self, response: Response) -> Iterator[dict[str, object] | LinkBatch]:
        if not _is_html(response):
            return
        if self.items_on.accepts(response.url):
            picture = self._save_screenshot(response)
            for fields in self._items(response):
                yield {"url": response.url, **fields, **picture}
        yield response.follow_all()

    def _items(self, response: Response) -> Iterator[dict[str, object]]:
        if not self.rows and not self.queries:
            yield self._whole(response)
            return
        texts = _Texts(len(response.body))
        for part in response.css(self.rows) if self.rows else [response.selector]:
            if self.queries:
                yield {name: texts.of(part.css(query)) for name, query in self.queries.items()}
            else:
                yield {"text": texts.of([part])}

    def _save_screenshot(self, response: Response) -> dict[str, object]:
        """Write the picture of a page. A page that is fetched again replaces its picture."""
        if self.screenshots is None or response.screenshot is None:
            return {}
        words = "-".join(re.findall(r"[a-zA-Z0-9]+", response.url.partition("://")[2]))[:80]
        path = self.screenshots / f"{words}-{response.request.fingerprint().hex()[:8]}.png"
        path.write_bytes(response.screenshot)
        return {"screenshot": str(path)}

    def _whole(self, response: Response) -> dict[str, object]:
        title = response.css("title::text").get()
        text = response.to_markdown() if self.markdown else response.main_text()
        return {"title": title.strip() if title else None, "text": text}


class _Texts:
    """The texts of selected elements of one page, up to a total length: nested elements repeat their text."""

    def __init__(self, size: int) -> None:
        fixed, multiple = _MAX_CHARACTERS
        self._room = self._limit = max(fixed, multiple * size)

    def of(self, elements: Iterable[Selector]) -> object:
        """The text of one element, the texts of several, or None."""
        texts: list[str] = []
        for element in elements:
            text = element.text_content().strip()
            self._room -= len(text)
            if self._room < 0:
                raise TooComplexError(f"the page is too complex: its fields have more than {self._limit} characters")
            if text:
                texts.append(text)
        return texts[0] if len(texts) == 1 else texts or None


def page_spider(
    url: str,
    *,
    same_site: bool,
    fields: Mapping[str, str],
    markdown: bool,
    rows: str = "",
    allow: Sequence[str] = (),
    deny: Sequence[str] = (),
) -> PageSpider:
    """Make a spider for one site. It is named after its start URL, so that its crawl can be resumed.

    ``rows``, ``allow`` and ``deny``: see `PageSpider.rows` and `PageSpider.items_on`.
    """
    try:
        Selector("").css(rows or "p")
    except SelectorError as exc:
        raise SpiderError(f"--each {rows!r}: {exc}") from exc
    url = typed_url(url)
    host = host_of(url)
    kind = type("PageSpider", (PageSpider,), {"name": url.partition("://")[2].rstrip("/"), "settings": DEFAULTS})
    spider: PageSpider = kind(start_urls=[url], queries=dict(fields), markdown=markdown, rows=rows)
    spider.items_on = LinkFilter(allow, deny)
    if same_site:
        spider.allowed_domains = [host.removeprefix("www.")]
    return spider


def parse_fields(definitions: list[str]) -> dict[str, str]:
    """Parse ``name=css`` of the command line."""
    fields = {}
    for definition in definitions:
        name, mark, query = definition.partition("=")
        if not mark or not name.strip() or not query.strip():
            raise SpiderError(f'--item {definition!r}: write it as "name=css query", for example "price=p.price"')
        try:
            Selector("").css(query)
        except SelectorError as exc:
            raise SpiderError(f"--item {definition!r}: {exc}") from exc
        fields[name.strip()] = query.strip()
    return fields


def _is_html(response: Response) -> bool:
    kind = response.headers.get("Content-Type", "text/html").lower()
    return "html" in kind or "xml" in kind or kind.startswith("text/plain")


# The URLs of a site, from its sitemaps or its links: `shoal map`.


class SiteUrl(Struct, frozen=True):
    """A URL of a site. ``lastmod`` is when its sitemap says that it changed, in ISO 8601."""

    url: str
    lastmod: str | None = None


class SiteMap:
    """Lists the URLs of a site, each once: those in its sitemaps, or if there is none, those that its pages link to.

    It crawls in memory, in one or two parts, and stops at ``limit``. It is awaitable once. ``summary`` is that of the
    last part."""

    def __init__(
        self,
        site: str,
        resolved: Resolved,
        on_url: Callable[[SiteUrl], None],
        *,
        match: re.Pattern[str] | None = None,
        since: str | None = None,
        limit: int | None = None,
    ) -> None:
        """``site`` is a normalized URL. ``since``: leave out URLs with an earlier date; ValueError if it is no date.
        ``on_url`` is called with each URL as it is found."""
        self._site = site
        own = {
            "frontier": "memory:", "mode": "standalone", "robots.noindex": False, "robots.nofollow": False,
            "shutdown_grace": 0,
        }  # fmt: skip
        self._resolved = Resolved(resolved.config.with_settings(own), resolved.sources)
        self._on_url = on_url
        self._match = match
        self._since = None if since is None else read_since(since)
        self._limit = limit
        self._seen: set[bytes] = set()
        self._crawl: Crawl | None = None
        self._stopped = False
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        self.sitemaps = 0
        """How many sitemaps were read."""
        self.entries = 0
        """How many entries they have. 0: the URLs are links of pages."""

    @property
    def count(self) -> int:
        """How many URLs were found."""
        return len(self._seen)

    @property
    def limit_reached(self) -> bool:
        return self._limit is not None and self.count >= self._limit

    def __await__(self) -> Generator[object, None, SiteMap]:
        return self._work().__await__()

    async def _work(self) -> SiteMap:
        spider = MapSpider(site=self._site, since=self._since)
        await self._list(spider)
        self.sitemaps, self.entries = spider.stats.own["sitemaps"], spider.stats.own["sitemap entries"]
        if not self.entries and not self._stopped and self.error is None:
            await self._list(link_spider(self._site))
        return self

    async def _list(self, spider: Spider) -> None:
        crawl = self._crawl = Crawl(spider, self._resolved)
        try:
            async with aclosing(aiter(crawl)) as items:
                async for item in items:
                    self._found(item["url"], item["lastmod"])
                    if self.limit_reached or self._stopped:
                        break
        except ShoalError as error:
            self.error = error
        self.summary = crawl.summary

    def _found(self, url: str, lastmod: str | None) -> None:
        fingerprint = url_fingerprint(url)
        if fingerprint not in self._seen and (self._match is None or self._match.search(url)):
            self._seen.add(fingerprint)
            self._on_url(SiteUrl(url, lastmod))

    def stop(self) -> None:
        """Stop soon."""
        self._stopped = True
        if self._crawl is not None:
            self._crawl.stop(0)

    async def snapshot(self) -> CrawlSnapshot | None:
        return None if self._crawl is None else await self._crawl.snapshot()
