"""What a page says to crawlers: nofollow and noindex, in its links, its meta tags and its X-Robots-Tag headers.

`robots.nofollow` and `robots.noindex` turn it on. Both are off by default, and cost nothing then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shoal.config import RobotsSettings
from shoal.errors import RequestError, TooComplexError
from shoal.http import LinkBatch, Request, Response
from shoal.sitemaps.entry import read_period
from shoal.urls.normalize import LinkJoiner, resolve

if TYPE_CHECKING:
    from shoal.crawling.callbacks import Found
    from shoal.crawling.stats import Counters

_MARKED = frozenset({"nofollow", "ugc", "sponsored"})
_WITH_VALUE = frozenset({"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"})
_AGENT = re.compile(r"\s*([A-Za-z*][\w.*-]*)\s*:(.*)", re.DOTALL)
_WEEKDAY = re.compile(r"\s*(mon|tue|wed|thu|fri|sat|sun)[a-z]*\s*", re.IGNORECASE)
_WORD = re.compile("[a-z][a-z0-9_-]*")
_UNSPECIFIC = frozenset({"mozilla", "compatible", "robots"})
"""Words of a user agent that name no crawler."""
_MAX_TEXT = 5000  # characters of a header or a meta tag
_MAX_META = 200
_MAX_MARKED = 20_000  # links; further ones with nofollow are not followed, even if another link to them has none
_HEADER = "X-Robots-Tag"


class PageDirectives:
    """Removes from the output of a callback what its page forbids."""

    def __init__(self, config: RobotsSettings, user_agent: str, counters: Counters) -> None:
        self._config = config
        """At least one of the two settings is on."""
        self._names = frozenset(_WORD.findall(user_agent.lower())) - _UNSPECIFIC
        self._counters = counters

    def apply(self, response: Response, found: Found) -> str:
        """Remove items and links, and return what the history of the page says about that."""
        if not found.links and not found.items and not found.files:
            return ""
        says, notes = self._directives(response), []
        dropped = len(found.items) + len(found.files)  # a request for a file carries its item
        if self._config.noindex and dropped and "noindex" in says:
            for _ in range(dropped):
                self._counters.drop("noindex")
            notes.append(f"{dropped} items were dropped: {says['noindex']} (robots.noindex)")
            found.items, found.files = [], []
        if self._config.nofollow and found.links:
            count, why = self._unfollow(response, found, says.get("nofollow"))
            if count:
                self._counters.not_followed += count
                notes.append(f"{count} links were not followed: {why} (robots.nofollow)")
        return "; ".join(notes)

    def _directives(self, response: Response) -> dict[str, str]:
        """``nofollow`` and ``noindex`` with the place that says it."""
        now = datetime.now(UTC)
        found: dict[str, str] = {}
        headers = response.headers.getall(_HEADER, ())
        for name in read_directives(headers, self._names, now):
            found[name] = f"{_HEADER} says {name}"
        if _is_html(response):
            for name in read_directives(self._meta_tags(response), self._names, now):
                found.setdefault(name, f"a meta tag says {name}")
        return found

    def _meta_tags(self, response: Response) -> list[str]:
        """The contents of the meta tags for all crawlers, or for this one."""
        names = self._names | {"robots"}
        tags = response._tree.select("meta[name][content]")[:_MAX_META]
        return [tag.attr("content") or "" for tag in tags if (tag.attr("name") or "").strip().lower() in names]

    def _unfollow(self, response: Response, found: Found, page_says: str | None) -> tuple[int, str]:
        """Remove links. Return how many, and why."""
        if page_says is not None:
            count = sum(len(link) if isinstance(link, LinkBatch) else 1 for link in found.links)
            found.links = []
            return count, page_says
        if not _is_html(response):
            return 0, ""
        marked = _MarkedLinks(response)
        if not marked:
            return 0, ""
        before = sum(len(link) if isinstance(link, LinkBatch) else 1 for link in found.links)
        found.links = [kept for link in found.links if (kept := marked.without(link)) is not None]
        return before - sum(
            len(link) if isinstance(link, LinkBatch) else 1 for link in found.links
        ), "rel says nofollow"


class _MarkedLinks:
    """The links of a page that have rel=nofollow, ugc or sponsored, unless another link to the same URL has none."""

    def __init__(self, response: Response) -> None:
        marked: dict[str, None] = {}
        plain: dict[str, None] = {}
        links = response._tree.select("a[href], area[href]")
        hrefs, rels = (response._attributes.values(links, name) for name in ("href", "rel"))
        for href, rel in zip(hrefs, rels, strict=True):
            is_marked = rel is not None and not _MARKED.isdisjoint(rel[:_MAX_TEXT].lower().split())
            (marked if is_marked else plain)[href or ""] = None
        self._known = plain.keys() - marked.keys()
        self._hrefs: set[str] = set()
        self._urls: set[str] = set()
        if not marked:
            return
        followed = set(resolve(response.base_url, plain))
        joiner = LinkJoiner(response.base_url)
        for number, href in enumerate(marked):
            with suppress(RequestError):
                try:
                    url = joiner.join(href) if number < _MAX_MARKED else href
                except TooComplexError:
                    url = href
                if url not in followed:
                    self._hrefs.add(href)
                    self._urls.add(url)

    def __bool__(self) -> bool:
        return bool(self._hrefs)

    def without(self, link: Request | LinkBatch) -> Request | LinkBatch | None:
        """The link, or the part of a batch, that may be followed."""
        if isinstance(link, Request):
            return None if link.url in self._urls else link
        joiner = LinkJoiner(link.base)
        link.hrefs = [href for href in link.hrefs if not self._has(joiner, href)]
        return link if link.hrefs else None

    def _has(self, joiner: LinkJoiner, href: str) -> bool:
        if href in self._hrefs or href in self._urls:
            return True
        if href in self._known:
            return False
        try:
            return joiner.join(href) in self._urls
        except RequestError:
            return False
        except TooComplexError:  # nobody follows it: such links are left out
            return True


def read_directives(texts: Iterable[str], names: frozenset[str], now: datetime) -> set[str]:
    """Which of ``nofollow`` and ``noindex`` these texts say, to all crawlers or to those with one of these names.

    ``none`` is both. ``unavailable_after`` is noindex from its date on. A name holds for what follows it in its text.
    """
    found: set[str] = set()
    for text in texts:
        is_ours = True
        parts = text[:_MAX_TEXT].split(",")
        for number, part in enumerate(parts):
            name, value = part.strip().lower(), ""
            while match := _AGENT.fullmatch(part):
                name, value = match[1].lower(), match[2]
                if name in _WITH_VALUE:
                    break
                is_ours = name == "*" or name in names
                part, name, value = value, value.strip().lower(), ""
            if not is_ours:
                continue
            if name == "none":
                found |= {"nofollow", "noindex"}
            elif name in ("nofollow", "noindex"):
                found.add(name)
            elif name == "unavailable_after":
                if _WEEKDAY.fullmatch(value):  # "Friday, 25-Jun-10 15:00:00 GMT"
                    value = "".join(parts[number + 1 : number + 2])
                period = read_period(value)
                if period is not None and period[0] <= now:
                    found.add("noindex")
    return found


def _is_html(response: Response) -> bool:
    return "html" in response.headers.get("Content-Type", "text/html").lower()
