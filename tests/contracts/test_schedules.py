"""Schedules on every store: each time gets one run, whoever calls and how often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from msgspec.structs import replace

from shoal.errors import RunError
from shoal.frontier import open_store
from shoal.operations.schedules.schedule import Definition, Schedule
from shoal.operations.schedules.service import Schedules, fire
from shoal.ports import Run, Store
from shoal.testing import FakeClock, Harness
from tests.contracts.test_redis_rewinds import Rewindable
from tests.support.databases import PostgresServer

pytestmark = pytest.mark.asyncio

START = 1_700_000_000.0 // 60 * 60
CALLERS = 10
MINUTELY = Definition(spider="Books", every="1m", missed="all")


async def make_run(schedule: Schedule, due: float) -> Run:
    await asyncio.sleep(0)  # other callers decide at the same time
    return Run(
        run_id=schedule.run_id_at(due), spider="books", state="queued", created_at=due,
        settings={"schedule": schedule.name}, project=schedule.project,
    )  # fmt: skip


@pytest_asyncio.fixture
async def schedules(harness: Harness) -> AsyncIterator[Schedules]:
    await harness.open()
    made = Schedules(harness.store, "shoal", FakeClock(START))
    await made.add("minutely", MINUTELY)
    yield made
    await harness.close()


async def end(store: Store, run_id: str) -> None:
    await store.transition(run_id, "running")
    await store.transition(run_id, "finished")


async def test_of_many_callers_one_fires(schedules: Schedules) -> None:
    key, created = schedules.key("minutely"), []
    for minute in range(1, 6):
        now = START + 60 * minute
        fired = await asyncio.gather(*(fire(schedules.store, key, now, make_run) for _ in range(CALLERS)))
        runs = [each.run for each in fired if each.run is not None]
        assert len(runs) == 1
        created.append(runs[0].run_id)
        await end(schedules.store, runs[0].run_id)
    found = await schedules.runs("minutely")
    assert [run.run_id for run in reversed(found)] == created
    schedule = await schedules.get("minutely")
    assert created == [schedule.run_id_at(START + 60 * minute) for minute in range(1, 6)]
    assert (schedule.fired, schedule.skipped, schedule.missed) == (5, 0, 0)


async def test_callers_that_are_late_make_up_for_each_time_once(schedules: Schedules) -> None:
    await schedules.add("minutely", replace(MINUTELY, overlap="cancel"), replaces=True)
    key, now = schedules.key("minutely"), START + 60 * 12

    async def call() -> list[str]:
        created = []
        while (schedule := await schedules.get("minutely")).last < now:
            fired = await fire(schedules.store, key, now, make_run)
            if fired.run is not None:
                created.append(fired.run.run_id)
                with suppress(RunError):  # the last time is not late, so it cancels the run before
                    await end(schedules.store, fired.run.run_id)
            elif fired.schedule == schedule:
                await asyncio.sleep(0.001)  # the run of another caller has not ended
        return created

    created = [name for each in await asyncio.gather(*(call() for _ in range(CALLERS))) for name in each]
    assert len(created) == len(set(created)) == 12
    assert sorted(run.run_id for run in await schedules.runs("minutely")) == sorted(created)


async def test_a_run_that_exists_is_not_created_again(schedules: Schedules) -> None:
    """The clock was years ahead, fired, and was corrected: the schedule continues, and the same time has one run."""
    key, due = schedules.key("minutely"), START + 60
    first = await fire(schedules.store, key, due, make_run)
    assert first.run is not None
    await end(schedules.store, first.run.run_id)
    clock = schedules.now
    assert isinstance(clock, FakeClock)
    clock.now = START + 1e9
    await schedules.pause("minutely")
    await schedules.resume("minutely")  # its last time is in the year 2055
    for _ in range(3):
        await fire(schedules.store, key, START + 1, make_run)
    again = await fire(schedules.store, key, due, make_run)
    assert again.schedule is not None
    assert again.schedule.last == due
    assert [(run.run_id, run.state) for run in await schedules.runs("minutely")] == [(first.run.run_id, "finished")]


async def test_a_policy_that_cancels_ends_the_earlier_run(schedules: Schedules) -> None:
    await schedules.add("minutely", replace(MINUTELY, overlap="cancel"), replaces=True)
    key = schedules.key("minutely")
    first = await fire(schedules.store, key, START + 60, make_run)
    assert first.run is not None
    fired = await asyncio.gather(*(fire(schedules.store, key, START + 120, make_run) for _ in range(CALLERS)))
    assert [each.run is not None for each in fired].count(True) == 1
    assert [each.cancelled for each in fired if each.run is not None] in ([first.run.run_id], [""])
    assert [run.state for run in await schedules.runs("minutely")] == ["queued", "cancelled"]


async def test_nothing_fires_for_a_schedule_that_was_removed_or_paused(schedules: Schedules) -> None:
    key = schedules.key("minutely")
    await schedules.pause("minutely")
    assert not (await fire(schedules.store, key, START + 600, make_run)).changed
    await schedules.remove("minutely")
    assert (await fire(schedules.store, key, START + 600, make_run)).schedule is None
    with pytest.raises(RunError):
        await schedules.run("minutely", make_run)
    assert await schedules.runs("minutely") == []


@pytest.mark.parametrize("kind", ["redis", "postgresql"])
async def test_a_store_that_goes_back_in_time_fires_what_it_lost_again(kind: str) -> None:
    """Run and schedule are stored in one step, so a rewind loses both or none."""
    server = Rewindable(appendfsync="always") if kind == "redis" else PostgresServer()
    try:
        name = "prefix=s" if kind == "redis" else "schema=s"
        clock = FakeClock(START)

        async def fire_until(minutes: int) -> list[str]:
            store = await open_store(f"{server.url}?{name}")
            schedules = Schedules(store, "shoal", clock)
            if await schedules.find("minutely") is None:
                await schedules.add("minutely", MINUTELY)
            while (await schedules.get("minutely")).last < START + 60 * minutes:
                fired = await fire(store, schedules.key("minutely"), START + 60 * minutes, make_run)
                assert fired.run is not None
                await end(store, fired.run.run_id)
            names = [run.run_id for run in reversed(await schedules.runs("minutely"))]
            await store.close()
            return names

        await fire_until(3)
        server.save()
        before = await fire_until(6)
        server.rewind()
        assert await fire_until(8) == [*before, *(f"minutely_{_utc(START + 60 * minute)}" for minute in (7, 8))]
    finally:
        server.close()


def _utc(moment: float) -> str:
    return Schedule(name="x", project="shoal", definition=MINUTELY, last=0.0).run_id_at(moment).removeprefix("x_")
