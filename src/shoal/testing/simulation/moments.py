"""When schedules are due, computed from what ``docs/schedules.md`` promises, without the code that is judged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from math import ceil, inf
from random import Random
from zoneinfo import ZoneInfo

from msgspec import Struct

_YEAR = 2026
ZONES = (
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "America/Havana", "Asia/Beirut"),
    *("America/Santiago", "UTC"),
)
"""Zones whose clocks change by an hour or half an hour, at night or at midnight; and one whose clock never changes."""
_HALF_HOURS = "Australia/Lord_Howe"
_MINUTES = ("*", "*/2", "*/5", "*/15", "0", "30", "0,30", "10-12", "59")


class Timing(Struct, frozen=True):
    """When a schedule is due: every so many seconds, or at some minutes of some hours in a zone."""

    seconds: int = 0
    """0: see the others."""
    minute: str = ""
    hour: str = ""
    zone: str = "UTC"

    @property
    def key(self) -> tuple[str, str, str]:
        """``cron``, ``every`` and ``time_zone``, as a user writes them."""
        if self.seconds:
            return "", f"{self.seconds}s", "UTC"
        return f"{self.minute} {self.hour} * * *", "", self.zone

    @classmethod
    def of(cls, key: tuple[str, str, str]) -> Timing:
        """The timing that a user wrote, as ``key`` returns it."""
        cron, every, zone = key
        if every:
            return cls(seconds=int(every.removesuffix("s")))
        minute, hour = cron.split()[:2]
        return cls(minute=minute, hour=hour, zone=zone)

    @classmethod
    def draw(cls, random: Random, zone: str, around: float) -> Timing:
        """A timing that is due around a moment."""
        if random.random() < 0.4:
            return cls(seconds=random.choice([5, 7, 20, 60, 90, 300]))
        here = datetime.fromtimestamp(around, ZoneInfo(zone)).hour
        hours = sorted({(here + random.choice([-1, 0, 0, 1, 2])) % 24 for _ in range(random.choice([1, 2, 3]))})
        hour = ",".join(map(str, hours))
        if random.random() < 0.4 and zone != _HALF_HOURS:  # there, no hour is due at the same minute of the next one
            hour = "*"
        return cls(minute=random.choice(_MINUTES), hour=hour, zone=zone)

    def between(self, after: float, until: float) -> list[float]:
        """The moments later than ``after``, and not later than ``until``."""
        if until <= after:
            return []
        if self.seconds:
            first = int(after // self.seconds + 1)
            return [float(number * self.seconds) for number in range(first, int(until // self.seconds) + 1)]
        if self.hour == "*":
            return self._real_minutes(after, until)
        return self._local_times(after, until)

    def following(self, moment: float) -> float:
        """The first moment later than this one; infinite if there is none within two days."""
        return next(iter(self.between(moment, moment + 2 * 86400)), inf)

    def _real_minutes(self, after: float, until: float) -> list[float]:
        """An expression whose hour is ``*`` counts real hours."""
        minutes, zone = _values(self.minute, 60), ZoneInfo(self.zone)
        moments = (float(60 * number) for number in range(ceil(after / 60), int(until // 60) + 1))
        return [
            moment for moment in moments if moment > after and datetime.fromtimestamp(moment, zone).minute in minutes
        ]

    def _local_times(self, after: float, until: float) -> list[float]:
        """A time that exists twice is due the first time. One that does not exist is due at the next that does."""
        day = datetime.fromtimestamp(after, ZoneInfo(self.zone)).date() - timedelta(days=1)
        last = datetime.fromtimestamp(until, ZoneInfo(self.zone)).date()
        found = set[float]()
        while day <= last:
            for hour in _values(self.hour, 24):
                for minute in _values(self.minute, 60):
                    found.add(_moment_of(datetime(day.year, day.month, day.day, hour, minute), self.zone))
            day += timedelta(days=1)
        return sorted(moment for moment in found if after < moment <= until)


@lru_cache(maxsize=100_000)
def _moment_of(local: datetime, zone: str) -> float:
    while True:
        moment = local.replace(tzinfo=ZoneInfo(zone), fold=0)
        if moment.astimezone(UTC).astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0) == local:
            return moment.timestamp()
        local += timedelta(minutes=1)


@lru_cache(maxsize=1000)
def _values(field: str, count: int) -> frozenset[int]:
    values = set[int]()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            values.update(range(0, count, int(step or 1)))
        else:
            values.update(range(int(first), int(last or first) + 1))
    return frozenset(values)


@lru_cache(maxsize=100)
def changes_of(zone: str) -> tuple[float, ...]:
    """The moments of a year at which the clocks of a zone change."""
    start = datetime(_YEAR, 1, 1, tzinfo=UTC)
    moments = [start + timedelta(minutes=30 * number) for number in range(2 * 24 * 365)]
    offsets = [moment.astimezone(ZoneInfo(zone)).utcoffset() for moment in moments]
    return tuple(
        moment.timestamp()
        for moment, before, after in zip(moments[1:], offsets, offsets[1:], strict=False)
        if before != after
    )
