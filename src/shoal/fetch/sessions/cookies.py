"""Cookies: read from Set-Cookie headers, and kept in memory with limits for each domain and for all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeAlias, cast

from msgspec import Struct

from shoal.system import clock
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from publicsuffixlist import PublicSuffixList

_MAX_LENGTH = 4096  # of one cookie, as in browsers
_MAX_PATH_LENGTH = 1024
_MAX_HEADER_LENGTH = 8190  # servers refuse longer ones
_MAX_PER_DOMAIN = 50
_MAX_BYTES_PER_DOMAIN = 64 * 1024
_MAX_DOMAINS = 10_000
_MAX_BYTES = 32 * 1024 * 1024  # of all cookies in all jars, but at least one domain fits into each jar

_UNSAFE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
_MAX_DATE_LENGTH = 200
_DATE_TOKEN = re.compile(r"[^\t -/;-@\[-`{-~]+")
_TIME = re.compile(r"(\d{1,2}):(\d{1,2}):(\d{1,2})(?!\d)", re.ASCII)
_DAY = re.compile(r"(\d{1,2})(?!\d)", re.ASCII)
_YEAR = re.compile(r"(\d{2,4})(?!\d)", re.ASCII)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ADDRESS = re.compile(r"[\d.]+|\[.*")


class Cookie(Struct, frozen=True, array_like=True):
    """A cookie. ``host_only``: subdomains do not get it. ``expires``: None if it lasts as long as the session."""

    name: str
    value: str
    domain: str
    path: str
    host_only: bool
    secure: bool = False
    expires: float | None = None
    http_only: bool = False
    same_site: str = ""

    @property
    def key(self) -> CookieKey:
        return self.domain, self.name, self.path

    def is_over(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


CookieKey: TypeAlias = tuple[str, str, str]
"""Domain, name and path. A cookie replaces the one with the same key."""


class CookieJar:
    """Cookies of many domains, within limits. Those of the domain that was not used for the longest time go first."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = lambda: clock.time(),
        jars: Callable[[], int] = lambda: 1,
        on_evict: Callable[[str], None] = lambda domain: None,
    ) -> None:
        """``jars``: how many jars share the limit. ``on_evict``: called with each domain whose cookies were dropped
        because the jar is full."""
        self.clock = clock
        self._jars = jars
        self._on_evict = on_evict
        self.domains: dict[str, dict[tuple[str, str], Cookie]] = {}
        """By domain, in order of use; then by name and path, in order of setting."""
        self._sizes: dict[str, int] = {}
        """Bytes by domain."""
        self._size = 0

    def pairs_for(self, url: str) -> list[tuple[str, str]]:
        """What to send to a URL: names and values, those with the longest path first, up to the maximum length of a
        header. Cookies of several paths can have the same name; all of them are sent."""
        chosen: list[tuple[str, str]] = []
        size = 0
        for cookie in self.cookies_for(url):
            size += len(cookie.name) + len(cookie.value) + 3
            if size <= _MAX_HEADER_LENGTH:
                chosen.append((cookie.name, cookie.value))
        return chosen

    def cookies_for(self, url: str) -> list[Cookie]:
        """The cookies for a URL, those with the longest path first."""
        host, path = _host_and_path(url)
        now = self.clock()
        cookies: list[Cookie] = []
        domain = host
        while domain:
            if (bucket := self.domains.get(domain)) is not None:
                self.domains[domain] = self.domains.pop(domain)
                cookies += [
                    cookie
                    for cookie in bucket.values()
                    if _applies(cookie, host, path, now) and (url.startswith("https:") or not cookie.secure)
                ]
            domain = domain.partition(".")[2]
        cookies.sort(key=lambda cookie: -len(cookie.path))
        return cookies

    def all(self) -> list[Cookie]:
        """All cookies, by domain."""
        return [cookie for bucket in self.domains.values() for cookie in bucket.values()]

    def get(self, key: CookieKey) -> Cookie | None:
        domain, *rest = key
        return self.domains.get(domain, {}).get(cast("tuple[str, str]", tuple(rest)))

    def put(self, cookie: Cookie) -> None:
        """Store a cookie; remove it if its time is over."""
        domain, key = cookie.domain, (cookie.name, cookie.path)
        bucket = self.domains.pop(domain, {})
        self.domains[domain] = bucket
        if key in bucket:
            self._drop(domain, key)
        if not cookie.is_over(self.clock()):
            bucket[key] = cookie
            self._count(domain, _bytes_of(cookie))
        while len(bucket) > _MAX_PER_DOMAIN or self._sizes.get(domain, 0) > _MAX_BYTES_PER_DOMAIN:
            self._drop(domain, next(iter(bucket)))
        if not bucket:
            self._forget(domain)
        limit = max(_MAX_BYTES_PER_DOMAIN, _MAX_BYTES // max(1, self._jars()))
        while len(self.domains) > _MAX_DOMAINS or self._size > limit:
            oldest = next(iter(self.domains))
            self._forget(oldest)
            self._on_evict(oldest)

    def remove(self, key: CookieKey) -> None:
        """Remove a cookie, if there is one."""
        domain, name, path = key
        if (name, path) in self.domains.get(domain, {}):
            self._drop(domain, (name, path))
            if not self.domains[domain]:
                self._forget(domain)

    def _drop(self, domain: str, key: tuple[str, str]) -> None:
        self._count(domain, -_bytes_of(self.domains[domain].pop(key)))

    def _forget(self, domain: str) -> None:
        del self.domains[domain]
        self._count(domain, -self._sizes.get(domain, 0))
        self._sizes.pop(domain, None)

    def _count(self, domain: str, size: int) -> None:
        self._sizes[domain] = self._sizes.get(domain, 0) + size
        self._size += size


@lru_cache(maxsize=20_000)
def site_of(host: str) -> str:
    """The registrable domain of a host without its port: ``bbc.co.uk`` for ``news.bbc.co.uk``. A host without one, such
    as an address, is its own."""
    if "." not in host or _ADDRESS.fullmatch(host):
        return host
    return _suffixes().privatesuffix(host) or host


def site_of_url(url: str) -> str:
    return site_of(_host_and_path(url)[0])


def _bytes_of(cookie: Cookie) -> int:
    """Approximate memory: the strings, and the objects around them."""
    return 256 + sum(map(sys.getsizeof, (cookie.name, cookie.value, cookie.path)))


def read_cookie(line: str, url: str, now: float) -> Cookie | None:
    """Parse a Set-Cookie header as browsers do. None if it is invalid, or if this host may not set it.

    A host may set a cookie for a parent domain, but not for a public suffix such as ``co.uk`` or ``github.io``. A host
    that is itself a public suffix may set one for itself; its subdomains do not get it.
    """
    pair, *rest = line.split(";")
    name, mark, value = pair.partition("=")
    name, value = name.strip(), value.strip()
    if not mark or not name or len(name) + len(value) > _MAX_LENGTH or _UNSAFE.search(name + value):
        return None
    attributes = {key.strip().lower(): text.strip() for key, _, text in (part.partition("=") for part in rest)}
    host, request_path = _host_and_path(url)
    domain = attributes.get("domain", "").lower().removeprefix(".")
    if domain and domain != host and not _is_subdomain(host, domain):
        return None
    is_suffix = bool(domain) and is_public_suffix(domain)
    if is_suffix and domain != host:
        return None
    path = attributes.get("path", "")
    if not path.startswith("/") or len(path) > _MAX_PATH_LENGTH:
        path = request_path[: request_path.rindex("/")] or "/"
    return Cookie(
        name=name,
        value=value,
        domain=domain or host,
        path=path,
        host_only=not domain or is_suffix,
        secure="secure" in attributes,
        expires=_expires(attributes, now),
        http_only="httponly" in attributes,
        same_site=attributes.get("samesite", "")[:10],
    )


def invalid_part(cookie: Cookie) -> str:
    """What is wrong with a cookie that no header set. Empty if it can be stored and sent."""
    if not cookie.name or "=" in cookie.name or _UNSAFE.search(cookie.name) or ";" in cookie.name:
        return "the name is empty or has characters that a cookie cannot have"
    if _UNSAFE.search(cookie.value) or ";" in cookie.value:
        return f"the value of {cookie.name:.60} has characters that a cookie cannot have"
    if len(cookie.name) + len(cookie.value) > _MAX_LENGTH:
        return f"{cookie.name:.60} has more than {_MAX_LENGTH:,} characters"
    if not cookie.path.startswith("/") or len(cookie.path) > _MAX_PATH_LENGTH or _UNSAFE.search(cookie.path):
        return f"the path of {cookie.name:.60} must begin with / and have at most {_MAX_PATH_LENGTH:,} characters"
    return ""


def _expires(attributes: dict[str, str], now: float) -> float | None:
    """When the cookie expires; None: when the session ends."""
    age = attributes.get("max-age", "")
    if re.fullmatch(r"-?\d+", age, re.ASCII):
        return now + int(age[:12])
    moment = _read_date(attributes.get("expires", ""))
    return None if moment is None else moment.timestamp()


def _read_date(text: str) -> datetime | None:
    """Read a date as browsers do (RFC 6265, 5.1.1): its parts may be in any order, with anything between them."""
    clock: list[int] = []
    day = month = year = None
    for token in _DATE_TOKEN.findall(text[:_MAX_DATE_LENGTH]):
        if not clock and (match := _TIME.match(token)):
            clock = list(map(int, match.groups()))
        elif day is None and (match := _DAY.match(token)):
            day = int(match[1])
        elif month is None and (name := token[:3].lower()) in _MONTHS:
            month = _MONTHS.index(name) + 1
        elif year is None and (match := _YEAR.match(token)):
            year = int(match[1])
    if not clock or day is None or month is None or year is None:
        return None
    if year < 100:
        year += 1900 if year >= 70 else 2000
    try:
        return datetime(year, month, day, clock[0], clock[1], clock[2], tzinfo=UTC) if year >= 1601 else None
    except ValueError:
        return None


@lru_cache(maxsize=256)  # a page needs it several times
def _host_and_path(url: str) -> tuple[str, str]:
    """Host without port, and path, of a normalized URL."""
    path = url[url.index("/", 8) :].partition("?")[0]
    host = host_of(url)
    if ":" in host and (name := host.rpartition(":"))[2].isdigit():  # not the last part of an IPv6 address
        host = name[0]
    return host, path


def _applies(cookie: Cookie, host: str, path: str, now: float) -> bool:
    if (cookie.host_only and cookie.domain != host) or cookie.is_over(now):
        return False
    return path == cookie.path or path.startswith(cookie.path.rstrip("/") + "/")


def _is_subdomain(host: str, domain: str) -> bool:
    return host.endswith("." + domain) and not _ADDRESS.fullmatch(host)


def is_public_suffix(domain: str) -> bool:
    """Whether different owners have domains below it: ``com``, ``co.uk``, ``github.io``. A name without dots is one."""
    return "." not in domain or bool(_suffixes().is_public(domain))


@cache
def _suffixes() -> PublicSuffixList:
    """The list that comes with the library. Only few crawls need it, so it is imported and parsed when one does."""
    from publicsuffixlist import PublicSuffixList

    return PublicSuffixList()
