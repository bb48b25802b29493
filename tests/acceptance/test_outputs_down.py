"""An output whose disk is full: it is waited for, and then the process stops. No item is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

from tests.acceptance.faults import fill
from tests.acceptance.fleets import KINDS, SHOAL, SPIDER, Fleet, frontier_url, site, visits
from tests.acceptance.serving import until
from tests.support import forking
from tests.support.databases import PostgresServer

PAGES = 600

pytestmark = pytest.mark.timeout(120)

Start = Callable[..., forking.Popen]


@contextmanager
def crawling(folder: Path, disk: Path, frontier: Path | None = None) -> Iterator[tuple[str, Start]]:
    """A site, and a function that starts a crawl of it with these settings. Its output is on the disk."""
    (folder / "spider.py").write_text(SPIDER)
    with site(PAGES, latency=0.05) as url:

        def start(*settings: str) -> forking.Popen:
            options = [f"--set={setting}" for setting in settings]
            command = [
                *SHOAL, "run", "spider.py", "-a", f"start_urls={url}/", "-o", str(disk / "items.jsonl"), *options,
                "--frontier", f"sqlite:///{frontier or folder / 'crawl.db'}",
            ]  # fmt: skip
            with (folder / "log").open("w") as log:
                return forking.Popen(command, cwd=folder, stdout=log, stderr=log, text=True)

        yield url, start


def attempts(folder: Path, log: str = "log") -> int:
    return (folder / log).read_text().count("trying again in")


def assert_complete(disk: Path, url: str) -> None:
    lines = (disk / "items.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["url"] for line in lines) == Counter(
        [f"{url}/", *(f"{url}/p/{number}" for number in range(PAGES))]
    )


def test_a_crawl_stops_and_the_same_command_continues(tmp_path: Path, small_disk: Path) -> None:
    with crawling(tmp_path, small_disk) as (url, start):
        crawl = start("items.patience=1")
        until(lambda: len(visits(url)) > 50)
        ballast = fill(small_disk)
        assert crawl.wait(60) == 1
        assert "the disk is full" in (tmp_path / "log").read_text()
        ballast.unlink()
        assert start().wait(60) == 0
        assert_complete(small_disk, url)


def test_a_crawl_whose_database_does_not_answer_can_be_stopped(tmp_path: Path) -> None:
    """It does not wait for the timeout of the database. The same command continues."""
    (tmp_path / "spider.py").write_text(SPIDER)
    with closing(PostgresServer()) as server, site(PAGES, latency=0.05) as url:
        command = [
            *SHOAL, "run", "spider.py", "-a", f"start_urls={url}/", "-o", f"{server.url}?table=pages&timeout=600",
            "--frontier", f"sqlite:///{tmp_path}/crawl.db", "-q",
        ]  # fmt: skip

        async def rows() -> list[str]:
            connection = await asyncpg.connect(server.url)
            try:
                return [row[0] for row in await connection.fetch("SELECT url FROM pages")]
            finally:
                await connection.close()

        def is_writing() -> bool:
            with suppress(asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):
                return len(asyncio.run(rows())) > 20
            return False

        crawl = forking.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        until(is_writing)
        with server.frozen():
            before = len(visits(url))
            until(lambda: len(visits(url)) > before + 20)
            crawl.send_signal(signal.SIGINT)
            said = crawl.communicate(timeout=60)[1]
        assert crawl.returncode == 0, said
        assert "an output or the server of the frontier does not answer; the next process continues" in said
        forking.run(command, cwd=tmp_path, check=True, timeout=60)
        assert Counter(asyncio.run(rows())) == Counter([f"{url}/", *(f"{url}/p/{n}" for n in range(PAGES))])


def test_a_crawl_waits_until_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    """Longer than the eight seconds of a process that stops."""
    with crawling(tmp_path, small_disk) as (url, start):
        crawl = start()
        until(lambda: len(visits(url)) > 50)
        ballast = fill(small_disk)
        until(lambda: attempts(tmp_path) >= 7)
        assert crawl.poll() is None
        ballast.unlink()
        assert crawl.wait(60) == 0
        assert_complete(small_disk, url)


def test_a_crawl_waits_until_there_is_room_for_its_frontier(tmp_path: Path, small_disk: Path) -> None:
    """A process that waits can be stopped, and the same command continues."""
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk], check=True)  # as much as the whole crawl needs
    with crawling(tmp_path, tmp_path, frontier=small_disk / "crawl.db") as (url, start):
        crawl = start("shutdown_grace=0.5")
        until(lambda: len(visits(url)) > 50)
        for is_stopped in (True, False):
            ballast = fill(small_disk)
            until(lambda: "the frontier is away, waiting for it" in (tmp_path / "log").read_text())
            if is_stopped:
                crawl.send_signal(signal.SIGINT)
                crawl.wait(40)
            else:
                time.sleep(2)
                assert crawl.poll() is None
            ballast.unlink()
            if is_stopped:
                crawl = start("shutdown_grace=0.5")
                until(lambda: len(visits(url)) > 150)
        assert crawl.wait(60) == 0
        assert "the frontier is back" in (tmp_path / "log").read_text()
        assert_complete(tmp_path, url)


def test_a_crawl_that_waits_can_be_stopped(tmp_path: Path, small_disk: Path) -> None:
    """Also when all pages are done, and only the output is left."""
    with crawling(tmp_path, small_disk) as (url, start):
        crawl = start()
        until(lambda: len(visits(url)) > 50)
        ballast = fill(small_disk)
        until(lambda: len(visits(url)) == PAGES + 1 and attempts(tmp_path) >= 6)
        crawl.send_signal(signal.SIGINT)
        stopped = time.monotonic()
        assert crawl.wait(60) == 1
        assert time.monotonic() - stopped < 10
        ballast.unlink()
        assert start().wait(60) == 0
        assert_complete(small_disk, url)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_stops_and_another_one_continues(kind: str, tmp_path: Path, small_disk: Path) -> None:
    output = str(small_disk / "items.jsonl")
    with site(PAGES, latency=0.05) as url, Fleet(tmp_path, frontier_url(kind), SPIDER) as fleet:
        fleet.start(f"{url}/")
        worker = fleet.worker("-o", output, settings={"items.patience": 3})
        until(lambda: len(visits(url)) > 50)
        ballast = fill(small_disk)
        assert worker.wait(60) == 1
        assert "the disk is full" in (tmp_path / "worker-0.log").read_text()
        ballast.unlink()
        assert fleet.worker("-o", output).wait(60) == 0
        assert_complete(small_disk, url)
