"""A cache of links that a run already has, so that most links of a page need no further work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.urls.normalize import origin_of

_MAX_LENGTH = 500


class KnownLinks:
    """Raw hrefs that the frontier of a run already has.

    It keeps only hrefs that mean the same on every page of their origin (``/path`` and absolute ones, unless they are
    very long), and only after the frontier has stored them. It is bounded: when full, it is cleared.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._size = 0
        self._by_origin: dict[str, set[str]] = {}

    def unknown(self, base: str, hrefs: Sequence[str]) -> list[str]:
        """Return the hrefs that are not in the cache, without duplicates."""
        known = self._by_origin.get(origin_of(base))
        if known is None:
            return list(dict.fromkeys(hrefs))
        return list(dict.fromkeys([href for href in hrefs if href not in known]))

    def learn(self, base: str, hrefs: Iterable[str]) -> None:
        """Add hrefs that the frontier has stored."""
        fixed = [
            href
            for href in hrefs
            if (href[:1] == "/" or href[:7] == "http://" or href[:8] == "https://")
            and len(href) <= _MAX_LENGTH
            and href.isascii()  # others may have been dropped: a page has a limit of foreign hosts
        ][: self._limit]
        if self._size + len(fixed) > self._limit:
            self._by_origin.clear()
            self._size = 0
        known = self._by_origin.setdefault(origin_of(base), set())
        before = len(known)
        known.update(fixed)
        self._size += len(known) - before
