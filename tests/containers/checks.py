"""Steps that are reported one by one, and conditions that are waited for."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Failed(Exception):
    """Why a step failed."""


class Checks:
    """Counts steps. A step that fails ends its group, because the next ones need what it made."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        print(f"{name} ...", end=" ", flush=True)
        begun = time.monotonic()
        try:
            yield
        except BaseException:
            print("FAILED", flush=True)
            raise
        self.passed += 1
        print(f"ok ({time.monotonic() - begun:.0f} s)", flush=True)

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        print(f"-- {name}", flush=True)
        try:
            yield
        except (Failed, OSError, subprocess.SubprocessError) as exc:
            self.failed += 1
            print(explain(exc), flush=True)
        except Exception:
            self.failed += 1
            traceback.print_exc(file=sys.stdout)


def explain(exc: BaseException) -> str:
    if isinstance(exc, subprocess.CalledProcessError):
        said = "".join(text for text in (exc.stdout, exc.stderr) if text)
        return f"{' '.join(map(str, exc.cmd))} failed with exit code {exc.returncode}:\n{said[-6000:]}"
    return str(exc)


def wait_for(what: str, find: Callable[[], T | None], timeout: float = 60.0) -> T:
    """The first true value that ``find`` returns. An OSError means: not yet."""
    until = time.monotonic() + timeout
    trouble: object = None
    while True:
        try:
            found = find()
            if found:
                return found
            trouble = found
        except OSError as exc:
            trouble = exc
        if time.monotonic() > until:
            raise Failed(f"{what}: not within {timeout:g} s (the last answer was {trouble!r:.500})")
        time.sleep(0.2)
