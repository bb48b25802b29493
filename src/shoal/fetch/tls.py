"""TLS for connections of Shoal's own HTTP client. It resumes sessions, and needs little memory for idle connections.

The TLS of asyncio and uvloop does neither: uvloop allocates 256 KB for each connection, and a new connection to a known
host costs a full handshake.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import cast

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
        self._context = context
        self._sessions: dict[str, ssl.SSLSession] = {}

    def start(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, origin: str, name: str) -> ssl.SSLObject:
        """A TLS connection that resumes the last session with this origin, if there is one."""
        session = self._sessions.get(origin)
        return self._context.wrap_bio(incoming, outgoing, server_hostname=name, session=session)

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
