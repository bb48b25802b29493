"""The documents that selectors query: parse them, get their content, remove parts of them."""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache
from html import escape, unescape
from html.entities import html5
from typing import TypeAlias, cast

import turbohtml
from turbohtml import Document, Element, Node

from shoal.errors import SelectorError, TooComplexError
from shoal.selector import parsing

Json: TypeAlias = dict[str, object] | list[object] | float | bool | None
Root: TypeAlias = Node | str | Json
"""What a query finds: a node, a string (of a text, an attribute or a number), or a JSON value."""

_MINIMAL = turbohtml.Html(formatter=turbohtml.Formatter.MINIMAL)
_XML = turbohtml.Html(xml=True)
_top_element = turbohtml.XPath("/*")
_XML_DECLARATION = re.compile(r"\ufeff?\s*<\?xml\s")
_JSON_CONTAINER = re.compile(r"\s*[\[{]")
_MAX_RENAMED = 10_000_000  # attributes to rename, times all attributes of the element: about half a second
_ENTITY = re.compile(r"&(?!(?:amp|lt);)(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);")


class JsonText(str):
    """A string in a JSON document. CSS and XPath queries parse it as HTML."""

    __slots__ = ()


def parse_text(text: str, kind: str | None) -> Root:
    """Parse a document of this kind. None detects JSON objects and arrays, and XML with a declaration, as in parsel."""
    match kind:
        case "html":
            return parse_html(text)
        case "xml":
            return _parse_xml(text)
        case "json":
            return load_json(text)
        case "text":
            return JsonText(text)
        case None:
            return _detect(text)
    raise SelectorError(f'unknown type {kind!r}: use "html", "xml", "json" or "text"')


def _detect(text: str) -> Root:
    if _JSON_CONTAINER.match(text) and (data := load_json(text)) is not None:
        return data
    if _XML_DECLARATION.match(text):
        try:
            return _parse_xml(text)
        except SelectorError:
            pass  # pages often declare XML that they are not
    return parse_html(text)


def load_json(text: str | bytes) -> Root:
    """Decode a JSON document. Invalid JSON is None, as in parsel."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return JsonText(data) if isinstance(data, str) else data


def parse_html(text: str) -> Document:
    document = parsing.parse(text)
    parsing.AttributeBudget(document, len(text)).check()
    return document


def _parse_xml(text: str) -> Document:
    try:
        return parsing.parse_xml(without_cdata(text.removeprefix("\ufeff")))
    except turbohtml.HTMLParseError as exc:
        raise SelectorError(f"not well-formed XML: {exc}") from exc


def without_cdata(text: str) -> str:
    """Replace CDATA sections by escaped text, because turbohtml's ``text()`` does not find them.

    The time is linear: after a section that does not end, the search stops.
    """
    parts: list[str] = []
    position = 0
    while (start := text.find("<![CDATA[", position)) >= 0 and (end := text.find("]]>", start + 9)) >= 0:
        parts += text[position:start], escape(text[start + 9 : end], quote=False)
        position = end + 3
    return "".join((*parts, text[position:])) if parts else text


def top(root: Root) -> Root:
    """Return the top element of a document, which parsel uses in place of the document; anything else unchanged."""
    if isinstance(root, Document) and root.root is not None:
        return root.root
    return root


def is_xml(node: Node) -> bool:
    """Whether the node belongs to an XML document. XHTML counts as HTML: the top of both is ``html``."""
    elements = cast("list[Element]", _top_element(node))
    return bool(elements) and elements[0].tag != "html" and isinstance(elements[0].parent, Document)


def content(root: Root) -> object:
    """Return the markup of a node, a plain string, or the JSON value."""
    if not isinstance(root, Node):
        return str(root) if isinstance(root, JsonText) else root
    node = cast("Node", top(root))
    if is_xml(node):
        return node.serialize(_XML)
    markup = node.html
    # A no-break space stays a character, which \s in a regex matches. The minimal format for all nodes is slower.
    return node.serialize(_MINIMAL) if "&nbsp;" in markup else markup


def replace_entities(text: str) -> str:
    """Replace character references by their characters, except ``&amp;`` and ``&lt;``."""
    return _ENTITY.sub(lambda match: unescape(match[0]), text) if "&" in text else text


def attributes_of(element: Element) -> dict[str, str]:
    """Return the attributes of an element as the page has them.

    The time is linear: searching one attribute by its name visits those before it, and a page may have a million.
    """
    return {
        name: value if isinstance(value, str) else element.attr(name) or ""  # turbohtml splits a few, such as class
        for name, value in element.attrs.items()
    }


def drop(root: Root) -> None:
    """Remove a node from its document. SelectorError for the top of a document, and for everything but nodes."""
    if not isinstance(root, Node):
        raise SelectorError(
            "cannot drop a text, an attribute or a value: select its element, such as 'li' instead of 'li::text'"
        )
    if root.parent is None or isinstance(root.parent, Document):
        raise SelectorError("cannot drop the top element of a document, or an element that was dropped before")
    root.decompose()


def remove_namespaces(root: Root) -> None:
    """Remove the prefixes and declarations of namespaces at and below a node. TooComplexError if an element has too
    many attributes."""
    node = top(root)
    if not isinstance(node, Element):
        return
    for element in (node, *node.iter_elements()):
        if ":" in element.tag:
            element.tag = element.tag.rpartition(":")[2]
        attributes = element.attrs
        renamed = [name for name in attributes if ":" in name or name == "xmlns"]
        if len(renamed) * len(attributes) > _MAX_RENAMED:
            raise TooComplexError(f"the page is too complex: an element has {len(renamed)} attributes with a prefix")
        for name in renamed:
            value = attributes.pop(name)
            if not name.startswith("xmlns"):
                attributes[name.rpartition(":")[2]] = value


# Recognize and parse pages that are XML: feeds, sitemaps and other documents.

_XML_TYPE = re.compile(r"\s*[\w.+-]+/(?:(?!xhtml)[\w.-]+\+)?xml\s*(?:;|$)", re.IGNORECASE)
_HTML_TYPE = re.compile(r"\s*(?:text/html|application/xhtml\+xml)\s*(?:;|$)", re.IGNORECASE)
_SPACE = rb"(?:\xef\xbb\xbf)?\s*"
_DECLARED = re.compile(_SPACE + rb"<\?xml\s")
_MAYBE_FEED = re.compile(_SPACE + rb"<(?:\?xml|rss|feed|rdf:|urlset|sitemapindex)")
_PROLOG = rb"(?>(?><\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>\[]*>)\s*)*+"
_FEED = re.compile(_SPACE + _PROLOG + rb"<(?:rss|feed|rdf:RDF|urlset|sitemapindex)[\s>]", re.DOTALL)
_HTML_ROOT = re.compile(_SPACE + _PROLOG + rb"<html[\s>]", re.DOTALL | re.IGNORECASE)
_ENCODING = re.compile(rb"""<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([\w.:-]{1,40})["']""")
_ENTITY_REFERENCE = re.compile(r"&([A-Za-z][A-Za-z0-9]{1,31};)")
_OF_XML = frozenset({"amp;", "lt;", "gt;", "quot;", "apos;"})
_START = 4096  # bytes in which the first element must begin
_MAX_DEPTH = 512  # as deep as the HTML parser goes
_is_deeper = turbohtml.XPath(f"boolean({'/*' * (_MAX_DEPTH + 1)})")
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16le"), (codecs.BOM_UTF16_BE, "utf-16be"))

_WIDE = ((b"<\0", "utf-16le"), (b"\0<", "utf-16be"))
"""A file in UTF-16 without a byte-order mark."""


def is_xml_page(content_type: str, body: bytes) -> bool:
    """Whether a page is XML, by its content type or its first bytes.

    A feed or a sitemap is XML even if the server calls it HTML. XHTML is not: it is parsed as HTML.
    """
    kind = _kind_of(content_type)
    if kind == "html" and not _MAYBE_FEED.match(body):
        return False
    start = body[:_START]
    if _FEED.match(start):
        return True
    return (kind == "xml" or (kind != "html" and _DECLARED.match(start) is not None)) and not _HTML_ROOT.match(start)


@lru_cache(maxsize=256)
def _kind_of(content_type: str) -> str:
    return "xml" if _XML_TYPE.match(content_type) else "html" if _HTML_TYPE.match(content_type) else ""


def parse_xml_page(body: bytes, charset: str | None) -> tuple[Document, str]:
    """Parse an XML page; return its document and its encoding.

    ``charset`` is the encoding from a header. SelectorError if the page is not well-formed, TooComplexError if it
    needs too much memory or is nested too deeply. Entities that the page itself defines are not expanded.
    """
    encoding = encoding_of(body, charset)
    text = without_cdata(body.decode("whatwg-" + encoding, "replace").removeprefix("\ufeff").lstrip())
    if "&" in text:
        text = _ENTITY_REFERENCE.sub(_named_character, text)
    try:
        document = parsing.parse_xml(text)
    except turbohtml.HTMLParseError as exc:
        raise SelectorError(f"not well-formed XML: {exc}") from exc
    if _is_deeper(document):
        raise TooComplexError(f"the page is too complex: its elements are nested more than {_MAX_DEPTH} levels deep")
    parsing.AttributeBudget(document, len(body)).check()
    return document, encoding


def encoding_of(body: bytes, charset: str | None) -> str:
    """The encoding of an XML page, in lower case: its byte-order mark, the header, its declaration, or UTF-8.
    Python can decode it as ``whatwg-`` and its name."""
    import turbohtml.detect  # noqa: F401 - registers the encodings of the web, which differ from Python's

    for mark, encoding in _MARKS:
        if body.startswith(mark):
            return encoding
    for begin, encoding in _WIDE:
        if body.startswith(begin):
            return encoding
    declared = _ENCODING.match(body.lstrip()[:400])
    for name in (charset, declared[1].decode("ascii", "replace") if declared else None):
        if name:
            try:
                codecs.lookup("whatwg-" + name.lower())
            except LookupError:
                continue
            return name.lower()
    return "utf-8"


def _named_character(entity: re.Match[str]) -> str:
    """Replace an entity of HTML, which many feeds use although XML does not define it."""
    name = entity[1]
    return entity[0] if name in _OF_XML or name not in html5 else escape(html5[name])
