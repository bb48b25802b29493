"""Runs worker processes on one machine, and replaces those that are killed.

``shoal worker --processes``, ``shoal run --processes`` and ``shoal autoscale`` use `Supervisor`. This module is also a
program: ``python -m shoal.runs.supervisor ...`` runs ``shoal ...`` without secrets on its command line.

Every user of a machine can read the command lines of all processes. Only the owner of a process can read its
environment. So the environment holds the words that may contain a password (URLs, settings, arguments), and `ps` shows
``***``. A tethered process stops when its standard input ends. Its parent holds the other end, so the process stops
when the parent ends, even if the parent is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from msgspec import Struct, field

from shoal.system import clock, threads

log = logging.getLogger("shoal.worker")

_WORDS = "_SHOAL_WORDS"
_TETHERED = "_SHOAL_TETHERED"
_HARMLESS = re.compile(r"[\w./:@%+-]*", re.ASCII)
_FIRST_PAUSE = 0.5
_STEADY = 60.0  # seconds after which the end of a child has nothing to do with the end before it
_POLL = 0.05
_KILL_AFTER = 15.0  # seconds that a worker has to stop
_BEFORE_SECRETS = ("--set", "-a", "--argument", "-o", "--output", "--frontier", "--coordinator", "--proxy")


class RestartBackoff:
    """How long to wait before starting a child again that has ended. Each pause is longer than the one before."""

    longest = 30.0

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    def pause_after(self, lived: float) -> float:
        """``lived``: seconds that the child has run. After a long life, the pauses start short again."""
        if lived > _STEADY:
            self._next = _FIRST_PAUSE
        pause, self._next = self._next, min(self.longest, 2 * self._next)
        return pause


class WorkerProcess(Struct, eq=False):
    """A worker process, seen from the process that started it."""

    pid: int
    poll: Callable[[], int | None]
    """Returns the exit code: negative for a signal, None while the process runs."""
    connection: socket.socket
    """A tethered process stops when this is closed."""
    output: IO[bytes] | None = None
    """Reads what the process prints. None: it shares the outputs of this process."""
    started: float = field(default_factory=lambda: clock.monotonic())
    is_retired: bool = False
    """Whether it was asked to stop. Then it is not replaced."""

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start_process(
    words: Sequence[str],
    environ: dict[str, str] = {},
    *,
    tethered: bool = False,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
) -> WorkerProcess:
    """Run `shoal` with these words. The connection is its standard input. OSError if it cannot be started."""
    command_line, environment = command(words, tethered=tethered)
    near, far = socket.socketpair()
    with far:
        process = subprocess.Popen(
            command_line,
            env=environment | environ,
            stdin=far.fileno(),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return WorkerProcess(process.pid, process.poll, near)


class Supervisor:
    """Runs worker processes. After a pause, replaces one that was killed (out of memory, a crash in a library). Never
    replaces one that has exited, whatever its exit code."""

    killed_message = "worker process %(pid)d was killed by signal %(number)d; restarting it"

    def __init__(self, start: Callable[[], WorkerProcess]) -> None:
        """``start`` starts a process."""
        self._start = start
        self._workers: dict[asyncio.Task[int], WorkerProcess] = {}
        """The process of each worker, or its last process until that is replaced. The newest worker is last."""
        self._stopping = asyncio.Event()

    def add(self, process: WorkerProcess | None = None) -> asyncio.Task[int]:
        """Supervise one more worker: ``process``, or a new process. OSError if that cannot be started."""
        process = process or self._start()
        task = asyncio.create_task(self._supervise(process))
        self._workers[task] = process
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[int]) -> None:
        del self._workers[task]
        if not task.cancelled() and isinstance(error := task.exception(), OSError):
            log.warning("a worker process could not be replaced: %s", error)

    @property
    def working(self) -> list[WorkerProcess]:
        """The workers that nobody has asked to stop."""
        return [process for process in self._workers.values() if not process.is_retired]

    async def run(self, count: int) -> int:
        """Run this many workers until all have exited. Returns the highest exit code. SIGINT and SIGTERM stop them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            for _ in range(count):
                self.add()
            return max(0, *await asyncio.gather(*self._workers))
        finally:
            self.stop()
            await self.wait(_KILL_AFTER)

    def retire(self) -> None:
        """Stop the newest worker. It is killed if it takes too long."""
        process = self.working[-1]
        process.is_retired = True
        process.signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(_KILL_AFTER, process.signal, signal.SIGKILL)

    def stop(self) -> None:
        """Ask all workers to stop, and replace none any more."""
        self._stopping.set()
        for process in self.working:
            process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all workers now."""
        self._stopping.set()
        for process in self._workers.values():
            process.signal(signal.SIGKILL)

    async def wait(self, timeout: float) -> None:
        """Wait until all have ended. Kill those that take longer than ``timeout`` seconds."""
        self._stopping.set()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=timeout)
            if late:
                self.kill()
                await asyncio.wait(late)

    async def _supervise(self, process: WorkerProcess) -> int:
        """Watch a worker. Whenever it is killed, start and watch a successor. Returns its last exit code."""
        backoff = RestartBackoff()
        while True:
            code = await self._watch(process)
            if code >= 0 or process.is_retired or self._stopping.is_set():
                return code
            pause = backoff.pause_after(clock.monotonic() - process.started)
            name = signal.Signals(-code).name
            log.warning(self.killed_message, {"pid": process.pid, "number": -code, "name": name, "pause": pause})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            if process.is_retired or self._stopping.is_set():
                return code
            task = asyncio.current_task()
            assert task is not None
            process = self._workers[task] = self._start()

    async def _watch(self, process: WorkerProcess) -> int:
        """Watch a process until it ends. Returns its exit code, negative for a signal."""
        while (code := process.poll()) is None:
            await asyncio.sleep(_POLL)
        process.connection.close()
        return code


def worker_processes(arguments: Sequence[str], count: int) -> int:
    """Run ``shoal worker`` with these arguments in ``count`` processes. Returns the highest exit code."""

    async def run() -> int:
        return await Supervisor(lambda: start_process(["worker", *arguments])).run(count)

    return asyncio.run(run())


# -- the command line of a process, and how the process reads it


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
        threads.start(partial(_stop_at_end_of_input, threading.get_ident()), "stop-at-end")
    runpy.run_module("shoal.cli.main", run_name="__main__")
