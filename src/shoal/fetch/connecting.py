"""Connects, only to addresses that the guard allows."""

from __future__ import annotations

import errno
import os
import socket
from asyncio import AbstractEventLoop, Event, get_running_loop
from collections.abc import Callable, Sequence
from typing import Any, cast

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shoal.errors import FetchError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.resolving import Caller, Names, ResolvedAddress

_NEXT_ADDRESS_AFTER = 0.25  # seconds until the next address is tried beside one that does not answer (RFC 8305)


class RefusedAddressError(OSError):
    """The guard refuses an address. The text is always the same: aiohttp replaces errors with different texts."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(errno.EACCES, "the address is refused")
        self.reason = reason
        self.message = f"{address} is {reason}, which may not be contacted (serve.allow)"


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
    """Opens TCP connections. Without a guard, every address is allowed."""

    def __init__(self, guard: AddressGuard | None, names: Names) -> None:
        self.names = names
        self._guard = guard
        self._sockets = None if guard is None else guarded_sockets(guard)

    async def connect(self, host: str, port: int) -> socket.socket:
        """Return a connected socket. OSError if there is none: `socket.gaierror`, `RefusedAddressError` or another."""
        return await self.connect_to(await self.resolve(host), port)

    async def connect_to(self, addresses: Sequence[ResolvedAddress], port: int) -> socket.socket:
        """Return a socket that is connected to one of the addresses. OSError if there is none."""
        return await self.open_socket([address.target(port) for address in addresses])

    async def open_socket(self, targets: Sequence[AddrInfoType]) -> socket.socket:
        """Return a socket that is connected to one of the targets. OSError if there is none."""
        loop = cast(AbstractEventLoop, _ConnectingLoop(get_running_loop()))
        try:
            return await aiohappyeyeballs.start_connection(
                targets, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER, socket_factory=self._sockets, loop=loop
            )
        except (RuntimeError, ValueError) as exc:  # uvloop's and Python's errors for odd addresses
            raise OSError(errno.EADDRNOTAVAIL, str(exc)) from exc

    async def resolve(self, host: str, caller: Caller | None = None) -> list[ResolvedAddress]:
        """The addresses of a host. `socket.gaierror` if there is none.

        Drops refused addresses if the host has others: a site that is briefly down must not look refused. With a guard,
        the private addresses of a host that also has public ones are dropped too.
        """
        addresses = await self.names.resolve(host, caller)
        if self._guard is None:
            return addresses
        selected = self._guard.select([address.host for address in addresses])
        return [address for address in addresses if address.host in selected] or addresses

    def close(self) -> None:
        self.names.close()


class _ConnectingLoop:
    """An event loop that needs no thread to connect to an address.

    uvloop passes even addresses to its threads for lookups, where they would wait for names without an answer.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def sock_connect(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        try:
            sock.connect(address)
            return
        except (BlockingIOError, InterruptedError):
            pass
        writable = Event()
        self._loop.add_writer(sock, writable.set)
        try:
            await writable.wait()
        finally:
            self._loop.remove_writer(sock)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, f"Connect call failed {address}")


def unresolved(host: str, error: BaseException | None) -> FetchError:
    """The error of a page whose host has no address, or none in time."""
    reason = getattr(error, "reason", "")
    message = f"can't resolve the host {host}" + (f": {reason}" if reason else "")
    return FetchError(message, kind="dns", retryable=True, contacted=False)


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
