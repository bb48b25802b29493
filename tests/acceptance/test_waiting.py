"""A crawl that waits says why, in its log."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.acceptance.fleets import SHOAL
from tests.acceptance.serving import until
from tests.acceptance.target import target
from tests.support import forking

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///run.db"])
def test_a_crawl_says_why_it_waits(frontier: str, tmp_path: Path) -> None:
    with target() as site, (tmp_path / "log.txt").open("w") as log:
        url = f"{site.url}/busy?status=503&after=500"
        words = ["--frontier", frontier, "--set", "robots.obey=false"]
        crawl = forking.Popen([*SHOAL, "crawl", url, *words], cwd=tmp_path, stdout=log, stderr=log, text=True)
        try:
            said = until(lambda: [line for line in _lines(tmp_path) if "waiting: " in line], what="a reason", pause=0.2)
        finally:
            crawl.send_signal(signal.SIGINT)
            crawl.wait(30)
    assert "is due in" in said[0]
    assert "503" in said[0]
    assert len(said) == 1


def _lines(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()
