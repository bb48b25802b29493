"""JSON responses. Large ones are encoded and sent piece by piece, and never held whole."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import TypeAlias, cast

import msgspec
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from shoal.api.batch.results import Entry, grouped
from shoal.api.server.budgets import AnswerBudgets, Budget, Share

PIECE = 128 * 1024
"""Stored bytes of results to encode at once. A larger result is encoded alone. Its memory counts until it is sent."""
WHOLE = 4 << 20
"""Stored bytes of all results of an answer to encode at once, because pieces would cost more time. The budget must have
room for the largest size that the answer may have."""
_SENT = 200_000  # bytes to send at once, about; a smaller answer is sent whole, with its length
_SLICE = 240_000  # characters of a text to encode at once; divisible by 3, because Base64 pads
_GROWTH = 6  # JSON has up to six bytes for a stored byte
_OUTLINE = 1000  # bytes that a result adds to its content, about
_HELD = 5  # a decoded result needs up to this times its stored size: one wide letter makes a text four times as large

_COMMA = ord(",")

Piece: TypeAlias = bytes | bytearray

_encode = msgspec.json.encode
_encode_into = msgspec.json.Encoder().encode_into


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, media_type="application/json")


def json_pieces(value: object) -> Iterator[bytes]:
    """The value in JSON. Pieces have a limited size, however large the texts, lists and objects of the value are."""
    if isinstance(value, dict):
        yield b"{"
        for index, (key, member) in enumerate(value.items()):
            yield (b"," if index else b"") + _encode({key: 0})[1:-2]
            yield from json_pieces(member)
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
    """The elements of a list. Short ones are encoded together."""
    separator = b""
    for is_long, neighbours in groupby(values, lambda value: isinstance(value, dict | list) or _size(value) > _SLICE):
        for group in grouped(neighbours, _size, 1 if is_long else sys.maxsize, _SLICE):
            yield separator
            yield from json_pieces(group[0]) if is_long else (_encode(group)[1:-1],)
            separator = b","


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | bytes) else 8


class EntryEncoder:
    """Encodes the results of one answer. The bytes that are sent count against its limit."""

    def __init__(self, budgets: AnswerBudgets, caller: str, max_bytes: float = inf) -> None:
        self._budgets, self._caller = budgets, caller
        self._bytes_left = max_bytes
        self._waiting: list[Piece] = []
        self._size = 0
        """The bytes that wait to be sent."""
        self._count = 0
        """How many results are in the list so far."""
        self._last = 0
        self._is_whole = False
        """Whether the next piece is the whole answer."""

    def page(
        self, begin: Mapping[str, object], name: str, portions: AsyncGenerator[list[Entry]], limit: int, after: int
    ) -> AsyncGenerator[Piece]:
        """An object with these values, a list of results, and ``next``: the number of the last result. The list has as
        many results as fit, at least one and at most ``limit``."""
        self._last = after
        return self.elements(begin, name, portions, lambda: {"next": self._last}, limit)

    async def elements(
        self,
        begin: Mapping[str, object],
        name: str,
        portions: AsyncGenerator[list[Entry]],
        end: Callable[[], Mapping[str, object]],
        limit: int | None = None,
    ) -> AsyncGenerator[Piece]:
        """An object with a list of results, and with values before and after it. All pieces but the last are large
        enough to send. Without a limit, results that do not fit lose their content. With one, they end the list."""
        entries: list[Entry] = []
        async with aclosing(portions):
            with Share(self._budgets.whole, self._caller) as share:
                if await self._gather(entries, portions, limit, share):
                    async with self._budgets.turn if share.amount else nullcontext():
                        results = [entry.decode(True) for entry in entries]
                        self._last = entries[-1].number if entries else self._last
                        whole = _encode({**begin, name: results, **end()})
                    if len(whole) <= self._bytes_left and (len(whole) <= _SENT or share.change(len(whole))):
                        entries.clear()
                        self._is_whole = True
                        yield whole
                        return
                beginning = b'%b,"%b":[' % (_encode(begin)[:-1], name.encode())
                async for piece in self._elements(beginning, _chain(entries, portions), end, limit):
                    yield piece

    async def _gather(
        self, entries: list[Entry], portions: AsyncIterator[list[Entry]], limit: int | None, share: Share
    ) -> bool:
        """Read results while the answer may be encoded at once. False if there are too many for that."""
        size = 0
        async for portion in portions:
            entries += portion if limit is None else portion[: limit - len(entries)]
            size += sum(entry.size + _OUTLINE for entry in portion)
            most = _GROWTH * size
            if size > WHOLE or most > self._bytes_left or (size > PIECE and not share.change(most)):
                return False
            if len(entries) == limit:
                break
        return True

    async def _elements(
        self,
        begin: bytes,
        portions: AsyncIterator[list[Entry]],
        end: Callable[[], Mapping[str, object]],
        limit: int | None,
    ) -> AsyncGenerator[Piece]:
        """The object of `elements` in pieces."""
        self._add(begin)
        async for portion in portions:
            fits = True
            entries = portion if limit is None else portion[: limit - self._count]
            for group in grouped(entries, attrgetter("size"), len(entries), PIECE):
                if group[0].size <= PIECE:
                    fits = self._append(group, optional=limit is not None)
                else:
                    count_before = self._count
                    async for piece in self._large(group[0], optional=limit is not None):
                        yield piece
                    fits = self._count > count_before
                if not fits:
                    break
                if self._size > _SENT:
                    yield self._flush()
            if not fits or self._count == limit:
                break
        self._add(b"]," + _encode(end())[1:])
        yield self._flush()

    async def respond(self, pieces: AsyncGenerator[Piece]) -> Response:
        """A response of the pieces of `page` or `elements`. BusyError if it is large and too many of those are open."""
        try:
            first = await anext(pieces)
            if len(first) > _SENT:
                length = len(first) if self._is_whole else None
                return _JsonStream(first, pieces, self._budgets.open, self._caller, length)
        except BaseException:
            await pieces.aclose()
            raise
        await pieces.aclose()  # there was only this piece
        return Response(bytes(first), media_type="application/json")

    async def alone(self, entry: Entry, begin: bytes, end: bytes) -> AsyncGenerator[Piece]:
        """A result that is not in a list, after ``begin`` and before ``end``."""
        self._add(begin)
        self._count = 0
        if entry.size <= PIECE:
            self._append([entry], optional=False)
        else:
            async for piece in self._large(entry, optional=False):
                yield piece
        self._add(end)
        yield self._flush()

    def _add(self, piece: Piece) -> None:
        self._waiting.append(piece)
        self._size += len(piece)

    def _flush(self) -> Piece:
        """Take what waits to be sent."""
        waiting = self._waiting
        self._waiting, self._size = [], 0
        return waiting[0] if len(waiting) == 1 else b"".join(waiting)

    async def _large(self, entry: Entry, *, optional: bool) -> AsyncGenerator[Piece]:
        """Add a large result as `_append` does. Hold the memory that it needs until it is sent."""
        memory = _HELD * entry.size + _GROWTH * min(entry.size, _SLICE)
        async with self._budgets.decoded.holding(self._caller, memory):
            async with self._budgets.turn:
                result = entry.decode(True)
                if _GROWTH * entry.size > self._bytes_left and sum(map(len, json_pieces(result))) > self._bytes_left:
                    if optional and self._count:
                        return
                    result = entry.decode(False)
            if self._count:
                self._add(b",")
            self._count, self._last = self._count + 1, entry.number
            for piece in json_pieces(result):
                self._bytes_left -= len(piece)
                self._add(piece)
                if self._size > _SENT:
                    yield self._flush()

    def _append(self, entries: Sequence[Entry], *, optional: bool) -> bool:
        """Add results. Those that are too large for the answer lose their content. But if they are ``optional``, and
        not the first, do not add them, and return False."""
        if self._encode([entry.decode(True) for entry in entries]):
            self._last = entries[-1].number
            return True
        if len(entries) > 1:
            return all(self._append([entry], optional=optional) for entry in entries)
        if optional and self._count:
            return False
        self._encode([entries[0].decode(False)], anyway=True)
        self._last = entries[0].number
        return True

    def _encode(self, results: Sequence[object], *, anyway: bool = False) -> bool:
        """Add elements of the list, all at once. False if the answer has no room for them."""
        elements = bytearray()  # it can lose its brackets without a copy
        _encode_into(results, elements)
        del elements[-1:]
        if self._count:
            elements[0] = _COMMA
        else:
            del elements[:1]
        if len(elements) > self._bytes_left and not anyway:
            return False
        self._add(elements)
        self._bytes_left -= len(elements)
        self._count += len(results)
        return True


async def _chain(entries: list[Entry], portions: AsyncIterator[list[Entry]]) -> AsyncIterator[list[Entry]]:
    yield entries
    async for portion in portions:
        yield portion


class LimitedStream(StreamingResponse):
    """A response that holds a place of a budget until it is sent or its client is gone. BusyError if none is free."""

    def __init__(
        self,
        content: AsyncGenerator[Piece] | AsyncGenerator[str],
        budget: Budget,
        caller: str,
        *,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(cast(AsyncGenerator[bytes], content), headers=headers, media_type=media_type)
        budget.take(caller)
        self._content, self._budget, self._caller = content, budget, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send(scope, receive, send)
        finally:
            self._budget.give_back(self._caller)
            await self._content.aclose()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)


class _JsonStream(LimitedStream):
    """A large answer. It ends by itself: no task waits for the end of its client, because that would cost more than
    many an answer. What is sent to a client that is gone is dropped."""

    def __init__(
        self, first: Piece, rest: AsyncGenerator[Piece], budget: Budget, caller: str, length: int | None
    ) -> None:
        """``length``: bytes of the whole answer, if known."""
        headers = {} if length is None else {"Content-Length": str(length)}
        super().__init__(rest, budget, caller, media_type="application/json", headers=headers)
        self._first = first
        self._is_whole = length is not None

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        self._first = b""
        if not self._is_whole:
            async for piece in self._content:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        # This waits until the client has read most of the answer.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
