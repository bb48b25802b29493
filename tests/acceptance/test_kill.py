"""A crawl that is killed repeatedly, and resumed with the same command."""

from __future__ import annotations

import csv
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.support import forking
from tests.support.forking import SHOAL

PAGES = 1500
KILLS = 20
SPIDER = """
from shoal import Request, Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "concurrency": 8, "retry": {"max_attempts": 50}}

    def start(self):
        yield Request(self.start_url)

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")
"""


@pytest.fixture
def site() -> Iterator[str]:
    """The site in a process of its own, slow enough that the crawl lasts through all kills."""
    command = [sys.executable, "-m", "tests.support.servers", "--pages", str(PAGES), "--latency", "0.08"]
    with forking.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


def items_of(path: Path) -> Counter[str]:
    """The URLs in an output, and how often each is there."""
    match path.suffix:
        case ".jsonl":
            return Counter(json.loads(line)["url"] for line in path.read_text().splitlines())
        case ".csv":
            with path.open(newline="") as file:
                return Counter(row["url"] for row in csv.DictReader(file))
        case ".parquet":
            return Counter(pyarrow.parquet.read_table(path)["url"].to_pylist())
        case _:
            with sqlite3.connect(path) as db:
                return Counter(url for (url,) in db.execute("SELECT url FROM item"))


@pytest.mark.timeout(300)
def test_killed_twenty_times_every_item_is_there_once(site: str, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    outputs = [tmp_path / f"out{ending}" for ending in (".jsonl", ".csv", ".parquet", ".db")]
    frontier = ["--frontier", f"sqlite:///{tmp_path}/crawl.db"]
    command = [*SHOAL, "run", "spider.py", "-a", f"start_url={site}", *frontier, "-q"]
    for output in outputs:
        command += ["-o", str(output)]
    moments = random.Random(time.time_ns())
    killed = 0
    while killed < KILLS:
        with forking.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as crawl:
            try:
                crawl.wait(moments.uniform(0.1, 0.7))
            except subprocess.TimeoutExpired:
                crawl.send_signal(signal.SIGKILL)
                killed += 1
            else:
                pytest.fail(f"it ended after {killed} kills: {crawl.stderr and crawl.stderr.read()}")
    forking.run(command, cwd=tmp_path, check=True, timeout=120)

    expected = Counter([f"{site}/", *(f"{site}/p/{number}" for number in range(PAGES))])
    for output in outputs:
        assert items_of(output) == expected, output.name
    for ending in (".jsonl", ".csv", ".parquet", ".db"):
        again = tmp_path / f"again{ending}"
        forking.run([*SHOAL, "export", *frontier, "-o", str(again)], cwd=tmp_path, check=True, timeout=60)
        assert items_of(again) == expected, again.name
    audit = forking.run([*SHOAL, "audit", *frontier], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "balanced: nothing lost" in audit.stdout
