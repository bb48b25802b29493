"""All processes of one command, found and killed from outside."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import forking
from tests.support.forking import SHOAL

_MARK = "TEST_MACHINE"


class Machine:
    """Commands whose processes, and those that these start, can be told from all others."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.runtime = runtime
        self._mark = secrets.token_hex(8)
        self._started: list[subprocess.Popen[str]] = []
        # Crawls announce themselves in one of these folders: those of other tests must not be found here.
        self.environ = {**os.environ, _MARK: self._mark, "XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(runtime)}

    def start(self, *words: str, err: str = "err.txt") -> subprocess.Popen[str]:
        """Start a command in the background. What it says goes to a file."""
        with (self.folder / err).open("w") as file:
            made = subprocess.Popen(
                [*SHOAL, *words], cwd=self.folder, env=self.environ, stdout=file, stderr=file, text=True
            )
        self._started.append(made)
        return made

    def shoal(self, *words: str, check: bool = True, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        done = forking.run(
            [*SHOAL, *words], cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=timeout
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done

    def said(self, err: str = "err.txt") -> str:
        return (self.folder / err).read_text()

    def processes(self) -> dict[int, str]:
        """The processes that run now, each with its name."""
        mark = f"{_MARK}={self._mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[pid] = (entry / "comm").read_text().strip()
        return found

    def owners(self) -> list[int]:
        """The processes that own a frontier."""
        return [pid for pid, name in self.processes().items() if name == "shoal-frontier"]

    def workers(self) -> list[int]:
        """The worker processes of a crawl."""
        return [pid for pid, name in self.processes().items() if name == "shoal-worker"]

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def wait_until(self, holds: Callable[[], object], what: str, timeout: float = 60.0) -> None:
        until = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < until, f"not {what} after {timeout:g} s; running: {self.processes()}"
            time.sleep(0.1)

    def close(self) -> None:
        for pid in self.processes():
            self.kill(pid)
        for process in self._started:
            process.wait()


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Its sockets are in a folder of its own, with a short path."""
    runtime = Path(tempfile.mkdtemp(prefix="shoal-t-"))
    made = Machine(folder, runtime)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(runtime, ignore_errors=True)
