"""SOCKS5 proxies: real crawls through a proxy that writes down who asked for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal import Request
from shoal.fetch import http_fetcher
from shoal.fetch.http_fetcher import HttpFetcher
from tests.acceptance.crawls import Pages, crawl_beside
from tests.support.servers import MisbehavingServer
from tests.support.socks_server import Connect, SocksServer


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


@pytest.fixture
async def proxy() -> AsyncIterator[SocksServer]:
    async with SocksServer({"ann": "pass word", "bob": "b"}) as made:
        yield made


def named(server: MisbehavingServer, path: str, name: str = "shop.test") -> str:
    """A URL whose name only the proxy can resolve."""
    return server.url.replace("127.0.0.1", name) + path


def through(via: str, *urls: str) -> type[Pages]:
    class Through(Pages):
        def start(self) -> Any:
            yield from super().start()
            for url in urls:
                yield Request(url, proxy=via, callback=self.handle)

    return Through


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
async def test_names_are_resolved_by_the_proxy(scheme: str, server: MisbehavingServer, proxy: SocksServer) -> None:
    urls = [named(server, f"/leaf/{number}") for number in range(5)]
    items, _ = await crawl_beside(server, spider=through(proxy.address("ann", scheme), *urls), concurrency=1)
    assert sorted(item["h1"] for item in items) == [f"Leaf {number}" for number in range(5)]
    port = int(server.url.rpartition(":")[2])
    assert proxy.connects == [Connect("ann", "shop.test", port)]  # one connection for all of them


async def test_the_setting_applies_to_all_requests(server: MisbehavingServer, proxy: SocksServer) -> None:
    items, _ = await crawl_beside(server, "/leaf/1", **{"http.proxy": proxy.address("bob")})
    assert [item["h1"] for item in items] == ["Leaf 1"]
    assert {(each.user, each.host) for each in proxy.connects} == {("bob", "127.0.0.1")}


async def test_different_passwords_never_share_a_connection(server: MisbehavingServer, proxy: SocksServer) -> None:
    class Both(Pages):
        def start(self) -> Any:
            yield from super().start()
            for number in range(6):
                via = proxy.address("ann" if number % 2 else "bob")
                yield Request(named(server, f"/leaf/{number}"), proxy=via, callback=self.handle)

    items, _ = await crawl_beside(server, spider=Both, concurrency=1)
    assert len(items) == 6
    assert sorted(each.user for each in proxy.connects) == ["ann", "bob"]


async def test_tls_goes_through_the_proxy(
    server: MisbehavingServer, secure: MisbehavingServer, proxy: SocksServer
) -> None:
    url = named(secure, "/leaf/1")
    settings = {"http.verify_tls": False}
    items, _ = await crawl_beside(server, spider=through(proxy.address("ann"), url), **settings)
    assert [item["h1"] for item in items] == ["Leaf 1"]
    assert [each.host for each in proxy.connects] == ["shop.test"]


async def test_a_wrong_password_is_not_retried_and_not_shown(
    server: MisbehavingServer, proxy: SocksServer, caplog: Any
) -> None:
    via = proxy.address("ann", password="wrong-secret")
    _, summary = await crawl_beside(server, spider=through(via, named(server, "/leaf/1")), **{"retry.max_attempts": 3})
    assert summary.dead_kinds == {"proxy": 1}
    assert summary.counters.retried == 0
    assert "no connection to shop.test" in caplog.text
    assert "secret" not in caplog.text
    assert proxy.connects == []


@pytest.mark.parametrize(
    ("host", "message", "attempts"),
    [
        ("shop.test:1", "the host did not answer the proxy", 2),
        ("192.0.2.1", "the proxy refused", 1),
    ],
)
async def test_what_the_proxy_answers_decides_about_a_retry(
    server: MisbehavingServer, proxy: SocksServer, caplog: Any, host: str, message: str, attempts: int
) -> None:
    _, summary = await crawl_beside(
        server, spider=through(proxy.address("bob"), f"http://{host}/"), **{"retry.max_attempts": 2}
    )
    assert summary.dead_kinds == {"proxy": 1}
    assert len(proxy.connects) == attempts
    assert message in caplog.text


async def test_a_proxy_that_is_down(server: MisbehavingServer, caplog: Any) -> None:
    _, summary = await crawl_beside(server, spider=through("socks5://u:secret@127.0.0.1:1", named(server, "/leaf/1")))
    assert summary.dead_kinds == {"proxy": 1}
    assert "no connection to the proxy" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("answers", [b"", b"\x05", b"\x05\x00", b"\x05\x00\x05\x00"])
async def test_a_proxy_that_closes_the_connection(server: MisbehavingServer, caplog: Any, answers: bytes) -> None:
    """At any step, as when it is killed."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(3)
        writer.write(answers)
        await writer.drain()
        if len(answers) > 1:
            await reader.read(100)
        writer.close()

    async with await asyncio.start_server(converse, "127.0.0.1", 0) as proxy:
        via = f"socks5://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        _, summary = await crawl_beside(server, spider=through(via, named(server, "/leaf/1")))
    assert summary.dead_kinds == {"proxy": 1}
    assert "the proxy closed the connection" in caplog.text


async def test_connections_through_many_proxies_are_closed(
    server: MisbehavingServer, proxy: SocksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy service may give each request a user of its own."""
    monkeypatch.setattr(http_fetcher, "_MAX_IDLE", 3)
    proxy._users |= {f"user{number}": "x" for number in range(12)}

    class Many(Pages):
        def start(self) -> Any:
            yield from super().start()
            for number in range(12):
                yield Request(
                    named(server, f"/leaf/{number}"), proxy=proxy.address(f"user{number}"), callback=self.handle
                )

    idle: list[int] = []
    close = HttpFetcher.close

    async def closing(fetcher: HttpFetcher) -> None:
        idle.append(fetcher.idle_connections)
        await close(fetcher)

    monkeypatch.setattr(HttpFetcher, "close", closing)
    items, _ = await crawl_beside(server, spider=Many, concurrency=2)
    assert len(items) == 12
    assert idle == [3]
