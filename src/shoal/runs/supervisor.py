"""Runs several worker processes on one machine, and restarts those that are killed."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

# `python -m shoal.runs.supervisor ...` runs `shoal ...` as a child process, without secrets on its command line.
#
# Every user of a machine can read the command lines of all processes. Only the owner of a process can read its
# environment. So words that may hold a password (URLs, settings, arguments) are passed there, and `ps` shows
# ``***``.
#
# A tethered child stops when its standard input ends. Its parent holds the other end of the pipe, so the child
# stops whenever the parent ends, even if it is killed.


_WORDS = "_SHOAL_WORDS"
_TETHERED = "_SHOAL_TETHERED"
_HARMLESS = re.compile(r"[\w./:@%+-]*", re.ASCII)
_FIRST_PAUSE = 0.5
_STEADY = 60.0  # seconds after which the end of a child has nothing to do with the one before
_BEFORE_SECRETS = ("--set", "-a", "--argument", "-o", "--output", "--frontier", "--coordinator", "--proxy")


class RestartBackoff:
    """Seconds to wait before a child that ended is started again: longer each time, as the next one may end too."""

    longest = 30.0

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    def pause_after(self, lived: float) -> float:
        """``lived``: seconds that the child has run. After a long life the pauses begin anew."""
        if lived > _STEADY:
            self._next = _FIRST_PAUSE
        pause, self._next = self._next, min(self.longest, 2 * self._next)
        return pause


def command(words: Sequence[str], *, tethered: bool = False) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that run `shoal` with these words."""
    shown = [_shown(word, before) for before, word in zip(("", *words), words, strict=False)]
    environ = {**os.environ, _WORDS: json.dumps(list(words)), **({_TETHERED: "1"} if tethered else {})}
    return [sys.executable, "-m", "shoal.runs.supervisor", *shown], environ


def _shown(word: str, before: str) -> str:
    harmless = before not in _BEFORE_SECRETS and _HARMLESS.fullmatch(word) and "://" not in word
    return word if harmless else "***"


def _reveal() -> None:
    """Put the hidden words back into ``sys.argv``."""
    words = os.environ.pop(_WORDS, None)
    if words is not None:
        sys.argv[1:] = json.loads(words)


def _stop_at_end_of_input(main: int) -> None:
    while os.read(0, 4096):
        pass
    signal.pthread_kill(main, signal.SIGTERM)


if __name__ == "__main__":
    _reveal()
    if os.environ.pop(_TETHERED, None):
        threading.Thread(target=_stop_at_end_of_input, args=(threading.get_ident(),), daemon=True).start()
    runpy.run_module("shoal.cli.main", run_name="__main__")


log = logging.getLogger("shoal.worker")

_KILL_AFTER = 15.0


class Processes:
    """Runs the same command several times. A worker that is killed (out of memory, a crash in a library) is restarted
    with backoff. A worker that exits is not, whatever its exit code."""

    def __init__(self, command: Sequence[str], count: int, environ: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environ = environ
        self._count = count
        self._running: dict[subprocess.Popen[bytes], float] = {}
        self._due: list[float] = []
        self._backoff = RestartBackoff()
        self._signalled: set[subprocess.Popen[bytes]] = set()
        self._stopping = False

    def run(self) -> int:
        """Run until all workers have exited. Returns the highest exit code. SIGINT and SIGTERM stop the workers."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        worst = 0
        try:
            for _ in range(self._count):
                self._start()
            while self._running or (self._due and not self._stopping):
                time.sleep(0.05)
                worst = max(worst, self._check())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._end()
        return worst

    def _start(self) -> None:
        process = subprocess.Popen(self._command, env=self._environ, start_new_session=True)
        self._running[process] = time.monotonic()

    def _check(self) -> int:
        """Restart killed workers when they are due. Returns the highest exit code of the workers that exited."""
        now, worst = time.monotonic(), 0
        if self._stopping:  # also a worker that was starting when the signal came
            for process in self._running.keys() - self._signalled:
                self._terminate(process)
        for process in [process for process in self._running if process.poll() is not None]:
            lived = now - self._running.pop(process)
            if process.returncode >= 0 or self._stopping:
                worst = max(worst, process.returncode)
                continue
            log.warning("worker process %d was killed by signal %d; restarting it", process.pid, -process.returncode)
            self._due.append(now + self._backoff.pause_after(lived))
        for moment in [moment for moment in self._due if moment <= now and not self._stopping]:
            self._due.remove(moment)
            self._start()
        return worst

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True
        for process in self._running:
            self._terminate(process)

    def _terminate(self, process: subprocess.Popen[bytes]) -> None:
        self._signalled.add(process)
        process.send_signal(signal.SIGTERM)

    def _end(self) -> None:
        until = time.monotonic() + _KILL_AFTER
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def worker_processes(arguments: Sequence[str], count: int) -> int:
    """Run ``shoal worker`` with these arguments in ``count`` processes."""
    words, environ = command(["worker", *arguments])
    return Processes(words, count, environ).run()
