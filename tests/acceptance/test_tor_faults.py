"""Crawls through an existing Tor daemon that fails in every way. That costs no attempt; failures of hosts do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal import Crawl, Response, Spider, crawl
from shoal.config import TorSettings
from shoal.crawling.stats import Summary
from shoal.errors import TorError
from shoal.fetch.tor import layer
from tests.acceptance.blocking import BlockingSite
from tests.support.fakes import eventually
from tests.support.scripted_tor import STEPS, ScriptedTor

PAGES = 6
SETTINGS = {
    "tor.enabled": True,
    "download_delay": 0,
    "throttle.enabled": False,
    "concurrency": 2,
    "retry.max_attempts": 1,
    "retry.base_delay": 0.01,
}


class Pages(Spider):
    name = "pages"

    def parse(self, response: Response) -> Any:
        yield {"h1": response.css("h1::text").get()}
        yield response.follow_all("a")


@pytest.fixture
async def site() -> AsyncIterator[BlockingSite]:
    async with BlockingSite(PAGES, patience=10_000) as made:
        yield made


@pytest.fixture
async def tor() -> AsyncIterator[ScriptedTor]:
    async with ScriptedTor() as made:
        yield made


@pytest.fixture(autouse=True)
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fetch.tor.circuits._SECONDS", (0.1, 0.4))


def start(tor: ScriptedTor, site: BlockingSite, *hosts: str, **settings: Any) -> asyncio.Task[Crawl]:
    port = site.url.rpartition(":")[2]
    made = crawl(
        Pages, {**SETTINGS, "tor.url": tor.address, **settings},
        arguments={"start_urls": [f"http://{host}:{port}/" for host in hosts or ("shop.test",)]},
    )  # fmt: skip

    async def run() -> Crawl:
        return await made

    return asyncio.create_task(run())


async def ended(crawling: asyncio.Task[Crawl]) -> tuple[list[str], Summary]:
    async with asyncio.timeout(30):
        done = await crawling
    assert done.summary is not None
    return sorted(item["h1"] for item in done.items), done.summary


def assert_complete(items: list[str], summary: Summary, site: BlockingSite, hosts: int = 1) -> None:
    assert items == sorted([*site.paths] * hosts)
    assert (summary.stats.dead, summary.counters.retried) == (0, 0)


# -- faults of the daemon


@pytest.mark.parametrize("step", STEPS)
async def test_a_daemon_that_is_replaced_between_two_probes(site: BlockingSite, tor: ScriptedTor, step: str) -> None:
    """No probe ever fails, because its successor answers at once. The pages in flight lose nothing."""
    crawling = start(tor, site, "a.test", "b.test")
    for _ in range(3):  # for robots.txt, and for pages
        tor.pauses_at = step
        await eventually(lambda: tor.paused == 2)
        tor.pauses_at = None
        tor.replace()
    assert_complete(*await ended(crawling), site, hosts=2)


@pytest.mark.parametrize("reply", [1, 3, 6])
async def test_a_daemon_that_has_no_circuit_yet(site: BlockingSite, tor: ScriptedTor, reply: int) -> None:
    """It answers that it cannot connect, for a while: at the start, and after it was replaced."""
    tor.replies["*"] = reply
    crawling = start(tor, site)
    for _ in range(2):
        await eventually(lambda: tor.connects["shop.test"] >= 3)
        tor.replies.clear()
        before = len(site.log)
        await eventually(lambda: len(site.log) > before + 1)  # noqa: B023
        tor.replies["*"] = reply
        tor.connects.clear()
        tor.replace()
    tor.replies.clear()
    assert_complete(*await ended(crawling), site)


async def test_a_daemon_that_does_not_answer_before_it_has_a_circuit(site: BlockingSite, tor: ScriptedTor) -> None:
    """As Tor does: it keeps the page waiting for up to two minutes."""
    tor.hangs = True
    crawling = start(tor, site, **{"tor.connect_timeout": 0.3, "http.connect_timeout": 0.3})
    await eventually(lambda: tor.connects["shop.test"] >= 3)
    tor.hangs = False
    assert_complete(*await ended(crawling), site)


async def test_a_daemon_that_never_has_a_circuit(site: BlockingSite, tor: ScriptedTor) -> None:
    """Pages do not wait for ever."""
    tor.replies["*"] = 6
    _, summary = await ended(start(tor, site, **{"tor.bootstrap_timeout": 1.0}))
    assert summary.dead_kinds == {"proxy": 1}
    assert tor.connects["shop.test"] > 1


async def test_another_proxy_in_place_of_the_daemon(tor: ScriptedTor) -> None:
    """The crawl ends, but the page that failed stays in the frontier."""
    used = layer.ExistingTor(TorSettings(url=tor.address))
    await used.start()
    try:
        await eventually(lambda: used.ready)
        tor.is_tor = False
        assert await used.explains_failure(used.epoch)
        with pytest.raises(TorError, match="is not Tor"):
            async with asyncio.timeout(10):
                await used.keep()
    finally:
        await used.close()


# -- faults of hosts


@pytest.mark.parametrize("reply", [1, 4, 5, 6])
async def test_a_host_that_cannot_be_reached_uses_up_attempts(site: BlockingSite, tor: ScriptedTor, reply: int) -> None:
    """Another one answers, so the daemon is connected."""
    tor.replies["dead.test"] = reply
    settings = {"robots.obey": False, "retry.max_attempts": 2}
    items, summary = await ended(start(tor, site, "shop.test", "dead.test", **settings))
    assert items == sorted(site.paths)
    assert summary.dead_kinds == {"proxy": 1}
    assert tor.connects["dead.test"] <= 4


@pytest.mark.parametrize("reply", [2, 4, 5])
async def test_what_only_a_connected_daemon_answers(site: BlockingSite, tor: ScriptedTor, reply: int) -> None:
    """No other host is needed to know whose fault it is."""
    tor.replies["*"] = reply
    _, summary = await ended(start(tor, site, **{"robots.obey": False, "retry.max_attempts": 2}))
    assert summary.dead_kinds == {"proxy": 1}
    assert tor.connects["shop.test"] == (1 if reply == 2 else 2)


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_host_that_resets_connections_uses_up_attempts(
    tor: ScriptedTor, hangs_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the daemon closes connections that are idle, which looks as if it were replaced again and again."""
    monkeypatch.setattr(layer, "PROBE_EVERY", 0.2)
    tor.hangs_up = hangs_up

    class Resetting(BlockingSite):
        async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")

    async with Resetting(0) as site:
        settings = {"robots.obey": False, "retry.max_attempts": 4, "retry.base_delay": 0.3}
        _, summary = await ended(start(tor, site, **settings))
    assert summary.dead_kinds == {"reset": 1}
    assert summary.counters.retried == 3
