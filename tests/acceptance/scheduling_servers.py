"""Servers that start the runs of schedules on a simulated clock, and what disturbs them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from shoal.frontier import open_store
from shoal.operations.schedules.schedule import Definition, Schedule
from shoal.operations.schedules.service import Schedules
from tests.support import forking

SERVERS = 3
SPEED = 20.0
START = 1_774_745_700.0


class Servers:
    """Server processes that are killed and started again, or frozen for a while."""

    def __init__(self, url: str, folder: Path) -> None:
        self.created = folder / "created.log"
        """A line for each run that a server believes to have created."""
        self._arguments = [url, str(time.time()), str(START), str(SPEED), "1.5", str(self.created)]
        self._folder = folder
        self.kills = self.freezes = 0
        self.processes = [self._start() for _ in range(SERVERS)]

    def _start(self) -> subprocess.Popen[str]:
        with (self._folder / "servers.log").open("ab") as log:
            return forking.Popen(
                [sys.executable, "-m", "tests.acceptance.scheduling_server", *self._arguments], stderr=log
            )

    def kill_one(self) -> None:
        number = random.randrange(SERVERS)
        assert self.processes[number].poll() is None, self.said()
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self._start()
        self.kills += 1

    def freeze_one(self, seconds: float) -> None:
        """Stop a process for so many seconds of real time, wherever it is. The clock goes on."""
        process = random.choice(self.processes)
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        self.freezes += 1

    def said(self) -> str:
        return (self._folder / "servers.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def add_schedule(url: str) -> None:
    """One that is due every simulated second."""
    store = await open_store(url)
    definition = Definition(spider="Pages", every="1s", missed="all", overlap="cancel")
    await Schedules(store, "shoal", lambda: START).add("often", definition)
    await store.close()


async def read_schedule(url: str) -> tuple[Schedule, list[str]]:
    """The schedule and its runs."""
    store = await open_store(url)
    try:
        schedules = Schedules(store, "shoal")
        return await schedules.get("often"), [run.run_id for run in await schedules.runs("often")]
    finally:
        await store.close()


def judge(schedule: Schedule, runs: list[str]) -> None:
    """Each time up to now has exactly one run."""
    assert len(runs) == schedule.fired
    assert sorted(runs) == [schedule.run_id_at(START + second) for second in range(1, len(runs) + 1)]
    assert (schedule.skipped, schedule.missed) == (0, 0)
