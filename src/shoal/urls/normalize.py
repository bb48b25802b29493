"""URLs: normal form, joining, fingerprints.

Links are what a page costs: dozens on each, nearly all seen before. So the common spellings take a path of one regular
expression and one concatenation, and only the rest goes through yarl.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from socket import AF_INET6, inet_aton, inet_ntoa, inet_pton

from yarl import URL

from shoal.errors import RequestError
from shoal.urls.hostnames import MOST_OF_A_PAGE, ascii_host, foreign_host

log = logging.getLogger("shoal.urls")

# Already in normal form: lower-case host, no user, no fragment, nothing that needs quoting or unquoting. A "/." may be
# the start of a dot segment, so it takes the slow path, as do a default port and a host that ends like an odd address.
_PATH = r"/(?!/)[\w\-~!$&'()*+,;=:@./]*(?:\?[\w\-~!$&'()*+,;=:@./]+)?"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HOST = rf"(?:{_BYTE}(?:\.{_BYTE}){{3}}|(?:[a-z0-9._\-]*\.)?[a-z]+)"
_NORMAL_PATH = re.compile(_PATH, re.ASCII)
_NORMAL_URL = re.compile(rf"https?://{_HOST}(?::(?!80/|443/)(?:[1-9]\d{{0,3}}|[1-5]\d{{4}}))?{_PATH}", re.ASCII)
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*):")
_AUTHORITY = re.compile(r"//(?:[^/?]*@)?([^/?@]*)")
_ANY_NAME = re.compile(r"[a-z0-9._\-]+", re.ASCII)
_ADDRESS = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)\.?", re.ASCII)
_NO_PATH = re.compile(r"(https?://[^/?]*)(\?.*)?", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_IGNORED = str.maketrans("", "", "\n\r\t")
_AROUND = "".join(map(chr, range(33)))

# What a stranger's page may cost.
_LONGEST = 65536
_LONGEST_HOST = 261  # 255 and a port
_MOST_CHARACTERS = 48 << 20  # of the links of one page that are joined, the base counted for each
_MOST_SLOW = 20_000  # links of one page that need more than that: up to 60 microseconds each


def normalize_url(url: str) -> str:
    """The one spelling of an http(s) URL that Shoal uses: quoted, host in lower case, no fragment, no default port.

    RequestError says what is wrong with anything else.
    """
    try:
        if _NORMAL_URL.fullmatch(url) and "/." not in url:
            return url
    except TypeError:
        raise RequestError(f"not a URL: {url!r:.200} is no text") from None
    return _normalize(_clean(url))


def _clean(url: str) -> str:
    """Read as browsers do: spaces around it, line ends in it and its fragment don't count, a backslash is a slash."""
    url = url.strip(_AROUND).translate(_IGNORED).partition("#")[0]
    if len(url) > _LONGEST:
        raise RequestError(f"not a URL: {url[:100]!r}... is longer than {_LONGEST} characters")
    if "\\" in url:
        path, mark, query = url.partition("?")
        url = path.replace("\\", "/") + mark + query
    return url if url.isascii() else _SURROGATE.sub(_unescape, url)


def _unescape(surrogate: re.Match[str]) -> str:
    """Half of the surrogates stand for a byte of a header that was no UTF-8; the others for nothing."""
    byte = ord(surrogate[0]) - 0xDC00
    return f"%{byte:02X}" if 0x80 <= byte <= 0xFF else "\ufffd"


def _normalize(url: str) -> str:
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise RequestError(f"not a URL: {url[:200]!r} has no scheme; write http:// or https:// before it")
    if scheme[1].lower() not in ("http", "https"):
        raise RequestError(f"can't fetch {url[:200]!r}: only http and https URLs can be crawled")
    authority = _AUTHORITY.match(url, scheme.end())
    if authority is None or not 0 < len(authority[1]) <= _LONGEST_HOST:
        raise RequestError(f"not a URL: {url[:200]!r} has no host, or one that is too long")
    try:
        if not authority[1].isascii():
            name, colon, number = authority[1].partition(":")
            url = url[: authority.start(1)] + ascii_host(name) + colon + number + url[authority.end(1) :]
        parsed = URL(url)
        host, port = parsed.raw_host or "", parsed.port
        if ":" in host:
            inet_pton(AF_INET6, host)
        elif _ADDRESS.fullmatch(host):
            parsed = parsed.with_host(inet_ntoa(inet_aton(host.removesuffix("."))))
    except (ValueError, TypeError, OSError) as exc:
        raise RequestError(f"not a URL: {url[:200]!r} ({exc})") from exc
    if not port or not (":" in host or _ANY_NAME.fullmatch(host)):
        raise RequestError(f"not a URL: {url[:200]!r} has a host or a port that can't be")
    text = str(parsed)
    if len(text) > _LONGEST:  # it was quoted, which makes it up to nine times as long
        raise RequestError(f"not a URL: {url[:100]!r}... is longer than {_LONGEST} characters")
    if bare := _NO_PATH.fullmatch(text):
        return f"{bare[1]}/{bare[2] or ''}"
    return text


def join_url(base: str, href: str) -> str:
    """``href`` as found on the page ``base``, in normal form. RequestError if it is no http(s) URL."""
    try:
        if "/." not in href:
            if _NORMAL_PATH.fullmatch(href):
                return base[: base.index("/", 8)] + href
            if _NORMAL_URL.fullmatch(href):
                return href
    except TypeError:
        raise RequestError(f"not a URL: {href!r:.200} is no text") from None
    url = _join(base, _clean(href))
    if not _NORMAL_URL.fullmatch(url):
        return _normalize(url)
    if "/." not in url:
        return url
    short = _without_dots(url)
    return short if _NORMAL_URL.fullmatch(short) else _normalize(url)


def _without_dots(url: str) -> str:
    """A URL that is normal but for the segments ``.`` and ``..`` of its path, without them."""
    start = url.index("/", 8)
    path, mark, query = url[start + 1 :].partition("?")
    segments = path.split("/")
    kept: list[str] = []
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    if segments[-1] in (".", ".."):
        kept.append("")
    return f"{url[:start]}/{'/'.join(kept)}{mark}{query}"


def _join(base: str, href: str) -> str:
    if scheme := _SCHEME.match(href):
        name, rest = scheme[1].lower(), href[scheme.end() :]
        if name not in ("http", "https"):
            raise RequestError(f"can't follow {href[:200]!r}: only http and https URLs can be crawled")
        if rest.startswith("//") or not base.startswith(f"{name}:"):
            return f"{name}://{rest.lstrip('/')}"
        href = rest  # "http:page" on a page of http is relative, to browsers
    if href.startswith("//"):
        return f"{base[: base.index('/')]}//{href.lstrip('/')}"
    if href.startswith("/"):
        return origin_of(base) + href
    if not href:
        return base
    path = base.partition("?")[0]
    return path + href if href.startswith("?") else path[: path.rindex("/") + 1] + href


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


def resolve(base: str, hrefs: Iterable[str]) -> list[str]:
    """The URLs in normal form, each once, in order; what can't be followed (``mailto:``, ``#top``) is left out.

    Links that need quoting or an odd host have a limit for each page, and all that are joined have one of characters:
    a page may name a base of 60,000 characters for 100,000 short links. Links in normal form have none.
    """
    origin = origin_of(base)
    found: dict[str, None] = {}
    match = _NORMAL_PATH.fullmatch
    foreign: set[str] = set()
    plain_base = _NORMAL_URL.fullmatch(base) is not None
    slow, room = 0, _MOST_CHARACTERS
    for href in hrefs:
        if "/." not in href and match(href):
            found[origin + href] = None
        elif href and href[0] != "#":
            if not href.isascii() and (host := foreign_host(href)) and host not in foreign:
                if len(foreign) >= MOST_OF_A_PAGE:
                    continue
                foreign.add(host)
            if _NORMAL_URL.fullmatch(href) and "/." not in href:
                found[href] = None
                continue
            # Those that fail and those that come twice cost the same.
            if plain_base and ":" not in href and "/." not in (path := "/" + href) and match(path):
                room -= len(base) + len(href)
            else:
                slow += 1
                room -= 4 * (len(base) + len(href))  # up to 0.2 microseconds a character
            if slow > _MOST_SLOW or room < 0:
                continue
            with suppress(RequestError):
                found[join_url(base, href)] = None
    if slow > _MOST_SLOW or room < 0:
        log.warning(
            "links left out url=%s: more than %d that need quoting, or more than %d characters with their base",
            base[:200], _MOST_SLOW, _MOST_CHARACTERS,
        )  # fmt: skip
    return list(found)
