"""The URLs of a batch in normal form: made once, and off the event loop where that may take long."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from shoal.errors import RequestError
from shoal.urls.normalize import normalize_url

MOST_FOREIGN = 500
"""Different host names outside ASCII in one batch: converting one takes up to 10 ms."""
LONGEST_URL = 8192
"""Characters of a URL in normal form: escapes make it up to nine times as long as it was given."""
_FEW = (100, 32 * 1024)  # URLs, and characters of them: so few take no longer than a change of threads

_HOST = re.compile(r"[\x00-\x20]*[a-zA-Z][a-zA-Z0-9+.\-]*:[/\\\x00-\x20]*([^/?#\\]*)")
_threads = ThreadPoolExecutor(2, thread_name_prefix="shoal-urls")


class TooManyNamesError(RequestError):
    """More host names outside ASCII than one batch may have."""


class GivenUrls:
    """The URLs that a caller gave, by their places."""

    def __init__(self, urls: Sequence[str], normal: Sequence[str], wrong: Mapping[int, str]) -> None:
        """``normal``: the normal form of each, and anything for those that are ``wrong``, with the reason."""
        self.urls = urls
        self.normal = normal
        self.wrong = wrong
        self.places: dict[str, int] = {}
        """Each normal form with the first place where it was given: it is fetched for that one."""
        for place, url in enumerate(normal):
            if place not in wrong:
                self.places.setdefault(url, place)

    @classmethod
    async def read(cls, urls: Sequence[str], normalize: Callable[[str], str] | None = None) -> Self:
        """``normalize``: `given_url` unless told otherwise. TooManyNamesError for more than `MOST_FOREIGN` host names
        outside ASCII."""
        normalize = normalize or given_url
        foreign = {host for url in urls if (host := _foreign_host(url))}
        if len(foreign) > MOST_FOREIGN:
            raise TooManyNamesError(
                f"{len(foreign)} host names outside ASCII; at most {MOST_FOREIGN} are taken at once. Send the URLs in "
                "several requests, or give these names in their ASCII form (xn--...)"
            )
        count, characters = _FEW
        if not foreign and len(urls) <= count and sum(map(len, urls)) <= characters:
            return cls._read(urls, normalize)
        return await asyncio.get_running_loop().run_in_executor(_threads, cls._read, urls, normalize)

    @classmethod
    def _read(cls, urls: Sequence[str], normalize: Callable[[str], str]) -> Self:
        normal: list[str] = []
        wrong: dict[int, str] = {}
        for place, url in enumerate(urls):
            try:
                normal.append(normalize(url))
            except RequestError as exc:
                normal.append("")
                wrong[place] = str(exc)
        return cls(urls, normal, wrong)


def _foreign_host(url: str) -> str:
    """The host of a URL if it may have to be converted to ASCII. Rather too often than too rarely."""
    if url.isascii() and "%" not in url:
        return ""
    match = _HOST.match(url)
    host = url[:100] if match is None else match[1]
    return "" if host.isascii() and "%" not in host else host


def has_user(url: str) -> bool:
    """Whether a URL in normal form has a user in it, or a password."""
    return "@" in url.split("/", 3)[2]


def given_url(url: str) -> str:
    """The normal form of a URL that a caller gave. RequestError for what is none, or has a password in it."""
    known = normalize_url(url)
    if len(known) > LONGEST_URL:
        raise RequestError(f"the URL is longer than {LONGEST_URL} characters in normal form")
    if has_user(known):
        raise RequestError("a URL with a user or a password in it would be in logs; send them in headers instead")
    return known
