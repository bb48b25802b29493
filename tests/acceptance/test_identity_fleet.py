"""Identities of a fleet: two worker processes share which identity rests."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.acceptance.blocking import BlockingSite
from tests.acceptance.fleets import SPIDER, Fleet, frontier_url
from tests.servers import ProxyServer
from tests.socks_server import SocksServer

PAGES = 80
REST = 1.5


@pytest.mark.parametrize(("store", "kill"), [("redis", False), ("redis", True), ("postgresql", True)])
async def test_two_workers_crawl_a_site_that_blocks(tmp_path: Path, store: str, kill: bool) -> None:
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(BlockingSite(PAGES, ban=1.0))
        first = await stack.enter_async_context(ProxyServer("127.0.0.11", "ann:s3cret"))
        second = await stack.enter_async_context(SocksServer({"bob": "s3cret"}, "127.0.0.12"))
        third = await stack.enter_async_context(ProxyServer("127.0.0.13"))
        (tmp_path / "proxies.txt").write_text(
            f"# the fleet's\n{first.address}\n\n{second.address('bob')}\n{third.url}\n"
        )
        fleet = stack.enter_context(Fleet(tmp_path, frontier_url(store), SPIDER))
        await asyncio.to_thread(fleet.start, f"{site.url}/", settings={"download_delay": 0.01})
        settings = {"identities.rest": REST, "identities.give_up_after": 50, "worker.session": 2}
        for words in (["--proxy", "@proxies.txt"], ["--set", "proxies=@proxies.txt"]):
            fleet.worker(*words, settings=settings)
        async with asyncio.timeout(50):
            while len(site.log) < 25:
                await asyncio.sleep(0.02)
        if kill:
            fleet.processes[0].kill()
            fleet.worker("--proxy", "@proxies.txt", settings=settings)
        listed = (await asyncio.to_thread(fleet.shoal, "identities", fleet.run_id)).stdout
        await asyncio.to_thread(fleet.wait, 60)
        stats = await asyncio.to_thread(fleet.stats)
        lines = (await asyncio.to_thread(fleet.shoal, "export", fleet.run_id, "-o", "-")).stdout.splitlines()
    assert sorted(json.loads(line)["title"] for line in lines) == sorted(site.paths)
    assert (stats["done"], stats["failed"], stats["left"]) == (PAGES + 1, 0, 0)
    assert {visit.address for visit in site.log} == {"127.0.0.11", "127.0.0.12", "127.0.0.13"}
    assert len(site.blocks()) >= 3
    if not kill:  # a worker may be killed before it has stored a block
        assert site.during_rest(REST - 0.1) == []
    for name in (first.url.replace("//", "//ann@"), second.url.replace("http://", "socks5://bob@"), third.url):
        assert name in listed
    assert "active" in listed or "resting" in listed
    logs = "".join(file.read_text() for file in tmp_path.glob("worker-*.log"))
    assert "s3cret" not in listed + logs
    assert "rests for" in logs
