"""The worker processes of one crawl: started, watched, restarted when they are killed, and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from shoal.crawling.stats import Counters
from shoal.runs.child import RestartBackoff, command
from shoal.runs.process_fork import WorkerProcess, start_worker
from shoal.runs.process_part import PartReport, ProcessPart, total_of, unmatched_by_all

log = logging.getLogger("shoal.worker")

_LONGEST_REPORT = 2**20
_KILL_AFTER = 5.0  # seconds that a worker may take longer than its grace period
_EXIT_POLL = 0.002  # a worker has closed its connection: it is about to end
_decode = msgspec.json.Decoder(PartReport).decode


class WorkerProcesses:
    """The worker processes of a crawl. One that was killed gets a successor; one that ends by itself is left alone,
    whatever its exit code."""

    def __init__(
        self, forked: Sequence[WorkerProcess], words: Sequence[str], *, on_line: Callable[[str], None] | None = None
    ) -> None:
        """``forked``: the first worker processes. ``words``: the command line of `shoal` for their successors.
        ``on_line``: called with each line that a worker writes to standard error. None: workers share the standard
        error of this process."""
        self._forked = list(forked)
        self._words = list(words)
        self._on_line = on_line
        self._reports: dict[int, PartReport] = {}
        """The last report of each process, also of those that have ended."""
        self._running: dict[int, tuple[WorkerProcess, asyncio.StreamWriter]] = {}
        self._supervising: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._ending = asyncio.Event()
        self.error = ""
        """The error of the first worker that failed."""

    @property
    def relays(self) -> bool:
        """Whether this process reads what the workers write to standard error."""
        return self._on_line is not None

    def start(self, part: ProcessPart) -> None:
        """Let all workers begin."""
        forked, self._forked = self._forked, []
        self._supervising = [asyncio.create_task(self._supervise(part, worker)) for worker in forked]
        for task in self._supervising:
            task.add_done_callback(lambda _: self._ending.set())

    @property
    def have_ended(self) -> bool:
        """Whether all workers have ended, and none will be restarted."""
        return all(task.done() for task in self._supervising)

    async def wait_for_end(self, timeout: float) -> None:
        """Wait until a worker reports that it ends, or has ended; at most ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._ending.wait()
        self._ending.clear()

    @property
    def in_flight(self) -> int:
        return sum(self._reports[pid].in_flight for pid in self._running if pid in self._reports)

    @property
    def counters(self) -> Counters:
        return total_of(list(self._reports.values()))

    @property
    def own_counters(self) -> Counter[str]:
        """What the spiders counted."""
        total: Counter[str] = Counter()
        for report in self._reports.values():
            total.update(report.own)
        return total

    @property
    def unmatched(self) -> dict[str, int]:
        """See `Summary`."""
        return unmatched_by_all(list(self._reports.values()))

    def stop(self) -> None:
        """Ask all workers to shut down."""
        self._is_stopping = True
        for _, writer in self._running.values():
            with suppress(OSError):
                writer.write(b"stop\n")

    async def wait(self, grace: float) -> None:
        """Wait until all have ended. Those that take much longer than the grace period are killed."""
        self._is_stopping = True
        if not self._supervising:
            return
        _, left = await asyncio.wait(self._supervising, timeout=grace + _KILL_AFTER)
        if left:
            self.kill()
            await asyncio.wait(left)

    def kill(self) -> None:
        """End all now."""
        self._is_stopping = True
        for worker in self._forked:  # these wait for their first line, and exit
            worker.connection.close()
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _supervise(self, part: ProcessPart, worker: WorkerProcess) -> None:
        """Watch a worker. Whenever it is killed, start and watch a successor."""
        backoff = RestartBackoff()
        worker.connection.sendall(msgspec.json.encode(part) + b"\n")
        while True:
            began = time.monotonic()
            code = await self._watch(worker)
            if code >= 0 or self._is_stopping:
                return
            pause = backoff.pause_after(time.monotonic() - began)
            name = signal.Signals(-code).name
            log.warning("worker process %d was killed by %s; starting another one in %g s", worker.pid, name, pause)
            await asyncio.sleep(pause)
            if self._is_stopping:
                return
            words, environ = command(self._words)
            worker = start_worker(words, environ | part.environ(), relays=self.relays)

    async def _watch(self, worker: WorkerProcess) -> int:
        """Watch a worker until it ends. Returns its exit code, negative for a signal."""
        reader, writer = await asyncio.open_connection(sock=worker.connection, limit=_LONGEST_REPORT)
        self._running[worker.pid] = worker, writer
        if self._is_stopping:
            writer.write(b"stop\n")
        try:
            await asyncio.gather(self._read_reports(worker.pid, reader), self._read_output(worker.output))
            while (code := worker.poll()) is None:
                await asyncio.sleep(_EXIT_POLL)
        finally:
            del self._running[worker.pid]
            writer.close()
        if code > 0 and not self.error:
            report = self._reports.get(worker.pid)
            self.error = report.error if report is not None and report.error else f"a worker ended with code {code}"
        return code

    async def _read_reports(self, pid: int, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                with suppress(msgspec.MsgspecError):
                    self._reports[pid] = report = _decode(line)
                    if report.is_last:
                        self._ending.set()

    async def _read_output(self, output: int | None) -> None:
        if output is None or self._on_line is None:
            return
        lines = asyncio.StreamReader()
        pipe = os.fdopen(output, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), pipe
        )
        try:
            while line := await lines.readline():
                self._on_line(line.decode(errors="replace").rstrip())
        finally:
            transport.close()
