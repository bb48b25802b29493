"""The spiders of Scrapy: the module ``scrapy.spiders``."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast
from urllib.parse import urljoin

import turbohtml
from turbohtml import Element

from shoal.config.checks import CompiledPattern, compile_pattern, linear
from shoal.errors import SitemapError, TooComplexError
from shoal.http.sitemaps import SitemapEntry, SitemapReader, sitemaps_in_robots
from shoal.scrapy.crawl_spider import CrawlSpider as CrawlSpider
from shoal.scrapy.crawl_spider import Rule as Rule
from shoal.scrapy.crawl_spider import each_result
from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.http import Request, Response, TextResponse, XmlResponse
from shoal.scrapy.spider import Spider
from shoal.scrapy.values import Function, Values
from shoal.selector import Selector
from shoal.selector.documents import attributes_of

# ``XMLFeedSpider`` and ``CSVFeedSpider``: one call for each node or row of a feed.


log = logging.getLogger("shoal.scrapy")

_XML = turbohtml.Html(xml=True)
_MAX_NODES = 128 << 20  # characters of all nodes of a feed
_MAX_DECLARED = 1000  # namespaces


class _FeedSpider(Spider):
    """The base class of both feed spiders."""

    def adapt_response(self, response: Response) -> Response:
        """Change the response before it is read."""
        return response

    def process_results(self, response: Response, results: Iterable[Any]) -> Iterable[Any]:
        """Change the results of one node or row."""
        return results

    def _processed(self, response: Response, result: object) -> Iterable[object]:
        return self.process_results(response, each_result(result))


class XMLFeedSpider(_FeedSpider):
    """Calls ``parse_node`` for each element ``itertag``.

    ``iterator`` is ``iternodes`` (each node is a document of its own), ``xml`` or ``html`` (nodes of the whole
    document). ``namespaces`` are pairs of a prefix and a URI, for queries.
    """

    iterator: str = "iternodes"
    itertag: str = "item"
    namespaces: Sequence[tuple[str, str]] = ()

    def parse_node(self, response: Response, selector: Any) -> Any:
        """Handle one node."""
        if hasattr(self, "parse_item"):  # its name in older projects
            return self.parse_item(response, selector)
        raise NotImplementedError(f"{type(self).__name__} has no parse_node()")

    def parse_nodes(self, response: Response, nodes: Iterable[Selector]) -> Iterator[object]:
        for node in nodes:
            yield from self._processed(response, self.parse_node(response, node))

    def _parse(self, response: Response, **options: object) -> Iterator[object]:
        response = self.adapt_response(response)
        if self.iterator not in ("iternodes", "xml", "html"):
            raise NotSupported(f"unknown iterator {self.iterator!r}: use 'iternodes', 'xml' or 'html'")
        if not isinstance(response, TextResponse):
            raise ValueError(f"cannot read the nodes of {response}: its content is not text")
        return self.parse_nodes(response, self._nodes(response))

    def _nodes(self, response: TextResponse) -> Iterator[Selector]:
        document = Selector(text=response.text, type="html" if self.iterator == "html" else "xml")
        if self.iterator == "iternodes":
            nodes: Iterable[Selector] = nodes_named(document, self.itertag)
        else:
            self._register_namespaces(document)
            nodes = document.xpath(f"//{self.itertag}")
        for node in nodes:
            self._register_namespaces(node)
            yield node

    def _register_namespaces(self, selector: Selector) -> None:
        for prefix, uri in self.namespaces:
            selector.register_namespace(prefix, uri)


class CSVFeedSpider(_FeedSpider):
    """Calls ``parse_row`` with a dict for each row. Its keys are ``headers``, or else the first row."""

    delimiter: str | None = None
    quotechar: str | None = None
    headers: Sequence[str] | None = None

    def parse_row(self, response: Response, row: dict[str, str]) -> Any:
        """Handle one row."""
        raise NotImplementedError(f"{type(self).__name__} has no parse_row()")

    def parse_rows(self, response: Response) -> Iterator[object]:
        for row in csv_rows(response, self.delimiter, self.headers, self.quotechar):
            yield from self._processed(response, self.parse_row(response, row))

    def _parse(self, response: Response, **options: object) -> Iterator[object]:
        return self.parse_rows(self.adapt_response(response))


def nodes_named(document: Selector, name: str) -> Iterator[Selector]:
    """Yield each element of this name as a document of its own, with the namespaces that are declared around it.

    TooComplexError if they would be huge: elements inside each other, or thousands of namespaces."""
    is_prefixed = ":" in name
    parent, around, nodes_left = None, dict[str, str](), _MAX_NODES
    for element in cast(turbohtml.Document, document.root).iter_elements():
        if element.tag != name:
            continue
        if element.parent != parent:  # elements of a feed have the same parent
            parent = element.parent
            around = _declarations(parent)
        declared = around | _own_declarations(element)
        if len(declared) > _MAX_DECLARED:
            raise TooComplexError(f"the page is too complex: it declares more than {_MAX_DECLARED} namespaces")
        for key, uri in declared.items():
            element.attrs[key] = uri
        text = element.serialize(_XML)
        nodes_left -= len(text)
        if nodes_left < 0:
            raise TooComplexError(f"the page is too complex: its nodes have more than {_MAX_NODES} characters")
        selector = Selector(text=text, type="xml")
        prefix = name.partition(":")[0]
        if is_prefixed and f"xmlns:{prefix}" in declared:
            selector.register_namespace(prefix, declared[f"xmlns:{prefix}"])
        yield selector.xpath("/*")[0]


def _declarations(node: object) -> dict[str, str]:
    """Return the namespaces in scope at an element, by the attribute that declares them."""
    namespaces: dict[str, str] = {}
    while isinstance(node, Element):
        namespaces = _own_declarations(node) | namespaces
        node = node.parent
    return namespaces


def _own_declarations(element: Element) -> dict[str, str]:
    return {key: uri for key, uri in attributes_of(element).items() if key == "xmlns" or key.startswith("xmlns:")}


def csv_rows(
    source: Response | str | bytes,
    delimiter: str | None = None,
    headers: Sequence[str] | None = None,
    quotechar: str | None = None,
) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV text as dicts. A row is left out if it has more or fewer columns than the header."""
    if isinstance(source, TextResponse):
        source = source.text
    elif isinstance(source, Response):
        source = source.body
    text = source.decode() if isinstance(source, bytes) else source
    rows = csv.reader(io.StringIO(text), delimiter=delimiter or ",", quotechar=quotechar or '"')
    names = headers or next(rows, None)
    if names is None:
        return
    for row in rows:
        if len(row) == len(names):
            yield dict(zip(names, row, strict=True))
        else:
            log.warning("ignored row %d: it has %d columns instead of %d", rows.line_num, len(row), len(names))


__all__ = ["CSVFeedSpider", "CrawlSpider", "Rule", "SitemapSpider", "Spider", "XMLFeedSpider"]


def __getattr__(name: str) -> type[SitemapSpider]:
    if name == "SitemapSpider":  # most projects do not need the reader of sitemaps
        return SitemapSpider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ``SitemapSpider``: crawls the pages that sitemaps list, with the names and hooks of Scrapy.


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
        first = list(next(([entry] for entry in entries), []))  # the format is known after it
        if reader.format not in ("urlset", "sitemapindex"):
            raise SitemapError(f"its format is {reader.format}")
        for url in self._urls(self.sitemap_filter(map(_as_dict, chain(first, entries)))):
            if reader.format == "sitemapindex":
                if any(pattern.search(url) for pattern in self._follow):
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
    values: Values = {"loc": entry.loc, **entry.fields}
    if entry.alternates:
        values["alternate"] = [alternate.url for alternate in entry.alternates]
    return values


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


# ``InitSpider``: requests something first, such as a login, and then its start URLs.


class InitSpider(Spider):
    """Starts with ``init_request``. Its callback returns ``initialized()``, which starts the crawl."""

    def start_requests(self) -> Iterable[object]:
        return each_result(self.init_request())

    def init_request(self) -> Any:
        """Return the first request or requests. By default the crawl starts at once."""
        return self.initialized()

    def initialized(self, response: Response | None = None) -> Iterable[Any]:
        """Return the requests for the start URLs. Every process of a fleet can call it."""
        return super().start_requests()
