"""Archives of several runs, whose crawls and prunes are killed: no page of a run that stays is ever lost."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.sinks.archive import ArchiveFolder, Found
from shoal.sinks.archive_index import REVISIT
from tests.acceptance.fleets import SHOAL, SPIDER, site
from tests.acceptance.test_warc import size_of, wait_until
from tests.support import forking
from tests.support.warc_files import warc_files

PAGES = 120
RUNS = 4

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def shop() -> Iterator[str]:
    with site(PAGES, latency=0.02) as url:
        yield url


def archive(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*SHOAL, "archive", *words]
    return forking.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)


def crawl_command(shop: str, number: int) -> list[str]:
    return [*SHOAL, "run", "spider.py", "-a", f"start_urls={shop}/", "--frontier", f"sqlite:///{number}.db", "-q",
            "--warc", "warc", "--set", "warc.max_file_bytes=40000",
            "--set", "worker.session=2", "--set", "retry.max_attempts=50"]  # fmt: skip


def listed(folder: Path) -> list[dict[str, Any]]:
    """The runs of the archive, newest first."""
    return [json.loads(line) for line in archive(folder, "list", "warc", "--json").stdout.splitlines()]


def stored(folder: Path) -> dict[str, dict[str, bytes]]:
    """The pages of each run with their bodies."""
    found: dict[str, dict[str, bytes]] = {}
    with ArchiveFolder(str(folder)) as opened:
        assert opened.faults == []
        for index in opened.indexes():
            for line in index:
                pages = found.setdefault(index.summary.run, {})
                assert line.entry.url not in pages or not index.summary.run
                pages[line.entry.url] = opened.read(Found(index, line)).body
    return found


def test_runs_and_prunes_that_are_killed(shop: str, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    folder, moments = tmp_path / "warc", random.Random(time.time_ns())
    for number in range(RUNS):
        command = crawl_command(shop, number)
        goal = size_of(folder) + moments.randrange(3000, 20_000)
        with forking.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as crawl:
            wait_until(folder, goal, crawl)
            assert archive(tmp_path, "prune", "warc", "--keep-runs", "1").returncode == 2, "a crawl writes"
            crawl.send_signal(signal.SIGKILL)
            crawl.wait()
        forking.run(command, cwd=tmp_path, check=True, timeout=120)
        runs = [run["run"] for run in listed(tmp_path)]
        for _ in range(2):
            words = [*SHOAL, "archive", "prune", "warc", "--keep-runs", "2"]
            with forking.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as prune:
                time.sleep(moments.uniform(0, 0.6))
                prune.send_signal(signal.SIGKILL)
                prune.wait()
            pages = stored(folder)
            assert len(pages[runs[0]]) == PAGES + 1
        done = archive(tmp_path, "prune", "warc", "--keep-runs", "2")
        assert done.returncode == 0, done.stderr
        checked = archive(tmp_path, "check", "warc")
        assert (checked.returncode, checked.stdout) == (0, "warc is whole\n")
    pages = stored(folder)
    assert set(pages) - {""} == set(runs[:2])
    first, last = pages[runs[1]], pages[runs[0]]
    assert first == last
    assert len(first) == PAGES + 1
    with ArchiveFolder(str(folder)) as opened:
        bodies = [line.entry.digest for index in opened.indexes() for line in index if line.entry.mime != REVISIT]
    assert len(bodies) <= 1.3 * len(set(bodies)), "bodies are stored once"
    assert len(warc_files(folder)) > 3


def test_the_commands(shop: str, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    for number in range(2):
        forking.run(crawl_command(shop, number), cwd=tmp_path, check=True, timeout=120)
    (tmp_path / "shoal.toml").write_text('[warc]\nfolder = "warc"\n')
    last, first = listed(tmp_path)
    assert (last["pages"], last["revisits"]) == (PAGES + 1, PAGES + 1)
    assert (first["pages"], first["revisits"]) == (PAGES + 1, 0)
    assert archive(tmp_path, "list").stdout.count("\n") == 3
    planned = archive(tmp_path, "prune", "--run", first["run"], "--dry-run").stdout
    assert planned.endswith(f"would keep the bodies of {PAGES + 1} pages: other runs need them\n")
    warc_files(tmp_path / "warc")[0].with_suffix("").with_suffix(".cdxj").unlink()
    broken = archive(tmp_path, "check")
    assert broken.returncode == 1
    assert "shoal archive check" in broken.stdout
    assert archive(tmp_path, "prune", "--keep-runs", "1").returncode == 2
    assert archive(tmp_path, "check", "--repair").returncode == 0
    assert archive(tmp_path, "prune", "--keep-runs", "1").stdout.startswith(f"removed {first['run']}: ")
    assert archive(tmp_path, "prune", "--keep-runs", "1").stdout == "nothing to remove: warc has no older runs\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["list"], "name the folder of the archive"),
        (["list", "missing"], "cannot read the archive"),
        (["check", "missing"], "cannot read the archive"),
        (["prune", "."], "--keep-runs N"),
        (["prune", ".", "--keep-runs", "1", "--run", "a"], "--keep-runs N"),
        (["prune", ".", "--keep-runs", "0"], "--keep-runs"),
        (["prune", ".", "--run", "a"], "has no run a"),
    ],
)
def test_mistakes_are_explained(words: list[str], says: str, tmp_path: Path) -> None:
    done = archive(tmp_path, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
