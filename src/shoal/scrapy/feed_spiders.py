"""``XMLFeedSpider`` and ``CSVFeedSpider``: one call for each node or row of a feed."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import turbohtml
from turbohtml import Element

from shoal.errors import TooComplexError
from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.http import Response, TextResponse
from shoal.scrapy.results import each_result
from shoal.scrapy.spider import Spider
from shoal.selector import Selector
from shoal.selector.documents import attributes_of

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
    parent, around, left = None, dict[str, str](), _MAX_NODES
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
        left -= len(text)
        if left < 0:
            raise TooComplexError(f"the page is too complex: its nodes have more than {_MAX_NODES} characters")
        made = Selector(text=text, type="xml")
        prefix = name.partition(":")[0]
        if is_prefixed and f"xmlns:{prefix}" in declared:
            made.register_namespace(prefix, declared[f"xmlns:{prefix}"])
        yield made.xpath("/*")[0]


def _declarations(node: object) -> dict[str, str]:
    """Return the namespaces in scope at an element, by the attribute that declares them."""
    found: dict[str, str] = {}
    while isinstance(node, Element):
        found = _own_declarations(node) | found
        node = node.parent
    return found


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
