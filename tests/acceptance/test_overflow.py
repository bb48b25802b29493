"""A queue with a maximum size for links: what does not fit is refused, shown, and fetched after a retry."""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import Request, Response, Spider, crawl
from shoal.frontier.rules import FULL_KIND
from tests.acceptance.fleets import SHOAL, Fleet, InProcessFleet, frontier_url, site
from tests.support import forking
from tests.support.servers import SiteServer

PAGES = 40
LIMITED = {"queue.max_size": 12, "queue.overflow": "refuse"}
OPTIONS = [f"--set={key}={value}" for key, value in LIMITED.items()]
BACKENDS: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda folder: f"sqlite:///{folder}/crawl.db",
    "redis": lambda folder: frontier_url("redis"),
    "postgresql": lambda folder: frontier_url("postgresql"),
}


@pytest.fixture
def url() -> Iterator[str]:
    with site(PAGES) as made:
        yield made


def pages_fetched(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url}/-/hits") as answer:
        hits: dict[str, int] = json.load(answer)
    return {path: count for path, count in hits.items() if path != "/robots.txt"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_refused_links_are_fetched_after_a_retry(backend: str, url: str, tmp_path: Path) -> None:
    """The crawl and `retry-failed` in turn, until nothing is failed: each page was fetched exactly once."""
    with InProcessFleet(tmp_path, BACKENDS[backend](tmp_path)) as fleet:
        (tmp_path / "spider.py").write_text((tmp_path / "spider.py").read_text() + f'    start_urls = ["{url}/"]\n')
        command = ["run", "spider.py", "-o", "items.jsonl", *OPTIONS]
        ended = fleet.shoal(*command)
        assert "links refused" in ended.stderr
        assert "queue full: " in ended.stderr
        assert "retry-failed" in ended.stderr
        stats = newest(fleet)
        assert stats["left"] == 0
        assert stats["failed_kinds"] == {FULL_KIND: stats["failed"]}
        assert len(pages_fetched(url)) == stats["done"] < PAGES + 1
        check_what_the_commands_say(fleet, url, stats["failed"])
        for _ in range(PAGES):
            if "0 requests" in fleet.shoal("retry-failed").stdout:
                break
            fleet.shoal(*command)
        stats = newest(fleet)
        assert (stats["done"], stats["failed"], stats["pushed"]) == (PAGES + 1, 0, PAGES + 1)
        assert set(pages_fetched(url).values()) == {1}
        items = [json.loads(line)["url"] for line in (tmp_path / "items.jsonl").read_text().splitlines()]
        assert len(items) == len(set(items)) == PAGES + 1
        assert "balanced: nothing lost" in fleet.shoal("audit").stdout


def newest(fleet: Fleet) -> dict[str, Any]:
    """The counters of the newest run."""
    found: dict[str, Any] = json.loads(fleet.shoal("stats", "--json").stdout)
    return found


def check_what_the_commands_say(fleet: Fleet, url: str, refused: int) -> None:
    """How many links were refused, and why."""
    assert f"failed: queue full {refused}" in fleet.shoal("stats").stdout
    audit = fleet.shoal("audit").stdout
    assert f"{FULL_KIND:<22} {refused:>10}" in audit
    assert "balanced: nothing lost" in audit
    fetched = pages_fetched(url)
    missing = next(path for path in (f"/p/{number}" for number in range(PAGES)) if path not in fetched)
    why = fleet.shoal("why", url + missing).stdout
    assert "state     failed" in why
    assert "reason    refused: the queue had its maximum of 12 requests" in why
    assert f"found on  {url}" in why


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_retry_with_too_little_room_says_so(backend: str, url: str, tmp_path: Path) -> None:
    """The command does not know the settings of the crawl. The run does."""
    with InProcessFleet(tmp_path, BACKENDS[backend](tmp_path)) as fleet:
        (tmp_path / "spider.py").write_text((tmp_path / "spider.py").read_text() + f'    start_urls = ["{url}/"]\n')
        fleet.shoal("run", "spider.py", "--set=queue.max_size=2", "--set=queue.overflow=refuse", "-q")
        refused = newest(fleet)["failed"]
        assert refused > 2
        said = fleet.shoal("retry-failed").stdout
        assert said.startswith("2 requests are queued again")
        assert f"{refused - 2} links did not fit into the queue (queue.max_size)" in said
        assert fleet.shoal("retry-failed").stdout.startswith("0 requests are queued again")
        assert "did not fit" not in fleet.shoal("retry-failed", "--kind", "http 500").stdout
        assert newest(fleet)["left"] == 2
        fleet.shoal("run", "spider.py", "-q")  # now without a limit
        assert newest(fleet)["left"] == 0
        said, stats = fleet.shoal("retry-failed").stdout, newest(fleet)
        assert said.startswith(f"{stats['left']} requests")
        assert (stats["left"], stats["failed"]) == (refused - 2, 0)


HOLDING_SPIDER = """
import asyncio
from pathlib import Path
from shoal import Request, Spider

class Holding(Spider):
    name = "holding"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False}
    url = ""

    def start(self):
        return [Request(f"{self.url}/p/0", callback=self.hold), Request(f"{self.url}/")]

    def parse(self, response):
        yield {"url": response.url}
        yield response.follow_all("a")

    async def hold(self, response):
        while not Path("go").exists():
            await asyncio.sleep(0.02)
        yield {"url": response.url}
"""


def test_a_crawl_in_memory_fetches_refused_links_after_a_retry(url: str, tmp_path: Path) -> None:
    """From another process, while the crawl has a page in flight."""
    name = f"holding{secrets.token_hex(6)}"
    (tmp_path / "holding.py").write_text(HOLDING_SPIDER.replace('"holding"', f'"{name}"'))

    def shoal(*arguments: str) -> str:
        command = [*SHOAL, *arguments, "--frontier", f"local:{name}"]
        return forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout

    command = [*SHOAL, "run", "holding.py", "-a", f"url={url}", "-o", "items.jsonl", "-q", *OPTIONS]
    with forking.Popen(command, cwd=tmp_path) as crawling:
        try:
            retried, until = 0, time.monotonic() + 60
            while time.monotonic() < until:
                stats = json.loads(shoal("stats", "--json") or "{}")
                if stats.get("done") and stats["left"] == stats["in_flight"] == 1:
                    if not stats["failed"]:
                        break
                    retried += int(shoal("retry-failed").split()[0])
            (tmp_path / "go").touch()
            assert crawling.wait(60) == 0
        finally:
            crawling.kill()
    assert retried > 0
    assert pages_fetched(url) == dict.fromkeys(["/", *(f"/p/{number}" for number in range(PAGES))], 1)
    assert len((tmp_path / "items.jsonl").read_text().splitlines()) == PAGES + 1


async def test_the_links_of_a_page_enter_while_the_queue_has_room(caplog: pytest.LogCaptureFixture) -> None:
    class Wide(Spider):
        url = ""

        def start(self) -> list[Request]:
            return [Request(f"{self.url}/")]

        def parse(self, response: Response) -> object:
            yield {"url": response.url}
            if response.request.depth == 0:
                yield from [Request(f"{self.url}/p/{number}") for number in range(PAGES)]

    async with SiteServer(PAGES) as server:
        settings = {"download_delay": 0, "queue": {"max_size": 15, "overflow": "refuse"}}
        with caplog.at_level("DEBUG", "shoal.scheduler"):
            done = await crawl(Wide, settings, arguments={"url": server.url})
    logged = [message.split()[0] for message in caplog.messages if "in the queue)" in message]
    assert Counter(logged) == {"enqueued": 16, "refused": PAGES - 15}  # the start request too
    assert len([message for message in caplog.messages if "`shoal retry-failed` queues them" in message]) == 1
    assert done.summary is not None
    assert done.summary.dead_kinds == {FULL_KIND: PAGES - 15}
    assert done.summary.counters.links_refused == PAGES - 15
    assert done.summary.lost == 0
    assert sorted(item["url"] for item in done.items) == sorted(
        [f"{server.url}/", *(f"{server.url}/p/{number}" for number in range(15))]
    )
