"""Recognize and parse pages that are XML: feeds, sitemaps and other documents."""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from html import escape
from html.entities import html5

import turbohtml
from turbohtml import Document

from shoal import parsing
from shoal.errors import SelectorError, TooComplexError
from shoal.selector.documents import without_cdata

_XML_TYPE = re.compile(r"\s*[\w.+-]+/(?:(?!xhtml)[\w.-]+\+)?xml\s*(?:;|$)", re.IGNORECASE)
_HTML_TYPE = re.compile(r"\s*(?:text/html|application/xhtml\+xml)\s*(?:;|$)", re.IGNORECASE)
_SPACE = rb"(?:\xef\xbb\xbf)?\s*"
_DECLARED = re.compile(_SPACE + rb"<\?xml\s")
_MAYBE_FEED = re.compile(_SPACE + rb"<(?:\?xml|rss|feed|rdf:|urlset|sitemapindex)")
_PROLOG = rb"(?>(?><\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>\[]*>)\s*)*+"
_FEED = re.compile(_SPACE + _PROLOG + rb"<(?:rss|feed|rdf:RDF|urlset|sitemapindex)[\s>]", re.DOTALL)
_HTML_ROOT = re.compile(_SPACE + _PROLOG + rb"<html[\s>]", re.DOTALL | re.IGNORECASE)
_ENCODING = re.compile(rb"""<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([\w.:-]{1,40})["']""")
_ENTITY = re.compile(r"&([A-Za-z][A-Za-z0-9]{1,31};)")
_OF_XML = frozenset({"amp;", "lt;", "gt;", "quot;", "apos;"})
_START = 4096  # bytes in which the first element must begin
_MAX_DEPTH = 512  # as deep as the HTML parser goes
_is_deeper = turbohtml.XPath(f"boolean({'/*' * (_MAX_DEPTH + 1)})")
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16le"), (codecs.BOM_UTF16_BE, "utf-16be"))

_WIDE = ((b"<\0", "utf-16le"), (b"\0<", "utf-16be"))
"""A file in UTF-16 without a byte-order mark."""


def is_xml(content_type: str, body: bytes) -> bool:
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
        text = _ENTITY.sub(_named_character, text)
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
