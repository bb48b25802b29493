"""What a crawler must find on a site: the list that its output and the log of the server are compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Facts:
    """What the item of a page contains. None is not compared."""

    title: str
    h1: str | None = None
    links: int | None = None


@dataclass(frozen=True)
class Content:
    root: Path
    pages: dict[str, Facts]
    """By key, see `key_of`."""
    redirects: dict[str, str] = field(default_factory=dict)
    """The key of the page that each one leads to. Nothing else leads there."""
    errors: frozenset[str] = frozenset()
    """Links that lead nowhere."""
    hosts: tuple[str, ...] = ()
    """Empty: the one host of a server on a free port."""

    def key_of(self, url: str) -> str:
        """The path of a page; with several hosts, its host, path and query without percent-encoding of the path."""
        parts = urlsplit(url)
        if not self.hosts:
            return parts.path
        return f"{parts.hostname}{unquote(parts.path)}{'?' if parts.query else ''}{parts.query}"

    def requests_of_busiest_host(self) -> int:
        """How many requests the host with the most of them gets, without robots.txt."""
        keys = [*self.pages, *self.redirects, *self.errors]
        return max(Counter(key.partition("/")[0] for key in keys).values())


def wrong_facts(item: dict[str, object], facts: Facts) -> str | None:
    """What is wrong with the item of a page, or None."""
    title, h1 = (" ".join(str(item.get(name) or "").split()) for name in ("title", "h1"))
    if not title or ("h1" in item and not h1) or ("links" in item and not item["links"]):
        return "without their title, h1 or links"
    if title != facts.title or ("h1" in item and facts.h1 is not None and h1 != facts.h1):
        return "with a wrong title or h1"
    if "links" in item and facts.links is not None and item["links"] != facts.links:
        return "with a wrong number of links"
    return None
