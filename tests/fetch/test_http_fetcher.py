"""The HTTP client: what it makes of odd responses, what it sends, and how it uses connections."""

from __future__ import annotations

import asyncio
import errno
import gc
import gzip
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Self, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal import Request, Response
from shoal.config import HttpSettings
from shoal.errors import FetchError
from shoal.fetch import http_fetcher
from shoal.fetch.connecting import Connector
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http_connection import HttpConnection
from shoal.fetch.http_fetcher import HttpFetcher
from shoal.fetch.resolving import CaresResolver, ResolvedAddress
from shoal.http.exchange import Exchange, captured
from tests.support.loops import event_loop_policy

__all__ = ["event_loop_policy"]

Fetch: TypeAlias = Callable[..., Awaitable[Response]]


class Replaying:
    """A server that sends these bytes, in these parts, for each request, and then closes the connection or not."""

    def __init__(self, *parts: bytes, close: bool = False) -> None:
        self._parts = parts
        self._close = close
        self.heard: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for writer in self.writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"), 0)
                self.heard.append(head + await reader.readexactly(length))
                await self._answer(writer)
                if self._close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        for part in self._parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01 if len(self._parts) > 1 else 0)


@pytest.fixture
async def fetch() -> AsyncIterator[Fetch]:
    fetcher = HttpFetcher(
        HttpSettings(max_body_bytes=5000, max_header_bytes=3000, read_timeout=5, keep_alive_seconds=30), "t"
    )
    yield fetcher.fetch
    await fetcher.close()


OK = b"HTTP/1.1 200 OK\r\n"
THREE = b"Content-Length: 3\r\n\r\nabc"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"

GOOD = [
    # what the server sends, whether it closes the connection, status, body
    ([OK + THREE], False, 200, b"abc"),
    ([OK + THREE[:10], THREE[10:]], False, 200, b"abc"),
    ([b"HTTP/1.1 200\r\n" + THREE], False, 200, b"abc"),  # no reason
    ([b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc"], False, 200, b"abc"),  # bare line feeds
    ([b"HTTP/1.1 299 \xff\xfe\r\n" + THREE], False, 299, b"abc"),
    ([b"HTTP/1.0 200 OK\r\n\r\n", b"abc", b"def"], True, 200, b"abcdef"),  # until the connection closes
    ([OK + b"\r\nabc"], True, 200, b"abc"),
    ([OK + b"Transfer-Encoding: identity\r\n\r\nabc"], True, 200, b"abc"),
    ([CHUNKED + b"3\r\nabc\r\n0\r\n\r\n"], False, 200, b"abc"),
    ([CHUNKED + b"3;a=b\r\nabc\r\n2 \r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"], False, 200, b"abcde"),
    ([CHUNKED, *(b"1\r\nx\r\n" for _ in range(20)), b"0\r\n\r\n"], False, 200, b"x" * 20),
    ([b"HTTP/1.1 204 No Content\r\n\r\n"], False, 204, b""),
    ([b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9999999\r\n\r\n"], False, 304, b""),
    ([b"HTTP/1.1 100 Continue\r\n\r\n", OK + THREE], False, 200, b"abc"),
    ([b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK + THREE], False, 200, b"abc"),
    ([OK + b"Upgrade: h2,h2c\r\nConnection: Upgrade, Keep-Alive\r\n" + THREE], False, 200, b"abc"),
    ([OK + b"X:\r\nY: a\r\n  folded\r\n" + THREE], False, 200, b"abc"),
    ([OK + b"Content-Length: 5000\r\n\r\n" + b"x" * 5000], False, 200, b"x" * 5000),
]


@pytest.mark.parametrize(("parts", "close", "status", "body"), GOOD)
async def test_an_unusual_response(fetch: Fetch, parts: list[bytes], close: bool, status: int, body: bytes) -> None:
    async with Replaying(*parts, close=close) as server:
        for _ in range(2):  # the second one shows that nothing of the first is left
            response = await fetch(Request(f"{server.url}/"))
            assert (response.status, response.body) == (status, body)
    assert server.connections == (2 if close else 1)


BAD = [
    # what the server sends before it closes the connection, the kind of the error, whether a retry can help
    ([OK + b"Content-Length: 5001\r\n\r\n"], "too large", False),
    ([CHUNKED + b"1388\r\n" + b"x" * 5000 + b"\r\n", b"1\r\nx\r\n"], "too large", False),
    ([OK + b"\r\n" + b"x" * 5001], "too large", False),
    ([OK + b"Content-Length: 4\r\n\r\nabc"], "half body", True),
    ([CHUNKED + b"3\r\nabc\r\n"], "half body", True),
    ([CHUNKED + b"zz\r\n"], "protocol", False),
    ([CHUNKED + b"fffffffffffffffff\r\n"], "protocol", False),
    ([OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"], "protocol", False),
    ([b"HTTP/1.1 2000 OK\r\n" + THREE], "protocol", False),
    ([b"SSH-2.0-OpenSSH\r\n"], "protocol", False),
    ([OK + b"X: " + b"x" * 3000 + b"\r\n" + THREE], "protocol", False),
    ([OK + b"X: ", *(b"x" * 1000 for _ in range(4))], "protocol", False),
    ([OK + b"".join(b"X-%d: 1\r\n" % number for number in range(1001)) + THREE], "protocol", False),
    ([OK + b"X : \0\r\n" + THREE], "protocol", False),
    ([OK + b"Content-Length: 3, 4\r\n\r\nabcd"], "protocol", False),
    ([OK + b"Content-Length: three\r\n\r\nabc"], "protocol", False),
    ([OK + b"Content-Length: 99999999999999999999999\r\n\r\n"], "protocol", False),
    ([CHUNKED + b"3 g\r\nabc\r\n0\r\n\r\n"], "protocol", False),
    ([OK + b"X: half a hea"], "reset", True),
    ([], "reset", True),
]


@pytest.mark.parametrize(("parts", "error", "retryable"), BAD)
async def test_a_broken_response(fetch: Fetch, parts: list[bytes], error: str, retryable: bool) -> None:
    async with Replaying(*parts, close=True) as server:
        with pytest.raises(FetchError) as caught:
            await fetch(Request(f"{server.url}/"))
    assert (caught.value.kind, caught.value.retryable, caught.value.contacted) == (error, retryable, True)
    assert "\n" not in str(caught.value)


ODD = [
    # what the server sends before it closes the connection, and the body
    ([CHUNKED[:-2] + b"Content-Length: 3\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"], b"abc"),
    ([OK + b"Content-Length: 9\r\n" + CHUNKED[len(OK) :] + b"3\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"], b"abc"),
    ([OK + b"Content-Length: 3\r\n" + THREE], b"abc"),
    ([OK + b"Content-Length: 3, 03\r\n\r\nabc"], b"abc"),
    ([OK + b"Server: a\rb\r\n" + THREE], b"abc"),
    ([OK + b"Content-Type : text/html\r\n" + THREE], b"abc"),
    ([OK + b"no colon\r\n" + THREE], b"abc"),
    ([OK + b"two words: x\r\n" + THREE], b"abc"),
    ([b"HTTP/1.1  200  OK\r\n" + THREE], b"abc"),
    ([CHUNKED + b"3\nabc\n2\nde\n0\n\n"], b"abcde"),
    ([b"HTTP/1.1 100 Continue\r\nX : 1\r\n\r\n" + OK + THREE], b"abc"),
]


@pytest.mark.parametrize(("parts", "body"), ODD)
@pytest.mark.parametrize("split", [False, True], ids=["at once", "byte by byte"])
async def test_an_odd_response_is_read_and_its_connection_closed(parts: list[bytes], body: bytes, split: bool) -> None:
    fetcher = HttpFetcher(HttpSettings(max_body_bytes=5000, max_header_bytes=3000, read_timeout=5), "t")
    pieces = [b"".join(parts)[at : at + 1] for at in range(len(b"".join(parts)))] if split else parts
    async with Replaying(*pieces) as server:
        for number in (1, 2):
            response = await fetcher.fetch(Request(f"{server.url}/"))
            assert (response.status, response.body) == (200, body)
            assert response.flags[0].startswith("odd HTTP: ")
            assert server.connections == number
    await fetcher.close()


@pytest.mark.parametrize(
    ("sent", "status", "location"),
    [
        (b"HTTP/1.1 301 Moved\r\nLocation: /x\r\n", 301, "/x"),
        (b"HTTP/1.1 204 No Content\r\n", 204, None),
        (b"HTTP/1.0 200 OK\n", 200, None),
    ],
)
async def test_headers_without_an_end(sent: bytes, status: int, location: str | None) -> None:
    """The connection must end after a whole line."""
    fetcher = HttpFetcher(HttpSettings(read_timeout=5), "t")
    async with Replaying(sent[:9], sent[9:], close=True) as server:
        response = await fetcher.fetch(Request(f"{server.url}/"))
    await fetcher.close()
    assert (response.status, response.body, response.headers.get("Location")) == (status, b"", location)
    assert response.flags == ("odd HTTP: the headers have no end",)


async def test_an_odd_response_to_head() -> None:
    fetcher = HttpFetcher(HttpSettings(read_timeout=5), "t")
    async with Replaying(OK + b"A : 1\r\nContent-Length: 9\r\n\r\n") as server:
        response = await fetcher.fetch(Request(f"{server.url}/", method="HEAD"))
    await fetcher.close()
    assert (response.status, response.body, response.headers["A"]) == (200, b"", "1")


async def test_many_headers_are_no_problem() -> None:
    fetcher = HttpFetcher(HttpSettings(max_header_bytes=3000), "t")
    async with Replaying(OK + b"".join(b"X-%d: 1\r\n" % number for number in range(900)) + THREE) as server:
        response = await fetcher.fetch(Request(f"{server.url}/"))
    await fetcher.close()
    assert (response.body, response.headers["X-899"], response.flags) == (b"abc", "1", ())


async def test_compressed_transfer() -> None:
    fetcher = HttpFetcher(HttpSettings(read_timeout=5), "t")
    packed = gzip.compress(b"abc")
    head = OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n"
    async with Replaying(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(packed), packed)) as server:
        assert (await fetcher.fetch(Request(f"{server.url}/"))).body == b"abc"
    await fetcher.close()


@pytest.mark.parametrize("coding", ["none", "utf-8", "binary", "foo", "gzip, foo"])
async def test_a_body_with_an_unknown_encoding_stays_as_it_is(fetch: Fetch, coding: str) -> None:
    async with Replaying(OK + b"Content-Encoding: %s\r\n" % coding.encode() + THREE) as server:
        response = await fetch(Request(f"{server.url}/"))
    name = coding.rpartition(" ")[2]
    assert (response.body, tuple(response.flags)) == (b"abc", (f"unknown content encoding {name!r}",))


async def test_of_a_truncated_body_what_came_is_kept(fetch: Fetch) -> None:
    whole = bytes(range(256)) * 10
    packed = gzip.compress(whole)[:-20]
    async with Replaying(
        OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(packed), packed)
    ) as server:
        response = await fetch(Request(f"{server.url}/"))
    assert response.body
    assert whole.startswith(response.body)
    assert tuple(response.flags) == ("truncated gzip",)


ENDLESS = [
    ([CHUNKED, *(b"1;" + b"e" * 1000 for _ in range(200))], "protocol"),  # a chunk that never comes
    ([CHUNKED + b"0\r\n", *(b"X-Trailer: 1\r\n" * 20 for _ in range(60))], "protocol"),
    ([OK, *(b"X-%d: %s\r\n" % (number, b"x" * 2900) for number in range(20))], "protocol"),
    ([b"HTTP/1.1 100 Continue\r\n\r\n" * 100], "protocol"),
    ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], "protocol"),
]


@pytest.mark.parametrize(("parts", "error"), ENDLESS)
async def test_what_never_becomes_a_response(parts: list[bytes], error: str) -> None:
    fetcher = HttpFetcher(HttpSettings(max_body_bytes=5000, max_header_bytes=3000, read_timeout=5), "t")
    async with Replaying(*parts) as server:
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch(Request(f"{server.url}/"))
        await asyncio.wait_for(server.closed.wait(), 5)
    await fetcher.close()
    assert caught.value.kind == error


async def test_headers_arrive_as_they_are(fetch: Fetch) -> None:
    lines = b"Set-Cookie: a=1\r\nset-cookie: b=2\r\nX-Bytes: \xff\xc3\xbc \r\nX-Empty:\r\n"
    async with Replaying(OK + lines + THREE) as server:
        response = await fetch(Request(f"{server.url}/"))
    assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert response.headers["x-bytes"].encode("utf-8", "surrogateescape") == b"\xff\xc3\xbc"
    assert response.headers["X-Empty"] == ""


# -- what is sent


@pytest.mark.parametrize(
    "path", ["/", "/a%20b?c=%2F%7C&d=%C3%BC;e", "/a//b/'(x)*,;=:@!$&~", "/?q='%22%5B]", "/%7Bx%7D?{}"]
)
async def test_urls_are_sent_as_they_are(fetch: Fetch, path: str) -> None:
    async with Replaying(OK + THREE) as server:
        request = Request(server.url + path)
        await fetch(request)
    sent = server.heard[0].split(b" ")[1].decode()
    assert server.url + sent == request.url


async def test_headers_are_sent_in_their_order_and_case(fetch: Fetch) -> None:
    headers = {"x-lower": "1", "X-UPPER": "ü", "accept": "text/x"}
    async with Replaying(OK + THREE) as server:
        await fetch(Request(f"{server.url}/", headers=headers))
        await fetch(Request(f"{server.url}/", headers={"Host": "other.test"}))
    lines = server.heard[0].split(b"\r\n")
    assert lines[:2] == [b"GET / HTTP/1.1", b"Host: " + server.url[7:].encode()]
    assert [line for line in lines if line[:1] in b"xX"][:2] == [b"x-lower: 1", "X-UPPER: ü".encode()]
    assert sum(line.lower().startswith(b"accept:") for line in lines) == 1
    assert server.heard[1].count(b"ost: ") == 1
    assert b"Host: other.test\r\n" in server.heard[1]


@pytest.mark.parametrize(
    ("method", "body", "present", "absent"),
    [
        ("POST", b"abc", [b"Content-Length: 3"], [b"Content-Type"]),
        ("POST", b"", [b"Content-Length: 0"], [b"Transfer-Encoding"]),
        ("GET", b"", [], [b"Content-Length", b"Content-Type", b"Transfer-Encoding"]),
        ("DELETE", b"x" * 200_000, [b"Content-Length: 200000"], [b"Transfer-Encoding"]),
    ],
)
async def test_bodies(fetch: Fetch, method: str, body: bytes, present: list[bytes], absent: list[bytes]) -> None:
    async with Replaying(OK + THREE) as server:
        await fetch(Request(f"{server.url}/", method=method, body=body))
    head, _, sent = server.heard[0].partition(b"\r\n\r\n")
    assert head.startswith(method.encode() + b" / ")
    assert sent == body
    assert all(line in head for line in present)
    assert not any(line in head for line in absent)


async def test_a_user_in_the_url(fetch: Fetch) -> None:
    async with Replaying(OK + THREE) as server:
        await fetch(Request(server.url.replace("//", "//ann:s%20x@") + "/"))
    assert b"Authorization: Basic YW5uOnMgeA==\r\n" in server.heard[0]
    assert b"ann" not in server.heard[0]


@pytest.mark.parametrize("header", [("Cookie", "a\r\nX-Injected: 1"), ("A: b\r\nX-Injected", "1")])
async def test_a_line_break_in_a_header_is_not_sent(fetch: Fetch, header: tuple[str, str]) -> None:
    """A request refuses it. A layer could still put one there."""
    async with Replaying(OK + THREE) as server:
        request = Request(f"{server.url}/")
        request.headers = dict([header])
        with pytest.raises(FetchError) as caught:
            await fetch(request)
    assert (caught.value.kind, caught.value.contacted) == ("request", False)
    assert server.heard == []


# -- connections


async def test_a_head_request(fetch: Fetch) -> None:
    async with Replaying(OK + b"Content-Length: 99999\r\n\r\n") as server:
        for _ in range(2):
            response = await fetch(Request(f"{server.url}/", method="HEAD"))
            assert (response.status, response.body, response.headers["Content-Length"]) == (200, b"", "99999")


async def test_bytes_that_nobody_asked_for_are_no_response(fetch: Fetch) -> None:
    """A second response behind the first one is not the response to the next request."""
    async with Replaying(OK + THREE + OK + b"Content-Length: 6\r\n\r\npoison") as server:
        for _ in range(3):
            assert (await fetch(Request(f"{server.url}/"))).body == b"abc"
        assert server.connections == 3


async def test_bytes_that_arrive_later_close_the_connection() -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    async with Replaying(OK + THREE) as server:
        await fetcher.fetch(Request(f"{server.url}/"))
        server.writers[0].write(OK + b"Content-Length: 6\r\n\r\npoison")
        await asyncio.wait_for(server.closed.wait(), 5)
        assert (await fetcher.fetch(Request(f"{server.url}/"))).body == b"abc"
        assert server.connections == 2
    await fetcher.close()


class Forgetful(Replaying):
    """Closes each connection when its second request arrives."""

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if len(self.heard) % 2:
            await super()._answer(writer)
        else:
            writer.transport.abort()


async def test_a_request_on_a_stale_connection_is_repeated_if_that_is_safe(fetch: Fetch) -> None:
    async with Forgetful(OK + THREE) as server:
        for _ in range(2):
            assert (await fetch(Request(f"{server.url}/"))).body == b"abc"
        assert len(server.heard) == 3
    async with Forgetful(OK + THREE) as server:
        await fetch(Request(f"{server.url}/", method="POST", body=b"1"))
        with pytest.raises(FetchError) as caught:
            await fetch(Request(f"{server.url}/", method="POST", body=b"2"))
        assert (caught.value.kind, len(server.heard)) == ("reset", 2)


async def test_a_cancelled_request_closes_its_connection(fetch: Fetch) -> None:
    async with Replaying(OK + b"Content-Length: 9\r\n\r\nabc") as server:
        task = asyncio.ensure_future(fetch(Request(f"{server.url}/")))
        async with asyncio.timeout(5):
            while not server.heard:
                await asyncio.sleep(0.01)
            task.cancel()
            await server.closed.wait()
    assert task.cancelled()


async def test_closing_the_fetcher_ends_its_requests() -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    async with Replaying() as server:
        task = asyncio.ensure_future(fetcher.fetch(Request(f"{server.url}/")))
        async with asyncio.timeout(5):
            while not server.heard:
                await asyncio.sleep(0.01)
            await fetcher.close()
            with pytest.raises(FetchError):
                await task
            await server.closed.wait()


async def test_idle_connections_are_closed_after_a_while() -> None:
    fetcher = HttpFetcher(HttpSettings(keep_alive_seconds=0.1), "t")
    async with Replaying(OK + THREE) as server:
        await asyncio.gather(*(fetcher.fetch(Request(f"{server.url}/")) for _ in range(3)))
        async with asyncio.timeout(5):
            while fetcher.idle_connections:
                await asyncio.sleep(0.02)
            await server.closed.wait()
    await fetcher.close()


async def test_idle_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_fetcher, "_MAX_IDLE", 3)
    fetcher = HttpFetcher(HttpSettings(), "t")
    async with Replaying(OK + THREE) as server:
        port = server.url.rpartition(":")[2]
        await asyncio.gather(*(fetcher.fetch(Request(f"http://127.0.0.1:{port}/")) for _ in range(8)))
        assert fetcher.idle_connections == 3
    await fetcher.close()


async def test_with_many_idle_connections_a_host_keeps_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host never loses its only connection to another one that has several."""
    monkeypatch.setattr(http_fetcher, "_MANY_IDLE", 2)
    fetcher = HttpFetcher(HttpSettings(), "t")
    async with Replaying(OK + THREE) as busy, Replaying(OK + THREE) as second, Replaying(OK + THREE) as third:
        await asyncio.gather(*(fetcher.fetch(Request(f"{busy.url}/")) for _ in range(8)))
        assert fetcher.idle_connections == 2
        for _ in range(2):
            for server in (second, third, busy):
                await fetcher.fetch(Request(f"{server.url}/"))
        assert fetcher.idle_connections == 3
        assert (busy.connections, second.connections, third.connections) == (8, 1, 1)
    await fetcher.close()


async def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by requests at the same time."""
    fetcher = HttpFetcher(HttpSettings(keep_alive_seconds=0), "t")
    found = []
    ask = CaresResolver.ask

    def count(self: CaresResolver, host: str) -> object:
        found.append(host)
        return ask(self, host)

    monkeypatch.setattr(CaresResolver, "ask", count)
    async with Replaying(OK + THREE) as server:
        port = server.url.rpartition(":")[2]
        await asyncio.gather(*(fetcher.fetch(Request(f"http://localhost:{port}/")) for _ in range(5)))
        await fetcher.fetch(Request(f"http://localhost:{port}/"))
        assert server.connections == 6
    await fetcher.close()
    assert found.count("localhost") == 1


async def test_bodies_are_not_kept_with_idle_connections() -> None:
    """Hundreds of connections can be idle, and each body can have many megabytes."""
    fetcher = HttpFetcher(HttpSettings(), "t")
    size = 1 << 20
    async with Replaying(OK + b"Content-Length: %d\r\n\r\n" % size + b"x" * size) as server:
        tracemalloc.start()
        try:
            responses = await asyncio.gather(*(fetcher.fetch(Request(f"{server.url}/")) for _ in range(4)))
            assert {len(response.body) for response in responses} == {size}
            del responses
            await asyncio.sleep(0)  # the event loop drops its own references
            gc.collect()
            assert fetcher.idle_connections == 4
            kept = sum(trace.size for trace in tracemalloc.take_snapshot().traces if trace.size >= size)
        finally:
            tracemalloc.stop()
    await fetcher.close()
    assert kept == 0


async def test_a_closed_connection_leaves_no_cycle() -> None:
    """A crawl collects garbage rarely."""
    fetcher = HttpFetcher(HttpSettings(), "t")
    gc.collect()
    gc.disable()
    try:
        async with Replaying(OK + b"Connection: close\r\n" + THREE, close=True) as server:
            for _ in range(5):
                await fetcher.fetch(Request(f"{server.url}/"))
            await asyncio.sleep(0.05)
            assert [each for each in gc.get_objects() if type(each) is HttpConnection] == []
    finally:
        gc.enable()
    await fetcher.close()


async def test_closing_the_fetcher_while_a_request_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    connecting, go_on = asyncio.Event(), asyncio.Event()
    connect_to = Connector.connect_to

    async def connect_later(self: Connector, found: list[ResolvedAddress], port: int) -> socket.socket:
        connecting.set()
        await go_on.wait()
        return await connect_to(self, found, port)

    monkeypatch.setattr(Connector, "connect_to", connect_later)
    async with Replaying(OK + THREE) as server:
        task = asyncio.ensure_future(fetcher.fetch(Request(f"{server.url}/")))
        await connecting.wait()
        await fetcher.close()
        go_on.set()
        with pytest.raises(FetchError) as caught:
            await task
        assert caught.value.kind == "reset"
        assert (server.heard, fetcher.idle_connections) == ([], 0)


class Hasty(Replaying):
    """Answers before it has the body, which it never reads."""

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        self.heard.append(await reader.readuntil(b"\r\n\r\n"))
        await self._answer(writer)


async def test_a_response_before_the_end_of_the_body_closes_the_connection() -> None:
    """The server could take the rest of the body for the next request."""
    fetcher = HttpFetcher(HttpSettings(), "t")
    body = b"GET /poison HTTP/1.1\r\nHost: x\r\n\r\n" * 500_000
    async with Hasty(b"HTTP/1.1 413 Too Large\r\n" + THREE) as server:
        for _ in range(2):
            assert (await fetcher.fetch(Request(f"{server.url}/", method="POST", body=body))).status == 413
        assert server.connections == 2
    await fetcher.close()


class SlowReader(Replaying):
    """Reads a long request in steps. ``pause``: seconds before each of them."""

    def __init__(self, pause: float) -> None:
        super().__init__(OK + THREE)
        self._pause = pause

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            left = next(int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:")
            while left:
                await asyncio.sleep(self._pause)
                left -= len(await reader.readexactly(min(left, 1 << 20)))
            await self._answer(writer)


async def test_the_time_of_an_upload_is_not_that_of_the_response() -> None:
    fetcher = HttpFetcher(HttpSettings(read_timeout=0.5), "t")
    async with SlowReader(0.08) as server:
        began = asyncio.get_running_loop().time()
        response = await fetcher.fetch(Request(f"{server.url}/", method="POST", body=bytes(25 << 20)))
        assert response.body == b"abc"
        assert asyncio.get_running_loop().time() - began > 1
    await fetcher.close()


async def test_a_server_that_does_not_read_an_upload_times_out() -> None:
    fetcher = HttpFetcher(HttpSettings(read_timeout=0.3), "t")
    async with SlowReader(60) as server:
        with pytest.raises(FetchError, match=r"did not read the request for 0.3 s \(http.read_timeout\)"):
            await fetcher.fetch(Request(f"{server.url}/", method="POST", body=bytes(25 << 20)))
    await fetcher.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_length_of_the_body_is_its_own(method: str) -> None:
    """Headers that were copied from a browser have another length: the server would wait, or take a part of the next
    request for a body."""
    fetcher = HttpFetcher(HttpSettings(read_timeout=5), "t")
    async with Replaying(OK + THREE) as server:
        headers = {"content-length": "7", "Transfer-Encoding": "chunked", "X-Kept": "1"}
        body = b"abc" if method == "POST" else b""
        for _ in range(2):
            await fetcher.fetch(Request(f"{server.url}/", method=method, body=body, headers=headers))
    await fetcher.close()
    head = server.heard[1].lower()
    assert head.count(b"content-length") == (method == "POST")
    assert b"transfer-encoding" not in head
    assert b"x-kept: 1\r\n" in head
    assert server.connections == 1


async def test_an_interim_response_leaves_nothing_behind() -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    exchanges: list[Exchange] = []
    token = captured.set(exchanges)
    async with Replaying(b"HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\nHTTP/1.1 200\r\n" + THREE) as server:
        await fetcher.fetch(Request(f"{server.url}/"))
    captured.reset(token)
    await fetcher.close()
    assert (exchanges[0].status, exchanges[0].reason, exchanges[0].received) == (200, "", [(b"Content-Length", b"3")])


async def test_an_ipv6_address() -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    server = await asyncio.start_server(Replaying(OK + THREE)._converse, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    for _ in range(2):
        assert (await fetcher.fetch(Request(f"http://[::1]:{port}/"))).body == b"abc"
    await fetcher.close()
    server.close()


async def test_a_cancelled_handshake_closes_its_connection() -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    began, ended = asyncio.Event(), asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        began.set()
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        ended.set()

    server = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    task = asyncio.ensure_future(fetcher.fetch(Request(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")))
    async with asyncio.timeout(10):
        await began.wait()
        task.cancel()
        await ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fetcher.close()
    server.close()


async def test_closing_the_fetcher_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails. It is not cancelled: nobody cancelled its task."""
    fetcher, asked = HttpFetcher(HttpSettings(), "t"), asyncio.Event()

    def wait(*_: object) -> asyncio.Future[object]:
        asked.set()
        return asyncio.Future()

    monkeypatch.setattr(CaresResolver, "ask", wait)
    task = asyncio.ensure_future(fetcher.fetch(Request("http://slow.example/")))
    await asked.wait()
    await fetcher.close()
    with pytest.raises(FetchError) as caught:
        await asyncio.wait_for(task, 5)
    assert (caught.value.kind, caught.value.retryable) == ("reset", True)


async def test_a_timeout_of_the_system_is_no_timeout_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")

    async def give_up(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connect call failed ('127.0.0.1', 9)")

    monkeypatch.setattr(Connector, "connect_to", give_up)
    with pytest.raises(FetchError, match=r"no connection to 127.0.0.1:9: Connection timed out") as caught:
        await fetcher.fetch(Request("http://127.0.0.1:9/"))
    assert (caught.value.kind, caught.value.retryable) == ("connect", True)
    await fetcher.close()


@pytest.mark.parametrize("guard", [None, AddressGuard(["127.0.0.1", "127.0.0.2"])])
async def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch, guard: AddressGuard | None) -> None:
    """The address that refuses the connection comes first, and the one that the guard refuses is never tried."""
    fetcher = HttpFetcher(HttpSettings(), "t", guard)
    refused: list[str] = []

    def ask(*_: object) -> object:
        answer = asyncio.get_running_loop().create_future()
        answer.set_result([ResolvedAddress(f"127.0.0.{last}", socket.AF_INET, 6) for last in (2, 3, 1)])
        return answer

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refused.append("127.0.0.3")
        writer.transport.abort()

    monkeypatch.setattr(CaresResolver, "ask", ask)
    async with Replaying(OK + THREE) as server:
        port = int(server.url.rpartition(":")[2])
        trap = await asyncio.start_server(converse, "127.0.0.3", port) if guard else None
        try:
            assert (await fetcher.fetch(Request(f"http://several.example:{port}/"))).body == b"abc"
        finally:
            if trap is not None:
                trap.close()  # uvloop waits for it when the loop is closed
    await fetcher.close()
    assert refused == []


# -- the URL


_LEGAL = "!$%&'()*+,-./0123456789:;=?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz|~"
_QUERY_LEGAL = _LEGAL + "{}^`\\"
_TEXT = st.lists(
    st.sampled_from([*map(chr, range(0x20, 0x7F)), "%3A", "%2f", "%7E", "%zz", "%C3%a9", "%2B", "é", "漢", "\x7f"]),
    max_size=12,
).map("".join)


def _as_written(text: str, legal: str) -> str:
    return "".join(each if each in legal else "".join(f"%{byte:02X}" for byte in each.encode()) for each in text)


@pytest.mark.parametrize("through", ["directly", "a proxy"])
async def test_a_url_is_sent_byte_for_byte(through: str) -> None:
    """Only what a URL must not contain is quoted, and nothing is unquoted."""
    async with Replaying(OK + THREE) as server:
        proxy = server.url if through == "a proxy" else None
        fetcher = HttpFetcher(HttpSettings(proxy=proxy), "t")
        loop = asyncio.get_running_loop()

        @settings(max_examples=200, deadline=None, database=None)
        @given(_TEXT, st.none() | _TEXT)
        @example("%7e%3A%40%28%zz%", "u=http%3A%2F%2Fx%2Fy&s=%7E%27")
        @example("[a]|b", "{c}|^`\\'[d]")
        @example("a", "")
        def check(path: str, query: str | None) -> None:
            path = "/p" + path.translate(str.maketrans("", "", "?#\\")).replace("/.", "/").replace("/%2", "/")
            query = query if query is None else query.replace("#", "").rstrip(" ") + "."[: query[-1:] == " "]
            url = f"{server.url}{path.rstrip(' ') if query is None else path}{'' if query is None else '?' + query}"
            sent = url[len(server.url) :]
            expected = _as_written(sent.partition("?")[0], _LEGAL)
            if query is not None:
                expected += "?" + _as_written(query, _QUERY_LEGAL)
            response = asyncio.run_coroutine_threadsafe(fetcher.fetch(Request(url)), loop).result()
            target = server.heard[-1].split(b" ")[1].decode()
            assert target == (server.url + expected if proxy else expected)
            assert response.url == Request(url).url == server.url + expected

        await asyncio.to_thread(check)
        await fetcher.close()
