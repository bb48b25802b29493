"""The identities of a worker: read from its settings and from files of proxies."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from shoal.config import IdentitySettings, check_proxy, check_trust
from shoal.errors import ConfigError

_MAX_FILE_BYTES = 16 * 1024 * 1024


class Identity(Struct, frozen=True):
    """Who a host sees: a way out, and the headers and cookies that belong to it.

    ``name`` is the URL of the proxy without its password. ``upstream`` returns the proxy for a host; most identities
    have one for all hosts, a Tor circuit may have one for each.
    """

    name: str
    upstream: Callable[[str], str]
    headers: dict[str, str] = {}


def make_roster(proxies: Sequence[str], settings: IdentitySettings) -> list[Identity]:
    """An identity for each proxy. ConfigError if a file can't be read, or has a line that is not a proxy."""
    roster: list[Identity] = []
    names: set[str] = set()
    for number, proxy in enumerate(all_proxies(proxies)):
        headers = settings.headers[number % len(settings.headers)] if settings.headers else {}
        name = _unused(name_of(proxy), names)
        names.add(name)
        roster.append(Identity(name, _always(proxy), headers))
    return roster


def _always(proxy: str) -> Callable[[str], str]:
    return lambda host: proxy


def name_of(proxy: str) -> str:
    """The URL of a proxy without its password."""
    url = urlsplit(proxy)
    user = f"{url.username}@" if url.username else ""
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{url.scheme}://{user}{host}" + (f":{url.port}" if url.port is not None else "")


def _unused(name: str, names: set[str]) -> str:
    """The name, with a number if proxies differ only in their password."""
    number = 1
    numbered = name
    while numbered in names:
        number += 1
        numbered = f"{name}#{number}"
    return numbered


def all_proxies(entries: Sequence[str]) -> list[str]:
    """The proxies of the setting ``proxies`` and of its files, each once."""
    found: list[str] = []
    for entry in entries:
        found += read_proxies(Path(entry[1:])) if entry.startswith("@") else [entry]
    return list(dict.fromkeys(found))


def read_proxies(file: Path) -> list[str]:
    """The proxies in a file: one in each line, ``host:port`` or a URL. Empty lines and lines with ``#`` are skipped."""
    try:
        with file.open("rb") as opened:
            check_trust(file, os.fstat(opened.fileno()))  # who writes the file decides where the traffic goes
            text = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f'"proxies": cannot read {file}: {exc.strerror}') from exc
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f'"proxies": {file} has more than {_MAX_FILE_BYTES} bytes')
    found = []
    for number, line in enumerate(text.decode("utf-8-sig", "replace").splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        proxy = entry if "://" in entry else f"http://{entry}"
        if (problem := check_proxy(proxy)) is not None:
            raise ConfigError(f'"proxies": {file}, line {number}: a proxy {problem}')
        found.append(proxy)
    if not found:
        raise ConfigError(f'"proxies": {file} has no proxies. Write one in each line')
    return found
