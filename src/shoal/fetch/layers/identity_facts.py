"""The state of identities in the store, as remembered facts. All workers share it, and the store's clock ends it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from shoal.config import IdentitySettings, check_proxy, check_trust
from shoal.errors import DECODING_ERRORS, ConfigError
from shoal.ports import Hosts
from shoal.system import clock

DAY = 86400.0
_PAGE_SECONDS = 6 * 3600.0  # how long the blocks of a page are counted together
_MAX_NAMES = 10_000
_ENDED = 0.001  # seconds; a fact with this ttl is gone

T = TypeVar("T")


class Rest(Struct, frozen=True):
    """Why an identity gets no requests of a host. It rests while the fact exists.

    ``returns`` is by the clock of the process that wrote it: for people, and for how often to check.
    """

    reason: str
    returns: float
    is_final: bool = False
    """The host blocked it again and again: it does not return soon."""


class Removal(Struct, frozen=True):
    """Why an identity was removed from all hosts. ``refused``: its proxy refuses the user and password of one worker;
    other workers may have the right ones."""

    reason: str
    refused: bool = False


class IdentityFacts:
    """Reads and writes the state. FrontierError if the store is away."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    async def assigned(self, host: str) -> str | None:
        """The identity that all workers use for a host."""
        return await self._recall(f"identity of {host}", str)

    async def assign(self, host: str, name: str, seconds: float) -> None:
        await self._remember(f"identity of {host}", name, seconds)

    async def resting(self, name: str, host: str) -> Rest | None:
        return await self._recall(f"identity rests {host} {name}", Rest)

    async def rest(self, name: str, host: str, reason: str, seconds: float, *, is_final: bool = False) -> None:
        rest = Rest(reason, clock.time() + seconds, is_final)
        await self._remember(f"identity rests {host} {name}", rest, seconds)

    async def streak(self, name: str, host: str) -> int:
        """How often the host blocked the identity without a page in between."""
        return max(0, await self._recall(f"identity streak {host} {name}", int) or 0)

    async def set_streak(self, name: str, host: str, streak: int) -> None:
        await self._remember(f"identity streak {host} {name}", streak, DAY if streak else _ENDED)

    async def removed(self, name: str) -> Removal | None:
        return await self._recall(f"identity removed {name}", Removal)

    async def remove(self, name: str, removal: Removal, seconds: float) -> None:
        await self._remember(f"identity removed {name}", removal, seconds)

    async def restore(self, name: str) -> None:
        """Use an identity again that was removed."""
        if await self.removed(name) is not None:
            await self.remove(name, Removal(""), _ENDED)

    async def count_failure(self, page: bytes) -> int:
        """Count a failure that cost a page no attempt. Returns how many it has had."""
        count = await self.failures_of(page) + 1
        await self._remember(f"identity page {page.hex()}", count, _PAGE_SECONDS)
        return count

    async def failures_of(self, page: bytes) -> int:
        return await self._recall(f"identity page {page.hex()}", int) or 0

    async def names(self) -> list[str]:
        """The identities of all workers that used the store during the last day."""
        return await self._recall("identity names", list[str]) or []

    async def add_names(self, names: list[str]) -> None:
        """Add the identities of a worker for a day. Two workers that start together may miss each other's: repeat
        it."""
        merged = dict.fromkeys([*await self.names(), *names])
        await self._remember("identity names", list(merged)[-_MAX_NAMES:], DAY)

    async def _recall(self, key: str, kind: type[T]) -> T | None:
        value = await self._hosts.recall(key)
        if value is None:
            return None
        try:
            return msgspec.msgpack.decode(value, type=kind)
        except DECODING_ERRORS:  # written by another version
            return None

    async def _remember(self, key: str, value: object, seconds: float) -> None:
        await self._hosts.remember(key, msgspec.msgpack.encode(value), seconds)


# The identities of a worker: read from its settings and from files of proxies.

_MAX_FILE_BYTES = 16 * 1024 * 1024


class Identity(Struct, frozen=True):
    """Who a host sees: a way out, and the headers and cookies that belong to it.

    ``name`` is the URL of the proxy without its password.
    """

    name: str
    proxy: str
    headers: dict[str, str] = {}


def make_roster(proxies: Sequence[str], settings: IdentitySettings) -> list[Identity]:
    """An identity for each proxy. ConfigError if a file can't be read, or has a line that is not a proxy."""
    roster: list[Identity] = []
    names: set[str] = set()
    for number, proxy in enumerate(all_proxies(proxies)):
        headers = settings.headers[number % len(settings.headers)] if settings.headers else {}
        name = _unused(name_of(proxy), names)
        names.add(name)
        roster.append(Identity(name, proxy, headers))
    return roster


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
    proxies: list[str] = []
    for entry in entries:
        proxies += read_proxies(Path(entry[1:])) if entry.startswith("@") else [entry]
    return list(dict.fromkeys(proxies))


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
    proxies = []
    for number, line in enumerate(text.decode("utf-8-sig", "replace").splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        proxy = entry if "://" in entry else f"http://{entry}"
        if (problem := check_proxy(proxy)) is not None:
            raise ConfigError(f'"proxies": {file}, line {number}: a proxy {problem}')
        proxies.append(proxy)
    if not proxies:
        raise ConfigError(f'"proxies": {file} has no proxies. Write one in each line')
    return proxies


# Counters of the identities of one process.


class IdentityCounts(Struct):
    """What a process did with its identities."""

    known: int = 0
    removed: int = 0
    resting: int = 0
    """Pairs of an identity and a host, as this process knows them."""
    requests: int = 0
    blocks: int = 0
    failures: int = 0
    """Requests that may have failed because of their proxy."""


# The identities of a store, for people: what each does on which host, and why.


IdentityStateName: TypeAlias = Literal["active", "resting", "given up", "removed", "free"]


class IdentityState(Struct, frozen=True):
    """One identity on one host. Without a host: on no host, or removed from all."""

    identity: str
    state: IdentityStateName
    """``active`` (assigned to the host), ``resting``, ``given up`` (the host blocks it), ``removed``, or ``free``."""
    host: str = ""
    reason: str = ""
    returns_in: float | None = None
    """Seconds until it returns, by the clock of this machine."""


async def list_identities(facts: IdentityFacts, hosts: Sequence[str], limit: int) -> list[IdentityState]:
    """The identities that workers of the store used during the last day, on these hosts."""
    names = (await facts.names())[:limit]
    assigned = {host: await facts.assigned(host) for host in hosts}
    return [row for name in names for row in await _rows(facts, name, assigned)]


async def _rows(facts: IdentityFacts, name: str, assigned: dict[str, str | None]) -> list[IdentityState]:
    if (removed := await facts.removed(name)) is not None:
        return [IdentityState(name, "removed", reason=removed.reason)]
    rows = []
    for host, chosen in assigned.items():
        if (rest := await facts.resting(name, host)) is not None:
            state: IdentityStateName = "given up" if rest.is_final else "resting"
            rows.append(IdentityState(name, state, host, rest.reason, max(0.0, rest.returns - clock.time())))
        elif chosen == name:
            rows.append(IdentityState(name, "active", host))
    return rows or [IdentityState(name, "free")]
