"""Callers of the API cannot make it fetch from forbidden addresses: by no spelling, name, redirect or proxy."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shoal import Request, Response, Spider
from shoal.config import HttpSettings
from shoal.errors import ConfigError, FetchError, RequestError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http_fetcher import HttpFetcher
from tests.acceptance.crawls import Pages, crawl_beside
from tests.acceptance.rebinding import PUBLIC, PUBLIC_6, fetch_while_rebinding
from tests.acceptance.serving import beside, serving
from tests.support.servers import MisbehavingServer, ProxyServer
from tests.support.socks_server import SocksServer

SPELLINGS = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7F.1", "0177.0.0.1", "017700000001", "127.0.0.1.",
    "①②⑦.⓪.⓪.①", "user:secret@127.0.0.1", "localhost", "LOCALHOST", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:127.0.0.1]",
]  # fmt: skip


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


class Forbidden:
    """What listens at an address that is not listed."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.2", 0))
        self._listening.setblocking(False)
        self.url = f"http://127.0.0.2:{self._listening.getsockname()[1]}/"

    def was_contacted(self) -> bool:
        try:
            self._listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def forbidden() -> Iterator[Forbidden]:
    with closing(Forbidden()) as forbidden:
        yield forbidden


async def fetch(url: str, *allowed: str, proxy: str | None = None, upstreams: tuple[str, ...] = ()) -> Response:
    fetcher = HttpFetcher(HttpSettings(), "test", AddressGuard(allowed), upstreams)
    try:
        return await fetcher.fetch(Request(url, proxy=proxy))
    finally:
        await fetcher.close()


async def refusal(url: str, *allowed: str) -> str:
    """What is said when the address is refused, as it must be."""
    with pytest.raises(FetchError) as caught:
        await fetch(url, *allowed)
    error = caught.value
    assert (error.kind, error.retryable, error.contacted) == ("address", False, False)
    return str(error)


# -- addresses


@pytest.mark.parametrize("host", SPELLINGS)
async def test_loopback_is_refused_in_every_spelling(server: MisbehavingServer, host: str) -> None:
    message = await refusal(f"http://{host}:{server.url.rpartition(':')[2]}/leaf/1")
    assert message.endswith(" is a loopback address, which may not be contacted (serve.allow)")
    assert server.connections == 0


@pytest.mark.parametrize("host", SPELLINGS)
async def test_loopback_is_served_in_every_spelling_when_it_is_listed(server: MisbehavingServer, host: str) -> None:
    response = await fetch(f"http://{host}:{server.url.rpartition(':')[2]}/leaf/1", "127.0.0.0/8")
    assert response.css("h1::text").get() == "Leaf 1"
    assert server.connections == 1


async def test_the_refusal_names_the_address(server: MisbehavingServer) -> None:
    said = "127.0.0.1 is a loopback address, which may not be contacted (serve.allow)"
    assert await refusal(server.url) == said


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("[::1]", "a loopback address"),
        ("0.0.0.0", "the unspecified address"),
        ("0", "the unspecified address"),
        ("[::]", "the unspecified address"),
        ("169.254.169.254", "a link-local address"),
        ("[fe80::1]", "a link-local address"),
        ("[fd00:ec2::254]", "a private address"),
        ("100.100.100.200", "a private address"),
        ("10.0.0.1", "a private address"),
        ("224.0.0.1", "a multicast address"),
        ("255.255.255.255", "a reserved address"),
        ("[64:ff9b::7f00:1]", "a loopback address"),
        ("[2002:7f00:1::]", "a reserved address"),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_other_addresses_are_refused(scheme: str, host: str, reason: str) -> None:
    assert f" is {reason}, " in await refusal(f"{scheme}://{host}:9/")


async def test_only_what_is_listed_is_open(server: MisbehavingServer, forbidden: Forbidden) -> None:
    assert (await fetch(f"{server.url}/leaf/1", "127.0.0.1/32")).ok
    assert "127.0.0.2" in await refusal(forbidden.url, "127.0.0.1/32")
    assert not forbidden.was_contacted()


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/", "unix:///run/x", "http+unix://x/", "gopher://x/"]
)
def test_only_http_can_be_asked_for(url: str) -> None:
    with pytest.raises(RequestError, match="only http and https URLs can be crawled"):
        Request(url)


async def test_no_proxy_connects_in_its_place(server: MisbehavingServer) -> None:
    async with ProxyServer() as proxy:
        with pytest.raises(FetchError) as caught:
            await fetch(f"{server.url}/leaf/1", "127.0.0.0/8", proxy=proxy.url)
        with pytest.raises(ConfigError, match=r'^"http\.proxy" can\'t be used here'):
            HttpFetcher(HttpSettings(proxy=proxy.url), "test", AddressGuard(["127.0.0.0/8"]))
    assert (caught.value.kind, caught.value.retryable, caught.value.contacted) == ("proxy", False, False)
    assert proxy.connections == server.connections == 0


async def test_what_can_not_be_connected_to_is_another_matter() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    with pytest.raises(FetchError) as caught:
        await fetch(url, "127.0.0.1")
    assert (caught.value.kind, caught.value.retryable) == ("connect", True)


# -- names


@pytest.fixture(params=["fetcher", "gateway"])
def via(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_name_that_changes_is_judged_by_the_address_that_is_connected_to(via: str) -> None:
    """Public when it is looked up, and the loopback at the next look-up, again and again."""
    outcome = fetch_while_rebinding([[PUBLIC], ["127.0.0.1"]], fetches=6, via=via)
    assert outcome.first == [PUBLIC]
    assert outcome.fetched == ["address", PUBLIC] * 3
    assert outcome.connections == {PUBLIC: 3}


def test_a_name_that_changes_reaches_what_is_listed(via: str) -> None:
    """That the test above could fail: the same, and the loopback is allowed."""
    outcome = fetch_while_rebinding([[PUBLIC], ["127.0.0.1"]], fetches=6, allowed=["127.0.0.0/8"], via=via)
    if via == "gateway":  # the host of a browser context stays private or public
        assert outcome.fetched == ["127.0.0.1", "address"] * 3
        assert outcome.connections == {"127.0.0.1": 3}
        return
    assert outcome.fetched == ["127.0.0.1", PUBLIC] * 3
    assert outcome.connections == {PUBLIC: 3, "127.0.0.1": 3}


@pytest.mark.parametrize(
    "answer", [["::1"], ["127.0.0.1", "::1"], ["10.0.0.1", "127.0.0.1", "::1", "::ffff:127.0.0.1", "fd00:ec2::254"]]
)
def test_a_name_with_refused_addresses_only_is_refused(via: str, answer: list[str]) -> None:
    outcome = fetch_while_rebinding([answer], fetches=3, via=via)
    assert sorted(outcome.first) == sorted(answer)
    assert outcome.fetched == ["address"] * 3
    assert outcome.connections == {}


@pytest.mark.parametrize("public", [PUBLIC, PUBLIC_6])
@pytest.mark.parametrize("others", [["127.0.0.1"], ["::1"], ["127.0.0.1", "10.0.0.1", "::1", "fd00:ec2::254"]])
def test_of_a_name_with_a_public_address_that_one_is_used(via: str, public: str, others: list[str]) -> None:
    outcome = fetch_while_rebinding([[*others, public]], fetches=3, via=via)
    assert sorted(outcome.first) == sorted([*others, public])
    assert outcome.fetched == [public] * 3
    assert outcome.connections == {public: 3}


@pytest.mark.parametrize("others", [["127.0.0.1", "::1"], ["10.0.0.1"]])
@pytest.mark.parametrize("allowed", [[], ["127.0.0.0/8", "::1", "10.0.0.0/8"]])
def test_when_the_public_address_is_down_the_others_are_not_tried(
    via: str, others: list[str], allowed: list[str]
) -> None:
    outcome = fetch_while_rebinding([[PUBLIC, *others]], fetches=3, down=[PUBLIC], allowed=allowed, via=via)
    assert outcome.fetched == ["connect"] * 3
    assert outcome.connections == {}


# -- in a crawl


@pytest.fixture
async def guarded() -> AsyncIterator[type[Spider]]:
    """A spider whose innermost layer is a guarded fetcher: robots.txt and each hop of a redirect come through it."""
    fetcher = HttpFetcher(HttpSettings(), "test", AddressGuard(["127.0.0.1/32"]))

    async def through_the_guard(request: Request, fetch: Any) -> Response:
        return await fetcher.fetch(request)

    class Guarded(Pages):
        middlewares = [through_the_guard]

    yield Guarded
    await fetcher.close()


@pytest.mark.parametrize("obey", [True, False])
async def test_a_redirect_is_not_followed_to_a_refused_address(
    server: MisbehavingServer, forbidden: Forbidden, guarded: type[Spider], obey: bool
) -> None:
    path = f"/redirect-out?to={forbidden.url}"
    items, summary = await crawl_beside(server, path, spider=guarded, **{"robots.obey": obey, "retry.max_attempts": 3})
    assert items == []
    assert summary.counters.redirected == 1
    assert summary.dead_kinds == {"address": 1}
    assert summary.counters.retried == 0
    assert not forbidden.was_contacted()


async def test_a_robots_txt_is_not_followed_to_a_refused_address(
    server: MisbehavingServer, forbidden: Forbidden, guarded: type[Spider]
) -> None:
    async with MisbehavingServer(robots=f"/redirect-out?to={forbidden.url}robots.txt") as other:
        items, summary = await crawl_beside(server, f"{other.url}/leaf/1", spider=guarded, **{"robots.obey": True})
    assert items == []
    assert summary.dead_kinds == {"address": 1}
    assert [visit.path for visit in other.requests] == ["/robots.txt"]
    assert not forbidden.was_contacted()


async def test_a_proxy_of_the_operator_gets_only_public_hosts(server: MisbehavingServer) -> None:
    """Names that may be public are the proxy's to resolve. It is itself at a private address."""
    port = server.url.rpartition(":")[2]
    async with SocksServer() as proxy, ProxyServer() as plain:
        upstreams = (proxy.address(), plain.url)
        page = await fetch(f"http://shop.test:{port}/leaf/1", proxy=proxy.address(), upstreams=upstreams)
        assert page.status == 200
        for host in (*SPELLINGS, "printer", "nas.local", "api.internal"):
            for upstream in upstreams:
                with pytest.raises((FetchError, RequestError)) as caught:
                    await fetch(f"http://{host}:{port}/leaf/1", proxy=upstream, upstreams=upstreams)
                if isinstance(caught.value, FetchError):
                    assert (caught.value.kind, caught.value.contacted) == ("address", False)
        with pytest.raises(FetchError, match="a proxy can't be used here"):
            await fetch(f"http://shop.test:{port}/", proxy=proxy.address("eve"), upstreams=upstreams)
        allowed = await fetch(f"{server.url}/leaf/2", "127.0.0.0/8", proxy=plain.url, upstreams=upstreams)
        assert allowed.status == 200
        assert len(proxy.connects) == len(plain.requests) == 1


def test_callers_of_the_api_use_the_operators_proxies(tmp_path: Path) -> None:
    with beside(MisbehavingServer()) as site, beside(SocksServer({"ann": "s3cret"})) as proxy:
        port = site.url.rpartition(":")[2]
        environ = {"SHOAL_PROXIES": proxy.address("ann"), "SHOAL_SERVE__ALLOW": ""}
        with serving(tmp_path, environ) as api:
            urls = [f"http://shop.test:{port}/leaf/1", f"http://127.0.0.1:{port}/leaf/1"]
            answer = api.batch(urls, timeout=20)
            good, bad = answer["results"]
            assert (good["status"], bad["status"]) == ("success", "failed"), answer
            assert "may not be contacted" in bad["error"]["message"]
            assert {each.host for each in proxy.connects} == {"shop.test"}
            status, answer = api.ask(
                "POST", "/api/crawl/batch", {"urls": urls[:1], "options": {"proxy": proxy.address()}}
            )
            assert status == 422, answer
            assert "s3cret" not in api.process.said()
