"""A Scrapy spider on three workers over Redis, one of which is killed: the same items as under Scrapy, each once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.fleets import frontier_url
from tests.scrapy.differential.runs import Outcome, Project, run_scrapy
from tests.scrapy.shop import Visitor, normalized, shop
from tests.support import forking
from tests.support.forking import SHOAL

RULES = Project("rules.py")
WORKERS = 3
LATENCY = 0.15


@contextmanager
def worker(folder: Path, number: int, run_id: str, frontier: str) -> Iterator[subprocess.Popen[str]]:
    words = [
        *SHOAL,
        "worker",
        "--scrapy",
        RULES.place,
        "--run-id",
        run_id,
        "--frontier",
        frontier,
        "--set",
        "lease.ttl=3",
    ]
    with (folder / f"worker-{number}.log").open("w") as log:
        process = forking.Popen(words, cwd=folder, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(visitor: Visitor, requests: int) -> None:
    until = time.monotonic() + 60
    while len(visitor.seen) < requests:
        assert time.monotonic() < until, f"the shop has seen only {visitor.lines}"
        time.sleep(0.02)


def shoal(folder: Path, *words: str) -> str:
    done = forking.run([*SHOAL, *words], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(200)
def test_every_item_once_although_a_worker_is_killed(tmp_path: Path) -> None:
    with shop() as opened:
        scrapy = Outcome(opened.visitor(), tmp_path / "scrapy")
        RULES.copy_to(scrapy.folder)
        run_scrapy([(RULES, scrapy)])
        assert scrapy.problem == ""

        visitor, folder, frontier = opened.visitor(), tmp_path / "shoal", frontier_url("redis")
        visitor.latency = LATENCY
        RULES.copy_to(folder)
        options = ["-a", f"site={visitor.url}", "--set", "lease.ttl=3", "--frontier", frontier]
        run_id = json.loads(shoal(folder, "start", "--scrapy", RULES.place, *options))["run_id"]
        with (
            worker(folder, 0, run_id, frontier) as first,
            worker(folder, 1, run_id, frontier) as second,
            worker(folder, 2, run_id, frontier) as third,
        ):
            wait_for(visitor, 12)
            os.kill(second.pid, signal.SIGKILL)
            codes = [each.wait(90) for each in (first, second, third)]
        logs = "\n".join((folder / f"worker-{number}.log").read_text()[-2000:] for number in range(WORKERS))
        assert codes == [0, -signal.SIGKILL, 0], logs
        shoal(folder, "export", run_id, "-o", "items.jsonl", "--frontier", frontier)
        items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
    assert sorted(normalized(item, visitor) for item in items) == scrapy.item_texts
    assert set(visitor.lines) == set(scrapy.visitor.lines)
    assert len(visitor.seen) > 12  # the killed worker left some for the others
