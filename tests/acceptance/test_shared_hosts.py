"""Runs of different programs that crawl the same host share it: both make progress, at the longest delay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal import Crawl, Response, Spider
from shoal.frontier import open_store
from tests.acceptance.fleets import KINDS, InProcessFleet, frontier_url
from tests.acceptance.target import Visit, closest, target
from tests.support.patience import allowance

pytestmark = pytest.mark.timeout(120)

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"robots.obey": False, "throttle.enabled": False}

    def parse(self, response):
        yield {"url": response.url}
"""
DELAYS = {"fast": 0.005, "slow": 0.08}
PAGES = 24


def while_both_work(visits: list[Visit]) -> list[Visit]:
    """The visits from the first of the second run to the last of the run that ends first."""
    times = [[visit.start for visit in visits if visit.path.startswith(f"/{name}/")] for name in DELAYS]
    first, last = max(times[0][0], times[1][0]), min(times[0][-1], times[1][-1])
    return [visit for visit in visits if first <= visit.start <= last]


def check_turns(visits: list[Visit]) -> None:
    """Both runs had about as many turns, none of them too early."""
    shared = while_both_work(visits)
    counts = {name: sum(visit.path.startswith(f"/{name}/") for visit in shared) for name in DELAYS}
    assert abs(counts["fast"] - counts["slow"]) <= 4
    assert counts["slow"] >= PAGES // 2
    assert closest(shared) >= DELAYS["slow"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_with_different_delays_share_a_host(kind: str, tmp_path: Path) -> None:
    frontier = frontier_url(kind)
    with target() as site:
        fleets = []
        for name, delay in DELAYS.items():
            folder = tmp_path / name
            folder.mkdir()
            fleet = InProcessFleet(folder, frontier, SPIDER)
            urls = [f"{site.url}/{name}/{number}" for number in range(PAGES)]
            fleet.start(*urls, settings={"download_delay": delay})
            fleets.append(fleet)
        with fleets[0], fleets[1]:
            for fleet in fleets:
                fleet.worker()
            for fleet in fleets:
                fleet.wait(allowance(60))
            for fleet in fleets:
                assert fleet.stats()["done"] == PAGES
        visits = site.visits()
    check_turns(visits)


class Pages(Spider):
    """Fetches its start URLs."""

    name = "pages"
    settings = {"robots.obey": False, "throttle.enabled": False}

    def parse(self, response: Response) -> None:
        """Nothing to do."""


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_two_crawls_of_one_process_share_a_host(kind: str, tmp_path: Path) -> None:
    store = await open_store("memory:" if kind == "memory" else f"sqlite:///{tmp_path}/frontier.db")
    with target() as site:
        crawls = [
            Crawl(
                Pages,
                {"download_delay": delay, "project_name": name},
                urls=[f"{site.url}/{name}/{number}" for number in range(PAGES)],
                store=store,
            )
            for name, delay in DELAYS.items()
        ]
        await asyncio.gather(*crawls)
        visits = site.visits()
    await store.close()
    assert all(crawl.summary is not None and crawl.summary.state == "finished" for crawl in crawls)
    check_turns(visits)
