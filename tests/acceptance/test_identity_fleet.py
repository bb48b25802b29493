"""Identities of a fleet: two worker processes share which identity rests."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import pytest

from tests.acceptance.blocking import BlockingSite
from tests.acceptance.fleets import SHOAL, SPIDER, Fleet, frontier_url
from tests.support import forking
from tests.support.servers import ProxyServer
from tests.support.socks_server import SocksServer

PAGES = 60
REST = 1.5


class Proxies:
    """Three proxies, one of them SOCKS5, and the file that lists them."""

    def __init__(self, folder: Path) -> None:
        self.first = ProxyServer("127.0.0.11", "ann:s3cret")
        self.second = SocksServer({"bob": "s3cret"}, "127.0.0.12")
        self.third = ProxyServer("127.0.0.13")
        self._file = folder / "proxies.txt"
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for server in (self.first, self.second, self.third):
            await self._stack.enter_async_context(server)  # type: ignore[arg-type]
        self._file.write_text(f"# ours\n{self.first.address}\n\n{self.second.address('bob')}\n{self.third.url}\n")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @property
    def names(self) -> list[str]:
        socks = self.second.url.replace("http://", "socks5://bob@")
        return [self.first.url.replace("//", "//ann@"), socks, self.third.url]


async def listing(folder: Path, *words: str) -> str:
    """What `shoal identities` prints."""
    command = [*SHOAL, "identities", *words]
    done = await asyncio.to_thread(forking.run, command, cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def visited(site: BlockingSite, count: int) -> None:
    """Wait until the site has got so many requests."""
    async with asyncio.timeout(60):
        while len(site.log) < count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("store", "kill"), [("redis", False), ("redis", True), ("postgresql", True)])
async def test_two_workers_crawl_a_site_that_blocks(tmp_path: Path, store: str, kill: bool) -> None:
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(BlockingSite(PAGES, ban=1.0))
        proxies = await stack.enter_async_context(Proxies(tmp_path))
        fleet = stack.enter_context(Fleet(tmp_path, frontier_url(store), SPIDER))
        await asyncio.to_thread(fleet.start, f"{site.url}/", settings={"download_delay": 0.01})
        settings = {"identities.rest": REST, "identities.give_up_after": 50, "worker.session": 2}
        for words in (["--proxy", "@proxies.txt"], ["--set", "proxies=@proxies.txt"]):
            fleet.worker(*words, settings=settings)
        await visited(site, 25)
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
    assert all(name in listed for name in proxies.names)
    assert "active" in listed or "resting" in listed
    logs = "".join(file.read_text() for file in tmp_path.glob("worker-*.log"))
    assert "s3cret" not in listed + logs
    assert "rests for" in logs


@pytest.mark.parametrize("kill", [False, True], ids=["two processes", "kill -9"])
async def test_one_machine(tmp_path: Path, kill: bool) -> None:
    """Two processes share a frontier in memory; a crawl in a file survives a kill."""
    async with BlockingSite(60, ban=0.3) as site, Proxies(tmp_path) as proxies:
        name = "t" + secrets.token_hex(6)
        (tmp_path / "pages.py").write_text(f"{SPIDER}\nPages.start_urls = ['{site.url}/']\nPages.name = '{name}'\n")
        how = ["--frontier", "sqlite:///pages.db"] if kill else ["--processes", "2"]
        settings = ["--set", "identities.rest=0.8", "--set", "identities.give_up_after=50", "--delay", "0.02"]
        command = [*SHOAL, "run", "pages.py", "-o", "pages.jsonl", "--proxy", "@proxies.txt", *settings, *how]
        with (tmp_path / "log").open("w") as log:
            crawl = forking.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
            try:
                await visited(site, 20)
                if kill:
                    crawl.kill()
                    crawl.wait()
                    crawl = forking.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
                    await visited(site, 25)
                listed = await listing(tmp_path, *(how if kill else ["--frontier", f"local:{name}"]))
                assert await asyncio.to_thread(crawl.wait, 60) == 0, (tmp_path / "log").read_text()
            finally:
                crawl.kill()
                crawl.wait()
    titles = [json.loads(line)["title"] for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    assert sorted(titles) == sorted(site.paths)
    assert all(name in listed for name in proxies.names)
    assert {visit.address for visit in site.log} == {"127.0.0.11", "127.0.0.12", "127.0.0.13"}
    if not kill:
        assert site.during_rest(0.7) == []
    assert "s3cret" not in listed + (tmp_path / "log").read_text()
