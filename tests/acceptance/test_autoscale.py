"""Autoscaling with real workers: they start with the backlog, stop cleanly, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.frontier import open_store
from shoal.http import Request
from shoal.item import decode_item
from tests.acceptance.faults import picture
from tests.acceptance.fleets import SHOAL, Fleet, frontier_url
from tests.acceptance.target import Target, target
from tests.support import forking
from tests.support.databases import RedisServer

SPIDER = """
import os
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8,
                "concurrency_per_host": 100, "lease.batch": 8, "user_agent": f"worker-{os.getpid()}"}

    def parse(self, response):
        yield {"url": response.url}
        yield response.follow_all("a")
"""
"""The site knows by the name of its visitor which process came."""

HUBS, PAGES = 6, 240
ALL = HUBS + PAGES + 1
WAITS = [0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3]  # seconds for a page; a worker that leaves gives it half a second


@pytest.fixture(scope="module")
def site() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, frontier_url("redis"), SPIDER) as made:
        yield made


class Autoscaler:
    """The command as a process, and what it said."""

    def __init__(self, fleet: Fleet, *arguments: str, path: Path | None = None) -> None:
        self._log = fleet.folder / "autoscale.log"
        environment = os.environ if path is None else {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
        with self._log.open("w") as log:
            self.process = forking.Popen(
                [*SHOAL, "autoscale", fleet.run_id, "--frontier", fleet.frontier, "--every", "0.2", *arguments],
                cwd=fleet.folder, stdout=log, stderr=log, text=True, env=environment,
            )  # fmt: skip
        fleet.processes.append(self.process)

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def numbers(self) -> list[int]:
        """Of workers, as it told them."""
        return [int(number) for number in re.findall(r"(\d+) workers? for [\d,]+ requests? \(was \d+\)", self.said)]

    @property
    def workers(self) -> list[int]:
        """The processes that it has started and that still live."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _parent(entry) == self.process.pid
        ]

    def wait_until(self, holds: Callable[[], object], timeout: float = 60.0) -> None:
        until = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < until, self.said
            time.sleep(0.03)

    def wait(self, timeout: float = 60.0) -> int:
        return self.process.wait(timeout)


def _parent(process: Path) -> int | None:
    """None for one that has ended, also when nobody has asked for its exit code yet."""
    try:
        state, parent, *_ = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def lives(pid: int) -> bool:
    return _parent(Path(f"/proc/{pid}")) is not None


def attempts_of(fleet: Fleet, urls: Iterable[str]) -> set[int]:
    """How many attempts pages have used up."""

    async def ask() -> set[int]:
        store = await open_store(fleet.frontier)
        try:
            frontier = await store.frontier(fleet.run_id)
            histories = [await frontier.find(Request(url)) for url in urls]
            return {0 if history is None else history.attempts for history in histories}
        finally:
            await store.close()

    return asyncio.run(ask())


def leased(fleet: Fleet) -> int:
    return picture(fleet.frontier, fleet.run_id).stats.leased


def hubs(site: Target) -> list[str]:
    """A few pages that link to many slow ones, and one that is not answered before the gate is open."""
    pages = [f"/{number}%3Fwait={WAITS[number % len(WAITS)]}" for number in range(PAGES)]
    found = [f"{site.url}/hub?" + "&".join(f"link={page}" for page in pages[n::HUBS]) for n in range(HUBS)]
    return [*found, f"{site.url}/last?gate=1"]


def test_from_one_to_four_and_back(fleet: Fleet) -> None:
    with target() as site:
        fleet.start(*hubs(site))
        scaler = Autoscaler(fleet, "--spider", "spider.py", "--per-worker", "60", "--max", "4", "--cool-down", "1")
        scaler.wait_until(lambda: len(scaler.workers) == 4)
        scaler.wait_until(lambda: len(scaler.workers) == 1)
        assert {f"worker-{pid}" for pid in scaler.workers} == {site.visits()[0].agent}  # the first one stays
        site.hurry()
        site.open_gate()
        assert scaler.wait() == 0, scaler.said

        assert scaler.numbers[0] == 1
        assert max(scaler.numbers) == 4
        rise = scaler.numbers.index(4)
        assert scaler.numbers[: rise + 1] == sorted(scaler.numbers[: rise + 1])
        assert scaler.numbers[rise:] == sorted(scaler.numbers[rise:], reverse=True)
        assert scaler.numbers[-1] == 1
        assert f"run {fleet.run_id} is finished" in scaler.said
        assert "WARNING" not in scaler.said

        visits = site.visits()
        assert len({visit.agent for visit in visits}) == 4
        seen = picture(fleet.frontier, fleet.run_id)
        found = Counter(decode_item(item.payload)[1]["url"] for item in seen.items)
        assert set(found.values()) == {1}
        assert len(found) == ALL
        assert seen.in_order
        assert (seen.run.state, seen.stats.done, seen.stats.dead) == ("finished", ALL, 0)
        assert attempts_of(fleet, found) == {1}
        assert len(visits) > ALL, "nothing was released, so nothing was proven"


def test_no_worker_is_left_behind(fleet: Fleet, site: Target) -> None:
    """SIGKILL gives the autoscaler no time for anything; its workers give back what they have all the same."""
    fleet.frontier = frontier_url("postgresql")
    fleet.start(*(f"{site.url}/{number}?wait=60" for number in range(30)))
    scaler = Autoscaler(fleet, "--spider", "spider.py", "--per-worker", "10")
    scaler.wait_until(lambda: leased(fleet) > 16)  # more than one of them can have
    workers = scaler.workers
    assert len(workers) == 3
    scaler.process.kill()
    scaler.wait()
    scaler.wait_until(lambda: not any(map(lives, workers)), timeout=5.0)
    seen = picture(fleet.frontier, fleet.run_id)
    assert seen.in_order
    assert (seen.stats.ready, seen.stats.leased) == (30, 0)


def test_the_killed_are_replaced_and_a_signal_ends_them_all(fleet: Fleet, site: Target) -> None:
    fleet.start(*(f"{site.url}/{number}?wait=60" for number in range(30)))
    scaler = Autoscaler(fleet, "--spider", "spider.py", "--per-worker", "10", "--logs", "logs")
    scaler.wait_until(lambda: leased(fleet) > 16)
    os.kill(scaler.workers[0], signal.SIGKILL)
    scaler.wait_until(lambda: "was killed by signal 9; restarting it" in scaler.said)
    scaler.wait_until(lambda: len(scaler.workers) == 3)
    workers = scaler.workers
    scaler.process.send_signal(signal.SIGTERM)
    assert scaler.wait(5.0) == 0, scaler.said
    assert not any(map(lives, workers))
    assert leased(fleet) <= 16  # those of the one that was killed
    logs = [path.read_text() for path in (fleet.folder / "logs").iterdir()]
    assert len(logs) == 4
    assert sum("stopping: pages in flight have" in log for log in logs) >= 2, logs


def test_what_can_not_work_is_told(fleet: Fleet, site: Target) -> None:
    fleet.start(f"{site.url}/1")

    def says(*arguments: str) -> str:
        done = fleet.shoal("autoscale", fleet.run_id, *arguments, check=False)
        assert done.returncode == 2, done.stderr
        return done.stderr

    assert "shoal.toml does not list 'pages'" in says()
    assert "--min 3 is more than --max 2" in says("--spider", "spider.py", "--min", "3", "--max", "2")
    assert "--via 'swarm:x': write local, compose:FILE" in says("--via", "swarm:x")
    (fleet.folder / "other.py").write_text(SPIDER + "# a change")
    assert "has changed since run" in says("--spider", "other.py")
    scaler = Autoscaler(fleet, "--spider", "other.py", "--", "--allow-changed", "--set", "concurrency=none")
    scaler.wait_until(lambda: "failed with exit code 2: shoal: " in scaler.said)
    assert scaler.process.poll() is None  # it may be better the next time


# -- those whom others look after

KUBECTL = f"""#!{sys.executable}
import pathlib, sys
replicas, trouble = pathlib.Path("replicas"), pathlib.Path("trouble")
if sys.argv[1:4] == ["--namespace", "crawls", "scale"]:
    if trouble.exists():
        sys.exit("the server is away")
    replicas.write_text(sys.argv[5].removeprefix("--replicas="))
print(replicas.read_text())
"""


def kubernetes(fleet: Fleet) -> Autoscaler:
    """With a program instead of kubectl that keeps the number in a file, and can fail."""
    folder = fleet.folder / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    words = ("--via", "kubernetes:crawls/shoal-worker", "--per-worker", "100", "--cool-down", "0.5")
    return Autoscaler(fleet, *words, path=folder)


def test_others_are_told_by_their_commands(fleet: Fleet, site: Target) -> None:
    fleet.start(*(f"{site.url}/{number}" for number in range(250)))
    replicas, trouble = fleet.folder / "replicas", fleet.folder / "trouble"
    replicas.write_text("1")
    trouble.touch()
    scaler = kubernetes(fleet)
    scaler.wait_until(lambda: "3 workers for 250 requests (was 1)" in scaler.said)
    scaler.wait_until(lambda: "failed: the server is away; trying again" in scaler.said)
    trouble.unlink()
    scaler.wait_until(lambda: replicas.read_text() == "3")
    fleet.shoal("pause", fleet.run_id)  # nothing to do for now
    scaler.wait_until(lambda: replicas.read_text() == "1")
    fleet.shoal("resume", fleet.run_id)
    scaler.wait_until(lambda: replicas.read_text() == "3")
    scaler.process.send_signal(signal.SIGTERM)
    assert scaler.wait() == 0
    assert replicas.read_text() == "3"  # they are not its own
    fleet.shoal("cancel", fleet.run_id)
    scaler = kubernetes(fleet)
    assert scaler.wait() == 0
    assert replicas.read_text() == "0"
    assert f"run {fleet.run_id} is cancelled" in scaler.said


def test_while_the_frontier_is_away_the_number_stays(tmp_path: Path) -> None:
    server = RedisServer()
    with closing(server), Fleet(tmp_path, frontier_url("redis", server), SPIDER) as fleet:
        fleet.start(*(f"http://127.0.0.1:9/{number}" for number in range(250)))
        (tmp_path / "replicas").write_text("1")
        scaler = kubernetes(fleet)
        scaler.wait_until(lambda: (tmp_path / "replicas").read_text() == "3")
        server.kill()
        scaler.wait_until(lambda: "stays the same: the frontier cannot be reached" in scaler.said)
        time.sleep(1.0)  # several looks
        server.start()
        scaler.wait_until(lambda: "the frontier is back" in scaler.said)
        assert scaler.said.count("cannot be reached") == 1
        assert (tmp_path / "replicas").read_text() == "3"
        assert scaler.numbers == [3]
