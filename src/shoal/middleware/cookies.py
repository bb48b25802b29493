"""Keeps the cookies of hosts in memory, with limits for each host and for all of them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import UTC
from functools import cache
from typing import TYPE_CHECKING

from msgspec import Struct

from shoal.http import Request, Response
from shoal.ports import Fetch
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
_PORT = re.compile(r":\d+$")
_ADDRESS = re.compile(r"[\d.]+|\[.*")


class Cookie(Struct, frozen=True):
    """A cookie without its name. ``host_only``: subdomains do not get it."""

    value: str
    domain: str
    path: str
    host_only: bool
    secure: bool
    expires: float | None


class Cookies:
    """Sends the cookies that a host set. A request's own cookies override them, and are the only ones with
    ``keep=False``."""

    def __init__(
        self, *, keep: bool = True, clock: Callable[[], float] = time.time, jars: Callable[[], int] = lambda: 1
    ) -> None:
        """``jars``: how many jars share the limit."""
        self._keep = keep
        self._clock = clock
        self._jars = jars
        self._domains: dict[str, dict[tuple[str, str], Cookie]] = {}
        """By domain, in order of use; then by name and path, in order of setting."""
        self._sizes: dict[str, int] = {}
        """Bytes by domain."""
        self._size = 0

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        cookies = self._cookies_for(request.url) if self._domains else {}
        cookies.update(request.cookies)
        if cookies and not any(name.lower() == "cookie" for name in request.headers):
            header = "; ".join(f"{name}={value}" for name, value in cookies.items())
            response = await fetch(request.replace(headers={**request.headers, "Cookie": header}, cookies={}))
            response.request = request
        else:
            response = await fetch(request)
        if self._keep and "Set-Cookie" in response.headers:
            for line in response.headers.getall("Set-Cookie"):
                self.store(line, response.url)
        return response

    def _cookies_for(self, url: str) -> dict[str, str]:
        """Values by name, those with the longest path first, up to the maximum length of a header."""
        host, path = _host_and_path(url)
        now = self._clock()
        found: list[tuple[int, str, str]] = []
        domain = host
        while domain:
            if (bucket := self._domains.get(domain)) is not None:
                self._domains[domain] = self._domains.pop(domain)
                for (name, _), cookie in bucket.items():
                    if _applies(cookie, host, path, now) and (url.startswith("https:") or not cookie.secure):
                        found.append((len(cookie.path), name, cookie.value))
            domain = domain.partition(".")[2]
        found.sort(key=lambda each: -each[0])
        chosen: dict[str, str] = {}
        size = 0
        for _, name, value in found:
            size += len(name) + len(value) + 3
            if size <= _MAX_HEADER_LENGTH:
                chosen.setdefault(name, value)
        return chosen

    def store(self, line: str, url: str) -> None:
        """Store the cookie of a Set-Cookie header that a page of ``url`` sent."""
        now = self._clock()
        read = read_cookie(line, url, now)
        if read is None:
            return
        name, cookie = read
        domain = cookie.domain
        bucket = self._domains.pop(domain, {})
        self._domains[domain] = bucket
        if (name, cookie.path) in bucket:
            self._drop(domain, (name, cookie.path))
        if cookie.expires is None or cookie.expires > now:
            bucket[name, cookie.path] = cookie
            self._count(domain, _bytes_of(name, cookie))
        while len(bucket) > _MAX_PER_DOMAIN or self._sizes.get(domain, 0) > _MAX_BYTES_PER_DOMAIN:
            self._drop(domain, next(iter(bucket)))
        if not bucket:
            self._forget(domain)
        limit = max(_MAX_BYTES_PER_DOMAIN, _MAX_BYTES // max(1, self._jars()))
        while len(self._domains) > _MAX_DOMAINS or self._size > limit:
            self._forget(next(iter(self._domains)))

    def _drop(self, domain: str, key: tuple[str, str]) -> None:
        cookie = self._domains[domain].pop(key)
        self._count(domain, -_bytes_of(key[0], cookie))

    def _forget(self, domain: str) -> None:
        del self._domains[domain]
        self._count(domain, -self._sizes.get(domain, 0))
        self._sizes.pop(domain, None)

    def _count(self, domain: str, size: int) -> None:
        self._sizes[domain] = self._sizes.get(domain, 0) + size
        self._size += size


def _bytes_of(name: str, cookie: Cookie) -> int:
    """Approximate memory: the strings, and the objects around them."""
    return 256 + sum(map(sys.getsizeof, (name, cookie.value, cookie.path)))


def read_cookie(line: str, url: str, now: float) -> tuple[str, Cookie] | None:
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
    is_suffix = bool(domain) and _is_public_suffix(domain)
    if is_suffix and domain != host:
        return None
    path = attributes.get("path", "")
    if not path.startswith("/") or len(path) > _MAX_PATH_LENGTH:
        path = request_path[: request_path.rindex("/")] or "/"
    return name, Cookie(
        value=value,
        domain=domain or host,
        path=path,
        host_only=not domain or is_suffix,
        secure="secure" in attributes,
        expires=_expires(attributes, now),
    )


def _expires(attributes: dict[str, str], now: float) -> float | None:
    """When the cookie expires; None: when the process ends."""
    age = attributes.get("max-age", "")
    if re.fullmatch(r"-?\d+", age, re.ASCII):
        return now + int(age[:12])
    if not attributes.get("expires"):
        return None
    from email.utils import parsedate_to_datetime  # few crawls need it

    try:
        moment = parsedate_to_datetime(attributes["expires"])
    except (ValueError, TypeError, OverflowError):
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _host_and_path(url: str) -> tuple[str, str]:
    """Host without port, and path, of a normalized URL."""
    path = url[url.index("/", 8) :].partition("?")[0]
    return _PORT.sub("", host_of(url)), path


def _applies(cookie: Cookie, host: str, path: str, now: float) -> bool:
    if (cookie.host_only and cookie.domain != host) or (cookie.expires is not None and cookie.expires <= now):
        return False
    return path == cookie.path or path.startswith(cookie.path.rstrip("/") + "/")


def _is_subdomain(host: str, domain: str) -> bool:
    return host.endswith("." + domain) and not _ADDRESS.fullmatch(host)


def _is_public_suffix(domain: str) -> bool:
    """Whether different owners have domains below it: ``com``, ``co.uk``, ``github.io``. A name without dots is one."""
    return "." not in domain or bool(_suffixes().is_public(domain))


@cache
def _suffixes() -> PublicSuffixList:
    """The list that comes with the library. Only few crawls need it, so it is imported and parsed when one does."""
    from publicsuffixlist import PublicSuffixList

    return PublicSuffixList()
