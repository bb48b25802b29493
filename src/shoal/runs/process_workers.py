"""The worker processes of one crawl: started, watched, restarted when they are killed, and stopped."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from shoal.crawling.stats import Counters
from shoal.runs.child import command
from shoal.runs.process_part import Part, Report, total_of

log = logging.getLogger("shoal.worker")

_RESTART_AFTER = (0.5, 30.0)  # seconds before a worker that was killed is started again, first and at most
_STEADY = 60.0  # seconds after which the death of a worker has nothing to do with the one before
_LONGEST_REPORT = 2**20
_KILL_AFTER = 5.0  # seconds that a worker may take longer than its grace period
_decode = msgspec.json.Decoder(Report).decode


class WorkerProcesses:
    """Runs the same command several times as worker processes. One that was killed gets a successor; one that ends by
    itself is left alone, whatever its exit code."""

    def __init__(self, words: Sequence[str], count: int, *, on_line: Callable[[str], None] | None = None) -> None:
        """``words``: the command line of `shoal`. ``on_line``: called with each line that a worker writes to standard
        error. None: it goes where that of this process goes."""
        self._words = list(words)
        self._count = count
        self._on_line = on_line
        self._reports: dict[int, Report] = {}
        """The last report of each process, also of those that have ended."""
        self._running: dict[int, tuple[Process, asyncio.StreamWriter]] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._started = 0
        self._is_stopping = False
        self.error = ""
        """Why the first worker that failed did."""

    def start(self, part: Part) -> None:
        self._keeping = [asyncio.create_task(self._keep(part)) for _ in range(self._count)]

    @property
    def have_ended(self) -> bool:
        """Whether none is left that works, or will."""
        return all(task.done() for task in self._keeping)

    @property
    def in_flight(self) -> int:
        return sum(self._reports[number].in_flight for number in self._running if number in self._reports)

    @property
    def counters(self) -> Counters:
        return total_of(list(self._reports.values()))

    def stop(self) -> None:
        """Ask all to stop in good order."""
        self._is_stopping = True
        for _, writer in self._running.values():
            with suppress(OSError):
                writer.write(b"stop\n")

    async def wait(self, grace: float) -> None:
        """Until all have ended. Those that take much longer than the grace period are killed."""
        self._is_stopping = True
        if not self._keeping:
            return
        _, left = await asyncio.wait(self._keeping, timeout=grace + _KILL_AFTER)
        if left:
            self.kill()
            await asyncio.wait(left)

    def kill(self) -> None:
        """End all now."""
        self._is_stopping = True
        for process, _ in self._running.values():
            with suppress(ProcessLookupError):
                process.kill()

    async def _keep(self, part: Part) -> None:
        """Run a worker, and its successors while it is killed."""
        pause = _RESTART_AFTER[0]
        while not self._is_stopping:
            began = time.monotonic()
            code = await self._run(part)
            if code >= 0 or self._is_stopping:
                return
            pause = _RESTART_AFTER[0] if time.monotonic() - began > _STEADY else min(_RESTART_AFTER[1], 2 * pause)
            name = signal.Signals(-code).name
            log.warning("a worker process was killed by %s; starting another one in %g s", name, pause)
            await asyncio.sleep(pause)

    async def _run(self, part: Part) -> int:
        """Run one worker to its end. Its exit code, negative for a signal."""
        number = self._started = self._started + 1
        near, far = socket.socketpair()
        with far:
            words, environ = command(self._words)
            process = await asyncio.create_subprocess_exec(
                *words, env=environ | part.environ(), stdin=far.fileno(), start_new_session=True,
                stderr=None if self._on_line is None else subprocess.PIPE,
            )  # fmt: skip
        reader, writer = await asyncio.open_connection(sock=near, limit=_LONGEST_REPORT)
        self._running[number] = process, writer
        if self._is_stopping:
            writer.write(b"stop\n")
        try:
            await asyncio.gather(self._read_reports(number, reader), self._read_output(process))
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            del self._running[number]
            writer.close()
        if code > 0 and not self.error:
            report = self._reports.get(number)
            self.error = report.error if report is not None and report.error else f"a worker ended with code {code}"
        return code

    async def _read_reports(self, number: int, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                with suppress(msgspec.MsgspecError):
                    self._reports[number] = _decode(line)

    async def _read_output(self, process: Process) -> None:
        if process.stderr is None or self._on_line is None:
            return
        while line := await process.stderr.readline():
            self._on_line(line.decode(errors="replace").rstrip())
