"""When schedules are due: cron expressions across daylight-saving changes, intervals, jitter."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.operations.schedules.schedule import (
    Cron,
    Interval,
    count_between,
    each_after,
    find_zone,
    latest,
    parse_interval,
    start_of,
)

BERLIN, NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")
CHANGES = (1_772_953_200, 1_774_746_000, 1_792_890_000, 1_793_512_800)
"""When the clocks change in 2026: New York and Berlin in spring, Berlin and New York in autumn."""


def at(zone: ZoneInfo, *parts: int, fold: int = 0) -> float:
    return datetime(*parts, tzinfo=zone, fold=fold).timestamp()  # type: ignore[misc,arg-type]


def day_of(expression: str, zone: ZoneInfo, *date: int) -> list[str]:
    """The times of one local day, as local times with their offset."""
    start, end = at(zone, *date, 0, 0), at(zone, *date, 23, 59, 59)
    found = takewhile(lambda due: due <= end, each_after(Cron(expression, zone), start - 1))
    return [datetime.fromtimestamp(due, zone).strftime("%H:%M %z") for due in found]


@pytest.mark.parametrize(
    ("expression", "zone", "date", "times"),
    [
        # Berlin, spring: 02:00 to 03:00 does not exist
        ("30 2 * * *", BERLIN, (2026, 3, 29), ["03:00 +0200"]),
        ("*/20 2 * * *", BERLIN, (2026, 3, 29), ["03:00 +0200"]),
        ("0 2,3 * * *", BERLIN, (2026, 3, 29), ["03:00 +0200"]),
        ("30 1-3 * * *", BERLIN, (2026, 3, 29), ["01:30 +0100", "03:00 +0200", "03:30 +0200"]),
        ("0 */6 * * *", BERLIN, (2026, 3, 29), ["00:00 +0100", "06:00 +0200", "12:00 +0200", "18:00 +0200"]),
        # Berlin, autumn: 02:00 to 03:00 exists twice
        ("30 2 * * *", BERLIN, (2026, 10, 25), ["02:30 +0200"]),
        ("*/30 2 * * *", BERLIN, (2026, 10, 25), ["02:00 +0200", "02:30 +0200"]),
        ("30 1-3 * * *", BERLIN, (2026, 10, 25), ["01:30 +0200", "02:30 +0200", "03:30 +0100"]),
        # New York, spring and autumn
        ("15 2 * * *", NEW_YORK, (2026, 3, 8), ["03:00 -0400"]),
        ("15 3 * * *", NEW_YORK, (2026, 3, 8), ["03:15 -0400"]),
        ("30 1 * * *", NEW_YORK, (2026, 11, 1), ["01:30 -0400"]),
        ("0 1,2 * * *", NEW_YORK, (2026, 11, 1), ["01:00 -0400", "02:00 -0500"]),
    ],
)
def test_each_local_time_is_due_once_when_the_clocks_change(
    expression: str, zone: ZoneInfo, date: tuple[int, ...], times: list[str]
) -> None:
    assert day_of(expression, zone, *date) == times


@pytest.mark.parametrize(
    ("zone", "date", "hours"),
    [(BERLIN, (2026, 3, 29), 23), (BERLIN, (2026, 10, 25), 25), (NEW_YORK, (2026, 3, 8), 23),
     (NEW_YORK, (2026, 11, 1), 25)],
)  # fmt: skip
def test_every_hour_counts_real_hours(zone: ZoneInfo, date: tuple[int, ...], hours: int) -> None:
    start = at(zone, *date, 0, 0)
    found = list(islice(each_after(Cron("0 * * * *", zone), start - 1), hours + 1))
    assert found == [start + 3600 * number for number in range(hours + 1)]
    assert datetime.fromtimestamp(found[-1], zone).strftime("%H:%M") == "00:00"


@pytest.mark.parametrize("expression", ["30 2 * * *", "*/20 1-3 * * *", "0 */2 * * *", "*/10 * * * *", "0 2 * 3,10 *"])
@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK])
@given(start=st.one_of(*(st.integers(change - 90_000, change + 90_000) for change in CHANGES)))
@settings(max_examples=40)
def test_times_do_not_depend_on_where_one_starts_random(expression: str, zone: ZoneInfo, start: int) -> None:
    """So a server that starts in the middle of a change computes the same times as one that ran all along."""
    times = Cron(expression, zone)
    before = list(islice(each_after(times, start - 86400), 150))
    expected = [due for due in before if due > start]
    if expected:
        assert list(islice(each_after(times, start), 5))[: len(expected)] == expected[:5]
        assert latest(times, start - 86400, expected[0]) == expected[0]
    assert before == sorted(set(before))


def test_a_schedule_that_begins_in_the_second_hour_does_not_repeat_the_first() -> None:
    after = at(BERLIN, 2026, 10, 25, 2, 10, fold=1)
    assert Cron("30 2 * * *", BERLIN).after(after) == at(BERLIN, 2026, 10, 26, 2, 30)


def test_intervals_are_the_same_for_every_server() -> None:
    every = Interval(900)
    assert every.after(1_000_000_000.5) == 1_000_000_800.0
    assert every.after(1_000_000_800.0) == 1_000_001_700.0
    assert latest(every, 0.0, 1_000_000_000.0) == 999_999_900.0
    assert latest(every, 999_999_900.0, 1_000_000_000.0) is None
    assert count_between(every, 999_999_900.0, 1_000_002_000.0) == 2
    assert count_between(every, 0.0, 1_000_000_000.0) == 1000


def test_the_latest_time_after_a_long_pause_is_found_quickly() -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC).timestamp()
    assert latest(Cron("0 0 1 1 *", UTC), 0.0, now) == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert latest(Cron("* * * * *", UTC), 0.0, now + 59) == now
    assert latest(Cron("0 0 1 1 *", UTC), now - 86400, now) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h30m", 5400), ("1d", 86400), ("2w", 1209600)]
)
def test_intervals_are_read(text: str, seconds: int) -> None:
    assert parse_interval(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "m", "1.5h", "-1s", "0s", "400d", "1y", "1 h", "9999999999s"])
def test_bad_intervals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be an interval"):
        parse_interval(text)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("30 2 * *", "4 fields, not 5"),
        ("0 30 2 * * *", "6 fields, not 5"),
        ("61 2 * * *", "bad minute"),
        ("0 25 * * *", "bad hour"),
        ("0 0 30 2 *", "bad day-of-month"),
        ("x * * * *", "bad minute"),
        ("0 0 * * MOON", "bad day-of-week"),
        ("*/0 * * * *", "bad minute"),
    ],
)
def test_bad_expressions_say_why(expression: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Cron(expression, UTC)


def test_an_unknown_time_zone_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean Europe/Berlin"):
        find_zone("Europe/Berln")
    for name in ("../../etc/passwd", "/etc/localtime", "\0", ""):
        with pytest.raises(ConfigError, match="IANA time zone"):
            find_zone(name)


@given(due=st.integers(1_700_000_000 // 60, 1_800_000_000 // 60), jitter=st.floats(0, 200))
def test_jitter_is_the_same_everywhere_and_keeps_the_order_random(due: int, jitter: float) -> None:
    times, moment = Interval(60), due * 60.0
    start = start_of(times, moment, jitter, "project/name")
    assert moment <= start <= moment + min(jitter, 60)
    assert start == start_of(times, moment, jitter, "project/name")
    assert start <= start_of(times, moment + 60, jitter, "project/name")


def test_jitter_spreads_schedules() -> None:
    starts = {start_of(Interval(3600), 3600.0, 60.0, f"shoal/{number}") for number in range(100)}
    assert len(starts) == 100
    assert max(starts) - min(starts) > 30
