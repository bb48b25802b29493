"""The dashboard of a crawl: `--ui`, and `shoal ui` beside a process that crawls."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import frontier_url, site
from tests.acceptance.machine import Machine, machine
from tests.acceptance.serving import until
from tests.support.databases import free_port

SPIDER = """
from shoal import Request, Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0.2, "robots.obey": False, "throttle.enabled": False}

    def start(self):
        yield Request(self.start_url)

    def parse(self, response):
        yield {"url": response.url}
        yield response.follow_all("a")
"""

RUN = ["run", "pages.py", "-o", "a.jsonl", "-q"]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "pages.py").write_text(SPIDER)
    with machine(tmp_path) as made:
        yield made


@pytest.fixture
def url() -> Iterator[str]:
    with site(500) as made:
        yield made


def get(address: str) -> str | None:
    """The page at an address, or None if nothing listens there."""
    try:
        with urllib.request.urlopen(address, timeout=10) as response:
            return str(response.read().decode())
    except OSError:
        return None


def runs_at(address: str) -> list[dict[str, Any]]:
    page = get(f"{address}api/runs")
    found: list[dict[str, Any]] = json.loads(page)["runs"] if page else []
    return found


def dashboard_of(here: Machine, err: str = "err.txt") -> str:
    found = until(lambda: re.search(r"dashboard: (\S+)", here.said(err)), what="the dashboard announced")
    address: str = found[1]
    until(lambda: get(address), what="the dashboard reachable")
    return address


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///pages.db"])
def test_a_crawl_shows_its_dashboard_which_ends_with_it(here: Machine, url: str, frontier: str) -> None:
    crawl = here.start(*RUN, "-a", f"start_url={url}/", "--frontier", frontier, "--ui")
    address = dashboard_of(here)
    (run,) = until(lambda: runs_at(address), what="the run shown")
    assert run["spider"] == "pages"
    until(lambda: any(now["stats"]["done"] > run["stats"]["done"] for now in runs_at(address)), what="progress shown")
    page = get(f"{address}ui/runs/{run['run_id']}")
    assert page is not None
    assert "✓ balanced" in page
    until(lambda: "<dt>Workers</dt><dd>1</dd>" in (get(address) or ""), what="the process that crawls counted")
    body = urllib.request.Request(f"{address}api/runs/{run['run_id']}/pause", b"", method="POST")
    try:
        urllib.request.urlopen(body, timeout=10).close()
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error}: {error.read().decode()}")
    until(lambda: [now["state"] for now in runs_at(address)] == ["paused"], what="the crawl paused")
    crawl.kill()
    until(lambda: get(address) is None, what="the dashboard gone with the killed crawl")


def test_a_worker_shows_the_dashboard_of_its_fleet(here: Machine, url: str) -> None:
    frontier = ["--run-id", "r1", "--frontier", frontier_url("redis")]
    here.shoal("start", "pages.py", "-a", f"start_url={url}/", *frontier)
    worker = here.start("worker", "pages.py", *frontier, "-o", "a.jsonl", "-q", "--ui", err="worker.txt")
    address = dashboard_of(here, "worker.txt")
    until(lambda: [each["state"] for each in runs_at(address)] == ["running"], what="the run shown")
    until(lambda: "<dt>Workers</dt><dd>1</dd>" in (get(address) or ""), what="the worker counted")
    worker.kill()
    until(lambda: get(address) is None, what="the dashboard gone with the killed worker")


def test_the_dashboard_shows_a_file_that_another_process_crawls(here: Machine, url: str) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    here.start(*RUN, "-a", f"start_url={url}/", "--frontier", "sqlite:///pages.db")
    until(lambda: (here.folder / "a.jsonl").exists(), what="the crawl running")
    here.start("ui", "--frontier", "sqlite:///pages.db", "--port", str(port), err="ui.txt")
    (run,) = until(lambda: runs_at(address), what="the run shown")
    until(lambda: any(now["stats"]["done"] > run["stats"]["done"] for now in runs_at(address)), what="progress shown")
    assert get(f"{address}api/crawl") is None  # batches are left to `shoal serve`
    (here.folder / "shoal.toml").write_text('[spiders.pages]\nfile = "pages.py"\n')
    body = urllib.request.Request(f"{address}api/runs", b'{"spider": "pages"}', {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(body, timeout=10)
    assert "shoal ui` crawls nothing itself" in refused.value.read().decode()
