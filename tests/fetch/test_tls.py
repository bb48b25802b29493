"""TLS connections of the HTTP client: sessions that are resumed, large messages, and every way they can end."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from shoal import Request
from shoal.config import HttpSettings
from shoal.errors import FetchError
from shoal.fetch import connecting, http_fetcher
from shoal.fetch.http_fetcher import HttpFetcher
from tests.support.fakes import eventually
from tests.support.loops import event_loop_policy

__all__ = ["event_loop_policy"]

BODY = bytes(range(256)) * 8_000  # larger than every buffer on the way


class SecureServer:
    """An HTTPS server that answers every request with the same body, and counts handshakes and resumed sessions."""

    def __init__(
        self, certificate: Path, *, newest: bool = True, close: bool = False, cut: bool = False, delay: float = 0.0
    ) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        if not newest:
            self._context.maximum_version = ssl.TLSVersion.TLSv1_2
        self._close = close
        self._cut = cut
        self._delay = delay
        self.resumed: list[bool] = []
        self.bodies: list[bytes] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", 0, ssl=self._context)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.resumed.append(writer.get_extra_info("ssl_object").session_reused)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"), 0)
                self.bodies.append(await reader.readexactly(length))
                await asyncio.sleep(self._delay)
                if self._close:
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY)
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY))
                writer.write(BODY[:100_000] if self._cut else BODY)
                await writer.drain()
                if self._cut:
                    writer.transport.abort()
        writer.close()


@pytest.fixture
async def fetcher() -> AsyncIterator[HttpFetcher]:
    fetcher = HttpFetcher(HttpSettings(verify_tls=False, read_timeout=20, connect_timeout=20), "test")
    yield fetcher
    await fetcher.close()


async def test_a_connection_serves_many_requests(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate) as server:
        for _ in range(3):
            assert (await fetcher.fetch(Request(server.url))).body == BODY
    assert server.resumed == [False]


@pytest.mark.parametrize("newest", [True, False], ids=["TLS 1.3", "TLS 1.2"])
async def test_later_connections_resume_the_session(certificate: Path, fetcher: HttpFetcher, newest: bool) -> None:
    async with SecureServer(certificate, newest=newest, delay=0.5) as server:
        await fetcher.fetch(Request(server.url))
        pages = await asyncio.gather(*(fetcher.fetch(Request(server.url)) for _ in range(4)))
        assert [page.body == BODY for page in pages] == 4 * [True]
    assert server.resumed == [False, True, True, True]


async def test_a_fast_server_is_used_over_few_connections(
    certificate: Path, fetcher: HttpFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for a host with connections waits a moment for one of them: a handshake costs more."""
    monkeypatch.setattr(http_fetcher, "_CHECK_AFTER", 60.0)  # a server that is always fast enough, on every machine
    monkeypatch.setattr(http_fetcher, "_MAX_WAITS", 16)
    async with SecureServer(certificate) as server:
        await fetcher.fetch(Request(server.url))
        pages = await asyncio.gather(*(fetcher.fetch(Request(server.url)) for _ in range(33)))
        assert [page.body == BODY for page in pages] == 33 * [True]
    assert len(server.resumed) == 3  # the first one, and one for every 16 requests that would have waited


async def test_a_slow_server_gets_all_requests_at_once(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate, delay=2.0) as server:
        started = asyncio.get_running_loop().time()
        await asyncio.gather(*(fetcher.fetch(Request(server.url)) for _ in range(8)))
        assert asyncio.get_running_loop().time() - started < 2 * 2.0  # no request waited for another one's response
    assert len(server.resumed) == 8


async def test_requests_that_wait_for_a_connection_can_be_cancelled(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate) as server:
        await fetcher.fetch(Request(server.url))
        tasks = [asyncio.create_task(fetcher.fetch(Request(server.url))) for _ in range(12)]
        await asyncio.sleep(0)
        for task in tasks[1::2]:
            task.cancel()
        pages = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(page, asyncio.CancelledError) for page in pages] == 6 * [False, True]
        for _ in range(3):  # no place was lost
            pages = await asyncio.gather(*(fetcher.fetch(Request(server.url)) for _ in range(12)))
            assert {page.status for page in pages} == {200}
    assert not [known for known in fetcher._pool._origins.values() if known.busy or known.waiters]


async def test_requests_go_on_when_the_connections_before_them_fail(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate, cut=True) as server:
        pages = await asyncio.gather(*(fetcher.fetch(Request(server.url)) for _ in range(12)), return_exceptions=True)
        assert {page.kind if isinstance(page, FetchError) else "?" for page in pages} == {"half body"}
        assert len(server.bodies) == 12
    await eventually(lambda: fetcher._pool._origins == {})  # the last connection may not be closed yet


async def test_closing_wakes_requests_that_wait_for_a_connection(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate, delay=30.0) as server:
        tasks = [asyncio.create_task(fetcher.fetch(Request(server.url))) for _ in range(4)]
        while not server.bodies:
            await asyncio.sleep(0.001)
        await fetcher.close()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in ended} == {FetchError}


async def test_a_connection_that_the_server_closes_is_resumed_too(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate, close=True) as server:
        for _ in range(3):
            assert (await fetcher.fetch(Request(server.url))).body == BODY
    assert server.resumed == [False, True, True]


async def test_a_server_that_forgot_the_session_gets_a_full_handshake(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate, close=True) as server:
        await fetcher.fetch(Request(server.url))
        server._server.close()
        await server._server.wait_closed()
        port = int(server.url.rpartition(":")[2].rstrip("/"))
        another = SecureServer(certificate, close=True)
        another._server = await asyncio.start_server(another._converse, "127.0.0.1", port, ssl=another._context)
        assert (await fetcher.fetch(Request(server.url))).body == BODY
        assert (await fetcher.fetch(Request(server.url))).body == BODY
        await another.__aexit__()
    assert another.resumed == [False, True]


async def test_a_large_body_is_sent_whole(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate) as server:
        await fetcher.fetch(Request(server.url, method="POST", body=BODY))
    assert server.bodies == [BODY]


async def test_a_body_that_breaks_off(certificate: Path, fetcher: HttpFetcher) -> None:
    async with SecureServer(certificate, cut=True) as server:
        with pytest.raises(FetchError) as error:
            await fetcher.fetch(Request(server.url))
    assert error.value.kind == "half body"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "connect"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "tls"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "tls"),  # an alert: handshake failure
    ],
    ids=["closes", "plain HTTP", "alert"],
)
async def test_a_server_that_refuses_the_handshake(fetcher: HttpFetcher, answer: bytes, kind: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(FetchError) as error:
            await fetcher.fetch(Request(f"https://127.0.0.1:{port}/"))
    assert error.value.kind == kind


async def test_a_handshake_that_never_ends_is_given_up_and_its_connection_closed() -> None:
    opened, closed = 0, asyncio.Semaphore(0)

    async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        with suppress(ConnectionError):
            while await reader.read(1000):
                pass
        writer.close()
        closed.release()

    fetcher = HttpFetcher(HttpSettings(verify_tls=False, connect_timeout=0.2), "test")
    async with await asyncio.start_server(ignore, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        while not opened:  # on a busy machine the time may be over before there is a connection
            with pytest.raises(FetchError, match="connect_timeout"):
                await fetcher.fetch(Request(f"https://127.0.0.1:{port}/"))
        for _ in range(opened):
            await asyncio.wait_for(closed.acquire(), 20)
    await fetcher.close()


async def test_a_busy_process_gives_up_a_connection_and_closes_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before uvloop 0.23, it closed the socket, and did not tell its owner, who closed it again."""
    shake_hands = connecting.TlsTransport._shake_hands

    def shake_hands_slowly(self: connecting.TlsTransport) -> None:
        shake_hands(self)
        time.sleep(0.7)

    monkeypatch.setattr(connecting.TlsTransport, "_shake_hands", shake_hands_slowly)
    fetcher = HttpFetcher(HttpSettings(verify_tls=False, connect_timeout=0.5), "test")
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(FetchError, match="connect_timeout"):
            await fetcher.fetch(Request(f"https://127.0.0.1:{port}/"))
    await fetcher.close()


async def test_a_certificate_for_another_host_is_refused_although_a_session_exists(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions belong to an origin: a resumed one has no certificate that could be checked."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    fetcher = HttpFetcher(HttpSettings(), "test")
    async with SecureServer(certificate, close=True) as server:
        assert (await fetcher.fetch(Request(server.url))).body == BODY
        with pytest.raises(FetchError) as error:
            await fetcher.fetch(Request(server.url.replace("127.0.0.1", "localhost")))
    assert error.value.kind == "tls"
    assert "certificate of localhost" in str(error.value)
    await fetcher.close()


async def test_sessions_are_limited_in_number(
    certificate: Path, fetcher: HttpFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_MAX_SESSIONS", 1)
    async with SecureServer(certificate, close=True) as first, SecureServer(certificate, close=True) as second:
        for server in (first, second, second, first):
            await fetcher.fetch(Request(server.url))
    assert first.resumed == [False, False]
    assert second.resumed == [False, True]
