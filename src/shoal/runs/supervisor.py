"""Runs several worker processes on one machine, and restarts those that are killed."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from shoal.runs.child import RestartBackoff, command

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
