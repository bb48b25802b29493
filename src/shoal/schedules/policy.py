"""What a schedule does next. Pure: a function of the schedule, the time, and whether its last run is active."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from shoal.schedules.schedule import Schedule
from shoal.schedules.times import count_between, latest, start_of

LATE = 60.0
"""Seconds after which a time counts as missed."""
STEP_BACK = 3600.0
"""If the clock goes back by up to this many seconds, earlier decisions remain valid. If the last time of a schedule is
further in the future, a clock was wrong, and the schedule starts again from now. Runs of the same time have the same
name, so none is created twice."""


class Step(Struct, frozen=True):
    """The schedule after a step; the time whose run starts, if one does; whether the earlier run is cancelled first.
    If ``after`` is the same object as before, there is nothing to do."""

    after: Schedule
    due: float | None = None
    cancels: bool = False


def next_step(schedule: Schedule, now: float, *, active: bool) -> Step:
    """Decide what to do now. ``active``: the newest run has not ended. Repeat the call until nothing changes."""
    if schedule.paused or schedule.orphaned_at is not None:
        return Step(schedule)
    if schedule.last > now + STEP_BACK:
        return Step(replace(schedule, last=now))
    if schedule.waiting is not None and not active:
        return _fire(replace(schedule, waiting=None), schedule.waiting)
    definition, times = schedule.definition, schedule.definition.times
    first = times.after(schedule.last)
    if first is None or _start(schedule, first) > now:
        return Step(schedule)
    if definition.missed == "all":
        due, is_missed = first, _is_missed(schedule, first, now)
        if is_missed and active:
            return Step(schedule)  # times that were missed start one after the other
        return _due(schedule, due, active=active)
    newest = latest(times, schedule.last, now)
    assert newest is not None
    due = newest if _start(schedule, newest) <= now else latest(times, schedule.last, newest - 1) or first
    if due > first:
        count = 1 + count_between(times, first, due)
        schedule = replace(
            schedule, missed=schedule.missed + count, missed_at=latest(times, schedule.last, due - 1), last=due - 1
        )
    if definition.missed == "none" and now - _start(schedule, due) > LATE:
        return Step(replace(schedule, missed=schedule.missed + 1, missed_at=due, last=due))
    return _due(schedule, due, active=active)


def wakes_at(schedule: Schedule, now: float) -> float | None:
    """When the next step may change something; None if no step will. A schedule that waits for a run must be checked
    regularly."""
    if schedule.last > now + STEP_BACK and not schedule.paused:
        return now
    due = schedule.next_due
    return None if due is None else _start(schedule, due)


def run_now(schedule: Schedule, now: float, *, active: bool) -> Step | None:
    """Start a run outside of its times. None if the earlier run is active, and the policy is to skip or another run
    waits already."""
    due = round(now, 3)
    for used in (schedule.fired_at, schedule.waiting):
        if used is not None and due <= used < due + 1:  # another run of this millisecond
            due = round(used + 0.001, 3)
    if due % 1 == 0:  # names with whole seconds are for its times
        due += 0.001
    if not active:
        return _fire(schedule, due)
    match schedule.definition.overlap:
        case "cancel":
            return _fire(schedule, due, cancels=True)
        case "wait" if schedule.waiting is None:
            return Step(replace(schedule, waiting=due))
    return None


def _start(schedule: Schedule, due: float) -> float:
    return start_of(schedule.definition.times, due, schedule.definition.jitter, f"{schedule.project}/{schedule.name}")


def _is_missed(schedule: Schedule, due: float, now: float) -> bool:
    """Whether a time was missed: it is late, or the next one is due too."""
    following = schedule.definition.times.after(due)
    return now - _start(schedule, due) > LATE or (following is not None and _start(schedule, following) <= now)


def _due(schedule: Schedule, due: float, *, active: bool) -> Step:
    decided = replace(schedule, last=due)
    if not active:
        return _fire(decided, due)
    match schedule.definition.overlap:
        case "cancel":
            return _fire(decided, due, cancels=True)
        case "wait" if schedule.waiting is None:
            return Step(replace(decided, waiting=due))
    return Step(replace(decided, skipped=schedule.skipped + 1))


def _fire(schedule: Schedule, due: float, *, cancels: bool = False) -> Step:
    fired = replace(
        schedule, run_id=schedule.run_id_at(due), fired_at=due, fired=schedule.fired + 1, error="",
    )  # fmt: skip
    return Step(fired, due, cancels)
