"""The commands with ``--scrapy``: what they show, and what they refuse."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.forking import SHOAL

SPIDER = """
import scrapy

class Own(scrapy.Spider):
    name = "own"
    custom_settings = {"DOWNLOAD_DELAY": 0.25, "RETRY_ENABLED": False, "MINE": 3}

    def start_requests(self):
        yield scrapy.Request("http://127.0.0.1:9/", errback=self.failed)

    def failed(self, failure):
        yield {"error": type(failure.value).__name__, "delay": self.settings.getfloat("DOWNLOAD_DELAY"), "x": self.x}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(SPIDER)
    return tmp_path


def shoal(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forking.run([*SHOAL, *words], cwd=folder, capture_output=True, text=True, timeout=60)


def test_config_shows_what_became_of_the_settings(folder: Path) -> None:
    done = shoal(folder, "config", "--scrapy", "own.py", "-s", "CONCURRENT_REQUESTS=3")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in done.stdout.splitlines()}
    assert lines["download_delay"] == "0.25 DOWNLOAD_DELAY in custom_settings of Own"
    assert lines["concurrency"] == "3 CONCURRENT_REQUESTS in -s"
    assert lines["MINE"] == "3 kept for self.settings; custom_settings of Own"
    assert lines["RETRY_ENABLED"] == "False used; custom_settings of Own"


def test_run_with_settings_and_arguments(folder: Path) -> None:
    done = shoal(folder, "run", "--scrapy", "own.py", "-o", "-", "-q", "-s", "DOWNLOAD_DELAY=0", "-a", "x=1")
    assert done.stdout == '{"error":"DownloadConnectionRefusedError","delay":0.0,"x":"1"}\n', done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "own.py"], "Is it a Scrapy spider? Run it with --scrapy: docs/scrapy.md"),
        (["run", "own.py", "own"], "to name a spider of a Scrapy project, add --scrapy"),
        (["run", "own.py", "-s", "A=1"], "-s sets a setting of Scrapy: add --scrapy"),
        (["run", "--scrapy", "own.py", "-s", "A"], "write it as key=value"),
        (["run", "--scrapy", ".", "own"], "is not a Scrapy project: it has no scrapy.cfg"),
        (["config", "--scrapy"], "--scrapy needs a spider"),
        (["run", "--scrapy", "own.py", "-s", "DOWNLOAD_DELAY=x"], "DOWNLOAD_DELAY = 'x' is not a valid value (-s)"),
    ],
)
def test_what_is_refused(folder: Path, words: list[str], message: str) -> None:
    done = shoal(folder, *words)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())


def test_an_error_in_a_file_that_is_there_suggests_no_other_file(folder: Path) -> None:
    (folder / "broken.py").write_text(
        "import scrapy\nfrom scrapy.mail import MailSender\n\nclass Own(scrapy.Spider):\n    name = 'x'\n"
    )
    (folder / "unnamed.py").write_text(SPIDER + "\nclass Other(scrapy.Spider):\n    pass\n")
    for words in (["broken.py"], [".", "own"], ["unnamed.py:Other"]):
        done = shoal(folder, "run", "--scrapy", *words)
        assert done.returncode == 2
        assert "did you mean" not in done.stderr
    assert "did you mean own.py?" in shoal(folder, "run", "--scrapy", "onw.py").stderr
