"""A connection that tasks read and write, or that is joined with another one: of the gateway, and to a proxy."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from shoal.errors import FetchError

_ENOUGH = 256 * 1024  # bytes that wait to be read; then the sender has to wait
_RESET = struct.pack("ii", 1, 0)
_MAX_WRITE_BUFFER = 256 * 1024


class Meter:
    """Counts the bytes that some connections receive."""

    def __init__(self) -> None:
        self.received = 0


class Pipe(asyncio.Protocol):
    """Buffers what arrives, within a limit, until it is read. One task may read and another may write at a time.

    ``join`` connects two of them: from then on the bytes go from one to the other without a task. ``active`` is set
    whenever bytes move. ``on_end`` is called once when the other side ends its stream or the connection is lost.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self.transport: asyncio.Transport | None = None
        self.active = True
        self.ended = False
        self.kept = False
        """Whether it has served a request before."""
        self.on_end: Callable[[], object] | None = None
        self.failure: FetchError | None = None
        """Why the gateway ended this connection. A waiting reader or writer gets it."""
        self._meter = meter
        self._buffer = bytearray()
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._other: Pipe | None = None
        self._closing: asyncio.Future[None] | None = None
        self._lost = False
        self._reset = False
        self._paused = False
        self._blocked = False
        self._finished = False
        self._tls = False

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not a subclass.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(_MAX_WRITE_BUFFER)
        self._tls = transport.get_extra_info("ssl_object") is not None

    def data_received(self, data: bytes) -> None:
        self.active = True
        if self._meter is not None:
            self._meter.received += len(data)
        if self._other is not None:
            self._other.send(data)
            return
        self._buffer += data
        if len(self._buffer) > _ENOUGH and not self._paused:
            self._pause(True)
        _wake(self._reading)

    def eof_received(self) -> bool:
        self._end()
        return not self._tls  # a TLS connection cannot be half open

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._reset = exc is not None
        _wake(self._writing)
        _wake(self._closing)
        if self._other is not None:
            if exc is None and self.failure is None:
                self._other.close()
            else:
                self._other.reset()
        self._end()

    def pause_writing(self) -> None:
        self._blocked = True
        if self._other is not None:
            self._other._pause(True)

    def resume_writing(self) -> None:
        self.active = True
        self._blocked = False
        _wake(self._writing)
        if self._other is not None:
            self._other._pause(False)

    # -- reading

    async def wait(self) -> bool:
        """Wait until there is something to read. False at the end of the stream."""
        while not self._buffer and await self._wait_for_more():
            pass
        return bool(self._buffer)

    async def _wait_for_more(self) -> bool:
        """Wait until more bytes arrive. False at the end of the stream."""
        if not self.ended:
            self._reading = asyncio.get_running_loop().create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        self._check()
        return not self.ended

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._reset:
            raise ConnectionResetError("the connection was reset")

    async def read(self, most: int | None = None) -> bytes:
        """Wait for bytes and return them; empty at the end of the stream."""
        if not self._buffer:
            await self.wait()
        if most is None or most >= len(self._buffer):
            data = bytes(self._buffer)
            self._buffer.clear()
        else:
            data = bytes(self._buffer[:most])
            del self._buffer[:most]
        if self._paused and len(self._buffer) <= _ENOUGH // 2:
            self._pause(False)
        return data

    async def read_exactly(self, size: int) -> bytes:
        """Read ``size`` bytes. EOFError if the stream ends before."""
        data = await self.read(size)
        while len(data) < size:
            more = await self.read(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    async def read_head(self, most: int) -> bytes:
        """The head of an HTTP message with its empty line. EOFError if the stream ends before, ValueError if it is too
        long. A single line feed ends a line too."""
        searched = 0
        while (end := _end_of_head(self._buffer, searched)) < 0 and len(self._buffer) <= most:
            searched = max(0, len(self._buffer) - 2)
            before = len(self._buffer)
            if not await self._wait_for_more() and len(self._buffer) == before:
                raise EOFError
        if not 0 < end <= most:
            raise ValueError(f"the header is larger than {most} bytes")
        return await self.read(end)

    def unread(self, data: bytes) -> None:
        """Put back bytes, to be read again."""
        self._buffer[:0] = data

    @property
    def pending(self) -> bool:
        """Whether bytes wait to be read."""
        return bool(self._buffer)

    # -- writing

    def send(self, data: bytes | bytearray) -> None:
        """Write without waiting. What can't be sent any more is dropped."""
        if self._lost or self._finished or self.transport is None or self.transport.is_closing():
            return
        self.active = True
        self.transport.write(data)

    async def write(self, data: bytes | bytearray) -> None:
        """Write, and wait while the receiver is slower. ConnectionError if the connection is lost."""
        self.send(data)
        if self._blocked:
            await self._wait_for_receiver()
        self._check()
        if self._lost:
            raise ConnectionResetError("the connection was lost")

    async def flush(self) -> None:
        """Wait until everything is sent, or the connection is lost."""
        if self.transport is not None and not self._lost:
            self.transport.set_write_buffer_limits(0)
            await self._wait_for_receiver()

    async def _wait_for_receiver(self) -> None:
        while self._blocked and not self._lost:
            self._writing = asyncio.get_running_loop().create_future()
            try:
                await self._writing
            finally:
                self._writing = None

    # -- joining and ending

    def join(self, other: Pipe) -> None:
        """Pass everything on in both directions, until both have ended or one is lost."""
        self._other, other._other = other, self
        for one, two in ((self, other), (other, self)):
            if one._buffer:
                two.send(bytes(one._buffer))
                one._buffer.clear()
            one._pause(two._blocked)
        for one in (self, other):
            if one._lost:
                one.connection_lost(None)
            elif one.ended:
                one._pass_end_on()

    def fail(self, failure: FetchError) -> None:
        """End the connection at once, for this reason."""
        if self.failure is None:
            self.failure = failure
        self._end()
        self.reset()

    def abort(self) -> None:
        """End the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def reset(self) -> None:
        """End the connection at once, so that the other side sees that something is missing."""
        if self.transport is not None and not self._lost:
            with suppress(OSError, AttributeError):  # it is closed already
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    def finish(self) -> None:
        """End the stream after what was written is sent. The other side may still send."""
        if not self._finished and not self._lost and self.transport is not None and not self.transport.is_closing():
            self._finished = True
            self.transport.write_eof()

    def close(self) -> None:
        """End the connection after what was written is sent."""
        if self.transport is not None:
            self.transport.close()

    async def wait_closed(self) -> None:
        if not self._lost and self.transport is not None:
            self._closing = asyncio.get_running_loop().create_future()
            await self._closing

    def hand_over(self, protocol: asyncio.BufferedProtocol) -> None:
        """Let another protocol use the connection from now on. ConnectionError if it has ended, or if bytes wait to be
        read."""
        if self.transport is None or not self.open:
            raise ConnectionResetError("the proxy closed the connection")
        if self._buffer:
            raise ConnectionResetError("the proxy sent more than an answer")
        self.transport.pause_reading()  # uvloop looks at the protocol when it begins to read
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        self.transport.resume_reading()

    @property
    def open(self) -> bool:
        return not (self._lost or self.ended or self.transport is None or self.transport.is_closing())

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        _wake(self._reading)
        if self._other is not None:
            self._pass_end_on()
        if self.on_end is not None:
            self.on_end()

    def _pass_end_on(self) -> None:
        other = self._other
        if other is None or other.transport is None or other._finished or other._lost:
            return
        if other.ended or not other.transport.can_write_eof():
            other.close()
            self.close()
        else:
            other.finish()

    def _pause(self, paused: bool) -> None:
        if self._paused == paused or self._lost or self.transport is None or self.transport.is_closing():
            return
        self._paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


async def open_pipe(
    sock: socket.socket, meter: Meter | None, tls: ssl.SSLContext | None = None, name: str | None = None
) -> Pipe:
    """A pipe on a connected socket. With ``tls``, it checks the certificate for ``name``."""
    loop = asyncio.get_running_loop()
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, pipe = await loop.create_connection(
            lambda: Pipe(meter), sock=sock, ssl=tls, server_hostname=name if tls else None
        )
    except BaseException:
        sock.close()
        raise
    return pipe


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _end_of_head(buffer: bytearray, start: int) -> int:
    """The position after the first empty line; -1 if there is none."""
    ends = [at + size for mark, size in ((b"\n\r\n", 3), (b"\n\n", 2)) if (at := buffer.find(mark, start)) >= 0]
    return min(ends, default=-1)
