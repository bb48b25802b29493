"""Workers that start at once: processes that run the real command, forked from one that has imported it.

A new worker needs almost a second of CPU time for its imports. A test that kills one per second on a small machine
would spend its time on little else.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Self

from tests.acceptance.crashing_worker import Crash, arm
from tests.acceptance.fleets import Fleet

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.acceptance.forked_workers",
        *("shoal.cli.main", "shoal.cli.commands.worker", "shoal.cli.commands.cluster"),
        *("shoal.cli.progress", "shoal.cli.summary", "shoal.runs.crawl", "shoal.runs.worker"),
        *("shoal.fetch.http", "shoal.middleware.cache", "shoal.middleware.cookies", "shoal.middleware.robots"),
        *("shoal.frontier.redis", "shoal.frontier.postgres", "shoal.runs.orchestrator"),
        *("shoal.cluster.node", "shoal.cluster.redis", "shoal.cluster.postgres", "shoal.cluster.zookeeper"),
        *("shoal.sinks.files", "shoal.sinks.sqlite", "shoal.sinks.postgres", "shoal.sinks.mysql"),
    ]
)


class ForkedWorker:
    """One worker process."""

    def __init__(
        self, fleet: Fleet, log: Path, arguments: list[str], crash: Crash | None, *, command: str = "worker"
    ) -> None:
        run = ["--run-id", fleet.run_id] if fleet.run_id else []
        words = [command, fleet.name, *run, "--frontier", fleet.frontier, *arguments]
        self.log = log
        self._process = _context.Process(target=_work, args=(str(fleet.folder), str(log), words, crash))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the worker with SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float) -> int | None:
        """The exit code, negative if the worker was killed by a signal. None if it still runs."""
        self._process.join(timeout)
        return self._process.exitcode


class ForkedFleet(Fleet):
    """A run whose workers are forked."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.workers: list[ForkedWorker] = []

    def fork(self, *arguments: str, settings: Mapping[str, object], crash: Crash | None = None) -> ForkedWorker:
        """Start one more worker. With ``crash``, it kills itself there."""
        options = [f"--set={key}={value}" for key, value in settings.items()]
        log = self.folder / f"{self.run_id}-{len(self.workers)}.log"
        worker = ForkedWorker(self, log, [*options, *arguments], crash)
        self.workers.append(worker)
        return worker

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until every worker has ended, with exit code 0 unless it was killed."""
        until = time.monotonic() + timeout
        for number, worker in enumerate(self.workers):
            code = worker.wait(max(0.1, until - time.monotonic()))
            told = worker.log.read_text()[-3000:]
            assert code in (0, -signal.SIGKILL), f"worker {number} of run {self.run_id}: exit code {code}\n{told}"

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        super().close()
        for worker in self.workers:
            worker.kill()


def _work(folder: str, log: str, command: list[str], crash: Crash | None) -> NoReturn:
    """Run the command in the new process."""
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if crash is not None:
        arm(crash)
    sys.argv = ["shoal", *command]
    from shoal.cli.main import main

    main()
    sys.exit(0)
