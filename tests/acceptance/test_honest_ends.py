"""The end of a crawl says what it achieved: in one line, in its exit code, and in commands that can be pasted."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.forking import SHOAL
from tests.support.servers import SiteServer

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "retry": {"max_attempts": 1}}

    def parse(self, response):
        %s
        yield response.follow_all("a")
"""


async def shoal(folder: Path, *words: str) -> tuple[int, str]:
    done = await asyncio.to_thread(forking.run, [*SHOAL, *words], cwd=folder, capture_output=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("body", "url", "code", "line"),
    [
        ('yield {"u": response.url}', "", 0, "pages: finished: every page found is accounted for"),
        (
            'yield {"u": response.url}',
            "http://127.0.0.1:9/",
            5,
            "pages: finished, failed: 1 page accounted for: 0 done, 1 failed .*\n +no page was fetched: the only",
        ),
        (
            'raise ValueError("x")',
            "",
            5,
            r"pages: finished, failed: 1 page accounted for: 0 done, 1 failed \(ValueError in parse: 1\)",
        ),
        ('response.css("p.prise")', "", 5, "finished, failed: .*\n +no items: nothing was yielded on 4 pages"),
    ],
)
async def test_exit_codes(tmp_path: Path, body: str, url: str, code: int, line: str) -> None:
    (tmp_path / "pages.py").write_text(SPIDER % body)
    async with SiteServer(pages=3) as site:
        found, text = await shoal(tmp_path, "run", "pages.py", "-a", f"start_urls={url or site.url}", "-o", "p.jsonl")
    assert found == code, text
    assert re.search(line, text), text
    assert ("`p.prise` matched nothing on 4 pages" in text) == ("p.prise" in body)


async def test_resuming_says_how_far_the_run_is_and_the_next_commands_work(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(SPIDER % 'yield {"u": response.url}')
    async with SiteServer(pages=30) as site:
        words = ["run", "pages.py", "-a", f"start_urls={site.url}", "-o", "p.jsonl", "--frontier", "sqlite:///q.db"]
        code, text = await shoal(tmp_path, *words, "--max-pages", "5")
        assert code == 0
        commands = re.findall(r"^ +shoal (.*)$", text, re.MULTILINE)
        assert commands[0].endswith("--max-pages 10")
        code, text = await shoal(tmp_path, *shlex.split(commands[0]))
        assert re.search(r"resuming run \w+: 5 done, \d+ left", text), text
        for command in commands[1:]:
            code, text = await shoal(tmp_path, *shlex.split(command))
            assert code == 0, (command, text)


async def test_an_output_of_another_run_is_not_destroyed(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(SPIDER % 'yield {"u": response.url}')
    async with SiteServer(pages=3) as site:
        words = ["run", "pages.py", "-a", f"start_urls={site.url}"]
        assert (await shoal(tmp_path, *words, "-o", "p.csv"))[0] == 0
        before = (tmp_path / "p.csv").read_bytes()
        code, text = await shoal(tmp_path, *words, "-o", "p.csv")
        assert code == 2
        assert re.search(r"p.csv has the output of run \w+. Use -O p.csv to replace it", text), text
        assert (tmp_path / "p.csv").read_bytes() == before
        code, text = await shoal(tmp_path, *words, "-O", "p.csv")
        assert code == 0, text
        assert re.search(r"written to +p.csv *\n", text)
        code, text = await shoal(tmp_path, *words, "-O", "p.db")
        assert code == 2
        assert "files of this machine can be replaced, not databases" in text


async def test_a_crawl_that_was_stopped_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(SPIDER % "import time; time.sleep(0.2)")
    async with SiteServer(pages=300) as site:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "shoal.cli.main", "run", "pages.py", "-a", f"start_urls={site.url}", "-o", "p.jsonl",
            cwd=tmp_path, stderr=subprocess.PIPE,
        )  # fmt: skip
        while not site.hits.total() > 2:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors
    assert b"pages: stopped before it was finished" in errors


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///q.db"])
@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (lambda path: path.unlink(), 0, "p.jsonl was removed while it was written; restoring it"),
        (lambda path: path.rename(path.with_name("moved")), 1, "p.jsonl was moved to .*moved: .* Restore the file"),
        (lambda path: os.truncate(path, 100), 1, r"p.jsonl has \d+ bytes, but had \d+: .* Restore the file"),
    ],
    ids=["removed", "moved", "truncated"],
)
async def test_a_file_that_another_program_changes(
    tmp_path: Path, frontier: str, change: Callable[[Path], None], code: int, line: str
) -> None:
    (tmp_path / "pages.py").write_text(SPIDER % 'yield {"u": response.url}')
    path = tmp_path / "p.jsonl"
    async with SiteServer(pages=200, latency=0.05) as site:
        words = ["run", "pages.py", "-a", f"start_urls={site.url}", "-o", "p.jsonl", "--frontier", frontier]
        running = asyncio.create_task(shoal(tmp_path, *words))
        async with asyncio.timeout(30):
            while not path.exists() or path.read_bytes().count(b"\n") < 20:
                await asyncio.sleep(0.01)
        change(path)
        found, text = await running
    assert found == code, text
    assert re.search(line, text), text
    if code == 0:
        lines = path.read_text().splitlines()
        assert len(set(lines)) == len(lines) == 201
