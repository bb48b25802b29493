"""Feeds and structured data of a page. Their size is limited: nested elements and references repeat text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat

import turbohtml
from turbohtml import Document, Element, Node

from shoal.errors import SelectorError, TooComplexError

_MAX_TEXT = (8 << 20, 4)  # characters, or this multiple of the page's size if that is more
_VALUES = ("content", "href", "src", "data", "datetime", "value")


def read_feed(document: Document, size: int) -> turbohtml.Feed | None:
    """Return an RSS, Atom or RDF document as a feed, or else None. TooComplexError if its entries are huge."""
    _check_texts(document.select("item, entry"), size)
    return document.feed()


def read_structured_data(document: Document, size: int, url: str) -> turbohtml.StructuredData:
    """Return JSON-LD, microdata, OpenGraph, RDFa and Dublin Core of a page of ``size`` bytes.

    TooComplexError if its records would be huge, SelectorError if they cannot be read.
    """
    _check_records(document, size, url)
    try:
        return document.structured_data(url)
    except (RecursionError, ValueError) as exc:
        raise SelectorError(f"cannot read the structured data of {url}: {exc}") from exc


def _check_texts(elements: Iterable[Node], size: int) -> None:
    _check_lengths((len(element.text) + 1 for element in elements), size)


def _check_records(document: Document, size: int, url: str) -> None:
    """Each URL is joined with the base, and each name of RDFa with its vocabulary: both may be long."""
    base = document.select_one("base[href]")
    added = len(url) + len((base.attr("href") if base is not None else None) or "")
    added += sum(
        max((len(element.attr(name) or "") for element in document.select(f"[{name}]")), default=0)
        for name in ("vocab", "prefix")
    )
    properties = document.select("[itemprop], [property]")
    subjects = document.select("[typeof], [resource], [about]")
    texts = (added + len(element.text) + 1 for element in properties)
    _check_lengths(chain(texts, repeat(added + 1, len(subjects)), _referred(document, added)), size)


def _check_lengths(lengths: Iterable[int], size: int) -> None:
    fixed, multiple = _MAX_TEXT
    left = limit = max(fixed, multiple * size)
    for length in lengths:
        left -= length
        if left < 0:
            raise TooComplexError(f"the page is too complex: its data has more than {limit} characters")


def _referred(document: Document, added: int) -> Iterator[int]:
    """The length of the data that each ``itemref`` refers to.

    TooComplexError if such an element refers to others: a chain of references grows exponentially.
    """
    referring = document.select("[itemref]")
    if not referring:
        return
    by_id: dict[str, Element] = {}
    for element in document.select("[id]"):
        by_id.setdefault(element.attr("id") or "", element)
    lengths: dict[str, int] = {}
    for element in referring:
        for name in (element.attr("itemref") or "").split():
            target = by_id.get(name)
            if target is None:
                continue
            if name not in lengths:
                lengths[name] = _length_of(target, added)
            yield lengths[name]


def _length_of(target: Element, added: int) -> int:
    """The length of an element's data: its text, and the attributes that are values of properties."""
    if target.attr("itemref") is not None or target.select_one("[itemref]") is not None:
        raise TooComplexError("the page is too complex: the data that an itemref refers to has an itemref")
    properties = [target, *target.select("[itemprop]")]
    values = sum(len(each.attr(name) or "") for each in properties for name in _VALUES)
    return len(target.text) + values + (added + 1) * len(properties)
