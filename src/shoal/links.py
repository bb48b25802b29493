"""URLs: normal form, joining, fingerprints; and the batch of links that ``follow_all`` makes.

Links are what a page costs: dozens on each, nearly all seen before. So the common spellings take a path of one regular
expression and one concatenation, and only the rest goes through yarl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Struct
from yarl import URL

from shoal.errors import RequestError

# Already in normal form: lower-case host, no user, no fragment, nothing that needs quoting or unquoting. A "/." may be
# the start of a dot segment, so it takes the slow path, as does a default port.
_PATH = r"/(?!/)[\w\-~!$&'()*+,;=:@./]*(?:\?[\w\-~!$&'()*+,;=:@./]*)?"
_NORMAL_PATH = re.compile(_PATH, re.ASCII)
_NORMAL_URL = re.compile(r"https?://[a-z0-9.\-]+(?::(?!80/|443/)(?:\d{1,4}|[1-5]\d{4}))?" + _PATH, re.ASCII)
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*):")
_NO_PATH = re.compile(r"(https?://[^/?]*)(\?.*)?", re.DOTALL)
_IGNORED = str.maketrans("", "", "\n\r\t")


def normalize_url(url: str) -> str:
    """The one spelling of an http(s) URL that Shoal uses: quoted, host in lower case, no fragment, no default port.

    RequestError says what is wrong with anything else.
    """
    if _NORMAL_URL.fullmatch(url) and "/." not in url:
        return url
    return _normalize(url.strip().partition("#")[0])


def _normalize(url: str) -> str:
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise RequestError(f"not a URL: {url[:200]!r} has no scheme; write http:// or https:// before it")
    if scheme[1].lower() not in ("http", "https"):
        raise RequestError(f"can't fetch {url[:200]!r}: only http and https URLs can be crawled")
    try:
        parsed = URL(url).with_fragment(None)
        host, port = parsed.host, parsed.port
    except (ValueError, TypeError) as exc:
        raise RequestError(f"not a URL: {url[:200]!r} ({exc})") from exc
    if not host or port is None or not 0 < port < 65536:
        raise RequestError(f"not a URL: {url[:200]!r} has no host, or a port that can't be")
    text = str(parsed)
    if bare := _NO_PATH.fullmatch(text):
        return f"{bare[1]}/{bare[2] or ''}"
    return text


def join_url(base: str, href: str) -> str:
    """``href`` as found on the page ``base``, in normal form. RequestError if it is no http(s) URL."""
    href = href.strip().translate(_IGNORED)
    if "/." not in href:
        if _NORMAL_PATH.fullmatch(href):
            return base[: base.index("/", 8)] + href
        if _NORMAL_URL.fullmatch(href):
            return href
    href = href.partition("#")[0]
    if scheme := _SCHEME.match(href):
        if scheme[1].lower() not in ("http", "https"):
            raise RequestError(f"can't follow {href[:200]!r}: only http and https URLs can be crawled")
        return _normalize(href)
    if not href:
        return base
    try:
        return _normalize(str(URL(base).join(URL(href))))
    except RequestError:
        raise
    except (ValueError, TypeError) as exc:
        raise RequestError(f"not a URL: {href[:200]!r} on {base} ({exc})") from exc


def host_of(url: str) -> str:
    """``host`` or ``host:port`` of a URL in normal form: what politeness is kept for."""
    host = url.split("/", 3)[2]
    return host.rpartition("@")[2] if "@" in host else host


def origin_of(url: str) -> str:
    """``scheme://host:port`` of a URL in normal form."""
    return url[: url.index("/", 8)]


def url_fingerprint(url: str, method: str = "GET", body: bytes = b"") -> bytes:
    """16 bytes that name a request: its method, its URL whatever the order of the query's parts, its body."""
    path, mark, query = url.partition("?")
    if mark and "&" in query:
        url = path + "?" + "&".join(sorted(query.split("&")))
    if method == "GET" and not body:
        return blake2b(url.encode(), digest_size=16).digest()
    return blake2b(b"\0".join((method.encode(), url.encode(), body)), digest_size=16).digest()


def derived_fingerprint(fingerprint: bytes, *parts: bytes) -> bytes:
    """A name for one more request of the same URL, the same each time it is derived from the same place."""
    return blake2b(b"\0".join((fingerprint, *parts)), digest_size=16).digest()


class LinkBatch(Struct, kw_only=True):
    """Links of one page that are followed in the same way: one object, however many they are."""

    base: str
    hrefs: list[str]
    callback: str | None = None
    errback: str | None = None
    priority: float = 0
    headers: dict[str, str] = {}
    cookies: dict[str, str] = {}
    meta: dict[str, Any] = {}
    dont_filter: bool = False

    def __len__(self) -> int:
        return len(self.hrefs)

    def __iter__(self) -> Iterator[str]:
        """The links' URLs, each once, without those that are no http(s) URLs."""
        return iter(resolve(self.base, self.hrefs))


def resolve(base: str, hrefs: Iterable[str]) -> list[str]:
    """The URLs in normal form, each once, in order; what can't be followed (``mailto:``, ``#top``) is left out."""
    origin = origin_of(base)
    found: dict[str, None] = {}
    match = _NORMAL_PATH.fullmatch
    for href in hrefs:
        if "/." not in href and match(href):
            found[origin + href] = None
        elif href and href[0] != "#":
            try:
                found[join_url(base, href)] = None
            except RequestError:
                continue
    return list(found)


class KnownLinks:
    """Raw hrefs that a run's frontier is known to have, so that they need not be looked at again.

    Only hrefs that mean the same on every page of their origin are kept (``/path`` and absolute ones), and only after
    the frontier has taken them. Bounded: when it is full it forgets all and learns again.
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
        fixed = [href for href in hrefs if href[:1] == "/" or href[:4] == "http"]
        if self._size + len(fixed) > self._limit:
            self._by_origin.clear()
            self._size = 0
        known = self._by_origin.setdefault(origin_of(base), set())
        before = len(known)
        known.update(fixed)
        self._size += len(known) - before
