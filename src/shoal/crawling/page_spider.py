"""The spider of `shoal crawl URL`, for crawls without code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from shoal.errors import SelectorError, SpiderError, TooComplexError
from shoal.http import LinkBatch, Response
from shoal.selector import Selector
from shoal.spider import Spider
from shoal.urls.normalize import host_of, normalize_url

DEFAULTS = {"scope": {"max_depth": 3, "max_pages": 1000}}
"""Limits for a site that may be endless."""


_MAX_CHARACTERS, _MAX_FACTOR = (
    1 << 20,
    4,
)  # of all fields of a page; or this many times the size of the page, if that is more


class PageSpider(Spider):
    """Yields one item per page, with its URL and the chosen fields, and follows the links of the page."""

    fields: Mapping[str, str] = {}
    """Name to CSS query. An element gives its text. Empty: title and text of the page."""
    markdown = False
    """Take the text as Markdown."""

    def parse(self, response: Response) -> Iterator[dict[str, object] | LinkBatch]:
        if not _is_html(response):
            return
        yield {"url": response.url, **(self._chosen(response) if self.fields else self._whole(response))}
        yield response.follow_all()

    def _chosen(self, response: Response) -> dict[str, object]:
        item: dict[str, object] = {}
        room = most = max(_MAX_CHARACTERS, _MAX_FACTOR * len(response.body))
        for name, query in self.fields.items():
            texts: list[str] = []
            for each in response.css(query):
                text = each.text_content().strip()
                room -= len(text)
                if room < 0:  # nested elements repeat their text
                    raise TooComplexError(f"the page is too complex: its fields have more than {most} characters")
                if text:
                    texts.append(text)
            item[name] = texts[0] if len(texts) == 1 else texts or None
        return item

    def _whole(self, response: Response) -> dict[str, object]:
        title = response.css("title::text").get()
        text = response.to_markdown() if self.markdown else response.main_text()
        return {"title": title.strip() if title else None, "text": text}


def page_spider(url: str, *, same_site: bool, fields: Mapping[str, str], markdown: bool) -> PageSpider:
    """Make a spider for one site. It is named after its start URL, so that its crawl can be resumed."""
    url = normalize_url(url if re.match(r"\s*[a-zA-Z][\w+.-]*://", url) else "http://" + url.strip())
    host = host_of(url)
    kind = type("PageSpider", (PageSpider,), {"name": url.partition("://")[2].rstrip("/"), "settings": DEFAULTS})
    spider: PageSpider = kind(start_urls=[url], fields=dict(fields), markdown=markdown)
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
