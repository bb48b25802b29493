"""Connects, only to addresses that the guard allows."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from asyncio import AbstractEventLoop, Event, get_running_loop
from collections.abc import Sequence
from typing import Any, cast

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from shoal.errors import FetchError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.resolving import Caller, Names, ResolvedAddress

_NEXT_ADDRESS_AFTER = 0.25  # seconds until the next address is tried beside one that does not answer (RFC 8305)


class RefusedAddressError(OSError):
    """The guard refuses an address. The text is always the same: aiohappyeyeballs replaces different errors."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(errno.EACCES, "the address is refused")
        self.message = f"{address} is {reason}, which may not be contacted (serve.allow)"


class Connector:
    """Opens TCP connections. Without a guard, every address is allowed."""

    def __init__(self, guard: AddressGuard | None, names: Names) -> None:
        self.names = names
        self._guard = guard

    def _socket(self, target: AddrInfoType) -> socket.socket:
        """Make a socket. The guard sees the resolved address that is connected to, so no DNS trick can bypass it."""
        family, kind, protocol, _, (address, *_) = target
        if self._guard is not None and (reason := self._guard.refuses(address)) is not None:
            raise RefusedAddressError(address, reason)
        return socket.socket(family, kind, protocol)

    async def connect_to(self, addresses: Sequence[ResolvedAddress], port: int) -> socket.socket:
        """Return a socket that is connected to one of the addresses. OSError if there is none: `RefusedAddressError` or
        another."""
        targets = [address.target(port) for address in addresses]
        loop = cast(AbstractEventLoop, _ConnectingLoop(get_running_loop()))
        try:
            return await aiohappyeyeballs.start_connection(
                targets, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER, socket_factory=self._socket, loop=loop
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
    text = " ".join((str(exc) or type(exc).__name__).split())
    return text if len(text) <= 160 else text[:160] + "..."


def without_verification() -> ssl.SSLContext:
    """Accepts any certificate (`http.verify_tls` = false)."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# TLS for connections of Shoal's own HTTP client. It resumes sessions, and needs little memory for idle connections.
#
# The TLS of asyncio and uvloop does neither: uvloop allocates 256 KB for each connection, and a new connection to a
# known host costs a full handshake.

_PORTION = 1 << 13
"""Bytes that are decrypted at once. OpenSSL keeps a buffer of 4/3 of the largest portion until the connection closes.
Twice this saves 3 % of the CPU time of fetching a page of 100 KB, and takes 11 KB more for each connection.
Half of this saves 5 KB, and takes a sixth more CPU time."""
_MAX_SESSIONS = 512


class TlsClient:
    """What the TLS connections of a fetcher share: the context, and the last session of each server."""

    def __init__(self, context: ssl.SSLContext) -> None:
        context.set_alpn_protocols(["http/1.1"])
        context.options |= ssl.OP_NO_RENEGOTIATION  # so that writing never has to wait for the server
        self.context = context
        self._sessions: dict[str, ssl.SSLSession] = {}

    def start(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, origin: str, name: str) -> ssl.SSLObject:
        """A TLS connection that resumes the last session with this origin, if there is one."""
        session = self._sessions.get(origin)
        return self.context.wrap_bio(incoming, outgoing, server_hostname=name, session=session)

    def remember(self, origin: str, tls: ssl.SSLObject) -> None:
        """Keep the session for the next connection to this origin. Call it after a response: TLS 1.3 sends what is
        needed to resume a session after the handshake."""
        if tls.session_reused and origin in self._sessions:
            return  # making a copy of a session takes time, and the one that was resumed is as good
        session = tls.session
        if session is not None and (session.has_ticket or tls.version() != "TLSv1.3"):
            self._sessions.pop(origin, None)
            self._sessions[origin] = session
            if len(self._sessions) > _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def forget(self, origin: str) -> None:
        """Start the next connection with a full handshake."""
        self._sessions.pop(origin, None)


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """A protocol for the TCP transport below it, and the transport of the protocol above it.

    It implements what `HttpConnection` uses of a transport. ``ready`` is done after the handshake, or fails with an
    OSError. Only then ``above`` is called.
    """

    def __init__(
        self, client: TlsClient, origin: str, name: str, above: asyncio.BufferedProtocol, buffer: memoryview
    ) -> None:
        """``buffer`` receives what arrives, and then what was decrypted. Connections of one event loop can share
        it."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._origin = origin
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client.start(self._incoming, self._outgoing, origin, name)
        self._above = above
        self._buffer = buffer
        self._below: asyncio.Transport | None = None
        self._used = False
        """Whether the protocol above is connected."""
        self._remembered = False
        self._lost = False

    # -- the event loop calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        received = self._buffer[:nbytes] if nbytes <= _PORTION else bytes(self._buffer[:nbytes])
        for start in range(0, nbytes, _PORTION):
            self._incoming.write(received[start : start + _PORTION])
            if not self._used:
                self._shake_hands()
            if self._used:
                self._read()
            if self._below is None or self._lost:
                return

    def connection_lost(self, exc: Exception | None) -> None:
        self._below = None
        if self._used:
            self._lose(exc)
        else:
            self._fail(exc or ConnectionResetError("the connection was closed during the TLS handshake"))

    # -- the protocol above calls these

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError as exc:
            self._lose(exc)
        self._flush()

    def abort(self) -> None:
        self.remember_session()
        if self._below is not None:
            self._below.abort()

    def pause_reading(self) -> None:
        if self._below is not None:
            self._below.pause_reading()

    def resume_reading(self) -> None:
        if self._below is not None:
            self._below.resume_reading()

    def get_write_buffer_size(self) -> int:
        return 0 if self._below is None else self._below.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default if self._below is None else self._below.get_extra_info(name, default)

    def remember_session(self) -> None:
        """Let the next connection resume the session of this one. Call it after the first response."""
        if self._used and not self._remembered:
            self._remembered = True
            self._client.remember(self._origin, self._tls)

    # -- inside

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as exc:
            self._flush()  # tell the server why
            self._fail(exc)
            return
        self._flush()
        if not self.ready.done():  # otherwise nobody waits for it any more
            self._used = True
            self._above.connection_made(self)
            self.ready.set_result(None)

    def _fail(self, exc: Exception) -> None:
        """Report that the handshake failed, and close the connection."""
        self._client.forget(self._origin)
        if not self.ready.done():
            self.ready.set_exception(exc)
            self.ready.exception()  # nobody may be waiting
        self.abort()

    def _read(self) -> None:
        """Decrypt what has arrived."""
        try:
            while self._incoming.pending or self._tls.pending():
                size = self._tls.read(len(self._buffer), cast(bytearray, self._buffer))
                if not size:  # the server ended the TLS connection
                    raise ssl.SSLZeroReturnError
                self._above.buffer_updated(cast(int, size))
                if self._lost:
                    return
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._lose(None)
        except ssl.SSLError as exc:
            self._lose(exc)
        if self._outgoing.pending:
            self._flush()

    def _flush(self) -> None:
        if self._below is not None and self._outgoing.pending:
            self._below.write(self._outgoing.read())

    def _lose(self, exc: Exception | None) -> None:
        """Report the end of the connection, once."""
        if not self._lost:
            self._lost = True
            self._above.connection_lost(exc)
            self.abort()
