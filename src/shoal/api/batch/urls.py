"""Normalizes the URLs of a batch: once, and in a thread if there are many."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Self

from shoal.errors import RequestError
from shoal.system import threads
from shoal.urls.normalize import normalize_url

MAX_NON_ASCII_HOSTS = 500
"""Different non-ASCII host names in one batch: converting one takes up to 10 ms."""
MAX_URL_LENGTH = 8192
"""Characters of a normalized URL: escaping makes a URL up to nine times as long."""
_MAX_INLINE = (100, 32 * 1024)  # URLs and characters below which a thread would cost more than it saves

_HOST = re.compile(r"[\x00-\x20]*[a-zA-Z][a-zA-Z0-9+.\-]*:[/\\\x00-\x20]*([^/?#\\]*)")
_threads = threads.Pool(2, "shoal-urls")


class TooManyNamesError(RequestError):
    """A batch has more non-ASCII host names than allowed."""


class UrlList:
    """The URLs that a caller sent, each with its normalized form or the reason why it is invalid."""

    def __init__(self, urls: Sequence[str], normalized: Sequence[str], invalid: Mapping[int, str]) -> None:
        """``invalid``: reasons by position. ``normalized`` is ignored at these positions."""
        self.urls = urls
        self.normalized = normalized
        self.invalid = invalid

    @cached_property
    def positions(self) -> dict[str, int]:
        """Each normalized URL with its first position. Duplicates share the result of that one."""
        positions: dict[str, int] = {}
        for position, url in enumerate(self.normalized):
            if position not in self.invalid:
                positions.setdefault(url, position)
        return positions

    @classmethod
    async def parse(cls, urls: Sequence[str], normalize: Callable[[str], str] | None = None) -> Self:
        """Normalize with ``normalize`` (default: `normalize_batch_url`). TooManyNamesError for more than
        `MAX_NON_ASCII_HOSTS` non-ASCII host names."""
        normalize = normalize or normalize_batch_url
        hosts = {host for url in urls if (host := _non_ascii_host(url))}
        if len(hosts) > MAX_NON_ASCII_HOSTS:
            raise TooManyNamesError(
                f"{len(hosts)} host names outside ASCII; at most {MAX_NON_ASCII_HOSTS} are allowed in one request. "
                "Split the URLs into several requests, or send these names in ASCII form (xn--...)"
            )
        count, characters = _MAX_INLINE
        if not hosts and len(urls) <= count and sum(map(len, urls)) <= characters:
            return cls._parse(urls, normalize)
        return await _threads.call(cls._parse, urls, normalize)

    @classmethod
    def _parse(cls, urls: Sequence[str], normalize: Callable[[str], str]) -> Self:
        normalized: list[str] = []
        invalid: dict[int, str] = {}
        for position, url in enumerate(urls):
            try:
                normalized.append(normalize(url))
            except RequestError as exc:
                normalized.append("")
                invalid[position] = str(exc)
        return cls(urls, normalized, invalid)


def _non_ascii_host(url: str) -> str:
    """The host of a URL if it may need conversion to ASCII, else an empty string."""
    if url.isascii() and "%" not in url:
        return ""
    match = _HOST.match(url)
    host = url[:100] if match is None else match[1]
    return "" if host.isascii() and "%" not in host else host


def has_user(url: str) -> bool:
    """Whether a normalized URL contains a user name or a password."""
    return "@" in url.split("/", 3)[2]


def normalize_batch_url(url: str) -> str:
    """Normalize a URL that a caller sent. RequestError if it is invalid, too long, or contains a password."""
    normalized = normalize_url(url)
    if len(normalized) > MAX_URL_LENGTH:
        raise RequestError(f"the normalized URL is longer than {MAX_URL_LENGTH} characters")
    if has_user(normalized):
        raise RequestError("a URL must not contain a user or a password, which logs would show; send them in headers")
    return normalized


# Removes private addresses, internal servers and paths from messages to callers. The log keeps them.


REFUSED_ADDRESS = "the host has an address that may not be contacted (serve.allow)"

_ADDRESS = re.compile(
    r"(?:(?<!\S)\S+ is )?(?:a|the|not an) [\w-]+ address, which [\w ]{1,60} "
    r"\((?:serve\.allow|browser\.public_networks)\)"
)
_SOCKET_ADDRESS = re.compile(r"\('[0-9a-fA-F.:%\w]*'(?:, \d+)+\)")
_SERVER = re.compile(r"\b((?:redis|postgres|mysql|mariadb|zookeeper|sqlite|amqp)\w*)(?:\+\w+)?://[^\s,;)\"']*")
_PROXY = re.compile(r"\bthe proxy \S+:\d+")
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:\"',;()]+/)+")


def redacted(text: str) -> str:
    """The message without private addresses. Of a server URL it keeps the scheme, of a path the last part."""
    text = _ADDRESS.sub(REFUSED_ADDRESS, text)
    text = _SOCKET_ADDRESS.sub("(an address)", text)
    text = _PROXY.sub("the proxy", text)
    text = _SERVER.sub(r"\1://...", text)
    return _PATH.sub("", text)
