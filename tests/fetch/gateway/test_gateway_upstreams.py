"""The ways out of the gateway: directly past the guard, and through proxies with passwords."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shoal.errors import ConfigError, FetchError
from shoal.fetch.browser.gateway import Gateway, Listener
from shoal.fetch.guard import AddressGuard
from tests.fetch.gateway.client import Client, Conversing, Scripted, listening
from tests.support.servers import MisbehavingServer, ProxyServer, Request, answer
from tests.support.socks_server import Connect, SocksServer

SPELLINGS = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7F.1", "0177.0.0.1", "017700000001",
    "localhost", "LOCALHOST", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]",
]  # fmt: skip
LOCAL_NAMES = [
    "127.0.0.1.",
    "localhost.",
    "a.localhost",
    "printer",
    "nas.local",
    "metadata.google.internal",
    "router.home.arpa",
    "x.lan",
]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def failure_of(listener: Listener, host: str, port: int) -> FetchError:
    found = listener.failure(host, port)
    assert found is not None
    return found


# -- directly


@pytest.mark.parametrize("host", SPELLINGS)
async def test_the_guard_decides_about_the_address(site: MisbehavingServer, host: str) -> None:
    url = f"http://{host}:{port_of(site.url)}/leaf/1"
    async with listening(guard=AddressGuard([])) as listener:
        client = await Client.to(listener)
        reply = await client.get(url)
        assert reply.status == 403
        assert b"127" not in reply.body
        assert (await client.connect(url)).status == 403
        failure = failure_of(listener, host.strip("[]"), port_of(site.url))
        client.close()
    assert (failure.kind, failure.retryable, failure.contacted) == ("address", False, False)
    assert str(failure).startswith(f"{host.strip('[]')} is a loopback address, which may not be contacted")
    assert listener.refused == {"address": 2}
    assert site.connections == 0
    assert listener.received == 0


async def test_what_the_guard_allows(site: MisbehavingServer) -> None:
    async with listening(guard=AddressGuard(["127.0.0.0/8"])) as listener:
        client = await Client.to(listener)
        for host in ("127.0.0.1", "localhost", "127.1"):
            reply = await client.get(site.url.replace("127.0.0.1", host) + "/leaf/1")
            assert (reply.status, reply.body) == (200, b"<h1>Leaf 1</h1>")
        client.close()


async def test_a_kept_connection_belongs_to_its_name(site: MisbehavingServer) -> None:
    """The same port of a refused name is refused, whatever connections are open."""
    async with listening(guard=AddressGuard(["127.0.0.1"])) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"{site.url}/leaf/1")).status == 200
        assert (await client.get(site.url.replace("127.0.0.1", "127.0.0.2") + "/leaf/1")).status == 403
        client.close()


async def test_a_name_that_does_not_exist(listener: Listener, client: Client) -> None:
    for _ in range(2):
        assert (await client.get("http://nothing.invalid/")).status == 502
        failure = failure_of(listener, "nothing.invalid", 80)
        assert (failure.kind, failure.retryable, failure.contacted) == ("dns", True, False)
    assert (await client.connect("http://xn--a.invalid:443")).status == 502


async def test_a_failure_is_forgotten_when_the_site_is_back(listener: Listener, client: Client) -> None:
    async with MisbehavingServer() as site:
        port = port_of(site.url)
    assert (await client.get(f"{site.url}/")).status == 502
    assert failure_of(listener, "127.0.0.1", port).kind == "connect"
    async with MisbehavingServer(port) as site:
        assert (await client.get(f"{site.url}/leaf/1")).status == 200
    assert listener.failure("127.0.0.1", port) is None


# -- SOCKS5

PASSWORD = "p@ss:w/rd é"


@pytest.fixture
async def socks() -> AsyncIterator[SocksServer]:
    async with SocksServer({"ann": PASSWORD}) as made:
        yield made


async def test_socks_with_a_password(site: MisbehavingServer, socks: SocksServer) -> None:
    """The proxy resolves the name: it does not exist here."""
    port = port_of(site.url)
    async with listening(socks.address("ann")) as listener:
        client = await Client.to(listener)
        for number in range(2):
            assert (await client.get(f"http://shop.test:{port}/leaf/{number}")).status == 200
        assert (await client.connect(f"http://shop.test:{port}")).status == 200
        client.writer.write(b"GET /leaf/3 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.reply()).body == b"<h1>Leaf 3</h1>"
        client.close()
    assert socks.connects == [Connect("ann", "shop.test", port)] * 2
    assert site.connections == 2


@pytest.mark.parametrize("user", ["", "ann"])
async def test_socks_without_a_password(site: MisbehavingServer, user: str) -> None:
    async with SocksServer() as socks, listening(socks.address(user, scheme="socks5h")) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"{site.url}/leaf/1")).status == 200
        client.close()
        assert socks.connects == [Connect("", "127.0.0.1", port_of(site.url))]


@pytest.mark.parametrize(
    ("host", "message", "retryable"),
    [
        ("shop.test", "the host did not answer the proxy: connection refused", True),
        ("192.0.2.1", "the proxy refused: reply 2", False),
    ],
)
async def test_what_a_socks_proxy_answers(socks: SocksServer, host: str, message: str, retryable: bool) -> None:
    async with listening(socks.address("ann")) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"http://{host}:1/")).status == 502
        failure = failure_of(listener, host, 1)
        client.close()
    assert str(failure) == f"no connection to {host} (through the proxy): {message}"
    assert (failure.kind, failure.retryable, failure.contacted) == ("proxy", retryable, False)


@pytest.mark.parametrize(
    ("user", "password", "message"), [("ann", "wrong", "wrong user or password"), ("", "", "it wants a password")]
)
async def test_a_wrong_password(socks: SocksServer, user: str, password: str, message: str) -> None:
    async with listening(socks.address(user, password=password)) as listener:
        client = await Client.to(listener)
        assert (await client.connect("http://shop.test:80")).status == 502
        failure = failure_of(listener, "shop.test", 80)
        client.close()
    assert message in str(failure)
    assert not failure.retryable
    assert socks.connects == []


@pytest.mark.parametrize(
    "lies",
    [
        b"", b"\x05", b"\x04\x00", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\xff", b"\x05\x02", b"\x05\x00\x05",
        b"\x05\x00\x05\x00\x00\x03\xff", b"\x05\x00\x04\x00\x00\x01", b"\x05\x00\x05\x63\x00\x01" + bytes(6),
        bytes(300),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["get", "connect"])
async def test_a_lying_socks_proxy(lies: bytes, method: str) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(3)
        writer.write(lies)
        await writer.drain()

    async with Conversing(converse) as proxy, listening(proxy.url.replace("http", "socks5")) as listener:
        client = await Client.to(listener)
        assert (await getattr(client, method)("http://shop.test:80")).status == 502
        assert failure_of(listener, "shop.test", 80).kind == "proxy"
        client.close()


@pytest.mark.parametrize("scheme", ["http", "https", "socks5"])
async def test_a_proxy_that_is_down_or_silent(scheme: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(f"{scheme}://user:secret@127.0.0.1:1") as listener:
        client = await Client.to(listener)
        assert (await client.connect("http://shop.test:80")).status == 502
        failure = failure_of(listener, "shop.test", 80)
        assert (failure.kind, failure.retryable) == ("proxy", True)
        assert str(failure) == "no connection to the proxy 127.0.0.1:1: Connection refused"
        client.close()
    async with (
        Conversing(silent) as proxy,
        listening(proxy.url.replace("http", scheme), connect_timeout=0.2) as listener,
    ):
        client = await Client.to(listener)
        assert (await client.connect("http://shop.test:80")).status == 504
        client.close()


# -- HTTP proxies


class PasswordProxy(ProxyServer):
    """Wants a user and a password. `targets` has what was asked for with the right ones."""

    def __init__(self, login: str, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(login=login, tls=tls)
        self.targets: list[str] = []

    async def _forward(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.targets.append(f"{request.method} {request.target}")
        await super()._forward(request, reader, writer)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_an_http_proxy_with_a_password(scheme: str, site: MisbehavingServer, certificate: Path) -> None:
    tls = None
    if scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
    trust = ssl.create_default_context(cafile=certificate)
    async with PasswordProxy(f"ann:{PASSWORD}", tls=tls) as proxy:
        gateway = Gateway(AddressGuard(["127.0.0.0/8"]), tls=trust)
        listener = await gateway.open(proxy.url.replace("://", "://ann:p%40ss%3Aw%2Frd%20%C3%A9@"))
        client = await Client.to(listener)
        reply = await client.get(f"{site.url}/echo")
        assert reply.status == 200
        assert b"uthorization" not in reply.body
        client.close()
        client = await Client.to(listener)
        assert (await client.connect(site.url)).status == 200
        client.writer.write(b"GET /leaf/3 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.reply()).body == b"<h1>Leaf 3</h1>"
        assert await client.ended()
        client.close()
        await gateway.close()
        assert proxy.targets == [f"GET {site.url}/echo", f"CONNECT 127.0.0.1:{port_of(site.url)}"]


async def test_an_http_proxy_with_a_wrong_password(site: MisbehavingServer) -> None:
    async with (
        PasswordProxy("ann:right") as proxy,
        listening(proxy.url.replace("://", "://ann:wrong-secret@")) as listener,
    ):
        client = await Client.to(listener)
        for status in ((await client.get(f"{site.url}/")).status, (await client.connect(site.url)).status):
            assert status == 502
            failure = failure_of(listener, "127.0.0.1", port_of(site.url))
            assert (failure.kind, failure.retryable, failure.contacted) == ("proxy", False, False)
            assert "secret" not in str(failure)
        client.close()
    assert site.connections == 0


async def test_the_certificate_of_a_proxy_is_checked(certificate: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with ProxyServer(tls=tls) as proxy, listening(proxy.url) as listener:
        client = await Client.to(listener)
        assert (await client.connect("http://shop.test:80")).status == 502
        failure = failure_of(listener, "shop.test", 80)
        assert "no secure connection to the proxy" in str(failure)
        assert not failure.retryable
        client.close()


async def test_an_http_proxy_keeps_its_connections() -> None:
    async with Scripted(answer(b"one"), answer(b"two")) as proxy, listening(proxy.url) as listener:
        client = await Client.to(listener)
        assert (await client.get("http://shop.test/a")).body == b"one"
        assert (await client.get("http://shop.test/b")).body == b"two"
        assert proxy.connections == 1
        assert [each.partition("\n")[0] for each in proxy.heard] == ["GET http://shop.test/a", "GET http://shop.test/b"]
        client.close()


# -- the guard behind a proxy


@pytest.mark.parametrize(
    "host", [*SPELLINGS, *LOCAL_NAMES, "10.0.0.1", "169.254.169.254", "[::1]", "[fd00::1]", "[::]"]
)
async def test_what_no_proxy_is_asked_for(host: str, socks: SocksServer) -> None:
    async with listening(socks.address("ann"), guard=AddressGuard([])) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"http://{host}/")).status == 403
        assert (await client.connect(f"http://{host}:80")).status == 403
        assert failure_of(listener, host.strip("[]"), 80).kind == "address"
        client.close()
    assert socks.connections == 0


@pytest.mark.parametrize("host", [*SPELLINGS, *LOCAL_NAMES, "10.0.0.1", "[::1]"])
async def test_what_no_proxy_is_asked_for_by_a_public_page(
    host: str, site: MisbehavingServer, socks: SocksServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(socks.address("ann")) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"http://shop.test:{port_of(site.url)}/leaf/1")).status == 200
        before = socks.connections
        assert (await client.get(f"http://{host}/")).status == 403
        assert (await client.connect(f"http://{host}:80")).status == 403
        assert "only pages from local addresses may contact" in str(failure_of(listener, host.strip("[]"), 80))
        client.close()
    assert socks.connections == before
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "a rendered page may not load everything it asks for"
    ]


async def test_a_guard_behind_a_proxy_allows_public_names(site: MisbehavingServer, socks: SocksServer) -> None:
    async with listening(socks.address("ann"), guard=AddressGuard([])) as listener:
        client = await Client.to(listener)
        assert (await client.get(f"http://shop.test:{port_of(site.url)}/leaf/1")).status == 200
        client.close()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1:1", "127.0.0.1:1", "socks5://", "socks5://host:99999", "socks4://127.0.0.1:1", "", "http://:80",
        "socks5://[::1:80", f"socks5://{'u' * 300}:x@127.0.0.1:1",
    ],
)  # fmt: skip
async def test_bad_upstreams(url: str) -> None:
    gateway = Gateway(None)
    with pytest.raises(ConfigError):
        await gateway.open(url)
    await gateway.close()
