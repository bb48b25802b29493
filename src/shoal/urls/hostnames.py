"""Internationalized host names: ``bücher.example`` is ``xn--bcher-kva.example`` on the wire.

Encoding one takes a tenth of a millisecond, and a name that is built for it took thirty. So names that no DNS could
hold are refused before they are encoded, each name is encoded once, and many at a time are encoded in a thread.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from yarl import URL

from shoal.errors import RequestError

MOST_OF_A_PAGE = 100
MOST_OF_A_BATCH = 2000

_LONGEST = 253  # as the DNS has it
_LONGEST_LABEL = 63
_PREFIX = len("xn--")
_REMEMBERED = 16_384
_CHUNK = 50
_DOTS = re.compile("[.\u3002\uff0e\uff61]")
_HOST = re.compile(r"(?:https?:[/\\]*|[/\\]{2,})(?:[^/?#\\]*@)?([^/?#\\@]*)", re.IGNORECASE)
_IGNORED = str.maketrans("", "", "".join(map(chr, range(33))))


def ascii_host(host: str) -> str:
    """The host (without a port) as it is sent. ValueError for one that can't be."""
    encoded, reason = _encode(host)
    if reason:
        raise ValueError(reason)
    return encoded


@lru_cache(maxsize=_REMEMBERED)
def _encode(host: str) -> tuple[str, str]:
    """The encoded name, or an empty one and why there is none. Both are remembered."""
    # Every character takes one byte at least, so this is what the encoded name can't be shorter than.
    labels = _DOTS.split(unicodedata.normalize("NFKC", host))
    sizes = [len(label) if label.isascii() else len(label) + _PREFIX for label in labels]
    if max(sizes) > _LONGEST_LABEL or sum(sizes) + len(sizes) - 1 > _LONGEST + 1:
        return "", f"a host name has {_LONGEST} characters at most, and {_LONGEST_LABEL} between dots"
    try:
        return URL(f"http://{host}/").raw_host or "", ""
    except (ValueError, TypeError) as exc:
        return "", str(exc)


def foreign_host(url: str) -> str:
    """The host of a URL or a link as it was found, if it is not in ASCII; else the empty string."""
    if url.isascii():
        return ""
    found = _HOST.match(url.translate(_IGNORED))
    return found[1] if found is not None and not found[1].isascii() else ""


async def prepare_hosts(urls: Iterable[str], most: int = MOST_OF_A_BATCH) -> None:
    """Encode the internationalized host names of many URLs in a thread: to normalize these URLs is quick afterwards.

    RequestError if there are more than ``most`` different ones. What is wrong with a single name is not said here.
    """
    hosts = list({host.partition(":")[0] for url in urls if (host := foreign_host(url))})
    if len(hosts) > most:
        raise RequestError(
            f"{len(hosts)} internationalized host names are too many for one batch: send {most} at a time at most"
        )
    for start in range(0, len(hosts), _CHUNK):
        await asyncio.to_thread(_encode_all, hosts[start : start + _CHUNK])


def _encode_all(hosts: list[str]) -> None:
    for host in hosts:
        _encode(host)
