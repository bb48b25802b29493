"""Heads and framing of HTTP/1.1 messages, for the gateway. It does no I/O.

Bad input raises ValueError with a short reason. Messages are forwarded as they were parsed, not as they arrived, so the
other side can't read them differently: sites that do not trust each other share connections.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple, cast

from shoal.errors import FetchError

Headers = list[tuple[bytes, bytes]]

UNTIL_CLOSE = -1
"""The length of a body that ends with its connection."""
CHUNKED = -2
"""The length of a body in chunks."""

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(?::([0-9]{0,5}))?")
_HTTP_URL = re.compile(r"http://([^/?#]*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n\x00]*)?[ \t]*")
_PLAIN_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_MAX_CHUNK_LINE = 4096
_MAX_TRAILER = 16384
# Headers for one connection, or for a proxy. They are not forwarded.
_HOP_BY_HOP = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"transfer-encoding",
     b"content-length", b"proxy-authorization", b"proxy-authenticate", b"proxy-authentication-info", b"proxy-status")
)  # fmt: skip


class RequestHead(NamedTuple):
    method: bytes
    target: str
    headers: Headers
    persistent: bool
    length: int
    declared: int | None


class ResponseHead(NamedTuple):
    status: int
    reason: bytes
    headers: Headers
    persistent: bool
    length: int
    declared: int | None


def parse_request(head: bytes) -> RequestHead:
    lines = _lines(head)
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        raise ValueError("not an HTTP/1.1 request")
    headers = _headers(lines)
    method, target, version = match.groups()
    coding, lengths = _framing(headers)
    if coding and (lengths or coding != b"chunked" or version == b"0"):
        raise ValueError("ambiguous length of the body")
    declared = _length(lengths)
    length = CHUNKED if coding else declared or 0
    return RequestHead(method, target.decode("ascii"), headers, _persistent(headers, version), length, declared)


def parse_response(head: bytes, *, to_head: bool = False) -> ResponseHead:
    """``to_head``: it answers a HEAD request, so it has no body."""
    lines = _lines(head)
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise ValueError("not an HTTP/1.1 response")
    headers = _headers(lines)
    version, status = match[1], int(match[2])
    persistent = _persistent(headers, version)
    coding, lengths = _framing(headers)
    declared = None if coding else _length(lengths)
    if to_head or status < 200 or status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        length = 0
    elif coding:
        if coding != b"chunked" or version == b"0":
            raise ValueError("unknown transfer coding")
        length = CHUNKED
        persistent = persistent and not lengths  # the sender declared the length twice
    else:
        length = UNTIL_CLOSE if declared is None else declared
    persistent = persistent and length != UNTIL_CLOSE
    return ResponseHead(status, match[3] or b"", headers, persistent, length, declared)


def _lines(head: bytes) -> list[bytes]:
    return [line.removesuffix(b"\r") for line in head.lstrip(b"\r\n").rstrip(b"\r\n").split(b"\n")]


def _headers(lines: Sequence[bytes]) -> Headers:
    """Lines that are not headers are dropped."""
    headers: Headers = []
    for line in lines[1:]:
        if _CONTROL.search(line):
            raise ValueError("a control character in a header")
        if line[:1] in (b" ", b"\t"):
            if headers:  # a header in several lines
                name, value = headers[-1]
                headers[-1] = (name, value + b" " + line.strip(b" \t"))
            continue
        name, colon, value = line.partition(b":")
        if colon and _TOKEN.fullmatch(name):
            headers.append((name, value.strip(b" \t")))
    return headers


def _framing(headers: Headers) -> tuple[bytes, list[bytes]]:
    """The transfer coding, and all lengths that are declared."""
    coding = b", ".join(value for name, value in headers if name.lower() == b"transfer-encoding")
    lengths = [
        part.strip() for name, value in headers if name.lower() == b"content-length" for part in value.split(b",")
    ]
    return coding.lower().strip(), lengths


def _length(lengths: list[bytes]) -> int | None:
    if not lengths:
        return None
    if not all(map(_LENGTH.fullmatch, lengths)) or len(set(map(int, lengths))) != 1:
        raise ValueError("ambiguous length of the body")
    return int(lengths[0])


def _options(headers: Headers) -> set[bytes]:
    """The options in the Connection headers."""
    return {
        option.strip().lower()
        for name, value in headers
        if name.lower() in (b"connection", b"proxy-connection")
        for option in value.split(b",")
    }


def _persistent(headers: Headers, version: bytes) -> bool:
    options = _options(headers)
    return b"close" not in options and (version == b"1" or b"keep-alive" in options)


def authority(text: str, default_port: int) -> tuple[str, int]:
    """The host, without brackets, and the port."""
    match = _AUTHORITY.fullmatch(text)
    if match is None or len(match[1]) > 255:
        raise ValueError("invalid host or port")
    port = int(match[2] or default_port)
    if not 0 < port < 65536:
        raise ValueError("invalid host or port")
    return match[1].strip("[]"), port


def absolute_target(target: str) -> tuple[str, str]:
    """The authority and the path of an ``http://`` URL."""
    match = _HTTP_URL.match(target)
    if match is None:
        raise ValueError("not an http:// URL")
    path = target[match.end() :].partition("#")[0]
    return match[1], path if path.startswith("/") else "/" + path


def forwarded(head: RequestHead | ResponseHead) -> Headers:
    """The headers for the next connection, with the framing that was understood."""
    dropped = _HOP_BY_HOP | _options(head.headers)
    headers = [header for header in head.headers if header[0].lower() not in dropped]
    if head.length == CHUNKED:
        headers.append((b"Transfer-Encoding", b"chunked"))
    elif head.declared is not None:
        headers.append((b"Content-Length", b"%d" % head.declared))
    return headers


def written(first_line: bytes, headers: Headers) -> bytes:
    return b"".join([first_line, b"\r\n", *(b"%b: %b\r\n" % header for header in headers), b"\r\n"])


class Chunks:
    """Follows a body in chunks, to find its end. It accepts only what every receiver reads in the same way."""

    def __init__(self) -> None:
        self.done = False
        self._left = 0  # of the chunk, with its line end
        self._line = b""
        self._trailer: int | None = None

    def feed(self, data: bytes) -> int:
        """How many of these bytes belong to the body."""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self._left > 2:
                step = min(self._left - 2, size - at)
                self._left -= step
                at += step
                continue
            if self._left:
                expected = b"\r\n"[2 - self._left :]
                part = data[at : at + self._left]
                if not expected.startswith(part):
                    raise ValueError("invalid chunk")
                self._left -= len(part)
                at += len(part)
                continue
            if not self._line and self._trailer is None:
                at = _after_whole_chunks(data, at)
            end = data.find(b"\n", at)
            line = self._line + data[at : end if end >= 0 else size]
            if len(line) > _MAX_CHUNK_LINE:
                raise ValueError("invalid chunk")
            if end < 0:
                self._line = line
                return size
            self._line = b""
            at = end + 1
            self._take_line(line)
        return at

    def _take_line(self, line: bytes) -> None:
        if line[-1:] != b"\r":
            raise ValueError("invalid chunk")
        line = line[:-1]
        if self._trailer is not None:
            self._trailer += len(line)
            if self._trailer > _MAX_TRAILER or b"\r" in line:
                raise ValueError("invalid trailer")
            self.done = not line
            return
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise ValueError("invalid chunk")
        size = int(match[1], 16)
        if size:
            self._left = size + 2
        else:
            self._trailer = 0


def _after_whole_chunks(data: bytes, at: int) -> int:
    """The position after all chunks that are complete and have no extension: a site may send thousands of tiny ones."""
    while (match := _PLAIN_CHUNK_LINE.match(data, at)) is not None:
        size = int(match[1], 16)
        end = match.end() + size + 2
        if not size or data[end - 2 : end] != b"\r\n":
            break
        at = end
    return at


# One connection of the gateway: read and written by tasks, or joined with another connection.

_ENOUGH = 256 * 1024  # bytes that wait to be read; then the sender has to wait
_RESET = struct.pack("ii", 1, 0)
_MAX_WRITE_BUFFER = 256 * 1024


class Meter:
    """Counts the bytes between the gateway and the network, in both directions together for the limit."""

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0
        self._limit: int | None = None
        self._end = 0

    @property
    def limit(self) -> int | None:
        """How many bytes may pass since the limit was set; None: any number. Setting it starts over."""
        return self._limit

    @limit.setter
    def limit(self, most: int | None) -> None:
        self._limit = most
        self._end = self.received + self.sent + (most or 0)

    @property
    def exceeded(self) -> bool:
        return self._limit is not None and self.received + self.sent > self._end

    def failure(self) -> FetchError:
        """The error for a connection that ends because of the limit."""
        return FetchError(
            f"the page with everything it loads is larger than {self._limit} bytes (browser.max_bytes)",
            kind="too large",
            retryable=False,
        )


class Pipe(asyncio.Protocol):
    """Buffers what arrives, within a limit, until it is read. One task may read and another may write at a time.

    ``join`` connects two of them: from then on the bytes go from one to the other without a task. ``active`` is set
    whenever bytes move. ``on_end`` is called once when the other side ends its stream or the connection is lost.
    With a ``meter``, the connection ends when its limit is exceeded.
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
        meter = self._meter
        if meter is not None:
            meter.received += len(data)
            if meter.exceeded:
                self.fail(meter.failure())
                return
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
        meter = self._meter
        if meter is not None:
            meter.sent += len(data)
            if meter.exceeded:
                self.fail(meter.failure())
                return
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


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _end_of_head(buffer: bytearray, start: int) -> int:
    """The position after the first empty line; -1 if there is none."""
    ends = [at + size for mark, size in ((b"\n\r\n", 3), (b"\n\n", 2)) if (at := buffer.find(mark, start)) >= 0]
    return min(ends, default=-1)
