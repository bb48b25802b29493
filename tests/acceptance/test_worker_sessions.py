"""A worker that dies, freezes or loses the store: its pages go to others within its session, and nothing is doubled."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shoal.frontier import open_store
from shoal.ports import Frontier
from tests.acceptance.fleets import KINDS, Fleet, frontier_url, site, visits

SESSION = 4.0
LONG = 14.0
"""A session in which a worker that waits reports why."""
PAGES = 300

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.timeout(120)]

SLEEPY = """
import os, time
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8}

    def parse(self, response):
        if response.url.endswith("/p/7") and os.environ.get("BLOCKS"):
            open("blocked", "w").close()
            time.sleep(float(os.environ["BLOCKS"]))
        yield {"url": response.url}
        yield response.follow_all("a")
"""


def held(fleet: Fleet) -> dict[int, int]:
    """How many pages each worker holds, by process id."""

    async def work() -> dict[int, int]:
        store = await open_store(fleet.frontier)
        try:
            frontier: Frontier = await store.frontier(fleet.run_id)
            return {each.pid: each.leases for each in await frontier.workers()}
        finally:
            await store.close()

    return asyncio.run(work())


def wait_until(so: Callable[[], bool], timeout: float = 30.0) -> float:
    """Wait until it is so. Returns the seconds that it took."""
    start = time.monotonic()
    while not so():
        assert time.monotonic() < start + timeout
        time.sleep(0.1)
    return time.monotonic() - start


def connections(pid: int, port: int) -> int:
    """How many connections a process has to this port."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" and f"socket:[{row[9]}]" in links for row in rows)


def items(fleet: Fleet) -> Counter[str]:
    fleet.shoal("export", fleet.run_id, "-o", "items.jsonl")
    return Counter(json.loads(line)["url"] for line in (fleet.folder / "items.jsonl").read_text().splitlines())


def expected(url: str) -> Counter[str]:
    return Counter([f"{url}/", *(f"{url}/p/{number}" for number in range(PAGES))])


def test_pages_of_a_killed_worker_return_within_its_session(kind: str, tmp_path: Path) -> None:
    with site(PAGES, latency=0.3) as url, Fleet(tmp_path, frontier_url(kind), SLEEPY) as fleet:
        fleet.start(f"{url}/")
        victim = fleet.worker(settings={"worker.session": SESSION})
        wait_until(lambda: held(fleet).get(victim.pid, 0) > 0)
        fleet.worker(settings={"worker.session": SESSION})
        wait_until(lambda: len(held(fleet)) == 2)
        victim.send_signal(signal.SIGSTOP)  # so that what it holds does not change until it is killed
        lost = held(fleet)[victim.pid]
        assert lost > 0
        victim.kill()
        assert wait_until(lambda: victim.pid not in held(fleet)) < SESSION + 3  # the machine may be busy
        fleet.wait()
        assert fleet.stats()["failed"] == 0
        assert items(fleet) == expected(url)
        fetched = Counter(path for _, path, _, _ in visits(url))
        assert {path for path, count in fetched.items() if count > 2} == set()
        assert sum(count - 1 for count in fetched.values()) <= lost  # only what was in flight is fetched twice


def test_a_blocked_event_loop_does_not_end_the_session(kind: str, tmp_path: Path) -> None:
    with site(PAGES, latency=0.05) as url, Fleet(tmp_path, frontier_url(kind), SLEEPY) as fleet:
        fleet.start(f"{url}/")
        settings = {"worker.session": SESSION, "lease.ttl": 60}
        fleet.worker(settings=settings, env={"BLOCKS": "9"})
        wait_until((tmp_path / "blocked").exists)
        fleet.worker(settings=settings)
        fleet.wait()
        assert items(fleet) == expected(url)
        logs = [(tmp_path / f"worker-{number}.log").read_text() for number in range(2)]
        assert "is silent" not in "".join(logs)
        assert "lease lost" not in "".join(logs)
        assert Counter(path for _, path, _, _ in visits(url)).most_common(1)[0][1] == 1


def test_a_frozen_worker_changes_nothing_and_joins_again(kind: str, tmp_path: Path) -> None:
    with site(PAGES, latency=0.3) as url, Fleet(tmp_path, frontier_url(kind), SLEEPY) as fleet:
        fleet.start(f"{url}/")
        frozen = fleet.worker(settings={"worker.session": SESSION})
        wait_until(lambda: held(fleet).get(frozen.pid, 0) > 0)
        other = fleet.worker(settings={"worker.session": SESSION, "concurrency": 1, "lease.batch": 1})
        wait_until(lambda: other.pid in held(fleet))
        frozen.send_signal(signal.SIGSTOP)
        wait_until(lambda: frozen.pid not in held(fleet))
        frozen.send_signal(signal.SIGCONT)
        wait_until(lambda: held(fleet).get(frozen.pid, 0) > 0)
        fleet.wait()
        assert fleet.stats()["failed"] == 0
        assert items(fleet) == expected(url)
        assert "joins again" in (tmp_path / "worker-0.log").read_text()


def test_heartbeats_need_no_connection_of_their_own(kind: str, tmp_path: Path) -> None:
    with site(PAGES, latency=0.1) as url, Fleet(tmp_path, frontier_url(kind), SLEEPY) as fleet:
        fleet.start(f"{url}/")
        worker = fleet.worker(settings={"worker.session": 1.0})
        wait_until(lambda: worker.pid in held(fleet))
        time.sleep(1.0)
        most = 2 if kind == "postgresql" else 4  # calls to Redis that overlap on a busy machine have one each
        assert 1 <= connections(worker.pid, urlsplit(fleet.frontier).port or 0) <= most
        fleet.wait()


def test_stats_show_a_silent_worker(kind: str, tmp_path: Path) -> None:
    with site(PAGES, latency=0.5) as url, Fleet(tmp_path, frontier_url(kind), SLEEPY) as fleet:
        fleet.start(f"{url}/")
        worker = fleet.worker()
        wait_until(lambda: held(fleet).get(worker.pid, 0) > 1)
        worker.send_signal(signal.SIGSTOP)
        time.sleep(8.0)  # more than half of the session: no other worker is there to fence it
        lines = fleet.shoal("stats", fleet.run_id).stdout.splitlines()
        assert any("pages held by worker" in line and "silent for" in line for line in lines), lines
        (known,) = fleet.stats()["workers"]
        assert known["pid"] == worker.pid
        os.kill(worker.pid, signal.SIGKILL)


def test_a_killed_worker_does_not_block_hosts_for_other_runs(kind: str, tmp_path: Path) -> None:
    """Nobody else works on its run. A host with a delay has one request in flight, for all runs together. Until the
    session of the dead worker ends, the other worker says whom it waits for."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    frontier, settings = frontier_url(kind), {"download_delay": 0.05}
    with (
        site(20, latency=0.3) as url,
        Fleet(folders[0], frontier, SLEEPY) as a,
        Fleet(folders[1], frontier, SLEEPY) as b,
    ):
        for fleet in (a, b):
            fleet.start(f"{url}/", settings=settings)
        victim = a.worker(settings={"worker.session": LONG})
        while not held(a).get(victim.pid):
            victim.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            victim.send_signal(signal.SIGSTOP)
        victim.kill()
        before = len(visits(url))
        b.worker(settings={"worker.session": SESSION})
        assert wait_until(lambda: len(visits(url)) > before) < LONG + 6  # its lease ends after 300 s
        b.wait()
        log = (folders[1] / "worker-0.log").read_text()
        assert re.search(
            rf"waiting: 127.0.0.1:\d+ is busy with run {a.run_id}, whose worker .* is silent for \d+ s", log
        )
        assert f"of run {a.run_id} is silent: its 1 pages are released" in log
        assert held(a) == {}
