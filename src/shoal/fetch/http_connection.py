"""One HTTP/1.1 connection to a server, with limits on everything that the server controls."""

from __future__ import annotations

import asyncio
import fcntl
import re
import ssl
import sys
import termios
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from shoal.errors import FetchError
from shoal.fetch.bodies import FREE_BYTES, BodyRoom
from shoal.fetch.connecting import TlsTransport, one_line, system_text
from shoal.system import clock

# Reads responses that break the rules of HTTP, but whose meaning is clear, as curl and browsers do.

_START = re.compile(rb"\s*(?:HTTP/|H?T?T?P?\Z)")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE = re.compile(rb"\s*HTTP/(\d(?:\.\d)?)[ \t]+(\d{3})(?:[ \t]+(.*))?\s*")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FOLD = re.compile(rb"\r?\n[ \t]+")
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_LENGTH = re.compile(rb"\d{1,18}")
_NO_BODY = frozenset({204, 304})


class LenientParser:
    """Has the interface of `HttpResponseParser`, and accepts more: spaces before a colon, bare CRs in lines and bare
    LFs after them, lines without a colon, equal lengths that are repeated, a length beside chunks, which then decide.

    The connection must be closed afterwards: where such a response ends may be a matter of opinion. It still refuses
    what has no clear meaning, with HttpParserError: different lengths, NUL, and chunks without a size.
    """

    def __init__(self, reader: HttpConnection) -> None:
        self._reader = reader
        self._data = bytearray()
        self._status = 0
        self._version = "1.1"
        self._reading = self._read()

    def feed_data(self, data: bytes | memoryview) -> None:
        self._data += data
        next(self._reading, None)

    def get_status_code(self) -> int:
        return self._status

    def get_http_version(self) -> str:
        return self._version

    def should_keep_alive(self) -> bool:
        return False

    # -- generators: each yields when it needs more bytes

    def _read(self) -> Iterator[None]:
        reader, length, is_chunked = self._reader, None, False
        while self._status < 200:
            while (end := _HEAD_END.search(self._data)) is None:
                if not _START.match(self._data):
                    raise HttpParserError("Bad status line")
                yield
            length, is_chunked = self._read_head(self._take(end.end())[: end.start()])
            if self._status == 101:
                raise HttpParserError("an upgrade that nobody asked for")
            if self._status < 200:
                reader.on_message_complete()
        if self._status in _NO_BODY:
            length, is_chunked = 0, False
        if is_chunked:
            yield from self._read_chunks()
        elif length is not None:
            yield from self._read_part(length)
        else:
            while True:  # the end of the connection is the end of the body
                reader.on_body(self._take(len(self._data)))
                yield
        reader.on_message_complete()

    def _read_chunks(self) -> Iterator[None]:
        size = -1
        while size:
            if line := (yield from self._read_line()):  # an empty one is the end of the chunk before
                match = _CHUNK_SIZE.fullmatch(line)
                if match is None:
                    raise HttpParserError("Invalid character in chunk size")
                size = int(match[1], 16)
                yield from self._read_part(size)
        while (yield from self._read_line()):
            self._reader.on_header(b"", b"")  # a trailer

    def _read_part(self, size: int) -> Iterator[None]:
        """Read the body, or a chunk."""
        while size:
            if part := self._take(size):
                self._reader.on_body(part)
                size -= len(part)
            else:
                yield

    def _read_line(self) -> Generator[None, None, bytes]:
        while (end := self._data.find(b"\n")) < 0:
            yield
        return self._take(end + 1).strip(b"\r\n")

    def _take(self, count: int) -> bytes:
        data = bytes(self._data[:count])
        del self._data[:count]
        return data

    def _read_head(self, head: bytes) -> tuple[int | None, bool]:
        """Read a head. Return the length of the body, and whether it is in chunks."""
        first, _, rest = head.lstrip(b"\r\n").partition(b"\n")
        status = _STATUS_LINE.fullmatch(first)
        if status is None:
            raise HttpParserError("Bad status line")
        if b"\0" in head:
            raise HttpParserError("NUL in a header")
        self._version, self._status = status[1].decode(), int(status[2])
        reader = self._reader
        reader.on_status((status[3] or b"").strip())
        headers = list(_headers(rest))
        codings = b",".join(value for name, value in headers if name.lower() == b"transfer-encoding").lower()
        length = None if codings else _length(headers)
        for name, value in headers:
            if name.lower() != b"content-length":
                reader.on_header(name, value)
        if length is not None:
            reader.on_header(b"Content-Length", b"%d" % length)
        reader.on_headers_complete()
        return length, codings.rpartition(b",")[2].strip() == b"chunked"


def _headers(lines: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The headers that have a name, without line breaks in their values."""
    for line in _FOLD.sub(b" ", lines).split(b"\n"):
        name, colon, value = line.partition(b":")
        name = name.rstrip(b" \t")
        if colon and _NAME.fullmatch(name):
            yield name, value.replace(b"\r", b" ").strip(b" \t")


def _length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """The length of the body. None if there is none: then the connection ends with the body."""
    lines = [value for name, value in headers if name.lower() == b"content-length"]
    values = [value.strip() for line in lines for value in line.split(b",")]
    if not all(map(_LENGTH.fullmatch, values)):
        raise HttpParserError("Invalid character in Content-Length")
    if len(lengths := set(map(int, values))) > 1:
        raise HttpParserError("different values of Content-Length")
    return lengths.pop() if lengths else None


_MAX_HEADERS = 1000
_MAX_HEAD = 16  # all headers together, as a multiple of the longest one that is allowed
_MAX_INTERIM = 16  # responses with a status below 200 before the response itself
_OVERHEAD = 8  # bytes on the wire for each byte of a body: chunks of a single byte need six
_LONG_UPLOAD = 1 << 14  # bytes of a request; a shorter one is sent at once
_MAX_UNUSED = 1 << 20  # bytes on the wire that are no part of a body


class ResponseLimits(NamedTuple):
    """The limits for one response."""

    deadline: float
    """By the clock of the event loop."""
    read_timeout: float
    max_body_bytes: int
    max_header_bytes: int
    room: BodyRoom | None = None
    """Where a large body needs room before the rest of it is read."""


class HttpConnection(asyncio.BufferedProtocol):
    """Sends one request at a time, and collects its response in ``status``, ``headers``, ``body``.

    ``host`` is for messages. ``buffer`` receives what arrives; connections of one event loop can share it.
    ``on_idle_close`` is called when the connection closes while it has no request.
    """

    def __init__(self, host: str, buffer: memoryview, on_idle_close: Callable[[HttpConnection], None]) -> None:
        self._host = host
        self._buffer = buffer
        self._on_idle_close = on_idle_close
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: HttpResponseParser | LenientParser = self._new_parser()
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.origin = ""
        self.address = ""
        """The IP address of the server."""
        self.reusable = False
        """Whether the connection can send another request."""
        self._limits = ResponseLimits(0.0, 0.0, 0, 0)
        self._reset(head_only=False)

    def _new_parser(self) -> HttpResponseParser:
        parser = HttpResponseParser(self)
        # Many servers break these rules, and none of them is about where a response ends.
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    def _reset(self, *, head_only: bool) -> None:
        self.unheard = False
        """Whether the server closed the connection before it sent a byte of the response."""
        self.status = 0
        self.reason = ""
        self.version = "1.1"
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: bytes | bytearray = b""
        self.flags: tuple[str, ...] = ()
        """What was odd about the response."""
        self.transfer_coding = ""
        """The Transfer-Encoding, if it is more than chunks."""
        self.answered_at = 0.0
        """When all headers had arrived, by `time.monotonic`."""
        self._head_only = head_only
        self._heard_at = 0.0
        self._unsent = 0  # bytes of a long request at the last check
        self._received = 0
        self._early: bytes | None = b""  # what arrived so far, while that is no more than headers
        self._header_count = 0  # of all interim responses, and with the trailers
        self._unparsed = 0  # bytes since the last complete header or part of the body
        self._interim = 0
        self._declared: int | None = None
        self._chunked = False
        self._paused_at = 0.0  # when the body began to wait for room, by the clock of the event loop

    async def exchange(self, message: bytes, limits: ResponseLimits, *, head_only: bool) -> None:
        """Send a request and wait for its response. ``head_only``: the response has no body, whatever it declares.

        TimeoutError after the deadline, FetchError for everything else. The connection is closed after an error.
        """
        self._reset(head_only=head_only)
        if self._transport is None:  # it closed after the caller chose it
            self.unheard = True
            raise _reset_by(self._host, "Server disconnected")
        self._limits = limits
        self.reusable = False
        self._heard_at = self._loop.time()
        self._waiter = waiter = self._loop.create_future()
        self._transport.write(message)
        self._unsent = len(message) if len(message) > _LONG_UPLOAD else 0
        self._arm(min(limits.deadline, self._heard_at + limits.read_timeout))
        try:
            await waiter
        except BaseException:  # also when the caller is cancelled
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # nobody else reads it
            self.abort()
            raise

    def forget(self) -> None:
        """Drop the response, to free its memory: hundreds of connections can be idle, and a body can have many
        megabytes."""
        self.headers = []
        self.body = b""

    def remember_session(self) -> None:
        """Let the next connection to this server resume the TLS session of this one."""
        if isinstance(self._transport, TlsTransport):
            self._transport.remember_session()

    def abort(self) -> None:
        """Close the connection at once. A request that waits for its response fails."""
        if self._waiter is not None:
            self._fail(_reset_by(self._host, "it is no longer needed"))
            return
        self.reusable = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    # -- time

    def _arm(self, due: float) -> None:
        """Check the time limits no later than at ``due``. A timer that fires too early checks once more: that is
        cheaper than a timer for each request."""
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if self._waiter is None or self._paused_at:
            return
        now, limits = self._loop.time(), self._limits
        if self._unsent:
            before, self._unsent = self._unsent, _unsent(self._transport)
            if self._unsent < before:  # the server reads the request: it cannot answer yet
                self._heard_at = now
        silent = self._heard_at + limits.read_timeout
        if now >= limits.deadline:
            self._fail(TimeoutError())
        elif now >= silent:
            what = "did not read the request" if self._unsent else "sent nothing"
            message = f"{self._host} {what} for {limits.read_timeout:g} s (http.read_timeout)"
            self._fail(FetchError(message, kind="timeout", retryable=True))
        else:
            self._arm(min(limits.deadline, silent))

    # -- the event loop calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None:  # unrequested: it could be taken for the next response
            self.abort()
            return
        self._heard_at = self._loop.time()
        self._received += nbytes
        self._unparsed += nbytes
        problem = self._feed(self._buffer[:nbytes])
        if problem and self._waiter is not None and self._early is not None:
            problem = self._read_again(self._early + self._buffer[:nbytes], problem)
        if self._waiter is None:  # complete, or failed; later bytes are unrequested
            self.reusable = self.reusable and not problem
        elif problem:
            self._fail(self._invalid(problem))
        elif self._unparsed > self._limits.max_header_bytes:
            self._fail(self._header_too_long())
        elif not self.answered_at and self._received > _MAX_HEAD * self._limits.max_header_bytes:
            self._fail(self._invalid("Too many headers"))
        elif self._received > _OVERHEAD * self._limits.max_body_bytes + _MAX_UNUSED:
            self._fail(_too_large(self._limits.max_body_bytes))
        elif self._early is not None:
            self._early = None if self.body else self._early + self._buffer[:nbytes]

    def _feed(self, data: bytes | memoryview) -> str:
        """Parse some bytes. Return what is wrong with them."""
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            return "an upgrade that nobody asked for"
        except HttpParserError as exc:
            is_clear = self.status or self.headers or isinstance(self._parser, LenientParser)
            return one_line(exc) if is_clear else "Bad status line"
        return ""

    def _read_again(self, data: bytes, problem: str) -> str:
        """Read a response that the parser refused, from its first byte, with the lenient parser. Then the connection
        is closed. Return what is wrong with it even so."""
        heard_at, received, unparsed = self._heard_at, self._received, self._unparsed
        self._reset(head_only=self._head_only)
        self._heard_at, self._received, self._unparsed, self._early = heard_at, received, unparsed, None
        self._parser = LenientParser(self)
        self.flags = (f"odd HTTP: {problem}",)
        return self._feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.reusable = False
        waits = self._waiter is not None and not self.answered_at
        if waits and exc is None and self._early and self._early.endswith(b"\n"):
            self._read_again(self._early + b"\n", "the headers have no end")
        del self._parser  # they refer to each other, and garbage is collected rarely
        if self._waiter is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._on_idle_close(self)
        elif self.answered_at:
            if exc is None and self._declared is None and not self._chunked:
                self._finish()  # the end of the connection is the end of the body
            else:
                self._fail(FetchError(f"the body is incomplete: {self._missing()}", kind="half body", retryable=True))
        else:
            self.unheard = self._received == 0
            self._fail(_reset_by(self._host, _reason(exc)))

    # -- the parser calls these

    def on_status(self, status: bytes) -> None:
        self.reason = status.decode("latin-1")

    def on_message_begin(self) -> None:
        if self._waiter is None:  # a second response to one request
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unparsed = 0
        if self._waiter is None:
            return
        self._header_count += 1
        if self._header_count > _MAX_HEADERS:
            self._fail(self._invalid("Too many headers"))
        elif len(name) + len(value) > self._limits.max_header_bytes:
            self._fail(self._header_too_long())
        elif not self.answered_at:  # later ones are trailers, which nobody reads
            self.headers.append((name, value.rstrip(b" \t")))
            if len(name) == 14 and name.lower() == b"content-length":
                self._declared = int(value)
            elif len(name) == 17 and name.lower() == b"transfer-encoding":
                coding = value.strip().lower()
                self._chunked = coding.endswith(b"chunked")
                if coding != b"chunked":
                    self.transfer_coding = coding.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if self._waiter is None:
            return
        self.status = self._parser.get_status_code()
        self.version = self._parser.get_http_version()
        if self.status < 200:
            return
        self.answered_at = clock.monotonic()
        if self._head_only:
            # A server that sends a body all the same would answer the next request with it.
            self._parser = self._new_parser()
            self._finish()
        elif self._declared is not None and self._declared > self._limits.max_body_bytes and self.status != 304:
            self._fail(_too_large(self._limits.max_body_bytes))

    def on_body(self, part: bytes) -> None:
        self._unparsed = 0
        body = self.body
        if self._waiter is None:
            return
        if len(body) + len(part) > self._limits.max_body_bytes:
            self._fail(_too_large(self._limits.max_body_bytes))
        elif not body:
            self.body = part
        elif isinstance(body, bytearray):  # not a list of parts: a server that sends single bytes would fill the memory
            body += part
        else:
            self.body = bytearray(body) + part
        if self._limits.room is not None and len(self.body) > FREE_BYTES:
            self._reserve(self._limits.room)

    def _reserve(self, room: BodyRoom) -> None:
        """Read no more until there is room for the body. That time counts for no time limit."""
        is_coded = self.transfer_coding or any(name.lower() == b"content-encoding" for name, _ in self.headers)
        most = self._limits.max_body_bytes
        self._limits = self._limits._replace(room=None)
        reserved = room.reserve(most if is_coded or self._declared is None else min(most, self._declared))
        if not reserved.done() and self._transport is not None:
            self._paused_at = self._loop.time()
            self._transport.pause_reading()
            reserved.add_done_callback(self._go_on)

    def _go_on(self, reserved: asyncio.Future[None]) -> None:
        if self._paused_at and self._transport is not None and not reserved.cancelled():
            self._heard_at = self._loop.time()
            deadline = self._limits.deadline + self._heard_at - self._paused_at
            self._limits, self._paused_at = self._limits._replace(deadline=deadline), 0.0
            self._transport.resume_reading()
            self._arm(min(deadline, self._heard_at + self._limits.read_timeout))

    def on_message_complete(self) -> None:
        if self._waiter is None:
            return
        if self.status >= 200:
            self._finish(reusable=self._parser.should_keep_alive())
            return
        self._interim += 1
        self.headers = []
        self.status, self.reason = 0, ""
        self._declared, self._chunked = None, False
        if self._interim > _MAX_INTERIM:
            self._fail(self._invalid("Too many interim responses"))

    # -- the end of a response

    def _finish(self, *, reusable: bool = False) -> None:
        waiter, self._waiter = self._waiter, None
        if self._paused_at and self._transport is not None:  # the last part was on its way already
            self._paused_at = 0.0
            self._transport.resume_reading()
        # A server that answers before it has the whole body could take the rest of it for the next request.
        self.reusable = reusable and self._transport is not None and not self._transport.get_write_buffer_size()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _missing(self) -> str:
        if self._declared is None:
            return "the last chunk is missing" if self._chunked else "the connection broke"
        return f"{len(self.body)} of {self._declared} bytes"

    def _invalid(self, why: str) -> FetchError:
        return FetchError(f"{self._host} sent invalid HTTP: {why}", kind="protocol", retryable=False)

    def _header_too_long(self) -> FetchError:
        message = f"{self._host} sent a header that is too long (http.max_header_bytes)"
        return FetchError(message, kind="protocol", retryable=False)


def _unsent(transport: asyncio.Transport | None) -> int:
    """Bytes of the request that have not arrived at the server, as far as the system tells."""
    if transport is None:
        return 0
    queued = 0
    with suppress(OSError):  # a system that does not know
        answer = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        queued = int.from_bytes(answer, sys.byteorder)
    return transport.get_write_buffer_size() + queued


def _too_large(limit: int) -> FetchError:
    message = f"the body is larger than {limit} bytes (http.max_body_bytes; files.max_bytes for files)"
    return FetchError(message, kind="too large", retryable=False)


def _reset_by(host: str, reason: str) -> FetchError:
    return FetchError(f"{host} closed the connection: {reason}", kind="reset", retryable=True)


def _reason(exc: Exception | None) -> str:
    if exc is None:
        return "Server disconnected"
    return system_text(exc) if isinstance(exc, OSError) and not isinstance(exc, ssl.SSLError) else one_line(exc)
