"""Reads responses that break the rules of HTTP, but whose meaning is clear, as curl and browsers do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Protocol

from httptools import HttpParserError

_START = re.compile(rb"\s*(?:HTTP/|H?T?T?P?\Z)")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE = re.compile(rb"\s*HTTP/(\d(?:\.\d)?)[ \t]+(\d{3})(?:[ \t]+(.*))?\s*")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FOLD = re.compile(rb"\r?\n[ \t]+")
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_LENGTH = re.compile(rb"\d{1,18}")
_NO_BODY = frozenset({204, 304})


class Reader(Protocol):
    """Receives the parts of a response, as from httptools."""

    def on_status(self, status: bytes) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, part: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class LenientParser:
    """Has the interface of `HttpResponseParser`, and accepts more: spaces before a colon, bare CRs in lines and bare
    LFs after them, lines without a colon, equal lengths that are repeated, a length beside chunks, which then decide.

    The connection must be closed afterwards: where such a response ends may be a matter of opinion. It still refuses
    what has no clear meaning, with HttpParserError: different lengths, NUL, and chunks without a size.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._data = bytearray()
        self._step: Callable[[], bool] = self._read_head
        self._status = 0
        self._version = "1.1"
        self._left = 0
        """Bytes that are missing of the body or of a chunk."""

    def feed_data(self, data: bytes | memoryview) -> None:
        self._data += data
        while self._step():
            pass

    def get_status_code(self) -> int:
        return self._status

    def get_http_version(self) -> str:
        return self._version

    def should_keep_alive(self) -> bool:
        return False

    def _take(self, count: int) -> bytes:
        taken = bytes(self._data[:count])
        del self._data[:count]
        return taken

    # -- steps: each returns whether there may be more to read

    def _read_head(self) -> bool:
        end = _HEAD_END.search(self._data)
        if end is None:
            if not _START.match(self._data):
                raise HttpParserError("Bad status line")
            return False
        head = self._take(end.end())[: end.start()]
        first, _, rest = head.lstrip(b"\r\n").partition(b"\n")
        status = _STATUS_LINE.fullmatch(first)
        if status is None:
            raise HttpParserError("Bad status line")
        if b"\0" in head:
            raise HttpParserError("NUL in a header")
        self._version, self._status = status[1].decode(), int(status[2])
        reader = self._reader
        reader.on_status(status[3] or b"")
        headers = list(_headers(rest))
        codings = b",".join(value for name, value in headers if name.lower() == b"transfer-encoding").lower()
        is_chunked = codings.rpartition(b",")[2].strip() == b"chunked"
        length = None if codings else _length(headers)
        for name, value in headers:
            if name.lower() != b"content-length":
                reader.on_header(name, value)
        if length is not None:
            reader.on_header(b"Content-Length", b"%d" % length)
        reader.on_headers_complete()
        self._begin_body(length, is_chunked=is_chunked)
        return True

    def _begin_body(self, length: int | None, *, is_chunked: bool) -> None:
        if self._status < 200:
            if self._status == 101:
                raise HttpParserError("an upgrade that nobody asked for")
            self._reader.on_message_complete()
        elif self._status in _NO_BODY or (length == 0 and not is_chunked):
            self._end()
        elif is_chunked:
            self._step = self._read_chunk_size
        elif length is None:
            self._step = self._read_rest
        else:
            self._left, self._step = length, self._read_body

    def _read_rest(self) -> bool:
        """The end of the connection is the end of the body."""
        if self._data:
            self._reader.on_body(self._take(len(self._data)))
        return False

    def _read_body(self) -> bool:
        if self._read_part():
            self._end()
        return False

    def _read_part(self) -> bool:
        """Read the next bytes of the body or of a chunk. Return whether it is complete."""
        part = self._take(self._left)
        self._left -= len(part)
        if part:
            self._reader.on_body(part)
        return not self._left

    def _read_chunk_size(self) -> bool:
        end = self._data.find(b"\n")
        if end < 0:
            return False
        line = self._take(end + 1).strip(b"\r\n")
        if line:  # an empty one is the end of the chunk before
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise HttpParserError("Invalid character in chunk size")
            self._left = int(size[1], 16)
            self._step = self._read_chunk if self._left else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if not self._read_part():
            return False
        self._step = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        end = self._data.find(b"\n")
        if end < 0:
            return False
        if self._take(end + 1).strip(b"\r\n"):
            self._reader.on_header(b"", b"")
            return True
        self._end()
        return False

    def _end(self) -> None:
        self._step = self._ignore
        self._reader.on_message_complete()

    def _ignore(self) -> bool:
        self._data.clear()
        return False


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
