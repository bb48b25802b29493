"""Three servers on one store are killed at random while a schedule fires 600 times: each time has one run."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.frontier import open_store
from shoal.schedules.schedule import Definition, Schedule
from shoal.schedules.service import Schedules
from tests.acceptance.fleets import KINDS, frontier_url
from tests.acceptance.scheduling_server import SimulatedClock

FIRINGS = 600
SPEED = 20.0
SERVERS = 3
START = 1_774_745_700.0


class Servers:
    """Server processes that are killed and started again."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self.kills = 0
        self.processes = [self._start() for _ in range(SERVERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "servers.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.scheduling_server", *self._arguments], stderr=log,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip

    def kill_one(self) -> None:
        number = random.randrange(SERVERS)
        assert self.processes[number].poll() is None, (self._folder / "servers.log").read_text()
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self._start()
        self.kills += 1

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_each_time_has_one_run_although_servers_are_killed(kind: str, tmp_path: Path) -> None:
    url, log, begun = frontier_url(kind), tmp_path / "created.log", time.time()

    async def fired() -> Schedule:
        store = await open_store(url)
        try:
            return await Schedules(store, "shoal").get("often")
        finally:
            await store.close()

    async def judge() -> tuple[Schedule, list[str]]:
        store = await open_store(url)
        schedules = Schedules(store, "shoal", SimulatedClock(begun, START, SPEED))
        try:
            return await schedules.get("often"), [run.run_id for run in await schedules.runs("often")]
        finally:
            await store.close()

    async def add() -> None:
        store = await open_store(url)
        definition = Definition(spider="Pages", every="1s", missed="all", overlap="cancel")
        await Schedules(store, "shoal", lambda: START).add("often", definition)
        await store.close()

    asyncio.run(add())
    servers = Servers([url, str(begun), str(START), str(SPEED), "1.5", str(log)], tmp_path)
    try:
        deadline = time.monotonic() + 240
        while asyncio.run(fired()).fired < FIRINGS:
            assert time.monotonic() < deadline, (tmp_path / "servers.log").read_text()
            time.sleep(random.uniform(0.1, 1.0))
            servers.kill_one()
    finally:
        servers.close()
    schedule, runs = asyncio.run(judge())
    assert servers.kills >= 5
    assert len(runs) == schedule.fired >= FIRINGS
    assert sorted(runs) == [schedule.run_id_at(START + second) for second in range(1, len(runs) + 1)]
    assert (schedule.skipped, schedule.missed) == (0, 0)
    created = log.read_text().split()
    assert len(created) == len(set(created))  # no two servers believe that they created the same run
    assert set(created) <= set(runs)
