"""WARC files of crawls whose processes are killed: every page that is done has its records exactly once."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acceptance.fleets import KINDS, SHOAL, SPIDER, Fleet, frontier_url, site
from tests.support import forking
from tests.support.warc_files import pages_of, read_folder, warc_files

PAGES = 400
KILLS = 6

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def shop() -> Iterator[str]:
    with site(PAGES, latency=0.08) as url:
        yield url


def expected(url: str) -> dict[str, int]:
    return {f"{url}/": 1, **{f"{url}/p/{number}": 1 for number in range(PAGES)}}


def size_of(folder: Path) -> int:
    """Of all files. One that is renamed meanwhile counts with the next call."""
    size = 0
    for path in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def wait_until(folder: Path, size: int, process: subprocess.Popen[str]) -> None:
    """Wait until the files have this size. The process must not end before."""
    until = time.monotonic() + 60
    while size_of(folder) < size:
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.005)


def test_a_crawl_that_is_killed_again_and_again(shop: str, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    command = [*SHOAL, "run", "spider.py", "-a", f"start_urls={shop}/", "--frontier", "sqlite:///crawl.db", "-q",
               "--warc", "warc", "--set", "warc.max_file_bytes=60000", "--set", "worker.session=2",
               "--set", "retry.max_attempts=50"]  # fmt: skip
    folder, moments, hits = tmp_path / "warc", random.Random(time.time_ns()), 0
    for _ in range(KILLS):
        goal = size_of(folder) + moments.randrange(3000, 30_000)
        with forking.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as crawl:
            wait_until(folder, goal, crawl)
            crawl.send_signal(signal.SIGKILL)
            crawl.wait()
        hits += any(path.name.endswith(".open") for path in folder.iterdir())  # or it had just finished one
    forking.run(command, cwd=tmp_path, check=True, timeout=120)
    assert pages_of(read_folder(folder)) == expected(shop)
    assert len(warc_files(folder)) > KILLS
    assert hits >= KILLS / 2


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_are_killed(kind: str, shop: str, tmp_path: Path) -> None:
    folder, moments = tmp_path / "warc", random.Random(time.time_ns())
    with Fleet(tmp_path, frontier_url(kind)) as fleet:
        fleet.start(f"{shop}/", settings={"retry.max_attempts": 50, "concurrency_per_host": 16})
        settings = {"warc.folder": "warc", "worker.session": 2, "lease.ttl": 20}
        workers = [fleet.worker(settings=settings) for _ in range(2)]
        for _ in range(4):
            goal = size_of(folder) + moments.randrange(5000, 30_000)
            victim = workers.pop(0)
            wait_until(folder, goal, victim)
            victim.kill()
            victim.wait()
            workers.append(fleet.worker(settings=settings))
        fleet.wait(120)
        stats = fleet.stats()
    assert (stats["done"], stats["failed"]) == (PAGES + 1, 0)
    assert pages_of(read_folder(folder)) == expected(shop)


def test_several_processes_of_one_machine(shop: str, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    command = [*SHOAL, "run", "spider.py", "-a", f"start_urls={shop}/", "-q", "--warc", "warc", "--processes", "2",
               "--set", "concurrency_per_host=32"]  # fmt: skip
    forking.run(command, cwd=tmp_path, check=True, timeout=120)
    assert pages_of(read_folder(tmp_path / "warc")) == expected(shop)
    assert len(warc_files(tmp_path / "warc")) == 2
