"""Learns which pages of a host need a browser. All workers of a store share what was learned, and it expires."""

from __future__ import annotations

import re
import time
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from shoal.errors import DECODING_ERRORS
from shoal.http import Response
from shoal.ports import Hosts
from shoal.selector import usage
from shoal.urls.normalize import host_of

Need: TypeAlias = Literal["http", "browser"]

_AGREEING = 2
"""How many pages of a kind must need the same before the need is taken as known."""
_VALID = 86_400.0
"""Seconds until a known need expires. Then the pages of this kind are checked again."""
_FEW_CHARACTERS = 400
"""A page with less text than this, but with scripts, may be an empty shell."""
_MANY_LINKS = 5
_VARIABLE = re.compile(r"\d+|[0-9a-f]{8,}|.{25,}", re.IGNORECASE)
_MAX_KINDS = 10_000
_MAX_KINDS_PER_HOST = 50
_FRESH = 5.0
"""Seconds for which a process uses what it has read from the store."""


def is_shell(response: Response) -> bool:
    """Whether the HTML is hardly more than a frame that scripts fill."""
    if "html" not in response.headers.get("Content-Type", "text/html") or b"<script" not in response.body.lower():
        return False
    return len(visible_text(response)) < _FEW_CHARACTERS and _links(response) < _MANY_LINKS


def says_more(rendered: Response, plain: Response) -> bool:
    """Whether scripts added text or links that the plain HTML does not have."""
    return _links(rendered) > _links(plain) or len(visible_text(rendered)) > 1.2 * len(visible_text(plain)) + 20


def visible_text(response: Response) -> str:
    """The text of the page without scripts and styles, with single spaces."""
    with usage.uncounted():
        texts = response.xpath("//body//text()[not(ancestor::script|ancestor::style|ancestor::noscript)]").getall()
    return " ".join(" ".join(texts).split())


def _links(response: Response) -> int:
    with usage.uncounted():
        return len(response.css("a[href]"))


def kind_of(url: str) -> str:
    """The kind of a page. Paths of a host that differ only in numbers and names are of one kind: ``/product/*``."""
    segments = urlsplit(url).path.split("/")[1:4]
    kinds = ("*" if each and (number or _VARIABLE.fullmatch(each)) else each for number, each in enumerate(segments))
    return "/" + "/".join(kinds)


class LearnedNeeds(Struct, frozen=True):
    """What pages of a kind need, and until when that is taken as known, in seconds since 1970."""

    need: Need
    until: float


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, LearnedNeeds])


async def learned_needs(hosts: Hosts, host: str) -> dict[str, Need]:
    """What is known of the pages of a host, by kind."""
    return {kind: each.need for kind, each in (await _recall(hosts, host)).items()}


async def _recall(hosts: Hosts, host: str) -> dict[str, LearnedNeeds]:
    """What the store knows, without what must be checked again."""
    stored = await hosts.recall(f"render:{host}")
    if stored is None:
        return {}
    try:
        found = _decoder.decode(stored)
    except DECODING_ERRORS:  # another version wrote it
        return {}
    return {kind: each for kind, each in found.items() if each.until > time.time()}


class PageNeeds:
    """What the pages of hosts need, by kind of page. It learns only from successful fetches."""

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._seen: dict[tuple[str, str], list[Need]] = {}
        """What the last pages of a kind needed, seen by this process."""
        self._known: dict[str, dict[str, LearnedNeeds]] = {}
        """By host. Used without a store, and for a short time with one."""
        self._fresh_until: dict[str, float] = {}

    async def known(self, url: str) -> Need | None:
        """What a page of this kind needs; None if that is not known, or must be checked again."""
        host = host_of(url)
        if self._hosts is not None and time.monotonic() > self._fresh_until.get(host, 0.0):
            if len(self._known) >= _MAX_KINDS:
                self._known.clear()
            self._known[host] = await _recall(self._hosts, host)
            self._fresh_until[host] = time.monotonic() + _FRESH
        found = self._known.get(host, {}).get(kind_of(url))
        return found.need if found is not None and found.until > time.time() else None

    async def learn(self, url: str, need: Need) -> None:
        """Record what a successfully fetched page needed."""
        host, kind = host_of(url), kind_of(url)
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        seen = self._seen.setdefault((host, kind), [])
        seen.append(need)
        if seen[-_AGREEING:] != [need] * _AGREEING:
            return
        del self._seen[host, kind]
        known = self._known.setdefault(host, {})
        if self._hosts is not None:
            known.update(await _recall(self._hosts, host))
        known[kind] = LearnedNeeds(need, time.time() + _VALID)  # the others expire when they would have
        while len(known) > _MAX_KINDS_PER_HOST:
            del known[next(iter(known))]
        if self._hosts is not None:
            await self._hosts.remember(f"render:{host}", _encoder.encode(known), _VALID)
