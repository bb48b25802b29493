"""Runs a caller's queries on a page in bounded time.

`shoal.batch.queries` accepts only queries that visit each node a few times. This module refuses pages on which even
that takes too long: all callers share one event loop.
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

_MAX_ELEMENTS = 100_000
_MAX_DEPTH = 128
_MAX_SIBLINGS = 2500
_TOO_DEEP = "/*" * (_MAX_DEPTH + 1)
_TOO_WIDE = f"//*/*[{_MAX_SIBLINGS + 1}]"
_SMALL_PAGE = 3000  # nodes of a page on which any query is fast
_MAX_REPEATED = 300_000  # pairs of a node and an ancestor: about a second
_MAX_SORTED = 200_000_000  # pairs of siblings: about a second
_MAX_CHARACTERS, _MAX_CHARACTERS_PER_BYTE = 1 << 20, 4  # of all fields: the larger of both limits
_TIMEOUT = 0.5  # seconds of CPU time for all fields of a page: matches may repeat the same text many times

Found: TypeAlias = str | list[str] | None
Shape: TypeAlias = tuple[int, int]


def fields_of(response: Response, fields: Mapping[str, FieldQuery]) -> dict[str, Found]:
    """The texts of all fields. SelectorError if the page is too large or takes too long."""
    if not _count(response, "//*") <= _MAX_ELEMENTS:
        raise SelectorError(f"the page has more than {_MAX_ELEMENTS} elements, which is too much for fields")
    if response.xpath(_TOO_DEEP):
        raise SelectorError(f"the page is nested more than {_MAX_DEPTH} deep, which is too much for fields")
    if response.xpath(_TOO_WIDE):
        raise SelectorError(f"an element has more than {_MAX_SIBLINGS} elements in it, which is too much for fields")
    end = time.thread_time() + _TIMEOUT
    max_characters = max(_MAX_CHARACTERS, _MAX_CHARACTERS_PER_BYTE * len(response.body))
    shape = cache(partial(_shape, response.document))
    found: dict[str, Found] = {}
    total = 0
    for name, query in fields.items():
        texts: list[str] = []
        for text in _texts(response, query, shape, end):
            total += len(text)
            if total > max_characters:
                raise SelectorError(f"the fields of this page have more than {max_characters} characters")
            texts.append(text)
            if not query.all:
                break
        found[name] = texts if query.all else next(iter(texts), None)
    return found


def _count(response: Response, nodes: str) -> int:
    """Count nodes of the tree: a page may have many more elements than tags."""
    return int(response.xpath(f"count({nodes})").get("0").partition(".")[0])


def _texts(response: Response, query: FieldQuery, shape: Callable[[], Shape], end: float) -> Iterator[str]:
    """The texts of all matches, lazily: the caller may need only the first."""
    _check_time(end)
    if query.xpath is not None:
        _check_effort(response, query.xpath, shape)
    found = response.css(query.css) if query.css is not None else response.xpath(query.xpath or "")
    for each in found:
        _check_time(end)
        if text := each.text_content().strip():
            yield text


def _check_effort(response: Response, xpath: str, shape: Callable[[], Shape]) -> None:
    """Refuse an XPath with several steps on a page that is so deep or wide that it would be slow."""
    effort = effort_of(xpath)
    if effort == (0, 0) or _count(response, "//node()") <= _SMALL_PAGE:
        return
    below, beside = shape()
    if below * effort.repeated > _MAX_REPEATED or beside * effort.sorted > _MAX_SORTED:
        raise SelectorError(f"{xpath!r:.80} is too costly for this page: use fewer steps, or CSS")


def _shape(document: Document) -> Shape:
    """The number of (node, ancestor) pairs, and of sibling pairs."""
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
        raise SelectorError(f"the fields of this page take more than {_TIMEOUT:g} s of CPU time")
