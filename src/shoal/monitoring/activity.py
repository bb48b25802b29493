"""What the processes of an active run did in the last minutes: pure functions of their reports and its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from shoal.crawling.stats import FailingHost
from shoal.monitoring.reports import LATE, RECENT, SHORT, CodeErrors, ProcessReport, sum_errors
from shoal.monitoring.samples import RunSample
from shoal.ports import Run, Stats

SILENT = 1.5 * LATE
"""Seconds without a report after which a process is lost. Clocks of machines differ a little."""


class HostFailures(Struct, frozen=True, kw_only=True):
    """A host that answers only errors, or not at all."""

    host: str
    since: float
    """No process has had a good answer since this time."""
    last: float
    """When the last attempt failed."""
    kinds: Mapping[str, int]
    """Attempts by kind of failure."""
    processes: int
    waiting: int = 0
    """Requests of the run that wait for it."""

    @property
    def attempts(self) -> int:
        return sum(self.kinds.values())


class BlockedProcess(Struct, frozen=True, kw_only=True):
    """A process whose event loop is blocked."""

    name: str
    at: float
    """When it reported that."""
    seconds: float
    by: str


class FailedLogin(Struct, frozen=True, kw_only=True):
    """A login whose last attempts failed."""

    jar: str
    failures: int
    reason: str
    at: float
    """When the last attempt failed."""
    stopped: bool
    """The run was stopped because of that."""


class Trend(NamedTuple):
    """How pages ended in the last seconds."""

    seconds: float
    ended: int
    dead: int


class RunActivity(Struct, frozen=True, kw_only=True):
    """What the processes of a run did lately."""

    callback_errors: CodeErrors = CodeErrors()
    item_errors: CodeErrors = CodeErrors()
    failed_in_callback: int = 0
    """Pages of the run that failed in a callback and were not retried since."""
    hosts: tuple[HostFailures, ...] = ()
    trends: tuple[Trend, ...] = ()
    blocked: tuple[BlockedProcess, ...] = ()
    failed_logins: tuple[FailedLogin, ...] = ()
    worked_at: float = 0.0
    """The last report of any process; 0 if there is none."""


def summarize_reports(reports: Sequence[ProcessReport], now: float) -> RunActivity:
    """What these reports say. Those of processes that ended or are lost count only for the totals."""
    live = [each for each in reports if not each.ended and now - each.at <= SILENT]
    blocked = [
        BlockedProcess(name=each.name, at=each.at, seconds=each.loop_age, by=each.blocked_by)
        for each in live
        if each.loop_age
    ]
    return RunActivity(
        callback_errors=_lately(sum_errors(each.callback_errors for each in reports), live, now),
        item_errors=sum_errors(each.item_errors for each in reports),
        hosts=_failing_hosts(live),
        blocked=tuple(blocked),
        worked_at=max((each.at for each in reports), default=0.0),
    )


def _lately(errors: CodeErrors, live: Sequence[ProcessReport], now: float) -> CodeErrors:
    """The errors of all processes, with those of the last minutes that live processes had. A process that ended says
    for ever how many it had before its end."""
    recent = sum(each.callback_errors.recent for each in live)
    if errors.last is not None and now - errors.last.at <= RECENT:
        recent = max(1, recent)
    return CodeErrors(total=errors.total, recent=recent, last=errors.last)


def _failing_hosts(live: Sequence[ProcessReport]) -> tuple[HostFailures, ...]:
    """The hosts that fail, those with the most attempts first. A host of which one process had a good answer lately is
    failing since then for all."""
    found: dict[str, list[FailingHost]] = {}
    for report in live:
        for host, failing in report.hosts.items():
            found.setdefault(host, []).append(failing)
    hosts = [
        HostFailures(
            host=host, since=max(each.since for each in every), last=max(each.last for each in every),
            kinds=_sum_kinds(every), processes=len(every),
        )
        for host, every in found.items()
    ]  # fmt: skip
    return tuple(sorted(hosts, key=lambda each: (-each.attempts, each.host)))


def _sum_kinds(failing: Sequence[FailingHost]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in failing:
        for kind, count in each.kinds.items():
            total[kind] = total.get(kind, 0) + count
    return dict(sorted(total.items(), key=lambda pair: (-pair[1], pair[0])))


def sum_forbidden(reports: Sequence[ProcessReport]) -> dict[float, int]:
    """The failed pages that do not count, for `find_trends`."""
    working = [report for report in reports if not report.ended]
    return {
        SHORT: sum(report.forbidden_lately for report in working),
        RECENT: sum(report.forbidden for report in working),
    }


def find_trends(
    run: Run, stats: Stats, samples: Sequence[RunSample], forbidden: Mapping[float, int], now: float
) -> tuple[Trend, ...]:
    """How pages of a run ended in the last two and in the last ten minutes. ``samples``: oldest first. ``forbidden``:
    failed pages of each of these times that do not count, such as those that robots.txt forbids."""
    found = []
    for seconds in (SHORT, RECENT):
        before = [each for each in samples if each.at <= now - seconds]
        if before or run.created_at > now - seconds:
            done, dead = (before[-1].done, before[-1].dead) if before else (0, 0)
        elif samples:
            done, dead = samples[0].done, samples[0].dead
        else:
            continue
        failed = max(0, stats.dead - dead - forbidden.get(seconds, 0))
        found.append(Trend(seconds, max(0, stats.done - done) + failed, failed))
    return tuple(found)
