"""Normalize, join and fingerprint URLs.

Links are most of the cost of a page: it has dozens, and nearly all were seen before. So the common forms need only one
regular expression and one concatenation. Only the others go through yarl.
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
from shoal.urls.hostnames import MAX_PER_PAGE, ascii_host, foreign_host

log = logging.getLogger("shoal.urls")

# Already in normal form: lower-case host, no user, no fragment, nothing to quote or unquote. A "/." may start a dot
# segment, so it takes the slow path. So do a default port and a host that ends like an unusual IP address.
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

# Limits for untrusted pages.
_MAX_LENGTH = 65536
_MAX_HOST = 261  # 255 and a port
_MAX_CHARACTERS = 48 << 20  # of all joined links of one page; the base counts for each link
_MAX_SLOW = 20_000  # links of one page that take the slow path: up to 60 microseconds each


def normalize_url(url: str) -> str:
    """Return the normal form of an http(s) URL: quoted, host in lower case, no fragment, no default port.

    RequestError says what is wrong with an invalid URL.
    """
    try:
        if _NORMAL_URL.fullmatch(url) and "/." not in url:
            return url
    except TypeError:
        raise RequestError(f"invalid URL: {url!r:.200} is not text") from None
    return _normalize(_clean(url))


def _clean(url: str) -> str:
    """Clean up as browsers do: drop outer spaces, line breaks and the fragment, and turn backslashes into slashes."""
    url = url.strip(_AROUND).translate(_IGNORED).partition("#")[0]
    if len(url) > _MAX_LENGTH:
        raise RequestError(f"invalid URL: {url[:100]!r}... is longer than {_MAX_LENGTH} characters")
    if "\\" in url:
        path, mark, query = url.partition("?")
        url = path.replace("\\", "/") + mark + query
    return url if url.isascii() else _SURROGATE.sub(_unescape, url)


def _unescape(surrogate: re.Match[str]) -> str:
    """Quote a surrogate that stands for a non-UTF-8 byte of a header; replace any other surrogate."""
    byte = ord(surrogate[0]) - 0xDC00
    return f"%{byte:02X}" if 0x80 <= byte <= 0xFF else "\ufffd"


def _normalize(url: str) -> str:
    scheme = _SCHEME.match(url)
    if scheme is None:
        raise RequestError(f"invalid URL: {url[:200]!r} has no scheme; add http:// or https://")
    if scheme[1].lower() not in ("http", "https"):
        raise RequestError(f"cannot fetch {url[:200]!r}: only http and https URLs can be crawled")
    authority = _AUTHORITY.match(url, scheme.end())
    if authority is None or not 0 < len(authority[1]) <= _MAX_HOST:
        raise RequestError(f"invalid URL: {url[:200]!r} has no host, or its host is too long")
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
        raise RequestError(f"invalid URL: {url[:200]!r} ({exc})") from exc
    if not port or not (":" in host or _ANY_NAME.fullmatch(host)):
        raise RequestError(f"invalid host or port in URL {url[:200]!r}")
    text = str(parsed)
    if len(text) > _MAX_LENGTH:  # quoting makes it up to nine times as long
        raise RequestError(f"invalid URL: {url[:100]!r}... is longer than {_MAX_LENGTH} characters")
    if bare := _NO_PATH.fullmatch(text):
        return f"{bare[1]}/{bare[2] or ''}"
    return text


def join_url(base: str, href: str) -> str:
    """Return the normal form of a link on the page ``base``. RequestError if it is not an http(s) URL."""
    try:
        if "/." not in href:
            if _NORMAL_PATH.fullmatch(href):
                return base[: base.index("/", 8)] + href
            if _NORMAL_URL.fullmatch(href):
                return href
    except TypeError:
        raise RequestError(f"invalid URL: {href!r:.200} is not text") from None
    url = _join(base, _clean(href))
    if not _NORMAL_URL.fullmatch(url):
        return _normalize(url)
    if "/." not in url:
        return url
    short = _without_dots(url)
    return short if _NORMAL_URL.fullmatch(short) else _normalize(url)


def _without_dots(url: str) -> str:
    """Resolve the segments ``.`` and ``..`` of an otherwise normal URL."""
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
            raise RequestError(f"cannot follow {href[:200]!r}: only http and https URLs can be crawled")
        if rest.startswith("//") or not base.startswith(f"{name}:"):
            return f"{name}://{rest.lstrip('/')}"
        href = rest  # browsers treat "http:page" on an http page as relative
    if href.startswith("//"):
        return f"{base[: base.index('/')]}//{href.lstrip('/')}"
    if href.startswith("/"):
        return origin_of(base) + href
    if not href:
        return base
    path = base.partition("?")[0]
    return path + href if href.startswith("?") else path[: path.rindex("/") + 1] + href


def host_of(url: str) -> str:
    """Return ``host`` or ``host:port`` of a URL in normal form. Delays and limits apply to it."""
    host = url.split("/", 3)[2]
    return host.rpartition("@")[2] if "@" in host else host


def origin_of(url: str) -> str:
    """Return ``scheme://host:port`` of a URL in normal form."""
    return url[: url.index("/", 8)]


def url_fingerprint(url: str, method: str = "GET", body: bytes = b"") -> bytes:
    """Return 16 bytes that identify a request: its method, URL and body. The order of the query does not matter."""
    path, mark, query = url.partition("?")
    if mark and "&" in query:
        url = path + "?" + "&".join(sorted(query.split("&")))
    if method == "GET" and not body:
        return blake2b(url.encode(), digest_size=16).digest()
    return blake2b(b"\0".join((method.encode(), url.encode(), body)), digest_size=16).digest()


def derived_fingerprint(fingerprint: bytes, *parts: bytes) -> bytes:
    """Return a fingerprint for another request of the same URL. Equal parts return an equal fingerprint."""
    return blake2b(b"\0".join((fingerprint, *parts)), digest_size=16).digest()


def resolve(base: str, hrefs: Iterable[str]) -> list[str]:
    """Return the URLs in normal form, in order, without duplicates and links like ``mailto:`` or ``#top``.

    The number of links that take the slow path is limited for each page, and so is the total length of all joined
    links: a page may have a base of 60,000 characters and 100,000 short links. Links in normal form have no limit.
    """
    origin = origin_of(base)
    found: dict[str, None] = {}
    match = _NORMAL_PATH.fullmatch
    foreign: set[str] = set()
    plain_base = _NORMAL_URL.fullmatch(base) is not None
    slow, room = 0, _MAX_CHARACTERS
    for href in hrefs:
        if "/." not in href and match(href):
            found[origin + href] = None
        elif href and href[0] != "#":
            if not href.isascii() and (host := foreign_host(href)) and host not in foreign:
                if len(foreign) >= MAX_PER_PAGE:
                    continue
                foreign.add(host)
            if _NORMAL_URL.fullmatch(href) and "/." not in href:
                found[href] = None
                continue
            # Invalid and duplicate links cost the same.
            if plain_base and ":" not in href and "/." not in (path := "/" + href) and match(path):
                room -= len(base) + len(href)
            else:
                slow += 1
                room -= 4 * (len(base) + len(href))  # up to 0.2 microseconds a character
            if slow > _MAX_SLOW or room < 0:
                continue
            with suppress(RequestError):
                found[join_url(base, href)] = None
    if slow > _MAX_SLOW or room < 0:
        log.warning(
            "too many links, ignored the rest url=%s: more than %d need quoting, or they have more than %d characters",
            base[:200], _MAX_SLOW, _MAX_CHARACTERS,
        )  # fmt: skip
    return list(found)
