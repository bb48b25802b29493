"""Workers and nodes that can die at a given step: processes that run the real command."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.acceptance.crashing_worker import Crash, crashing
from tests.acceptance.fleets import Fleet
from tests.support import forking
from tests.support.forking import SHOAL


class ForkedWorker:
    """One worker process."""

    def __init__(
        self, fleet: Fleet, log: Path, arguments: list[str], crash: Crash | None, *, command: str = "worker"
    ) -> None:
        run = ["--run-id", fleet.run_id] if fleet.run_id else []
        words = [command, fleet.name, *run, "--frontier", fleet.frontier, *arguments]
        self.log = log
        start = SHOAL if crash is None else crashing(crash)
        with log.open("w") as out:
            self._process = forking.Popen([*start, *words], cwd=fleet.folder, stdout=out, stderr=out)
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the worker with SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout: float) -> int | None:
        """The exit code, negative if the worker was killed by a signal. None if it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self._process.returncode


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
