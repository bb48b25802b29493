"""Times of schedules at which no run began."""

from __future__ import annotations

from shoal.monitoring.problems import MissedTime
from shoal.schedules.schedule import Schedule
from shoal.schedules.service import Schedules


async def read_missed(schedules: Schedules, since: float) -> tuple[MissedTime, ...]:
    """The last missed time of each schedule, and the last run that could not start. Nothing before ``since``."""
    found = [missed for schedule in await schedules.list_all() for missed in missed_times(schedule)]
    return tuple(missed for missed in found if missed.at >= since)


def missed_times(schedule: Schedule) -> list[MissedTime]:
    """What went wrong with a schedule. Times during a pause are not missed."""
    name, spider = schedule.name, schedule.definition.spider
    found = []
    if schedule.missed_at is not None:
        count = f"{schedule.missed} of its times were" if schedule.missed > 1 else "One of its times was"
        reason = f"{count} missed so far, because no server was running or all were late. `shoal schedule show {name}`"
        found.append(MissedTime(name, spider, schedule.missed_at, reason))
    if schedule.error and schedule.fired_at is not None:
        found.append(MissedTime(name, spider, schedule.fired_at, f"Run {schedule.run_id}: {schedule.error}"))
    return found
