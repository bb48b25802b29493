"""What is asked before actions on a rendered page lead to another one."""

from __future__ import annotations

import pytest

from shoal import Spider
from shoal.config import Config, RobotsSettings, ScopeSettings
from shoal.crawling.onion import make_onion
from shoal.fetch.layers.robots import fact_name
from shoal.fetch.routing import RoutingFetcher
from shoal.ports import Frontier, HostUpdate
from tests.fetch.test_page_needs import FakeBrowser, Web
from tests.support.fakes import memory_frontier

pytestmark = pytest.mark.asyncio

ORIGIN = "http://shop.example"


@pytest.fixture
async def frontier() -> Frontier:
    return await memory_frontier()


async def asked(frontier: Frontier, config: Config, path: str) -> float | None:
    fetcher = RoutingFetcher(Web(b""), FakeBrowser)
    make_onion(Spider(), config, frontier, fetcher)
    assert fetcher.permit is not None
    return await fetcher.permit(ORIGIN + path)


async def test_robots_txt(frontier: Frontier) -> None:
    config = Config()
    assert await asked(frontier, config, "/a") is None  # robots.txt is not known: the frontier fetches it first
    await frontier.remember(fact_name(ORIGIN), b"User-agent: *\nDisallow: /secret", 60)
    assert await asked(frontier, config, "/a") == 0.0
    assert await asked(frontier, config, "/secret") is None


async def test_the_scope(frontier: Frontier) -> None:
    config = Config(robots=RobotsSettings(obey=False), scope=ScopeSettings(deny=("/logout",)))
    assert await asked(frontier, config, "/a") == 0.0
    assert await asked(frontier, config, "/logout") is None


async def test_the_delay_and_a_block(frontier: Frontier) -> None:
    config = Config(robots=RobotsSettings(obey=False))
    await frontier.update_host("shop.example", HostUpdate(delay=2.5))
    assert await asked(frontier, config, "/a") == 2.5
    await frontier.update_host("shop.example", HostUpdate(block_for=60.0, block_reason="429"))
    wait = await asked(frontier, config, "/a")
    assert wait is not None
    assert 55 < wait <= 60
