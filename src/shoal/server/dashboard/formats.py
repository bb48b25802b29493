"""Numbers, times and durations as people read them."""

from __future__ import annotations

import datetime
import math

NOTHING = "\N{EN DASH}"
_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def number(value: float | None) -> str:
    """1234567 as 1,234,567; small fractions with one digit."""
    if value is None:
        return NOTHING
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """The two largest units: 3 h 20 min."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds > 0 else "0 s"
    left = round(seconds)
    words: list[str] = []
    for name, size in _UNITS:
        if left >= size or (words and len(words) < 2):
            words.append(f"{left // size} {name}")
            left %= size
        if len(words) == 2:
            break
    return " ".join(word for word in words if not word.startswith("0 ")) or "0 s"


def moment(at: float | None) -> str:
    """A time in ISO 8601, for the attribute ``datetime``: the browser shows it in the time zone of the reader."""
    if at is None or not 0 < at < 1e11:
        return ""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="seconds")


def size(count: float | None) -> str:
    """Bytes as kB, MB or GB."""
    if count is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def percent(part: float, whole: float) -> str:
    """A share in percent; a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else NOTHING
