"""One problem that needs attention: its values, its limits, and how its texts are made."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.messages import printable
from shoal.ports import Run

ProblemKind: TypeAlias = Literal[
    "finished", "degraded", "failed", "stalled", "no_worker", "failure_rate", "callback_errors", "host_failing",
    "login_failed", "few_items", "low_coverage", "worker_lost", "worker_stuck", "output_lagging", "output_missing",
    "unbalanced", "store_went_back", "store_away", "schedule_missed", "channel_failing",
]  # fmt: skip
Severity: TypeAlias = Literal["info", "warning", "critical"]

ONCE: frozenset[ProblemKind] = frozenset(
    {"finished", "degraded", "failed", "few_items", "low_coverage", "worker_lost", "store_went_back", "schedule_missed"}
)
"""Problems that happen at one moment. Those of other kinds last until they are resolved."""
UNTIL_END: frozenset[ProblemKind] = frozenset({"failure_rate", "callback_errors", "host_failing"})
"""Problems that the end of their run does not resolve."""
_MAX_NAME = 100
_MAX_TEXT = 1000


class Problem(Struct, frozen=True, kw_only=True):
    """Something that a person should know. Its texts are printable and short, whatever strangers wrote into them."""

    key: str
    """Identifies the problem. It stays the same while the problem lasts."""
    kind: ProblemKind
    severity: Severity
    run_id: str = ""
    spider: str = ""
    title: str
    text: str
    since: float
    figure: float = 0.0
    """What was measured. If it doubles, the problem has changed."""
    about: str = ""
    """The worker, output, schedule or channel that it is about."""


class ProblemLimits(Struct, frozen=True, kw_only=True):
    """The limits beyond which something is a problem."""

    stalled_after: float = 600.0
    """Seconds in which no page was done or failed, or no item was written."""
    failure_rate: float = 0.2
    """The share of failed pages. Pages that robots.txt or the scope forbids do not count."""
    failure_pages: int = 20
    """Pages that must have ended before the rate counts: in the last minutes, or since the start."""
    callback_errors: int = 1
    """Errors of callbacks, and items that could not be stored."""
    host_failing_after: float = 300.0
    """Seconds in which a host gave no good answer."""
    host_failing_attempts: int = 3
    """Attempts that must have failed in that time."""
    login_after: float = 60.0
    """Seconds for which a run is on hold for a login."""
    no_worker_after: float = 300.0
    """Seconds in which no process worked on a run that has work."""
    stuck_after: float = 30.0
    """Seconds for which the event loop of a process is blocked."""
    item_drop: float = 0.5
    """By which share a run may have fewer items than the last good run."""
    coverage_drop: float = 0.2
    """By how much the share of items with a field may be smaller than in the last good run."""
    output_lag: int = 10_000
    """Items that are not written to an output yet."""
    output_missing_after: float = 300.0
    """Seconds in which no process writes to an output although there are items for it."""


def of_run(
    run: Run, kind: ProblemKind, severity: Severity, title: str, text: str, since: float, *, figure: float = 0.0,
    about: str = "",
) -> Problem:  # fmt: skip
    """A problem of a run."""
    return make_problem(
        kind, severity, title, text, since, figure=figure, about=about, run_id=run.run_id, spider=run.spider
    )


def make_problem(
    kind: ProblemKind, severity: Severity, title: str, text: str, since: float, *, figure: float = 0.0,
    about: str = "", run_id: str = "", spider: str = "",
) -> Problem:  # fmt: skip
    """A problem under the key that its kind, run and subject have."""
    run_id, spider, about = map(_encodable, (run_id, spider, about))
    of = f"{short(spider)}: " if spider else ""
    return Problem(
        key="/".join(filter(None, (kind, run_id, about))), kind=kind, severity=severity, run_id=run_id, spider=spider,
        title=short(f"{of}{title}", 2 * _MAX_NAME), text=short(text, _MAX_TEXT), since=since, figure=figure,
        about=about,
    )  # fmt: skip


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def short(text: str, limit: int = _MAX_NAME) -> str:
    """One printable line."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def duration(seconds: float) -> str:
    """A duration for people."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(count: int, what: str) -> str:
    """A number with its noun: ``1 page``, ``8,442 pages``. Nouns on -ess get -es."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"
