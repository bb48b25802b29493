"""What the queries of a caller find on a page, in a time that is bounded.

``grammar`` takes only queries that look at each node some few times. Here only pages are queried on which that is soon
done: the time is that of one event loop, which everybody shares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import TypeAlias

from turbohtml import Document, Node

from shoal.batch.options import FieldQuery
from shoal.batch.queries import effort_of
from shoal.errors import SelectorError
from shoal.http import Response

_MOST_ELEMENTS = 100_000
_DEEPEST = 128
_MOST_SIBLINGS = 2500
_TOO_DEEP = "/*" * (_DEEPEST + 1)
_TOO_WIDE = f"//*/*[{_MOST_SIBLINGS + 1}]"
_FEW_NODES = 3000
_MOST_REPEATED = 300_000  # pairs of a node and an ancestor: about a second
_MOST_SORTED = 200_000_000  # pairs of siblings: about a second
_MOST_CHARACTERS, _CHARACTERS_TIMES = 1 << 20, 4  # of all fields, or so many times the size of the page
_TIME = 0.5  # seconds of CPU time for all fields of a page: what is found may hold the same text many times

Found: TypeAlias = str | list[str] | None
Shape: TypeAlias = tuple[int, int]


def fields_of(response: Response, fields: Mapping[str, FieldQuery]) -> dict[str, Found]:
    """SelectorError for a page on which it would take too long."""
    if not _count(response, "//*") <= _MOST_ELEMENTS:
        raise SelectorError(f"the page has more than {_MOST_ELEMENTS} elements, which is too much for fields")
    if response.xpath(_TOO_DEEP):
        raise SelectorError(f"the page is nested more than {_DEEPEST} deep, which is too much for fields")
    if response.xpath(_TOO_WIDE):
        raise SelectorError(f"an element has more than {_MOST_SIBLINGS} elements in it, which is too much for fields")
    end = time.thread_time() + _TIME
    most = max(_MOST_CHARACTERS, _CHARACTERS_TIMES * len(response.body))
    shape = cache(partial(_shape, response.document))
    found: dict[str, Found] = {}
    total = 0
    for name, query in fields.items():
        texts: list[str] = []
        for text in _texts(response, query, shape, end):
            total += len(text)
            if total > most:
                raise SelectorError(f"the fields of this page have more than {most} characters")
            texts.append(text)
            if not query.all:
                break
        found[name] = texts if query.all else next(iter(texts), None)
    return found


def _count(response: Response, nodes: str) -> int:
    """Of the tree: a page may have many more elements than it has tags."""
    return int(response.xpath(f"count({nodes})").get("0").partition(".")[0])


def _texts(response: Response, query: FieldQuery, shape: Callable[[], Shape], end: float) -> Iterator[str]:
    """One by one: what is not asked for is not made."""
    _check_time(end)
    if query.xpath is not None:
        _check_effort(response, query.xpath, shape)
    found = response.css(query.css) if query.css is not None else response.xpath(query.xpath or "")
    for each in found:
        _check_time(end)
        if text := each.text_content().strip():
            yield text


def _check_effort(response: Response, xpath: str, shape: Callable[[], Shape]) -> None:
    """Refuse a path with more than one step on a page that is deep or wide enough to make that slow."""
    effort = effort_of(xpath)
    if effort == (0, 0) or _count(response, "//node()") <= _FEW_NODES:
        return
    below, beside = shape()
    if below * effort.repeated > _MOST_REPEATED or beside * effort.sorted > _MOST_SORTED:
        raise SelectorError(f"{xpath!r:.80} is too costly for this page, which is large: use fewer steps, or CSS")


def _shape(document: Document) -> Shape:
    """The pairs of a node and one of its ancestors, and those of siblings."""
    below = beside = depth = 0
    level: list[Node] = [document]
    while level:
        families = [list(node.children) for node in level]
        level = [child for family in families for child in family]
        depth += 1
        below += depth * len(level)
        beside += sum(len(family) ** 2 for family in families)
    return below, beside


def _check_time(end: float) -> None:
    if time.thread_time() > end:
        raise SelectorError(f"the fields of this page take more than {_TIME:g} s of CPU time")
