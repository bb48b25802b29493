"""Cookies of hosts, kept for the life of the process, within limits that no host can pass."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

from msgspec import Struct

from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.urls.normalize import host_of

_LONGEST = 4096  # of one cookie, as in browsers
_LONGEST_PATH = 1024
_LONGEST_HEADER = 8190  # of all that are sent together: servers refuse more
_MOST_OF_A_DOMAIN = 50
_MOST_BYTES_OF_A_DOMAIN = 64 * 1024
_MOST_DOMAINS = 10_000
_MOST_BYTES = 32 * 1024 * 1024  # of the whole jar

_UNSAFE = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
_PORT = re.compile(r":\d+$")
_ADDRESS = re.compile(r"[\d.]+|\[.*")
# Under these, of countries, domains belong to strangers: co.uk, com.au.
_SHARED = frozenset({"ac", "co", "com", "edu", "gov", "mil", "net", "org"})


class Cookie(Struct, frozen=True):
    """What a host set."""

    value: str
    domain: str
    path: str
    host_only: bool
    secure: bool
    expires: float | None


class Cookies:
    """Sends back what a host set, and a request's own cookies over it. ``keep=False`` sends only the request's own."""

    def __init__(self, *, keep: bool = True, clock: Callable[[], float] = time.time) -> None:
        self._keep = keep
        self._clock = clock
        self._domains: dict[str, dict[tuple[str, str], Cookie]] = {}
        """By domain, the one used last at the end; then by name and path, the one set last at the end."""
        self._sizes: dict[str, int] = {}
        """Bytes, by domain."""
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
                self._store(line, response.url)
        return response

    def _cookies_for(self, url: str) -> dict[str, str]:
        """By name, those of the nearest path and domain first, up to what fits in a header."""
        host, path = _place(url)
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
            if size <= _LONGEST_HEADER:
                chosen.setdefault(name, value)
        return chosen

    def _store(self, line: str, url: str) -> None:
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
        while len(bucket) > _MOST_OF_A_DOMAIN or self._sizes.get(domain, 0) > _MOST_BYTES_OF_A_DOMAIN:
            self._drop(domain, next(iter(bucket)))
        if not bucket:
            self._forget(domain)
        while len(self._domains) > _MOST_DOMAINS or self._size > _MOST_BYTES:
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
    """What it takes in memory, roughly: its texts, and the objects around them."""
    return 256 + sum(map(sys.getsizeof, (name, cookie.value, cookie.path)))


def read_cookie(line: str, url: str, now: float) -> tuple[str, Cookie] | None:
    """A Set-Cookie header and the name in it, read as browsers do; None if it is none, or not for this host to set."""
    pair, *rest = line.split(";")
    name, mark, value = pair.partition("=")
    name, value = name.strip(), value.strip()
    if not mark or not name or len(name) + len(value) > _LONGEST or _UNSAFE.search(name + value):
        return None
    attributes = {key.strip().lower(): text.strip() for key, _, text in (part.partition("=") for part in rest)}
    host, request_path = _place(url)
    domain = attributes.get("domain", "").lower().removeprefix(".")
    if domain and domain != host and (_is_shared(domain) or not _belongs(host, domain)):
        return None
    path = attributes.get("path", "")
    if not path.startswith("/") or len(path) > _LONGEST_PATH:
        path = request_path[: request_path.rindex("/")] or "/"
    return name, Cookie(
        value=value,
        domain=domain or host,
        path=path,
        host_only=not domain or _is_shared(domain),
        secure="secure" in attributes,
        expires=_expires(attributes, now),
    )


def _expires(attributes: dict[str, str], now: float) -> float | None:
    """When it ends; None: with the process."""
    age = attributes.get("max-age", "")
    if re.fullmatch(r"-?\d+", age, re.ASCII):
        return now + int(age[:12])
    try:
        moment = parsedate_to_datetime(attributes.get("expires", ""))
    except (ValueError, TypeError, OverflowError):
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _place(url: str) -> tuple[str, str]:
    """Host without its port, and path, of a URL in normal form."""
    path = url[url.index("/", 8) :].partition("?")[0]
    return _PORT.sub("", host_of(url)), path


def _applies(cookie: Cookie, host: str, path: str, now: float) -> bool:
    if (cookie.host_only and cookie.domain != host) or (cookie.expires is not None and cookie.expires <= now):
        return False
    return path == cookie.path or path.startswith(cookie.path.rstrip("/") + "/")


def _belongs(host: str, domain: str) -> bool:
    return host.endswith("." + domain) and not _ADDRESS.fullmatch(host)


def _is_shared(domain: str) -> bool:
    """Whether it is no one's own: ``com``, ``co.uk``."""
    above, _, top = domain.rpartition(".")
    return not above or (len(top) == 2 and above in _SHARED)
