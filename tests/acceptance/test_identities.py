"""Identities: a site that blocks addresses is crawled through real proxies, each with an address of its own."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shoal import Response, Spider, crawl
from tests.acceptance.blocking import BlockingSite, LyingProxy
from tests.acceptance.crawls import ended
from tests.support.servers import ProxyServer
from tests.support.socks_server import SocksServer

SETTINGS: dict[str, Any] = {
    "download_delay": 0,
    "concurrency_per_host": 4,
    "retry.base_delay": 0.01,
    "http.connect_timeout": 5,
    "http.read_timeout": 5,
    "identities.rest": 1.0,
    "identities.give_up_after": 50,
    "shutdown_grace": 1,
}


class Links(Spider):
    name = "links"

    def parse(self, response: Response) -> Any:
        yield {"url": response.url, "h1": response.css("h1::text").get()}
        yield response.follow_all("a")


@pytest.fixture
async def proxies() -> AsyncIterator[list[ProxyServer | SocksServer]]:
    """One of each kind. The site sees them as 127.0.0.11, .12 and .13."""
    async with AsyncExitStack() as stack:
        made = [
            ProxyServer("127.0.0.11", "ann:s3cret"),
            SocksServer({"bob": "s3cret"}, "127.0.0.12"),
            ProxyServer("127.0.0.13"),
        ]
        yield [await stack.enter_async_context(proxy) for proxy in made]  # type: ignore[arg-type]


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first proxy that is available is the next one, not any of them."""
    monkeypatch.setattr("shoal.system.chance.shuffle", lambda names: None)


def urls_of(proxies: list[Any]) -> list[str]:
    return [proxy.address("bob") if isinstance(proxy, SocksServer) else proxy.address for proxy in proxies]


async def crawled(site: BlockingSite, proxies: list[str], *, spider: Any = Links, **settings: Any) -> Any:
    made = crawl(spider, {**SETTINGS, **settings, "proxies": proxies}, arguments={"start_urls": [site.url + "/"]})
    return await ended(made)


@pytest.mark.parametrize("delay", [0.0, 0.01])
async def test_a_site_that_blocks_is_crawled_completely(proxies: list[Any], delay: float) -> None:
    async with BlockingSite(60) as site:
        items, summary = await crawled(site, urls_of(proxies), download_delay=delay)
    assert (summary.state, summary.stats.dead) == ("finished", 0)
    assert {item["h1"] for item in items} == site.paths
    assert len(items) == len(site.paths)
    assert {visit.address for visit in site.log} == {"127.0.0.11", "127.0.0.12", "127.0.0.13"}  # nothing directly
    assert len(site.blocks()) >= 3
    late = site.during_rest(0.95)
    if delay:  # one request at a time
        assert late == []
    else:  # those that were on their way
        assert all(visit.status == 429 for visit in late)
        assert len(late) <= 3 * len(site.blocks())


async def test_a_secure_site_through_tunnels_and_a_secure_proxy(proxies: list[Any], tls: ssl.SSLContext) -> None:
    async with (
        BlockingSite(40, tls=tls, status=403) as site,
        ProxyServer("127.0.0.14", "dan:s3cret", tls=tls) as secure,
    ):
        items, summary = await crawled(site, [*urls_of(proxies), secure.address], **{"http.verify_tls": False})
        assert secure.requests
    assert {item["h1"] for item in items} == site.paths
    assert (len(items), summary.stats.dead) == (41, 0)
    assert {visit.address for visit in site.log} == {f"127.0.0.{number}" for number in (11, 12, 13, 14)}


# -- who is to blame


async def removed_from(
    site: BlockingSite, bad: str, proxies: list[Any], caplog: pytest.LogCaptureFixture, **settings: Any
) -> str:
    """Crawl with a bad proxy and two good ones. Returns the messages. Nothing may be lost."""
    async with site:
        items, summary = await crawled(site, [bad, *urls_of(proxies[:2])], **settings)
    assert (summary.state, summary.stats.dead) == ("finished", 0)
    assert {item["h1"] for item in items} == site.paths
    assert len(items) == len(site.paths)
    assert {visit.address for visit in site.log} <= {"127.0.0.11", "127.0.0.12"}
    assert "s3cret" not in caplog.text
    assert "wrong-pass" not in caplog.text
    return caplog.text


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("kind", ["http", "socks5"])
async def test_a_wrong_password(kind: str, proxies: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async with ProxyServer("127.0.0.14", "eve:right") as http, SocksServer({"eve": "right"}) as socks:
        bad = (
            http.url.replace("//", "//eve:wrong-pass@")
            if kind == "http"
            else socks.address("eve", password="wrong-pass")
        )
        said = await removed_from(BlockingSite(40), bad, proxies, caplog)
        assert len(http.requests) <= SETTINGS["concurrency_per_host"]  # it is not tried again and again
        assert "the identity " + bad.replace(":wrong-pass", "") + " is removed" in said
        assert ("it answered 407" if kind == "http" else "authentication failure") in said


@pytest.mark.usefixtures("in_order")
async def test_a_proxy_that_is_down(proxies: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    said = await removed_from(
        BlockingSite(60, ban=0.2),
        "http://eve:wrong-pass@127.0.0.1:9",
        proxies,
        caplog,
        **{"identities.remove_after": 0, "identities.rest": 0.3},
    )
    assert "http://eve@127.0.0.1:9 is removed: no connection to the proxy 127.0.0.1:9" in said


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("lie", ["closes", "garbage"])
async def test_a_proxy_that_lies(
    lie: str, secure: bool, proxies: list[Any], tls: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    async with LyingProxy(lie) as liar:
        settings = {"identities.remove_after": 0, "identities.rest": 0.3, "http.verify_tls": False}
        site = BlockingSite(60, ban=0.2, tls=tls if secure else None)
        said = await removed_from(site, liar.url, proxies, caplog, **settings)
        assert liar.requests
        assert f"the identity {liar.url} is removed" in said
        assert "(through the proxy)" in said


async def test_all_proxies_are_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """The crawl ends and says what to do. Its pages stay in the frontier."""
    async with ProxyServer("127.0.0.14", "eve:right") as proxy, BlockingSite(10) as site:
        bad = proxy.url.replace("//", "//eve:wrong-pass@")
        made = crawl(Links, {**SETTINGS, "proxies": [bad]}, arguments={"start_urls": [site.url + "/"]})
        summary = (await made).summary
        assert summary is not None
        assert (summary.state, summary.stats.remaining, summary.stats.dead) == ("failed", 1, 0)
        assert re.search('the only proxy in "proxies" failed: .*407.*Correct the setting', summary.error)
        assert site.log == []
    assert "wrong-pass" not in caplog.text


async def test_a_page_that_nobody_may_see(proxies: list[Any]) -> None:
    """It costs the identities a rest, but the crawl ends, and the page fails with its reason."""
    async with BlockingSite(12, patience=1000, forbidden=frozenset({"/p/3"})) as site:
        settings = {"identities.rest": 0.2, "identities.max_blocks": 2, "retry.max_attempts": 2}
        items, summary = await crawled(site, urls_of(proxies), **settings)
    assert {item["h1"] for item in items} == site.paths - {"/p/3"}
    assert summary.dead_kinds == {"blocked": 1}
    assert 3 <= sum(visit.path == "/p/3" for visit in site.log) <= 20


async def test_a_site_that_blocks_everybody(proxies: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    async with BlockingSite(5, patience=0, ban=60) as site:
        settings = {"identities.rest": 0.1, "identities.give_up_after": 2}
        items, summary = await crawled(site, urls_of(proxies), **settings)
    assert (items, summary.dead_kinds) == ([], {"blocked": 1})
    assert "blocks every identity" in caplog.text
    assert len(site.blocks()) == 6  # two for each


async def test_a_rule_of_the_spider(proxies: list[Any]) -> None:
    class Wary(Links):
        def blocked(self, response: Response) -> bool:
            return super().blocked(response) or "robot" in response.text

    async with BlockingSite(40, captcha=True) as site:
        items, summary = await crawled(site, urls_of(proxies), spider=Wary)
    assert {item["h1"] for item in items} == site.paths
    assert summary.stats.dead == 0


async def test_a_rule_that_fails(proxies: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Links):
        def blocked(self, response: Response) -> bool:
            raise KeyError("oops")

    async with BlockingSite(1) as site:
        _, summary = await crawled(site, urls_of(proxies), spider=Broken)
    assert summary.dead_kinds == {"callback": 1}
    assert "blocked() of the spider failed: KeyError" in caplog.text


async def test_cookies_and_headers_belong_to_the_identity(proxies: list[Any]) -> None:
    agents = [{"User-Agent": f"browser-{number}"} for number in range(3)]
    async with BlockingSite(60) as site:
        items, _ = await crawled(site, urls_of(proxies), **{"identities.headers": agents})
    assert len(items) == 61
    by_address: dict[str, set[str]] = {}
    for visit in site.log:
        by_address.setdefault(visit.address, set()).add(visit.headers["user-agent"])
        assert visit.headers.get("cookie", "") in ("", f"seen={visit.address}")
        assert "proxy-authorization" not in visit.headers
    assert by_address == {f"127.0.0.{11 + number}": {f"browser-{number}"} for number in range(3)}
    assert any(visit.headers.get("cookie") for visit in site.log)
