"""Processes that are looked after, and the signals that end it. Used by `distributed.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

START_AGAIN_AFTER = (1.0, 30.0)  # seconds, at first, and at most when it ends again and again
STEADY = 60.0  # who ran for so long starts again as if it were the first time
TAIL = 15  # lines of a log that are shown


def say(text: str, end: str = "\n") -> None:
    with suppress(OSError):  # whoever listened may be gone; the processes have to be stopped all the same
        print(text, end=end, flush=True)


class Part:
    """One process with a log file of its own.

    It has a session of its own, so that Ctrl-C reaches only this program, which then stops the parts in their order;
    and so that what it leaves behind when it is killed (a Celery worker has children) can be ended with it.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str], logs: Path) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._log = logs / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = START_AGAIN_AFTER[0]
        self._again_at: float | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._started = time.monotonic()
        self._again_at = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def end(self) -> str:
        code = self.process.returncode
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL:]
        return "\n".join([f"the end of {self._log}:", *(f"  {line}" for line in lines)])

    def look(self) -> None:
        """Whoever has ended gets a successor, but not at once: it may not fare better."""
        now = time.monotonic()
        if not self.has_ended:
            return
        if self._again_at is None:
            self.kill()
            self._pause = START_AGAIN_AFTER[0] if now - self._started > STEADY else self._pause
            self._again_at = now + self._pause
            say(f"{self.name} {self.end}; another takes its place in {self._pause:g} s (its log: {self._log})")
            self._pause = min(START_AGAIN_AFTER[1], 2 * self._pause)
        elif now >= self._again_at:
            self.start()
            say(f"{self.name} is started again: process {self.process.pid}")

    def terminate(self) -> None:
        if not self.has_ended:
            self.process.terminate()

    def kill(self) -> None:
        """It, and all that it started; also what is left of them when it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Signals:
    """The first asks to stop, the second not to wait for anyone."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.hurry = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._heard)

    def _heard(self, *_: object) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()
