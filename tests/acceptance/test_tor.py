"""Crawls through a private Tor network. The site sees which exit each request came from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import SHOAL, Fleet, frontier_url
from tests.acceptance.tor_apart import Step, run_apart
from tests.tor_network import NAMES, TorNetwork, daemons_below, tor_network
from tests.tor_site import TorSite, tor_site

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "throttle.enabled": False, "concurrency": 4, "retry.max_attempts": 1}

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")
"""


@pytest.fixture(scope="module")
def tor_site_process() -> Iterator[TorSite]:
    with tor_site() as made:
        yield made


@pytest.fixture(scope="module")
def network(tor_site_process: TorSite) -> Iterator[TorNetwork]:
    with tor_network(tor_site_process.port) as made:
        yield made


@pytest.fixture
def site(tor_site_process: TorSite) -> TorSite:
    tor_site_process.forget()
    return tor_site_process


class TorFleet(Fleet):
    """Workers whose daemons have their data below ``folder``."""

    def __init__(self, folder: Path, network: TorNetwork, **settings: Any) -> None:
        super().__init__(folder, frontier_url("redis"), SPIDER)
        self._settings = {"tor.torrc": network.torrc, "tor.probe_timeout": 5, "lease.batch": 2, **settings}

    def tor_worker(self, *arguments: str) -> subprocess.Popen[str]:
        return self.worker(
            "--tor", *arguments, settings=self._settings, env={"TMPDIR": str(self.folder), "SHOAL_WORKER__SESSION": "3"}
        )

    def daemons(self) -> dict[int, int]:
        return daemons_below(self.folder)

    def items(self) -> Counter[str]:
        done = self.shoal("export", self.run_id, "-o", "-")
        return Counter(json.loads(line)["url"] for line in done.stdout.splitlines())


def wait_until(holds: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, f"not {what} after {timeout:g} s"
        time.sleep(0.05)


def pages(site: TorSite, host: str, count: int, wait: float = 0.0) -> tuple[str, set[str]]:
    """The URL of a list, and the URLs of a crawl that begins there."""
    url = f"http://{host}:{site.port}"
    start = f"{url}/list?count={count}&wait={wait}"
    return start, {start, *(f"{url}/page/{number}?wait={wait}" for number in range(count))}


def run_tor(folder: Path, network: TorNetwork, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    (folder / "spider.py").write_text(SPIDER)
    return subprocess.run(
        [*SHOAL, "run", "spider.py", "--tor", f"--set=tor.torrc={network.torrc}", *words],
        cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip


def left_behind(folder: Path) -> list[object]:
    """Daemons and folders that nobody needs any more."""
    return [*daemons_below(folder), *folder.glob("shoal-tor-*")]


# -- a fleet


@pytest.mark.parametrize("fault", ["SIGKILL of a daemon", "SIGSTOP of a daemon", "SIGKILL of a worker"])
def test_a_fleet_survives_faults(tmp_path: Path, network: TorNetwork, site: TorSite, fault: str) -> None:
    """Two workers have two daemons. Everything is crawled once, with one attempt for each page."""
    lists = [pages(site, name, 12, wait=0.3) for name in NAMES[:2]]
    # A worker that is killed uses up an attempt of its pages in flight.
    attempts = 2 if fault == "SIGKILL of a worker" else 1
    with TorFleet(tmp_path, network) as fleet:
        fleet.start(*(start for start, _ in lists), settings={"retry.max_attempts": attempts})
        workers = [fleet.tor_worker(), fleet.tor_worker()]
        wait_until(lambda: len(fleet.daemons()) == 2, "two daemons")
        assert sorted(fleet.daemons().values()) == sorted(worker.pid for worker in workers)
        site.wait_for(4, timeout=90)
        victim, parent = next(iter(fleet.daemons().items()))
        if fault == "SIGKILL of a worker":
            os.kill(parent, signal.SIGKILL)
            wait_until(lambda: victim not in fleet.daemons(), "the daemon of a killed worker ends", timeout=5)
        else:
            os.kill(victim, signal.Signals[fault.split()[0]])
            wait_until(lambda: parent in (daemons := fleet.daemons()).values() and victim not in daemons, "replaced")
        fleet.wait(timeout=120)
        assert fleet.items() == Counter(url for _, urls in lists for url in urls)
        fleet.shoal("audit", fleet.run_id)
        assert not fleet.daemons()
    seen = site.visits("/")
    assert {visit.address for visit in seen} <= network.exits
    assert {visit.path for visit in seen} >= {"/robots.txt", "/list"}


# -- nothing goes past Tor


def test_no_packet_goes_past_tor(tmp_path: Path, network: TorNetwork, site: TorSite) -> None:
    """In a namespace where only Tor has a way out: neither while Tor cannot connect, nor while it can."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        why = "this test needs root, for a network namespace"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    (tmp_path / "spider.py").write_text(SPIDER)
    hosts = [f"{NAMES[0]}:{site.port}", f"{network.site_address}:{site.port}", network.onion]
    urls = [f"http://{host}/list?count=3&wait=0" for host in hosts]
    wanted = {*urls, *(f"http://{host}/page/{number}?wait=0" for host in hosts for number in range(3))}
    starts = "start_urls=" + json.dumps(urls)
    run = ["run", "spider.py:Listed", "--frontier", "sqlite:///crawl.db", "-o", "items.jsonl"]
    (tmp_path / "spider.py").write_text(f"{SPIDER}\nclass Listed(Pages):\n    {starts}\n")
    tor = ["--tor", f"--set=tor.torrc={network.torrc}"]
    direct, away, through = run_apart(
        tmp_path,
        network.places,
        [
            Step(["run", "spider.py:Listed", "--set=http.connect_timeout=2"], forwarded=True),
            Step([*run, *tor, "--set=tor.bootstrap_timeout=4"], forwarded=False),
            Step([*run, *tor], forwarded=True),
        ],
    )
    assert direct.packets > 0, "packets are not counted"
    assert (away.code, away.packets) == (1, 0), away.said
    assert "Tor did not get ready: the daemon is at" in away.said
    assert (through.code, through.packets) == (0, 0), through.said
    items = [json.loads(line)["url"] for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert sorted(items) == sorted(wanted)
    seen = {(visit.host, visit.address in network.exits) for visit in site.visits("/")}
    assert seen == {(hosts[0], True), (hosts[1], True), (hosts[2], False)}
    assert not left_behind(tmp_path)
