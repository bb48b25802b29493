"""Feeds and structured data of a page. Their size is limited: nested elements and references repeat text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat

import turbohtml
from turbohtml import Document, Element

from shoal.errors import SelectorError, TooComplexError

_MAX_TEXT = (8 << 20, 4)  # characters, or this multiple of the page's size if that is more
_ATOM_03 = "http://purl.org/atom/ns#"
_RSS_090 = "http://my.netscape.com/rdf/simple/0.9/"
_DC_TERMS = "http://purl.org/dc/terms/"
_VALUES = ("content", "href", "src", "data", "datetime", "value")


def read_feed(document: Document, size: int) -> turbohtml.Feed | None:
    """Return an RSS, Atom or RDF document as a feed, or else None. TooComplexError if its entries are huge."""
    _check_lengths((len(entry.text) + 1 for entry in document.select("item, entry")), size)
    feed, root = document.feed(), document.root
    if root is None:
        return feed
    namespaces = {str(value): name for name, value in root.attrs.items() if name.startswith("xmlns")}
    if feed is None:
        return _read_atom_03(root) if _ATOM_03 in namespaces else None
    if not feed.entries and _RSS_090 in namespaces:
        return _read_rss_090(root)
    if _DC_TERMS in namespaces:
        return _with_dates(feed, document, namespaces[_DC_TERMS].partition(":")[2] + ":")
    return feed


def _read_atom_03(root: Element) -> turbohtml.Feed:
    entries = tuple(map(_read_atom_03_entry, _children(root, "entry")))
    return turbohtml.Feed(
        type="atom", title=_child(root, "title"), link=_link(root), description=_child(root, "tagline"),
        updated=_child(root, "modified"), entries=entries,
    )  # fmt: skip


def _read_atom_03_entry(entry: Element) -> turbohtml.Entry:
    content = next(_children(entry, "content"), None)
    has_markup = content is not None and any(isinstance(child, Element) for child in content.children)
    return turbohtml.Entry(
        title=_child(entry, "title"), link=_link(entry), id=_child(entry, "id"), updated=_child(entry, "modified"),
        published=_child(entry, "issued", "created"), summary=_child(entry, "summary"), author=_author(entry),
        content=content.inner_xml if content is not None and has_markup else _child(entry, "content"),
    )  # fmt: skip


def _read_rss_090(root: Element) -> turbohtml.Feed:
    """Its items stand beside the channel, without identifiers and dates."""
    channel = next(_children(root, "channel"), root)
    return turbohtml.Feed(
        type="rdf", title=_child(channel, "title"), link=_child(channel, "link"),
        description=_child(channel, "description"), updated=None,
        entries=tuple(map(_read_rss_090_item, _children(root, "item"))),
    )  # fmt: skip


def _read_rss_090_item(item: Element) -> turbohtml.Entry:
    return turbohtml.Entry(
        title=_child(item, "title"), link=_child(item, "link"), id=None, updated=None, published=None,
        summary=_child(item, "description"), content=None, author=None,
    )  # fmt: skip


def _with_dates(feed: turbohtml.Feed, document: Document, prefix: str) -> turbohtml.Feed:
    """The feed with the dates of Dublin Core's terms, where its entries have no others."""
    elements: Iterable[Element] = document.select("entry" if feed.type == "atom" else "item")
    if feed.type == "rdf":  # its entries can be in another order
        by_id = {element.attr("rdf:about"): element for element in elements}
        elements = [by_id[entry.id] for entry in feed.entries if entry.id in by_id]
    elements = list(elements)
    if len(elements) != len(feed.entries):
        return feed
    entries = [
        entry._replace(
            published=entry.published or _child(element, f"{prefix}issued", f"{prefix}created", f"{prefix}date"),
            updated=entry.updated or _child(element, f"{prefix}modified"),
        )
        for entry, element in zip(feed.entries, elements, strict=True)
    ]
    return feed._replace(entries=tuple(entries))


def _children(element: Element, name: str) -> Iterator[Element]:
    """The child elements of this name, with any prefix."""
    for child in element.children:
        if isinstance(child, Element) and (child.tag == name or child.tag.endswith(f":{name}")):
            yield child


def _child(element: Element, *names: str) -> str | None:
    """The text of the first child that has one, in the order of the names."""
    texts = (child.text.strip() for name in names for child in _children(element, name))
    return next(filter(None, texts), None)


def _link(element: Element) -> str | None:
    links = [link for link in _children(element, "link") if link.attr("rel") in (None, "alternate")]
    return links[0].attr("href") if links else None


def _author(element: Element) -> str | None:
    return next((_child(author, "name") for author in _children(element, "author")), None)


def read_structured_data(document: Document, size: int, url: str) -> turbohtml.StructuredData:
    """Return JSON-LD, microdata, OpenGraph, RDFa and Dublin Core of a page of ``size`` bytes.

    TooComplexError if its records would be huge, SelectorError if they cannot be read.
    """
    _check_records(document, size, url)
    try:
        return document.structured_data(url)
    except (RecursionError, ValueError) as exc:
        raise SelectorError(f"cannot read the structured data of {url}: {exc}") from exc


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
    room = limit = max(fixed, multiple * size)
    for length in lengths:
        room -= length
        if room < 0:
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
    values = sum(len(element.attr(name) or "") for element in properties for name in _VALUES)
    return len(target.text) + values + (added + 1) * len(properties)
