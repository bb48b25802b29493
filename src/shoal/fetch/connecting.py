"""Resolves host names and connects, only to addresses that the guard allows."""

from __future__ import annotations

import errno
import os
import socket
import time
from asyncio import Task, create_task, get_running_loop, shield
from collections.abc import Callable
from typing import NamedTuple

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shoal.fetch.guard import AddressGuard

_NEXT_ADDRESS_AFTER = 0.25  # seconds until the next address is tried beside one that does not answer (RFC 8305)
_MAX_CACHED_NAMES = 1024


class RefusedAddressError(OSError):
    """The guard refuses an address. The text is always the same: aiohttp replaces errors with different texts."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(errno.EACCES, "the address is refused")
        self.reason = reason
        self.message = f"{address} is {reason}, which may not be contacted (serve.allow)"


class ResolvedAddress(NamedTuple):
    """An address of a host."""

    host: str
    family: int
    protocol: int
    scope: int = 0
    """The network interface of a link-local IPv6 address."""

    def target(self, port: int) -> AddrInfoType:
        """What a socket connects to."""
        address = (self.host, port, 0, self.scope) if self.family == socket.AF_INET6 else (self.host, port)
        return self.family, socket.SOCK_STREAM, self.protocol, "", address


def guarded_sockets(guard: AddressGuard) -> Callable[[AddrInfoType], socket.socket]:
    """Return a socket factory. It sees the resolved address that is connected to, so no DNS trick can bypass it."""

    def make(target: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, (address, *_) = target
        reason = guard.refuses(address)
        if reason is not None:
            raise RefusedAddressError(address, reason)
        return socket.socket(family, kind, protocol)

    return make


class Connector:
    """Opens TCP connections for code that does not use aiohttp. Without a guard, every address is allowed.

    Names are cached for ``dns_cache_seconds``. Connections that need the same name at the same time share one look-up.
    """

    def __init__(self, guard: AddressGuard | None, dns_cache_seconds: float) -> None:
        self._guard = guard
        self._sockets = None if guard is None else guarded_sockets(guard)
        self._seconds = dns_cache_seconds
        self._names: dict[str, tuple[float, Task[list[ResolvedAddress]]]] = {}

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connected socket. OSError if there is none: `socket.gaierror`, `RefusedAddressError` or another."""
        return await self.connect_to(await self.resolve(host), port)

    async def connect_to(self, found: list[ResolvedAddress], port: int) -> socket.socket:
        """Return a socket that is connected to one of the addresses. OSError if there is none."""
        targets = [each.target(port) for each in found]
        try:
            return await aiohappyeyeballs.start_connection(
                targets, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER, socket_factory=self._sockets
            )
        except (RuntimeError, ValueError) as exc:  # uvloop's and Python's errors for odd addresses
            raise OSError(errno.EADDRNOTAVAIL, str(exc)) from exc

    async def resolve(self, host: str) -> list[ResolvedAddress]:
        """The addresses of a host. `socket.gaierror` if there is none."""
        now = time.monotonic()
        until, lookup = self._names.get(host, (0.0, None))
        if lookup is None or (now >= until and lookup.done()):
            lookup = create_task(self._look_up(host))
            lookup.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
            self._names.pop(host, None)
            self._names[host] = (now + self._seconds, lookup)
            if len(self._names) > _MAX_CACHED_NAMES:
                del self._names[next(iter(self._names))]
        try:
            return await shield(lookup)
        except (UnicodeError, ValueError) as exc:  # a name that cannot be encoded
            raise socket.gaierror(socket.EAI_NONAME, str(exc)) from exc
        finally:
            if lookup.done() and (lookup.cancelled() or lookup.exception() is not None):
                self._names.pop(host, None)  # a failure is not remembered

    async def _look_up(self, host: str) -> list[ResolvedAddress]:
        """Drops refused addresses if the host has others: a site that is briefly down must not look refused. With a
        guard, the private addresses of a host that also has public ones are dropped too."""
        infos = await get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = [
            ResolvedAddress(str(address[0]), family, protocol, int(address[3]) if len(address) > 3 else 0)
            for family, _, protocol, _, address in infos
        ]
        if self._guard is None:
            return found
        selected = self._guard.select([each.host for each in found])
        return [each for each in found if each.host in selected] or found

    def close(self) -> None:
        for _, lookup in self._names.values():
            lookup.cancel()
        self._names.clear()


def system_text(exc: OSError) -> str:
    """The system's text for an error. Event loops replace it with an address."""
    return os.strerror(exc.errno) if exc.errno and exc.errno > 0 else one_line(exc)


def one_line(exc: BaseException) -> str:
    """The text of an error, cut: some quote pages of bytes."""
    message = getattr(exc, "message", "")
    if not isinstance(message, str):  # aiohttp keeps half a response there
        message = "the response is incomplete"
    text = " ".join((message or str(exc) or type(exc).__name__).split())
    return text if len(text) <= 160 else text[:160] + "..."
