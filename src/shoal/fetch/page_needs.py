"""Learns which pages of a host need a browser. All workers of a store share what was learned, and it expires."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from shoal.http import Response
from shoal.ports import Hosts

Need: TypeAlias = Literal["http", "browser"]

_AGREEING = 2
"""Pages of a kind that must need the same before it is taken as known."""
_VALID = 86_400.0
"""Seconds for which it is known. Then the pages of this kind are checked again."""
_FEW_CHARACTERS = 400
"""A page with less text than this, but with scripts, may be an empty shell."""
_MANY_LINKS = 5
_VARIABLE = re.compile(r"\d+|[0-9a-f]{8,}|.{25,}", re.IGNORECASE)
_MAX_KINDS = 10_000


def is_shell(response: Response) -> bool:
    """Whether the HTML is hardly more than a frame that scripts fill."""
    if "html" not in response.headers.get("Content-Type", "text/html") or b"<script" not in response.body.lower():
        return False
    text = visible_text(response)
    return len(text) < _FEW_CHARACTERS and len(response.css("a[href]")) < _MANY_LINKS


def says_more(rendered: Response, plain: Response) -> bool:
    """Whether scripts added text or links that the plain HTML does not have."""
    more_links = len(rendered.css("a[href]")) > len(plain.css("a[href]"))
    return more_links or len(visible_text(rendered)) > 1.2 * len(visible_text(plain)) + 20


def visible_text(response: Response) -> str:
    """The text of the page without scripts and styles, with single spaces."""
    found = response.xpath("//body//text()[not(ancestor::script|ancestor::style|ancestor::noscript)]").getall()
    return " ".join(" ".join(found).split())


def kind_of(url: str) -> str:
    """Pages of a host whose paths differ only in numbers and names are of one kind: /p/17 and /p/18."""
    parts = urlsplit(url)
    segments = parts.path.split("/")[1:4]
    shape = "/".join(
        "*" if _VARIABLE.fullmatch(each) or (number and each) else each for number, each in enumerate(segments)
    )
    return f"{parts.netloc}/{shape}"


class PageNeeds:
    """What the pages of a host need, by kind of page. Only successful fetches teach something."""

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._seen: dict[str, list[Need]] = {}
        """What the last pages of a kind needed, seen by this process."""
        self._known: dict[str, Need] = {}

    async def known(self, url: str) -> Need | None:
        """What a page of this kind needs; None if that is not known, or must be checked again."""
        kind = kind_of(url)
        if self._hosts is None:
            return self._known.get(kind)
        stored = await self._hosts.recall(f"render:{kind}")
        return None if stored is None else "browser" if stored == b"browser" else "http"

    async def learn(self, url: str, need: Need) -> None:
        """A page was fetched successfully, and needed this."""
        kind = kind_of(url)
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        seen = self._seen.setdefault(kind, [])
        seen.append(need)
        if seen[-_AGREEING:] == [need] * _AGREEING:
            del self._seen[kind]
            if self._hosts is None:
                self._known[kind] = need
            else:
                await self._hosts.remember(f"render:{kind}", need.encode(), _VALID)
