"""Feeds and structured data of a page. Their size is limited: nested elements and references repeat text."""

from __future__ import annotations

from collections.abc import Iterable

import turbohtml
from turbohtml import Document, Element, Node

from shoal.errors import SelectorError, TooComplexError

_MAX_TEXT = (8 << 20, 4)  # characters, or this multiple of the page's size if that is more


def read_feed(document: Document, size: int) -> turbohtml.Feed | None:
    """Return an RSS, Atom or RDF document as a feed, or else None. TooComplexError if its entries are huge."""
    _check_texts(document.select("item, entry"), size)
    return document.feed()


def read_structured_data(document: Document, size: int, url: str) -> turbohtml.StructuredData:
    """Return JSON-LD, microdata, OpenGraph, RDFa and Dublin Core of a page of ``size`` bytes.

    TooComplexError if its records would be huge, SelectorError if they cannot be read.
    """
    _check_texts([*document.select("[itemprop], [property]"), *_referred(document)], size)
    try:
        return document.structured_data(url)
    except (RecursionError, ValueError) as exc:
        raise SelectorError(f"cannot read the structured data of {url}: {exc}") from exc


def _check_texts(elements: Iterable[Node], size: int) -> None:
    fixed, multiple = _MAX_TEXT
    left = limit = max(fixed, multiple * size)
    for element in elements:
        left -= len(element.text) + 1
        if left < 0:
            raise TooComplexError(f"the page is too complex: its data has more than {limit} characters")


def _referred(document: Document) -> Iterable[Element]:
    """The elements that ``itemref`` attributes refer to, once for each reference.

    TooComplexError if such an element refers to others: a chain of references grows exponentially.
    """
    referring = document.select("[itemref]")
    if not referring:
        return
    by_id: dict[str, Element] = {}
    for element in document.select("[id]"):
        by_id.setdefault(element.attr("id") or "", element)
    for element in referring:
        for name in (element.attr("itemref") or "").split():
            target = by_id.get(name)
            if target is None:
                continue
            if target.attr("itemref") is not None or target.select_one("[itemref]") is not None:
                raise TooComplexError("the page is too complex: the data that an itemref refers to has an itemref")
            yield target
