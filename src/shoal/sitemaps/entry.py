"""One URL of a sitemap, with its date and other values."""

from __future__ import annotations

import re
from calendar import monthrange
from datetime import UTC, date, datetime, timedelta
from email.utils import parsedate_to_datetime

from msgspec import Struct

_W3C = re.compile(
    r"(\d{4})(?:-(\d\d?)(?:-(\d\d?)(?:[T ](\d\d?):(\d\d)(?::(\d\d)(?:[.,](\d+))?)?\s*(Z|[+-]\d\d:?\d\d)?)?)?)?",
    re.IGNORECASE,
)
_MAX_DATE = 100  # characters


class Alternate(Struct, frozen=True):
    """The same page in another language."""

    hreflang: str
    url: str


class SitemapEntry(Struct, frozen=True):
    """A URL of a sitemap, or another sitemap of an index."""

    loc: str
    """The URL as the file has it. It may be relative or invalid."""
    is_sitemap: bool = False
    """Whether an index names it: it is another sitemap, not a page."""
    fields: dict[str, str] = {}
    """The texts of the other elements, such as ``lastmod``, ``changefreq`` and ``priority``. In a feed, ``lastmod`` is
    the date of the entry."""
    alternates: tuple[Alternate, ...] = ()

    @property
    def lastmod(self) -> datetime | None:
        """When the page was last changed, with a time zone. A date without a time means the start of that day. None if
        the sitemap has no date, or an invalid one."""
        period = read_period(self.fields.get("lastmod", ""))
        return None if period is None else period[0]

    def may_be_newer_than(self, since: datetime) -> bool:
        """Whether the page may have changed at this time or later. An entry without a date may have."""
        period = read_period(self.fields.get("lastmod", ""))
        return period is None or period[1] > since or period[0] >= since


def read_period(text: str) -> tuple[datetime, datetime] | None:
    """The first moment of a date, and the first moment after it: ``2026-05`` is a month, ``2026-05-01`` a day.

    Dates are those of sitemaps (ISO 8601) and of feeds (RFC 822). Without a time zone, they are in UTC. None for
    anything else."""
    text = text.strip()[:_MAX_DATE]
    try:
        if match := _W3C.fullmatch(text):
            return _w3c_period(match)
        moment = parsedate_to_datetime(text)
        moment = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
        return moment, moment + timedelta(seconds=1)
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


def _w3c_period(match: re.Match[str]) -> tuple[datetime, datetime]:
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    first = datetime(int(year), int(month or 1), int(day or 1), tzinfo=UTC)
    if month is None:
        return first, first + timedelta(days=366 if monthrange(first.year, 2)[1] == 29 else 365)
    if day is None:
        return first, first + timedelta(days=monthrange(first.year, first.month)[1])
    if hour is None:
        return first, first + timedelta(days=1)
    moment = first + timedelta(
        hours=int(hour),
        minutes=int(minute),
        seconds=int(second or 0),
        microseconds=int((fraction or "")[:6].ljust(6, "0")),
    )
    if zone and zone.upper() != "Z":
        digits = zone[1:].replace(":", "")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        moment += offset if zone[0] == "-" else -offset
    return moment, moment + (timedelta(seconds=1) if second else timedelta(minutes=1))


def read_since(value: datetime | date | str) -> datetime:
    """The moment that a user names: a datetime, a date, or text as in a sitemap. ValueError if it is not a date."""
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    period = read_period(value) if isinstance(value, str) else None
    if period is None:
        raise ValueError(f"{value!r:.80} is not a date: write it as 2026-05-01 or 2026-05-01T12:00:00Z")
    return period[0]
