"""One atomic step of a schedule: it records the decision about a due time and creates the run, or does neither."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from msgspec import Struct

from shoal.errors import RunError
from shoal.ports import Run, Store
from shoal.schedules.policy import Step, next_step
from shoal.schedules.schedule import Schedule
from shoal.stores.documents import StoredValue

log = logging.getLogger("shoal.schedules")

MakeRun: TypeAlias = Callable[[Schedule, float], Awaitable[Run]]
"""Makes the run for a due time of a schedule, without storing it."""
Decide: TypeAlias = Callable[[Schedule, bool], Step]
"""Decides the next step of a schedule. Its second argument says whether the newest run is active."""

_ACTIVE = ("queued", "running", "paused")


class Fired(Struct, frozen=True):
    """What a step did. ``schedule`` is the schedule as it is stored now, or None if it does not exist. ``run`` is the
    run that this call created. ``cancelled`` is the earlier run that this call cancelled, or an empty string."""

    schedule: Schedule | None
    changed: bool = False
    run: Run | None = None
    cancelled: str = ""


async def fire(store: Store, key: str, now: float, make_run: MakeRun) -> Fired:
    """Do the next step of the schedule in the document ``key``.

    Many processes may call this at the same time, and repeat it after a crash or a lost answer: each due time gets one
    run. The schedule's last time and the new run are stored together, and only if no other process has changed the
    schedule meanwhile. The name of the run is made from the schedule and the time."""
    return await take_step(store, key, lambda schedule, active: next_step(schedule, now, active=active), make_run)


async def take_step(store: Store, key: str, decide: Decide, make_run: MakeRun) -> Fired:
    """Read the schedule, decide, and store the result with its run. If another process changed the schedule in the
    meantime, nothing is done: read it again."""
    stored = StoredValue(store, key, Schedule)
    seen = await stored.read()
    if seen is None:
        return Fired(None)
    active = bool(seen.run_id) and await store.run_state(seen.run_id) in _ACTIVE
    step = decide(seen, active)
    if step.after is seen:
        return Fired(seen)
    run = None if step.due is None else await make_run(seen, step.due)
    cancelled = ""
    if step.cancels:
        with suppress(RunError):  # it has ended in the meantime
            await store.transition(seen.run_id, "cancelled")
            cancelled = seen.run_id
    is_mine = False

    def update(value: Schedule | None) -> tuple[Schedule | None, Run | None]:
        nonlocal is_mine
        is_mine = value == seen
        return (step.after, run) if is_mine else (value, None)

    after = await stored.change_with_run(update)
    if is_mine and run is not None:
        log.info("schedule %s: run %s is created", seen.name, run.run_id)
    return Fired(after, is_mine, run if is_mine else None, cancelled)
