"""Choose links by regular expression, and make the links of a document absolute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from shoal.errors import RequestError, TooComplexError
from shoal.urls.normalize import LinkJoiner

if TYPE_CHECKING:
    import turbohtml

Patterns: TypeAlias = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]

_MAX_LINKS = 50_000
_MAX_CHARACTERS = 32 << 20  # of all links of one document that become absolute


class LinkFilter:
    """Regular expressions that choose URLs: one of ``allow``, if there are any, and none of ``deny``."""

    def __init__(self, allow: Patterns = (), deny: Patterns = ()) -> None:
        """RequestError for an invalid expression."""
        self._allow = _compile(allow)
        self._deny = _compile(deny)

    def accepts(self, url: str) -> bool:
        return (not self._allow or any(each.search(url) for each in self._allow)) and not any(
            each.search(url) for each in self._deny
        )

    def of(self, urls: Iterable[str]) -> list[str]:
        return [url for url in urls if self.accepts(url)]


def _compile(patterns: Patterns) -> list[re.Pattern[str]]:
    if isinstance(patterns, str | re.Pattern):
        patterns = [patterns]
    try:
        return [re.compile(each) for each in patterns]
    except (re.error, TypeError) as exc:
        raise RequestError(f"invalid regular expression in {patterns!r:.200}: {exc}") from exc


def make_absolute(document: turbohtml.Document, base: str) -> None:
    """Make the links of a document absolute, in place. Those beyond a limit, and invalid ones, stay as they are."""
    left, room = _MAX_LINKS, _MAX_CHARACTERS
    joiner = LinkJoiner(base)

    def absolute(href: str) -> str | None:
        nonlocal left, room
        left -= 1
        room -= len(base) + len(href)
        if left < 0 or room < 0:
            return None
        path, mark, fragment = href.partition("#")
        try:
            return joiner.join(path) + mark + fragment
        except (RequestError, TooComplexError):
            return None

    document.rewrite_links(absolute)
