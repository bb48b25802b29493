"""What the queries of a caller find on a page, in a time that is bounded.

``grammar`` takes only queries that look at each node some few times. Here only pages are queried on which that is soon
done: the time is that of one event loop, which everybody shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from shoal.batch.options import FieldQuery
from shoal.errors import SelectorError
from shoal.http import Response

_MOST_ELEMENTS = 100_000
_DEEPEST = 128
_MOST_SIBLINGS = 2500
_TOO_DEEP = "/*" * (_DEEPEST + 1)
_TOO_WIDE = f"//*/*[{_MOST_SIBLINGS + 1}]"
_TIME = 0.5  # seconds for all fields of a page: what is found may hold the same text many times

Found: TypeAlias = str | list[str] | None


def fields_of(response: Response, fields: Mapping[str, FieldQuery]) -> dict[str, Found]:
    """SelectorError for a page on which it would take too long."""
    if not _count(response) <= _MOST_ELEMENTS:
        raise SelectorError(f"the page has more than {_MOST_ELEMENTS} elements, which is too much for fields")
    if response.xpath(_TOO_DEEP):
        raise SelectorError(f"the page is nested more than {_DEEPEST} deep, which is too much for fields")
    if response.xpath(_TOO_WIDE):
        raise SelectorError(f"an element has more than {_MOST_SIBLINGS} elements in it, which is too much for fields")
    end = time.monotonic() + _TIME
    return {name: _field(response, query, end) for name, query in fields.items()}


def _count(response: Response) -> int:
    """Elements of the tree: a page may have many more than it has tags."""
    return int(response.xpath("count(//*)").get("0").partition(".")[0])


def _field(response: Response, query: FieldQuery, end: float) -> Found:
    texts = _texts(response, query, end)
    return list(texts) if query.all else next(texts, None)


def _texts(response: Response, query: FieldQuery, end: float) -> Iterator[str]:
    """One by one: what is not asked for is not made."""
    _check_time(end)
    found = response.css(query.css) if query.css is not None else response.xpath(query.xpath or "")
    for each in found:
        _check_time(end)
        if text := each.text_content().strip():
            yield text


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise SelectorError(f"the fields of this page take more than {_TIME:g} s")
