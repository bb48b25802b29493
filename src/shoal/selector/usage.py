"""Finds queries that matched on no page of a crawl: they usually have a typo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

_MAX_QUERIES = 1000
_MAX_LENGTH = 200  # of a query that is tracked


class QueryUsage:
    """The queries of one crawl. A query that has matched once costs only one set lookup."""

    __slots__ = ("_missed", "_page", "matched")

    def __init__(self) -> None:
        self.matched: set[str] = set()
        self._missed: dict[str, tuple[int, int]] = {}
        """By query: the number of pages without a match, and the last of these pages."""
        self._page = 0

    def begin_page(self) -> None:
        """Count the following queries for a new page."""
        self._page += 1

    def count(self, query: str, has_found: bool) -> None:
        if has_found:
            self._missed.pop(query, None)
            if len(self.matched) <= _MAX_QUERIES:
                self.matched.add(query)
            return
        pages, last = self._missed.get(query, (0, -1))
        if last != self._page and (pages or self._has_room(query)):
            self._missed[query] = (pages + 1, self._page)

    def _has_room(self, query: str) -> bool:
        # When the set of matched queries is full, a query that is not in it may have matched before.
        return len(query) <= _MAX_LENGTH and max(len(self._missed), len(self.matched)) < _MAX_QUERIES

    def unmatched(self) -> dict[str, int]:
        """The queries that never matched, with their numbers of pages, most pages first."""
        return {query: pages for query, (pages, _) in sorted(self._missed.items(), key=lambda each: -each[1][0])}


current: ContextVar[QueryUsage | None] = ContextVar("shoal_query_usage", default=None)
"""The usage of the crawl that this task belongs to."""


def counted(query: str, found: list[T]) -> list[T]:
    """Count a query and return what it found."""
    usage = current.get()
    if usage is not None and query not in usage.matched:
        usage.count(query, bool(found))
    return found


def begin_page() -> None:
    """Count the following queries of this task for a new page."""
    usage = current.get()
    if usage is not None:
        usage.begin_page()


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count the queries in this block: they are not those of the spider, or need not match."""
    counting = current.set(None)
    try:
        yield
    finally:
        current.reset(counting)
