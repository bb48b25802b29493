"""JSON responses. Large ones are encoded and sent piece by piece, and never held whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from math import inf

import msgspec
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal.batch.results import Entry
from shoal.server.budgets import Budget

PIECE = 64 * 1024
"""Stored bytes of a result above which it is encoded in pieces."""
_SENT = 256 * 1024  # bytes that are sent at once, about; a smaller answer is sent whole, with its length
_SLICE = 30_000  # characters of a text that are encoded at once; divisible by 3, as Base64 pads
_GROWTH = 6  # JSON has up to six bytes for a byte that is stored
_HELD = 5  # times the stored size: memory of a decoded result; one wide letter makes a text four times as large

_encode = msgspec.json.encode
_encode_into = msgspec.json.Encoder().encode_into


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, media_type="application/json")


def json_pieces(value: object) -> Iterator[bytes]:
    """The value in JSON, in pieces of limited size, however large its texts, lists and objects are."""
    if isinstance(value, dict):
        yield b"{"
        for index, (key, each) in enumerate(value.items()):
            yield (b"," if index else b"") + _encode({key: 0})[1:-2]
            yield from json_pieces(each)
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        yield from _list_pieces(value)
        yield b"]"
    elif isinstance(value, str | bytes) and len(value) > _SLICE:
        yield b'"'
        for start in range(0, len(value), _SLICE):
            yield _encode(value[start : start + _SLICE])[1:-1]
        yield b'"'
    else:
        yield _encode(value)


def _list_pieces(values: list[object]) -> Iterator[bytes]:
    """The elements. Short ones are encoded many at a time."""
    separator = b""
    short: list[object] = []
    size = 0
    for value in values:
        own = len(value) if isinstance(value, str | bytes) else 8
        if own > _SLICE or isinstance(value, dict | list):
            if short:
                yield separator + _encode(short)[1:-1]
                separator, short, size = b",", [], 0
            yield separator
            yield from json_pieces(value)
            separator = b","
            continue
        short.append(value)
        size += own
        if size > _SLICE:
            yield separator + _encode(short)[1:-1]
            separator, short, size = b",", [], 0
    if short:
        yield separator + _encode(short)[1:-1]


class EntryEncoder:
    """Encodes the results of one answer. What counts against its limit is what is sent."""

    def __init__(self, budget: Budget, caller: str, max_bytes: float = inf) -> None:
        """``budget``: for the memory of large results, from decoding them until they are sent."""
        self._budget, self._caller = budget, caller
        self._bytes_left = max_bytes
        self._last = 0

    async def page(
        self, begin: Mapping[str, object], name: str, portions: AsyncGenerator[list[Entry]], limit: int, after: int
    ) -> AsyncGenerator[bytes]:
        """An object with these values, a list of up to ``limit`` results, as many as fit but at least one, and
        ``next``: the number of the last one."""
        self._last = after
        yield begin_object(begin) + b'"%b":[' % name.encode()
        async for piece in self.elements(portions, limit):
            yield piece
        yield b'],"next":%d}' % self._last

    async def elements(self, portions: AsyncGenerator[list[Entry]], limit: int | None = None) -> AsyncGenerator[bytes]:
        """The elements of a list. Without a limit, those that do not fit lose their content; with one, the list ends
        there."""
        count = 0
        small = bytearray()
        async with aclosing(portions):
            async for portion in portions:
                for entry in portion:
                    optional = limit is not None and count > 0
                    if entry.size <= PIECE:  # without a generator for each: pages often have hundreds of them
                        fits = self._append(small, b"," if count else b"", entry, optional)
                    else:
                        yield bytes(small)
                        small.clear()
                        fits = False
                        async for piece in self.pieces(entry, b"," if count else b"", optional=optional):
                            fits = True
                            yield piece
                    if fits:
                        count, self._last = count + 1, entry.number
                    if not fits or count == limit:
                        yield bytes(small)
                        return
                    if len(small) > _SENT:
                        yield bytes(small)
                        small.clear()
        yield bytes(small)

    async def pieces(self, entry: Entry, begin: bytes = b"", *, optional: bool = False) -> AsyncGenerator[bytes]:
        """A result in JSON after ``begin``. If it is too large for the answer: without its content, or nothing at all
        if it is ``optional``."""
        if entry.size <= PIECE:
            small = bytearray()
            if self._append(small, begin, entry, optional):
                yield bytes(small)
            return
        async with self._budget.holding(self._caller, _HELD * entry.size):
            result = entry.decode(True)
            if _GROWTH * entry.size > self._bytes_left and sum(map(len, json_pieces(result))) > self._bytes_left:
                if optional:
                    return
                result = entry.decode(False)
            for piece in json_pieces(result):
                self._bytes_left -= len(piece)
                yield begin + piece
                begin = b""

    def _append(self, buffer: bytearray, begin: bytes, entry: Entry, optional: bool) -> bool:
        """Append a small result to the buffer. False if there is no room for it."""
        buffer += begin
        start = len(buffer)
        _encode_into(entry.decode(True), buffer, -1)
        if len(buffer) - start > self._bytes_left:
            del buffer[start:]
            if optional:
                del buffer[start - len(begin) :]
                return False
            _encode_into(entry.decode(False), buffer, -1)
        self._bytes_left -= len(buffer) - start
        return True


def begin_object(values: Mapping[str, object]) -> bytes:
    """A JSON object that goes on."""
    return _encode(values)[:-1] + b","


async def stream_json(pieces: AsyncGenerator[bytes], budget: Budget, caller: str) -> Response:
    """A response of these pieces. BusyError if it is large, and too many of those are open (``budget``)."""
    begin: list[bytes] = []
    size = 0
    try:
        async for piece in pieces:
            begin.append(piece)
            size += len(piece)
            if size > _SENT:
                return LimitedStream(_joined(begin, pieces), budget, caller, media_type="application/json")
    except BaseException:
        await pieces.aclose()
        raise
    return Response(b"".join(begin), media_type="application/json")


async def _joined(begin: list[bytes], pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The pieces, small ones together: each that is sent costs time."""
    held, size = begin, sum(map(len, begin))
    async with aclosing(pieces):
        async for piece in pieces:
            if size > _SENT:
                yield b"".join(held)
                held, size = [], 0
            held.append(piece)
            size += len(piece)
    yield b"".join(held)


class LimitedStream(StreamingResponse):
    """A response that takes one from a budget until it is sent, or its client is gone. BusyError if there is none."""

    def __init__(
        self, content: AsyncGenerator[bytes] | AsyncGenerator[str], budget: Budget, caller: str, *, media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(content, headers=headers, media_type=media_type)
        budget.take(caller)
        self._content, self._budget, self._caller = content, budget, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._budget.give_back(self._caller)
            await self._content.aclose()
