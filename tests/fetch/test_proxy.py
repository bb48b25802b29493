"""The HTTP client behind proxies: who gets which password, which connections are shared, and who is to blame."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shoal import Request
from shoal.config import HttpSettings
from shoal.errors import FetchError, ProxyError
from shoal.fetch.http_fetcher import HttpFetcher
from shoal.http.exchange import Exchange, captured
from tests.support.loops import event_loop_policy
from tests.support.servers import MisbehavingServer, ProxyServer, StreamServer
from tests.support.socks_server import SocksServer

__all__ = ["event_loop_policy"]

PASSWORD = "p@ss:w/rd é"
QUOTED = "ann:p%40ss%3Aw%2Frd%20%C3%A9"


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture(params=["http", "https"])
async def site(request: pytest.FixtureRequest, tls: ssl.SSLContext) -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer(tls=tls if request.param == "https" else None) as server:
        yield server


@pytest.fixture
async def fetcher() -> AsyncIterator[HttpFetcher]:
    fetcher = HttpFetcher(HttpSettings(verify_tls=False, connect_timeout=0.5), "t")
    yield fetcher
    await fetcher.close()


@pytest.mark.parametrize("scheme", ["http", "https", "socks5", "socks5h"])
async def test_a_page_through_every_kind_of_proxy(
    site: MisbehavingServer, fetcher: HttpFetcher, tls: ssl.SSLContext, scheme: str
) -> None:
    """With TLS to the proxy, to the site, or to both, the second one inside the first."""
    proxy: ProxyServer | SocksServer = SocksServer({"ann": PASSWORD})
    if not scheme.startswith("socks"):
        proxy = ProxyServer(login=f"ann:{PASSWORD}", tls=tls if scheme == "https" else None)
    exchanges: list[Exchange] = []
    captured.set(exchanges)
    async with proxy:
        address = f"{scheme}://{QUOTED}@{proxy.url.partition('://')[2]}"
        for number in range(3):
            response = await fetcher.fetch(Request(f"{site.url}/leaf/{number}", proxy=address))
            assert response.body == b"<h1>Leaf %d</h1>" % number
        large = await fetcher.fetch(Request(f"{site.url}/echo", method="POST", body=b"x" * 300_000, proxy=address))
        assert len(large.json()["body"]) == 400_000  # in base64
    assert "authorization" not in large.text.lower()
    assert {exchange.address for exchange in exchanges} == {""}  # that would be the proxy's
    assert site.connections == (4 if scheme.startswith("http") and site.url.startswith("http:") else 1)


async def test_users_of_a_proxy_share_no_connection(site: MisbehavingServer, fetcher: HttpFetcher) -> None:
    async with SocksServer({"ann": "a", "bob": "b"}) as proxy:
        for number in range(6):
            user = "ann" if number % 2 else "bob"
            await fetcher.fetch(Request(f"{site.url}/leaf/{number}", proxy=proxy.address(user)))
        assert sorted(connect.user for connect in proxy.connects) == ["ann", "bob"]
        assert fetcher.idle_connections == 2
        await fetcher.fetch(Request(f"{site.url}/leaf/1"))
    assert site.connections == 3


async def test_users_of_a_proxy_share_no_tls_session(tls: ssl.SSLContext, fetcher: HttpFetcher) -> None:
    """A session that is resumed would show the site that two identities are one."""
    resumed: list[bool] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        resumed.append(writer.get_extra_info("ssl_object").session_reused)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc")
        writer.close()

    async with SocksServer({"ann": "a", "bob": "b"}) as proxy:
        server = await asyncio.start_server(converse, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        for user in ("ann", "bob", "bob", "ann"):
            await fetcher.fetch(Request(f"https://127.0.0.1:{port}/", proxy=proxy.address(user)))
        server.close()
    assert resumed == [False, False, True, True]


class Scripted(StreamServer):
    """Reads a request and sends these bytes. It closes the connection, or waits until the client does."""

    def __init__(self, sent: bytes, *, closes: bool = True) -> None:
        super().__init__()
        self._sent = sent
        self._closes = closes

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(3)
        writer.write(self._sent)
        await writer.drain()
        if not self._closes:
            while await reader.read(1000):
                pass


ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
CONNECTED = b"\x05\x00\x05\x00\x00\x01" + bytes(6)


@pytest.mark.parametrize(
    ("url", "scheme", "sent", "error", "retryable", "message"),
    [
        ("https", "http", b"", FetchError, True, "the proxy closed the connection"),
        ("https", "http", b"SSH-2.0-OpenSSH\r\n\r\n", ProxyError, False, "it does not speak HTTP"),
        ("https", "http", b"HTTP/1.1 100 Continue\r\n\r\n" + ESTABLISHED + b"more", FetchError, True, ""),
        ("https", "http", ESTABLISHED, FetchError, True, ""),
        ("https", "http", b"HTTP/1.1 407 No\r\n\r\n", ProxyError, False, "Check its user and password"),
        ("http", "http", b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n", ProxyError, False, "it answered 407 No"),
        ("https", "http", b"HTTP/1.1 503 Busy\r\n\r\n", FetchError, True, "it answered 503 Busy"),
        ("http", "http", b"", FetchError, True, "closed the connection: Server disconnected"),
        ("http", "socks5", b"HTTP/1.1 400 Bad Request\r\n\r\n", ProxyError, False, "it does not speak SOCKS5"),
        ("http", "socks5", b"\x05\xff", ProxyError, False, "it wants a password"),
        ("http", "socks5", b"\x05\x00\x05\x04\x00\x01", FetchError, True, ": host unreachable"),
        ("http", "socks5", CONNECTED + b"more", FetchError, True, "the proxy sent more than an answer"),
    ],
)
async def test_what_a_proxy_may_answer(
    fetcher: HttpFetcher, url: str, scheme: str, sent: bytes, error: type[FetchError], retryable: bool, message: str
) -> None:
    async with Scripted(sent) as proxy:
        with pytest.raises(FetchError) as caught:
            await fetcher.fetch(Request(f"{url}://shop.test/", proxy=proxy.url.replace("http", scheme, 1)))
    assert (type(caught.value), caught.value.retryable) == (error, retryable)
    assert message in str(caught.value)
    assert "shop.test" in str(caught.value)
    assert fetcher.idle_connections == 0


@pytest.mark.parametrize(
    ("url", "proxy", "sent", "error"),
    [
        ("http://shop.test/", "https", b"", ProxyError),  # no TLS handshake with the proxy
        ("https://shop.test/", "https", b"", ProxyError),
        ("https://shop.test/", "http", b"", FetchError),  # it may wait for the host
        ("https://shop.test/", "http", ESTABLISHED, FetchError),
        ("http://shop.test/", "socks5", b"\x05\x00", FetchError),
    ],
)
async def test_who_did_not_answer_in_time(
    fetcher: HttpFetcher, url: str, proxy: str, sent: bytes, error: type[FetchError]
) -> None:
    async with Scripted(sent, closes=False) as server:
        with pytest.raises(FetchError, match=r"within 0.5 s \(http.connect_timeout\)") as caught:
            await fetcher.fetch(Request(url, proxy=server.url.replace("http", proxy, 1)))
    assert (type(caught.value), caught.value.retryable) == (error, True)
    assert ("shop.test (through the proxy)" in str(caught.value)) is (error is FetchError)


@pytest.mark.parametrize("proxy", ["socks4://h:1", "h:1", "http://", "http://h:99999", "http://[::1"])
async def test_a_proxy_that_is_no_proxy(proxy: str) -> None:
    fetcher = HttpFetcher(HttpSettings(), "t")
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(Request("http://shop.test/", proxy=proxy))
    assert (caught.value.kind, caught.value.retryable, caught.value.contacted) == ("proxy", False, False)
    await fetcher.close()


@pytest.mark.parametrize("make", [lambda url: {"Proxy-Authorization": url}, lambda url: {"X": "1"}])
async def test_the_password_of_the_proxy_is_a_default(
    fetcher: HttpFetcher, make: Callable[[str], dict[str, str]]
) -> None:
    heard: list[bytes] = []

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(converse, "127.0.0.1", 0) as server:
        proxy = f"http://ann:a@127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await fetcher.fetch(Request("http://shop.test/a?b", proxy=proxy, headers=make("Bearer x")))
    assert heard[0].startswith(b"GET http://shop.test/a?b HTTP/1.1\r\nHost: shop.test\r\n")
    assert heard[0].lower().count(b"proxy-authorization: ") == 1
    assert (b"Bearer x" in heard[0]) is (b"Basic" not in heard[0])
