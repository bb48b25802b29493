"""A cache of the links that the frontier of a run already has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shoal.urls.normalize import folder_of, origin_of

_MAX_HREF = 500
"""Longer ones are not remembered."""
_RELATIVE_START = re.compile(r"[\w.\-~][^:]*\Z", re.ASCII)
"""An href that is relative to the folder of its page. One with a colon may have a scheme."""
_NONE: frozenset[str] = frozenset()


class KnownLinks:
    """Links that the frontier of a run already has: raw hrefs, so that most of them need not be resolved, and URLs.

    Absolute ones mean the same everywhere, ``/path`` on every page of its origin, and ``page.html`` or ``../page`` on
    every page of their folder. Very long ones are left out. Links are added only after the frontier has stored them.
    The cache is bounded: when full, it is cleared.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._size = 0
        self._absolute: set[str] = set()
        self._by_place: dict[str, set[str]] = {}
        """The hrefs by origin, or by folder if they are relative to it."""

    def unknown(self, base: str, hrefs: Sequence[str]) -> list[str]:
        """Return the hrefs that are not in the cache, without duplicates."""
        known = self._by_place.get(origin_of(base), _NONE)
        if known.issuperset(hrefs):  # as on most pages of a site
            return []
        here, absolute = self._by_place.get(folder_of(base), _NONE), self._absolute
        if here or absolute:
            found = [href for href in hrefs if href not in known and href not in here and href not in absolute]
        else:
            found = [href for href in hrefs if href not in known]
        return list(dict.fromkeys(found))

    def new(self, urls: Iterable[str]) -> list[str]:
        """Return the URLs that are not in the cache."""
        known = self._absolute
        return [url for url in urls if url not in known]

    def has(self, url: str) -> bool:
        """Whether this URL is in the cache."""
        return url in self._absolute

    def learn(self, base: str, hrefs: Iterable[str]) -> None:
        """Add hrefs of the page ``base`` that the frontier has stored."""
        fixed: list[str] = []
        relative: list[str] = []
        absolute: list[str] = []
        for href in hrefs:
            if len(href) <= _MAX_HREF:
                if href[:1] == "/":
                    fixed.append(href)
                elif href[:7] == "http://" or href[:8] == "https://":
                    absolute.append(href)
                elif _RELATIVE_START.match(href):
                    relative.append(href)
        if fixed:
            self._add_to(origin_of(base), fixed)
        if relative:
            self._add_to(folder_of(base), relative)
        if absolute:
            self.learn_urls(absolute)

    def learn_urls(self, urls: Iterable[str]) -> None:
        """Add absolute URLs that the frontier has stored."""
        urls = [url for url in urls if len(url) <= _MAX_HREF]
        self._make_room(urls)
        before = len(self._absolute)
        self._absolute.update(urls)
        self._size += len(self._absolute) - before

    def _add_to(self, place: str, hrefs: list[str]) -> None:
        self._make_room(hrefs)
        known = self._by_place.setdefault(place, set())
        before = len(known)
        known.update(hrefs)
        self._size += len(known) - before

    def _make_room(self, hrefs: list[str]) -> None:
        del hrefs[self._limit :]
        if self._size + len(hrefs) > self._limit:
            self._by_place.clear()
            self._absolute.clear()
            self._size = 0
