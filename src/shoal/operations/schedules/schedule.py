"""A schedule: what runs, when, and what happened so far."""

from __future__ import annotations

import hashlib
import re
import time
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.messages import did_you_mean, pip_install

# When a schedule is due: cron expressions in a time zone, or an interval. Pure: nothing here asks for the time.
#
# Times are whole seconds since 1970. A local time that a change of the clocks skips is due once, at the next moment
# that exists. A local time that exists twice is due once, the first time. Only an expression whose hour is ``*``
# counts real hours: it is due in both of them.


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_INTERVAL = 366 * 86400
_FIRST_WINDOW = 120.0
_MAX_COUNT = 1000


class Times(Protocol):
    """The moments at which something is due, without jitter."""

    def after(self, moment: float) -> float | None:
        """The first one later than ``moment``. None if there is none in the next decades."""
        ...


class Interval:
    """Every so many seconds, counted from 1970. So all servers agree, and a restart changes nothing."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds

    def after(self, moment: float) -> float | None:
        return (moment // self._seconds + 1) * self._seconds


class Cron:
    """A cron expression with five fields, in a time zone."""

    def __init__(self, expression: str, zone: tzinfo) -> None:
        """ConfigError if the expression is invalid."""
        self._zone = zone
        self._expression = _with_specific_hours(expression)
        self.after = lru_cache(maxsize=16)(self._after)  # servers ask for the same one again and again
        try:
            next(self._from(0.0))
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        except StopIteration:
            raise ConfigError("no date matches it") from None

    def _after(self, moment: float) -> float | None:
        return next((due for due in self._from(moment) if due > moment), None)

    def _from(self, moment: float) -> Iterator[float]:
        try:
            from cronsim import CronSim, CronSimError
        except ModuleNotFoundError as exc:
            raise ConfigError(f"cron needs {exc.name}; install it with: {pip_install('api')}") from exc
        try:
            moments = CronSim(self._expression, datetime.fromtimestamp(moment // 1, self._zone))
        except CronSimError as exc:
            raise ValueError(str(exc)[:1].lower() + str(exc)[1:]) from exc
        return (float(due.timestamp()) for due in moments)


def _with_specific_hours(expression: str) -> str:
    """Write ``*/15`` as ``0-59/15`` if the hours are specific. cronsim handles skipped and repeated local times only if
    neither the minute nor the hour begins with a star."""
    fields = expression.split()
    if len(fields) != 5:
        raise ConfigError(f"it has {len(fields)} fields, not 5: minute, hour, day of month, month, day of week")
    if fields[1] not in ("*", "*/1"):
        for number, last in ((0, 59), (1, 23)):
            fields[number] = re.sub(r"(^|,)\*", rf"\g<1>0-{last}", fields[number])
    return " ".join(fields)


@lru_cache(maxsize=1024)
def make_times(cron: str, every: str, time_zone: str) -> Times:
    """The times of a cron expression, or of an interval if that is empty. ConfigError if it is invalid."""
    return Cron(cron, find_zone(time_zone)) if cron else Interval(parse_interval(every))


@lru_cache(maxsize=1024)
def find_zone(name: str) -> tzinfo:
    """The time zone of an IANA name. ConfigError suggests the nearest one."""
    if name == "UTC":
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = did_you_mean(name, zoneinfo.available_timezones())
        raise ConfigError(f'must be an IANA time zone such as "Europe/Berlin", not {name!r:.80}{near}') from None


def parse_interval(text: str) -> int:
    """The seconds of ``90s``, ``15m``, ``1h30m``, ``1d``, ``2w``. ConfigError if it is none, or too long."""
    if not re.fullmatch(r"(\d{1,9}[smhdw])+", text):
        raise ConfigError(f'must be an interval such as "15m", "1h30m" or "1d", not {text!r:.80}')
    seconds = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhdw])", text))
    if not 1 <= seconds <= _MAX_INTERVAL:
        raise ConfigError(f"must be an interval from 1 second to 366 days, not {text!r:.80}")
    return seconds


def latest(times: Times, after: float, until: float) -> float | None:
    """The last time in (``after``, ``until``]. It searches backwards in growing windows, so a long pause costs
    little."""
    window = _FIRST_WINDOW
    while True:
        start = max(after, until - window)
        last = None
        for last in takewhile(lambda due: due <= until, each_after(times, start)):  # noqa: B007
            pass
        if last is not None or start == after:
            return last
        window *= 8


def each_after(times: Times, moment: float) -> Iterator[float]:
    """All times later than ``moment``, in order."""
    while (due := times.after(moment)) is not None:
        yield due
        moment = due


def count_between(times: Times, after: float, before: float) -> int:
    """The number of times between the two moments; at most 1000."""
    return sum(1 for _ in islice(takewhile(lambda due: due < before, each_after(times, after)), _MAX_COUNT))


def start_of(times: Times, due: float, jitter: float, seed: str) -> float:
    """When the run of a time starts: up to ``jitter`` seconds later, but before the next time. All servers compute the
    same moment."""
    if not jitter:
        return due
    following = times.after(due)
    longest = jitter if following is None else min(jitter, following - due)
    digest = hashlib.blake2b(f"{seed} {due:.0f}".encode(), digest_size=8).digest()
    return due + longest * int.from_bytes(digest) / 2**64


OverlapPolicy: TypeAlias = Literal["skip", "wait", "cancel"]
"""What happens at a due time while an earlier run is active: skip this time, wait until that run has ended, or cancel
that run."""
MissedPolicy: TypeAlias = Literal["one", "all", "none"]
"""Which missed times are run later, after all servers were down: the latest one, all, or none."""
Origin: TypeAlias = Literal["file", "store"]

_DEFAULT_PROJECT = Config().project_name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class Definition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a user writes. `shoal.operations.schedules.definitions` checks it."""

    spider: str
    """Its name in the registry."""
    arguments: dict[str, object] = {}
    settings: dict[str, object] = {}
    """By dotted key."""
    cron: str = ""
    every: str = ""
    """An interval. Either ``cron`` or ``every`` is set."""
    time_zone: str = "UTC"
    jitter: float = 0.0
    overlap: OverlapPolicy = "skip"
    """If the previous run is still active: skip the time, wait until the run ends, or cancel it."""
    missed: MissedPolicy = "one"
    """Times at which no server ran: start a run for the latest, for all of them, or for none."""
    keep: int | None = None
    """How many ended runs to keep. None: all."""

    @property
    def times(self) -> Times:
        """ConfigError if another program stored an invalid definition."""
        return make_times(*self.timing)

    @property
    def timing(self) -> tuple[str, str, str]:
        return self.cron, self.every, self.time_zone


class Schedule(Struct, frozen=True, kw_only=True):
    """A schedule as it is stored."""

    name: str
    project: str
    definition: Definition
    origin: Origin = "store"
    paused: bool = False
    last: float
    """All times up to this one have been decided: fired, skipped or missed."""
    waiting: float | None = None
    """A time whose run starts when the earlier one has ended."""
    run_id: str = ""
    """The newest run."""
    fired_at: float | None = None
    """The time of the newest run."""
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    missed_at: float | None = None
    """The last time that was missed."""
    error: str = ""
    """Why the last run could not start, or failed in a server."""
    source: str = ""
    """The machine and the shoal.toml that define it. Empty if no file does, or it is unknown."""
    orphaned_at: float | None = None
    """Since when no server that runs has it in its shoal.toml. It is kept, but starts no runs."""

    @property
    def run_prefix(self) -> str:
        """The prefix of the names of its runs. Names of runs are unique in a store, which several projects may
        share."""
        own = "" if self.project == _DEFAULT_PROJECT else f"{self.project}."
        return f"{own}{self.name}_"

    def run_id_at(self, due: float) -> str:
        """The name of the run for a due time. It is the same on every server."""
        fraction = round(due % 1 * 1000)
        text = time.strftime("%Y%m%dT%H%M%S", time.gmtime(due // 1))
        return f"{self.run_prefix}{text}{f'-{fraction:03d}' if fraction else ''}"

    @property
    def next_due(self) -> float | None:
        """The next time, without jitter. None while it is paused or orphaned."""
        return None if self.paused or self.orphaned_at is not None else self.definition.times.after(self.last)


def schedule_of_run(settings: object) -> str:
    """The schedule that created a run with these settings; empty if none did."""
    name = settings.get("schedule", "") if isinstance(settings, dict) else ""
    return name if isinstance(name, str) else ""


def describe_timing(definition: Definition) -> str:
    """``every 15m``, or ``30 2 * * * Europe/Berlin``, for people."""
    if definition.every:
        return f"every {definition.every}"
    return f"{definition.cron} {definition.time_zone}"


# What a schedule does next. Pure: a function of the schedule, the time, and whether its last run is active.


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
    return _begin(schedule, due, active=active)


def _start(schedule: Schedule, due: float) -> float:
    return start_of(schedule.definition.times, due, schedule.definition.jitter, f"{schedule.project}/{schedule.name}")


def _is_missed(schedule: Schedule, due: float, now: float) -> bool:
    """Whether a time was missed: it is late, or the next one is due too."""
    following = schedule.definition.times.after(due)
    return now - _start(schedule, due) > LATE or (following is not None and _start(schedule, following) <= now)


def _due(schedule: Schedule, due: float, *, active: bool) -> Step:
    decided = replace(schedule, last=due)
    return _begin(decided, due, active=active) or Step(replace(decided, skipped=schedule.skipped + 1))


def _begin(schedule: Schedule, due: float, *, active: bool) -> Step | None:
    """Start the run of a time as the overlap policy says. None if the policy skips this time."""
    if not active:
        return _fire(schedule, due)
    match schedule.definition.overlap:
        case "cancel":
            return _fire(schedule, due, cancels=True)
        case "wait" if schedule.waiting is None:
            return Step(replace(schedule, waiting=due))
    return None


def _fire(schedule: Schedule, due: float, *, cancels: bool = False) -> Step:
    run_id = schedule.run_id_at(due)
    return Step(replace(schedule, run_id=run_id, fired_at=due, fired=schedule.fired + 1, error=""), due, cancels)
