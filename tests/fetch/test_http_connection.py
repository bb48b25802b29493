"""One connection, without a socket: responses in any parts, and connections that share a buffer."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import FetchError
from shoal.fetch.http_connection import HttpConnection, ResponseLimits
from tests.support.loops import event_loop_policy

__all__ = ["event_loop_policy"]

BODIES = st.binary(max_size=40)


class Answer(NamedTuple):
    wire: bytes
    status: int
    body: bytes


def with_length(body: bytes) -> Answer:
    return Answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, 200, body)


def chunked(parts: list[bytes]) -> Answer:
    chunks = b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts if part)
    head = b"HTTP/1.1 201 Made\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Answer(head + chunks + b"0\r\nX-Trailer: 1\r\n\r\n", 201, b"".join(parts))


def after_hints(answer: Answer) -> Answer:
    return answer._replace(wire=b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + answer.wire)


FRAMED = st.one_of(
    BODIES.map(with_length),
    st.lists(BODIES, max_size=4).map(chunked),
    st.just(Answer(b"HTTP/1.1 204 None\r\n\r\n", 204, b"")),
    st.just(Answer(b"HTTP/1.1 304 Same\r\nContent-Length: 77\r\n\r\n", 304, b"")),
)
ANSWERS = FRAMED | FRAMED.map(after_hints)


class Wire:
    """The transport of a connection."""

    def __init__(self, connection: HttpConnection) -> None:
        self.closed = False
        self._connection = connection
        connection.connection_made(cast(asyncio.Transport, self))

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        assert not self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closed = True

    def receive(self, data: bytes) -> None:
        buffer = self._connection.get_buffer(-1)
        buffer[: len(data)] = data
        self._connection.buffer_updated(len(data))
        buffer[: len(data)] = b"#" * len(data)  # the buffer is for other connections now


class Pair(NamedTuple):
    connection: HttpConnection
    wire: Wire


def pairs(count: int) -> list[Pair]:
    buffer = memoryview(bytearray(1 << 12))
    made = [HttpConnection("ex.com", buffer, lambda _: None) for _ in range(count)]
    return [Pair(each, Wire(each)) for each in made]


def ask(connection: HttpConnection, head_only: bool = False) -> asyncio.Task[None]:
    limits = ResponseLimits(asyncio.get_running_loop().time() + 60, 60.0, 1000, 1000)
    return asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", limits, head_only=head_only))


def split(data: bytes, sizes: list[int]) -> list[bytes]:
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return [part for part in (*parts, data[start:]) if part]


@settings(deadline=None)
@given(st.lists(st.tuples(ANSWERS, ANSWERS, st.lists(st.integers(1, 30), max_size=20)), min_size=1, max_size=4))
def test_responses_in_any_parts(rounds: list[tuple[Answer, Answer, list[int]]]) -> None:
    """Two connections receive theirs in turns, and are used again and again."""

    async def converse() -> None:
        used = pairs(2)
        for first, second, sizes in rounds:
            tasks = [ask(each.connection) for each in used]
            await asyncio.sleep(0)
            left = [split(first.wire, sizes), split(second.wire, sizes[::-1])]
            while any(left):
                for each, parts in zip(used, left, strict=True):
                    if parts:
                        each.wire.receive(parts.pop(0))
            await asyncio.gather(*tasks)
            for each, answer in zip(used, (first, second), strict=True):
                assert (each.connection.status, bytes(each.connection.body)) == (answer.status, answer.body)
                assert each.connection.reusable
                assert not each.wire.closed
            assert [name for name, _ in used[0].connection.headers if name in (b"Link", b"X-Trailer")] == []

    asyncio.run(converse())


@settings(deadline=None)
@given(ANSWERS, st.binary(min_size=1, max_size=30), st.booleans())
def test_what_follows_a_response_is_never_used(answer: Answer, extra: bytes, at_once: bool) -> None:
    """Line breaks behind a response mean nothing."""

    async def converse() -> None:
        (used,) = pairs(1)
        task = ask(used.connection)
        await asyncio.sleep(0)
        if at_once:
            used.wire.receive(answer.wire + extra)
        else:
            used.wire.receive(answer.wire)
            used.wire.receive(extra)
        await task
        assert (used.connection.status, bytes(used.connection.body)) == (answer.status, answer.body)
        assert not used.connection.reusable or (at_once and not extra.strip(b"\r\n"))

    asyncio.run(converse())


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(1, 30), max_size=10), st.booleans(), st.booleans())
def test_any_bytes_end_in_a_response_or_an_error(data: bytes, sizes: list[int], begin: bool, head_only: bool) -> None:
    async def converse() -> None:
        (used,) = pairs(1)
        task = ask(used.connection, head_only)
        await asyncio.sleep(0)
        for part in split((b"HTTP/1.1 200 OK\r\n" if begin else b"") + data, sizes):
            if not used.wire.closed:
                used.wire.receive(part)
        used.connection.connection_lost(None)
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert ended is None or isinstance(ended, FetchError)
        assert not used.connection.reusable

    asyncio.run(converse())
