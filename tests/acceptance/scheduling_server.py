"""A server that does nothing but start the runs of schedules, on a simulated clock.

``python -m tests.acceptance.scheduling_server URL BEGUN START SPEED SKEW LOG``: the clock showed ``START`` when the
time was ``BEGUN``, runs ``SPEED`` times as fast, and is wrong by up to ``SKEW`` seconds. Each run that this process
created is a line of ``LOG``. Every server ends all queued runs: one that is killed leaves its run to the others.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from contextlib import suppress

from shoal.errors import RunError
from shoal.frontier import open_store
from shoal.operations.schedules.runner import ScheduleRunner
from shoal.operations.schedules.schedule import Schedule
from shoal.operations.schedules.service import Schedules
from shoal.ports import Run


class SimulatedClock:
    """A clock that runs faster than the real one."""

    def __init__(self, begun: float, start: float, speed: float, skew: float = 0.0) -> None:
        self._begun = begun
        self._start = start
        self._speed = speed
        self._skew = skew

    def __call__(self) -> float:
        wrong = random.uniform(-self._skew, self._skew)  # it steps back and forth
        return self._start + (time.time() - self._begun) * self._speed + wrong

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds / self._speed):
                await event.wait()


class Ender:
    """Ends runs instead of crawling."""

    def __init__(self, schedules: Schedules, log: str) -> None:
        self._store = schedules.store
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def make_run(self, schedule: Schedule, due: float) -> Run:
        return Run(
            run_id=schedule.run_id_at(due), spider="pages", state="queued", created_at=due,
            settings={"schedule": schedule.name}, project=schedule.project,
        )  # fmt: skip

    async def launch(self, run: Run) -> None:
        os.write(self._log, f"{run.run_id}\n".encode())
        await self._end(run)

    async def cancelled(self, run_id: str) -> None:
        pass

    async def take_over(self) -> None:
        for run in await self._store.list_runs(states=("queued", "running")):
            await self._end(run)

    async def _end(self, run: Run) -> None:
        with suppress(RunError):  # another server was first
            if run.state == "queued":
                await self._store.transition(run.run_id, "running")
            await self._store.transition(run.run_id, "finished")


async def main(url: str, begun: str, start: str, speed: str, skew: str, log: str) -> None:
    clock = SimulatedClock(float(begun), float(start), float(speed), float(skew))
    schedules = Schedules(await open_store(url), "shoal", clock)
    await ScheduleRunner(schedules, Ender(schedules, log), clock.wait).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
