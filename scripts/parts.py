"""Child processes that are restarted when they end, and the signals that stop the program. Used by `distributed.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

RESTART_DELAY = 1.0  # seconds; doubles each time a process ends soon after its start
MAX_RESTART_DELAY = 30.0
STABLE_AFTER = 60.0  # a process that ran for this many seconds is restarted after RESTART_DELAY again
TAIL_LINES = 15  # shown from the end of a log when a start fails


def report(text: str, end: str = "\n") -> None:
    with suppress(OSError):  # the terminal may be closed; the processes must still be stopped
        print(text, end=end, flush=True)


class Part:
    """One process with its own log file, in its own session.

    Ctrl-C in the terminal reaches only this program, which then stops the parts in order. When a part is killed, its
    children (a Celery worker has some) are killed with it.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str], logs: Path) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._log = logs / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._restart_delay = RESTART_DELAY
        self._restart_at: float | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._started = time.monotonic()
        self._restart_at = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def exit_reason(self) -> str:
        code = self.process.returncode
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"the end of {self._log}:", *(f"  {line}" for line in lines)])

    def restart_if_ended(self) -> None:
        """Restart the process if it has ended, with a delay that grows while it keeps ending. Call this often."""
        now = time.monotonic()
        if not self.has_ended:
            return
        if self._restart_at is None:
            self.kill()
            if now - self._started > STABLE_AFTER:
                self._restart_delay = RESTART_DELAY
            self._restart_at = now + self._restart_delay
            report(f"{self.name} {self.exit_reason}; restarting in {self._restart_delay:g} s (log: {self._log})")
            self._restart_delay = min(MAX_RESTART_DELAY, 2 * self._restart_delay)
        elif now >= self._restart_at:
            self.start()
            report(f"{self.name} restarted: process {self.process.pid}")

    def terminate(self) -> None:
        if not self.has_ended:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the process and its children. Children that outlived it are killed, too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Signals:
    """The first signal sets ``stop``. The second sets ``hurry``: stop without waiting for work to finish."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.hurry = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()
