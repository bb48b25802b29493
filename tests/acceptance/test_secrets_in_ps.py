"""No process that Shoal starts has a password on its command line, which every user of a machine can read."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.acceptance.fleets import SHOAL, SPIDER, site
from tests.acceptance.serving import until
from tests.support.databases import RedisServer

SECRET = "s3cret-of-redis"


@pytest.fixture(scope="module")
def frontier() -> Iterator[str]:
    with closing(RedisServer(requirepass=SECRET)) as redis:
        yield redis.url.replace("redis://", f"redis://:{SECRET}@")


def descendants(pid: int) -> dict[int, str]:
    """The processes that one has started, also indirectly, with their command lines."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
    found, level = {}, {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        for child in level:
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def said(folder: Path) -> str:
    return "".join(file.read_text() for file in (folder / "log", *folder.glob("logs/*")))


@pytest.mark.parametrize("how", ["processes", "autoscale"])
def test_workers_that_are_started_for_the_user(tmp_path: Path, frontier: str, how: str) -> None:
    with site(100, latency=0.3) as url:
        (tmp_path / "pages.py").write_text(f"{SPIDER}\nPages.start_urls = ['{url}/']\n")
        start = [*SHOAL, "start", "pages.py", "--frontier", frontier, "--run-id", how]
        subprocess.run(start, cwd=tmp_path, capture_output=True, check=True)
        words = ["pages.py", "--set", f'http.headers={{"X-Token": "{SECRET}"}}']
        commands = {
            "processes": ["worker", *words, "--frontier", frontier, "--run-id", how, "--processes", "2"],
            "autoscale": [
                "autoscale", how, "--frontier", frontier, "--spider", "pages.py", "--per-worker", "1", "--max", "2",
                "--every", "0.2", "--logs", "logs", "--", *words[1:],
            ],
        }  # fmt: skip
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen([*SHOAL, *commands[how]], cwd=tmp_path, stdout=log, stderr=log)
        try:
            until(lambda: len(descendants(process.pid)) == 2, what="a fleet of two")
            shown = descendants(process.pid)
            assert not any(SECRET in line for line in shown.values()), shown
            assert all("worker pages.py" in line and f"--run-id {how}" in line for line in shown.values()), shown
            until(lambda: said(tmp_path).count(f"works on run {how}") == 2, what="both at work")  # with the password
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
