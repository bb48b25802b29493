"""The spider of `shoal crawl URL`, for crawls without code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shoal.errors import SelectorError, SpiderError, TooComplexError
from shoal.http import LinkBatch, Render, Response
from shoal.http.links import LinkFilter
from shoal.selector import Selector
from shoal.spider import Spider
from shoal.urls.normalize import host_of, typed_url

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
        for each in elements:
            text = each.text_content().strip()
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
