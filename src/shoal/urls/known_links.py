"""Links that a run is known to have, so that most links of a page are not examined again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.urls.normalize import origin_of

_LONGEST_KNOWN = 500


class KnownLinks:
    """Raw hrefs that a run's frontier is known to have, so that they need not be looked at again.

    Only hrefs that mean the same on every page of their origin are kept (``/path`` and absolute ones, unless they are
    very long), and only after the frontier has taken them. Bounded: when it is full it forgets all and learns again.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._size = 0
        self._by_origin: dict[str, set[str]] = {}

    def unknown(self, base: str, hrefs: Sequence[str]) -> list[str]:
        """The hrefs that are not known, each once."""
        known = self._by_origin.get(origin_of(base))
        if known is None:
            return list(dict.fromkeys(hrefs))
        return list(dict.fromkeys([href for href in hrefs if href not in known]))

    def learn(self, base: str, hrefs: Iterable[str]) -> None:
        """The frontier has these now."""
        fixed = [
            href
            for href in hrefs
            if (href[:1] == "/" or href[:7] == "http://" or href[:8] == "https://")
            and len(href) <= _LONGEST_KNOWN
            and href.isascii()  # others may have been one foreign host too many
        ][: self._limit]
        if self._size + len(fixed) > self._limit:
            self._by_origin.clear()
            self._size = 0
        known = self._by_origin.setdefault(origin_of(base), set())
        before = len(known)
        known.update(fixed)
        self._size += len(known) - before
