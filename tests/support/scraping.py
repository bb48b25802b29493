"""Helpers for the tests of metrics: a parsed scrape, and a check with Prometheus' own tool."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)", re.DOTALL)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


class Scrape:
    """A page of metrics."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for line in text.removesuffix("\n").split("\n"):
            if not line.startswith("#"):
                found = _LINE.fullmatch(line)
                assert found is not None, line
                key = (found[1], frozenset((name, _unescaped(value)) for name, value in _LABEL.findall(found[2])))
                assert key not in self.samples, f"twice: {line}"
                self.samples[key] = float(found[3])

    @property
    def names(self) -> set[str]:
        """The names of all families, including those without samples."""
        return set(re.findall(r"^# TYPE (\w+)", self.text, re.MULTILINE))

    def all(self, name: str, **labels: str) -> list[float]:
        """The values of all samples with this name and at least these labels."""
        wanted = set(labels.items())
        return [value for (found, having), value in self.samples.items() if found == name and wanted <= having]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = self.all(name, **labels)
        return value


def _unescaped(value: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES[found[0]], value)


def get(url: str, timeout: float = 30.0) -> tuple[int, str, str]:
    """The status, body and content type, even of an error."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Content-Type"]


def scrape(url: str) -> Scrape:
    status, text, _ = get(f"{url}/metrics")
    assert status == 200
    return Scrape(text)


def scrape_until(url: str, holds: Callable[[Scrape], bool], timeout: float = 60.0) -> Scrape:
    until = time.monotonic() + timeout
    while not holds(shown := scrape(url)):
        assert time.monotonic() < until, f"after {timeout:g} s it says\n{shown.text}"
        time.sleep(0.05)
    return shown


def addresses(log: Path, count: int = 1, timeout: float = 60.0) -> list[str]:
    """The addresses of metrics that processes have written to this log."""
    until = time.monotonic() + timeout
    while True:
        text = log.read_text() if log.exists() else ""
        found = re.findall(r"metrics are at (http://\S+)/metrics", text)
        if len(found) >= count:
            return found
        assert time.monotonic() < until, f"the log has no address of metrics:\n{text}"
        time.sleep(0.02)


def promtool(*arguments: str, text: str | None = None) -> str:
    """Check the text with Prometheus' tool, and return its output."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("promtool", path=places)
    assert program is not None, "these tests need promtool: scripts/test unpacks it"
    done = subprocess.run(
        [program, *arguments], cwd=ROOT, input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
