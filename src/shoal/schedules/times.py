"""When a schedule is due: cron expressions in a time zone, or an interval. Pure: nothing here asks for the time.

Times are whole seconds since 1970. A local time that a change of the clocks skips is due once, at the next moment that
exists. A local time that exists twice is due once, the first time. Only an expression whose hour is ``*`` counts real
hours: it is due in both of them.
"""

from __future__ import annotations

import hashlib
import re
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from typing import Protocol

from shoal.errors import ConfigError
from shoal.suggestions import did_you_mean, pip_install

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
        self._cached_after = lru_cache(maxsize=16)(self._find_after)  # servers ask for the same one again and again
        try:
            next(self._from(0.0))
        except ValueError as exc:
            raise ConfigError(str(exc)) from None
        except StopIteration:
            raise ConfigError("no date matches it") from None

    def after(self, moment: float) -> float | None:
        return self._cached_after(moment)

    def _find_after(self, moment: float) -> float | None:
        return next((found for found in self._from(moment) if found > moment), None)

    def _from(self, moment: float) -> Iterator[float]:
        try:
            from cronsim import CronSim, CronSimError
        except ModuleNotFoundError as exc:
            raise ConfigError(f"cron needs {exc.name}; install it with: {pip_install('api')}") from exc
        try:
            found = CronSim(self._expression, datetime.fromtimestamp(moment // 1, self._zone))
        except CronSimError as exc:
            raise ValueError(str(exc)[:1].lower() + str(exc)[1:]) from exc
        return (float(each.timestamp()) for each in found)


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
        found = None
        for found in takewhile(lambda due: due <= until, each_after(times, start)):  # noqa: B007
            pass
        if found is not None or start == after:
            return found
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
