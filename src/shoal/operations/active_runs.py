"""The problems of one active run: pure functions of its snapshot and of what its processes did lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from shoal.crawling.stats import FailingHost
from shoal.fetch.sessions.login import LoginState
from shoal.operations.problem import Problem, ProblemLimits, Severity, counted, duration, make_problem, of_run, short
from shoal.operations.snapshot import OutputState, RunSnapshot
from shoal.ports import HostState, Run, Stats, WorkerState
from shoal.runs.reports import LATE, RECENT, SHORT, CodeErrors, ProcessReport, sum_errors
from shoal.runs.samples import RunSample

# What the processes of an active run did in the last minutes: pure functions of their reports and its samples.


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


class Trend(NamedTuple):
    """How pages ended in the last seconds."""

    seconds: float
    ended: int
    dead: int

    def is_bad(self, limits: ProblemLimits) -> bool:
        """Whether too many of them failed."""
        return self.ended >= limits.failure_pages and self.dead > limits.failure_rate * self.ended


class RunActivity(Struct, frozen=True, kw_only=True):
    """What the processes of a run did lately."""

    callback_errors: CodeErrors = CodeErrors()
    item_errors: CodeErrors = CodeErrors()
    failed_in_callback: int = 0
    """Pages of the run that failed in a callback and were not retried since."""
    hosts: tuple[HostFailures, ...] = ()
    trends: tuple[Trend, ...] = ()
    blocked: tuple[ProcessReport, ...] = ()
    """Processes whose event loop is blocked."""
    failed_logins: Mapping[str, LoginState] = {}
    """By jar, logins whose last attempts failed."""
    worked_at: float = 0.0
    """The last report of any process; 0 if there is none."""


def summarize_reports(reports: Sequence[ProcessReport], now: float) -> RunActivity:
    """What these reports say. Those of processes that ended or are lost count only for the totals."""
    live = [report for report in reports if not report.ended and now - report.at <= SILENT]
    return RunActivity(
        callback_errors=_lately(sum_errors(report.callback_errors for report in reports), live, now),
        item_errors=sum_errors(report.item_errors for report in reports),
        hosts=_failing_hosts(live),
        blocked=tuple(report for report in live if report.loop_age),
        worked_at=max((report.at for report in reports), default=0.0),
    )


def _lately(errors: CodeErrors, live: Sequence[ProcessReport], now: float) -> CodeErrors:
    """The errors of all processes, with those of the last minutes that live processes had. A process that ended says
    for ever how many it had before its end."""
    recent = sum(report.callback_errors.recent for report in live)
    if errors.last is not None and now - errors.last.at <= RECENT:
        recent = max(1, recent)
    return CodeErrors(total=errors.total, recent=recent, last=errors.last)


def _failing_hosts(live: Sequence[ProcessReport]) -> tuple[HostFailures, ...]:
    """The hosts that fail, those with the most attempts first. A host of which one process had a good answer lately is
    failing since then for all."""
    by_host: dict[str, list[FailingHost]] = {}
    for report in live:
        for host, failing in report.hosts.items():
            by_host.setdefault(host, []).append(failing)
    hosts = [
        HostFailures(
            host=host, since=max(failure.since for failure in every), last=max(failure.last for failure in every),
            kinds=_sum_kinds(every), processes=len(every),
        )
        for host, every in by_host.items()
    ]  # fmt: skip
    return tuple(sorted(hosts, key=lambda host: (-host.attempts, host.host)))


def _sum_kinds(failing: Sequence[FailingHost]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for host in failing:
        total.update(host.kinds)
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
    trends = []
    for seconds in (SHORT, RECENT):
        before = [sample for sample in samples if sample.at <= now - seconds]
        if before or run.created_at > now - seconds:
            done, dead = (before[-1].done, before[-1].dead) if before else (0, 0)
        elif samples:
            done, dead = samples[0].done, samples[0].dead
        else:
            continue
        failed = max(0, stats.dead - dead - forbidden.get(seconds, 0))
        trends.append(Trend(seconds, max(0, stats.done - done) + failed, failed))
    return tuple(trends)


Mark: TypeAlias = tuple[int, float]
"""A count, and since when it has been the same."""

_SILENT_SESSIONS = 0.5
"""A worker that disappears counts as lost after this many sessions without a heartbeat. It sends three in each."""
_MAX_HOSTS = 5
"""Failing hosts of a run that are problems of their own: those for which most requests wait."""
_FAR_BEHIND = 50_000
"""Items. Workers fetch nothing while an output is further behind."""
_MAX_KINDS = 4
_FAILURES = {
    "connect": "refuses connections", "dns": "has no address", "reset": "closes connections",
    "timeout": "does not answer in time", "tls": "has no valid certificate", "half body": "sends only parts of pages",
    "protocol": "does not speak HTTP",
}  # fmt: skip


def find_stalls(
    snapshot: RunSnapshot,
    activity: RunActivity,
    marks: Mapping[str, Mark],
    limits: ProblemLimits,
    answering_since: float,
) -> Iterator[Problem]:
    """A run that nobody works on, or one without a page for a while, with the reason."""
    if snapshot.run.state not in ("queued", "running") or (snapshot.run.state == "running" and snapshot.stats.finished):
        return
    begun = snapshot.run.created_at if snapshot.run.state == "queued" else 0.0
    idle_since = max(begun, activity.worked_at) or _unchanged_since(marks, _key(snapshot, "processes"), 0, snapshot.at)
    if not snapshot.processes and snapshot.at - max(idle_since, answering_since) >= limits.no_worker_after:
        yield _no_worker(snapshot, idle_since)
    else:
        yield from _stalled(snapshot, activity, marks, limits)


def _no_worker(snapshot: RunSnapshot, since: float) -> Problem:
    run, left = snapshot.run, snapshot.stats.remaining
    nobody = f"No process has worked on it for {duration(snapshot.at - since)}"
    began = "It was never begun" if run.state == "queued" else nobody
    waits = "its start requests are not pushed yet" if not left else f"{counted(left, 'request')} wait"
    return of_run(
        run, "no_worker", "critical", "no worker",
        f"{began}; {waits}. Start a worker on this store: `shoal worker FILE --run-id {run.run_id}`. If it was started "
        "with `shoal run`, repeat that command.", since, figure=snapshot.at - since,
    )  # fmt: skip


def _stalled(
    snapshot: RunSnapshot, activity: RunActivity, marks: Mapping[str, Mark], limits: ProblemLimits
) -> Iterator[Problem]:
    stats = snapshot.stats
    since = _unchanged_since(marks, snapshot.run.run_id, stats.done + stats.dead, snapshot.changed_at)
    silence = snapshot.at - since
    busy = [host for host in snapshot.hosts if host.ready]
    delay = min((host.delay for host in busy if host.blocked_for <= 0), default=0.0)
    held_since = _unchanged_since(marks, _key(snapshot, "login"), int(True), snapshot.at)
    on_hold = snapshot.logs_in and snapshot.at - held_since >= limits.login_after
    patience = (min(limits.login_after, limits.stalled_after) if on_hold else limits.stalled_after) + 2 * delay
    if snapshot.run.state != "running" or not stats.remaining or silence < patience:
        return
    severity, reason = _why_stalled(snapshot, activity, busy, on_hold=on_hold)
    yield of_run(
        snapshot.run, "stalled", severity, "stalled",
        f"No page was done or failed for {duration(silence)}: {reason}. {stats.remaining} requests are left: "
        f"{stats.ready} ready, {stats.waiting} waiting, {stats.leased} in flight. {_workers(snapshot.processes)} on "
        "it.", since, figure=silence,
    )  # fmt: skip


def _why_stalled(
    snapshot: RunSnapshot, activity: RunActivity, busy: list[HostState], *, on_hold: bool
) -> tuple[Severity, str]:
    """How bad a stall is, and its most likely reason. A run that waits for a known time continues by itself."""
    stats = snapshot.stats
    if not snapshot.processes:
        return "critical", "no process works on it"
    if activity.blocked:
        return "critical", f"{activity.blocked[0].name} is blocked by {activity.blocked[0].blocked_by}"
    if on_hold:
        reasons = [login.reason for login in activity.failed_logins.values()]
        last = f"; the last attempt failed: {reasons[0]}" if reasons else ""
        return "warning", f"it is on hold until a login succeeds{last}"
    if behind := [output for output in snapshot.outputs if output.held and output.lag > _FAR_BEHIND]:
        return "critical", f"output {behind[0].name} is {behind[0].lag:,} items behind, and fetching waits for it"
    if stats.leased:
        return "critical", f"{counted(stats.leased, 'page')} in flight did not end"
    if busy and all(host.blocked_for > 0 for host in busy):
        first = min(busy, key=lambda host: host.blocked_for)
        why = f" ({first.block_reason})" if first.block_reason else ""
        hosts = f"its host {first.host} is blocked" if len(busy) == 1 else f"its {len(busy)} hosts are blocked"
        return "warning", f"{hosts}, the first for {duration(first.blocked_for)} more{why}"
    if not stats.ready and not stats.incoming:
        return "warning", f"{counted(stats.waiting, 'request')} wait for the time of their next attempt"
    return "critical", "its processes are alive, but take no request"


def _workers(count: int) -> str:
    return "No process works" if not count else "1 process works" if count == 1 else f"{count} processes work"


def find_failure_rate(
    snapshot: RunSnapshot, activity: RunActivity, forbidden: int, limits: ProblemLimits
) -> Iterator[Problem]:
    """Too many pages fail: in the last minutes, or since the start."""
    dead = max(0, snapshot.stats.dead - forbidden)
    total = Trend(snapshot.at - snapshot.run.created_at, snapshot.stats.done + dead, dead)
    recent = [
        Trend(trend.seconds, trend.ended - max(0, trend.dead - dead), min(trend.dead, dead))
        for trend in activity.trends
    ]
    failing = [trend for trend in (total, *recent) if trend.is_bad(limits)]
    if not failing:
        return
    worst = max(failing, key=lambda trend: trend.dead / trend.ended)
    rate = worst.dead / worst.ended
    lately = "" if worst is total else f" of the last {duration(worst.seconds)}"
    since_start = "" if worst is total else f", {total.dead:,} of {total.ended:,} since the start"
    yield of_run(
        snapshot.run, "failure_rate", "critical" if rate >= 0.9 else "warning", f"{rate:.0%} of the pages fail",
        f"{worst.dead:,} of {worst.ended:,} pages{lately} failed{since_start}; the limit is {limits.failure_rate:.0%}. "
        f"`shoal audit {snapshot.run.run_id}` lists the kinds of failures.", snapshot.at, figure=rate,
    )  # fmt: skip


def find_code_errors(snapshot: RunSnapshot, activity: RunActivity, limits: ProblemLimits) -> Iterator[Problem]:
    """Callbacks that raised, and items that could not be stored."""
    errors, items = activity.callback_errors, activity.item_errors
    pages = max(activity.failed_in_callback, errors.recent)
    if not pages + items.total or pages + items.total < limits.callback_errors:
        return
    lately, parts = f"in the last {duration(RECENT)}", []
    if pages:
        parts.append(f"Callbacks raised on {counted(pages, 'page')}, on {errors.recent:,} {lately}.")
    if items.total:
        parts.append(f"{counted(items.total, 'item')} could not be stored, {items.recent:,} {lately}.")
    latest = [error for error in (errors.last, items.last) if error is not None]
    last = max(latest, key=lambda error: error.at, default=None)
    if last is not None:
        parts.append(f"The latest: {last.reason}, at {last.url}.")
    parts.append(f"After a fix, `shoal retry-failed {snapshot.run.run_id}` fetches the failed pages again.")
    recently = activity.trends[-1] if activity.trends else Trend(0.0, 0, 0)
    is_half = errors.recent >= max(1, limits.failure_pages) and 2 * errors.recent >= recently.ended
    title = f"errors in callbacks: {pages:,}" if pages else f"items not stored: {items.total:,}"
    yield of_run(
        snapshot.run, "callback_errors", "critical" if is_half else "warning", title, " ".join(parts),
        last.at if last is not None else snapshot.at, figure=float(pages + items.total),
    )  # fmt: skip


def failing_hosts(hosts: Iterable[HostFailures], now: float, limits: ProblemLimits) -> list[HostFailures]:
    """The hosts without a good answer for so long that they may be a problem."""
    return [
        host
        for host in hosts
        if now - host.since >= limits.host_failing_after and host.attempts >= limits.host_failing_attempts
    ]


def find_failing_hosts(snapshot: RunSnapshot, activity: RunActivity, limits: ProblemLimits) -> Iterator[Problem]:
    """Hosts that answer only errors, or not at all. One that is not tried any more, and for which nothing waits, is no
    problem: its pages failed, and count in the failure rate."""
    lasting = [
        host
        for host in failing_hosts(activity.hosts, snapshot.at, limits)
        if host.waiting or host.last - host.since >= limits.host_failing_after
    ]
    for failing in sorted(lasting, key=lambda host: (-host.waiting, -host.attempts))[:_MAX_HOSTS]:
        name, lasted = short(failing.host), duration(snapshot.at - failing.since)
        waits = f"; {counted(failing.waiting, 'request')} wait for it" if failing.waiting else ""
        listed = ", ".join(f"{kind}: {count:,}" for kind, count in list(failing.kinds.items())[:_MAX_KINDS])
        others = snapshot.processes - failing.processes  # they may reach it: by another proxy, from another machine
        to = f" to {failing.processes} of {snapshot.processes} processes" if others > 0 else ""
        yield of_run(
            snapshot.run, "host_failing",
            "critical" if not to and 2 * failing.waiting >= snapshot.stats.remaining > 0 else "warning",
            f"{name} {_failure_of(failing.kinds)}{to}",
            f"No good answer from {name}{to} for {lasted}: {counted(failing.attempts, 'attempt')} by "
            f"{counted(failing.processes, 'process')} failed ({listed}){waits}. If it blocks you, slow down or pause "
            f"the run; `shoal hosts show {name}` shows its delay.",
            failing.since, figure=snapshot.at - failing.since, about=failing.host,
        )  # fmt: skip


def _failure_of(kinds: Mapping[str, int]) -> str:
    """What a host does instead of a good answer."""
    if len(kinds) > 1:
        return "gives no good answer"
    (kind,) = kinds
    return _FAILURES.get(kind, f"answers only {kind.removeprefix('http ')}")


def find_failed_logins(snapshot: RunSnapshot, logins: Mapping[str, LoginState]) -> Iterator[Problem]:
    """Logins whose last attempt failed. One that succeeds resolves it."""
    for jar, login in logins.items():
        of_jar = f" of {short(jar)}" if jar else ""
        text = f"{counted(login.failures, 'attempt')} failed, the last with: {login.reason.removesuffix('.')}."
        if login.stopped:
            text = (
                f"{text} The run was stopped. When the cause is gone, continue it with `shoal resume "
                f"{snapshot.run.run_id}`, or repeat the command of the crawl."
            )
        yield of_run(
            snapshot.run, "login_failed", "critical" if login.stopped else "warning", f"the login{of_jar} failed", text,
            login.failed_at, figure=float(login.failures), about=jar,
        )  # fmt: skip


def find_blocked(snapshot: RunSnapshot, blocked: Iterable[ProcessReport], limits: ProblemLimits) -> Iterator[Problem]:
    """Processes that hang in a callback."""
    for report in blocked:
        seconds = report.loop_age
        if seconds >= limits.stuck_after:
            yield of_run(
                snapshot.run, "worker_stuck", "critical", f"worker {short(report.name)} hangs",
                f"Its event loop has been blocked for {duration(seconds)} by {report.blocked_by}. Its log has the "
                "stack. Other workers get its pages when their leases end (lease.ttl). If it does not continue, kill "
                "it.", report.at - seconds, figure=seconds, about=report.name,
            )  # fmt: skip


def find_lost_workers(
    snapshot: RunSnapshot, before: RunSnapshot | None, since: float, answering_since: float
) -> Iterator[Problem]:
    """Workers that sent no heartbeat for a session, and workers that were fenced because of that. Nobody can send one
    while the store is away, so silence counts only since the store answers."""

    def silence(worker: WorkerState, run: RunSnapshot) -> float:
        return min(worker.silent_for, _read_at(run) - answering_since)

    silent = {worker.worker: worker for worker in snapshot.workers if 0 < worker.session < silence(worker, snapshot)}
    present = {worker.worker for worker in snapshot.workers}
    if before is not None:
        for gone in before.workers:
            if gone.worker not in present and 0 < gone.session * _SILENT_SESSIONS < silence(gone, before):
                silent.setdefault(gone.worker, gone)
    for worker in silent.values():
        lost_at = _read_at(snapshot) - worker.silent_for
        if lost_at >= since:
            yield worker_lost(snapshot.run.run_id, snapshot.run.spider, worker.worker, lost_at)


def _read_at(snapshot: RunSnapshot) -> float:
    """When the workers of a snapshot were read: not each snapshot reads them again."""
    return snapshot.at if snapshot.details_at is None else snapshot.details_at


def is_heard(worker: WorkerState) -> bool:
    """Whether the store had a heartbeat of a worker lately."""
    return worker.session > 0 and worker.silent_for < worker.session * _SILENT_SESSIONS


def worker_lost(run_id: str, spider: str, name: str, at: float) -> Problem:
    return make_problem(
        "worker_lost", "warning", f"worker {short(name)} is lost",
        "It was killed, hangs, or cannot reach the store. Other workers take over its pages; if there are none, start "
        "one.", at, run_id=run_id, spider=spider, about=name,
    )  # fmt: skip


def find_output_problems(
    snapshot: RunSnapshot, output: OutputState, marks: Mapping[str, Mark], limits: ProblemLimits
) -> Iterator[Problem]:
    """An output that nobody writes to, or one that lags."""
    if output.finished or not output.lag:
        return
    since = _unchanged_since(marks, _key(snapshot, output.name), output.written, snapshot.at)
    unheld_since = _unchanged_since(marks, _key(snapshot, output.name, "held"), 0, snapshot.at)
    if not output.held and snapshot.processes and snapshot.at - unheld_since >= limits.output_missing_after:
        yield of_run(
            snapshot.run, "output_missing", "critical", f"no process writes to output {short(output.name)}",
            f"{counted(output.lag, 'item')} are not written, and no process has written to it for "
            f"{duration(snapshot.at - unheld_since)}. Start a worker that reaches it. If it is not needed any more: "
            f"`shoal outputs {snapshot.run.run_id} forget OUTPUT`.", unheld_since, figure=float(output.lag),
            about=output.name,
        )  # fmt: skip
        return
    stands_still = snapshot.at - since >= limits.stalled_after and snapshot.run.state == "running"
    if output.lag < limits.output_lag and not stands_still:
        return
    writer = "A process writes to it" if output.held else "No process writes to it"
    still = f" Nothing was written for {duration(snapshot.at - since)}." if stands_still else ""
    yield of_run(
        snapshot.run, "output_lagging", "critical" if stands_still else "warning", f"output {short(output.name)} lags",
        f"{output.lag} items are not written yet, {output.written} are.{still} {writer}.", since,
        figure=float(output.lag), about=output.name,
    )  # fmt: skip


def marks_of(marks: Mapping[str, Mark], snapshot: RunSnapshot, at: float) -> dict[str, Mark]:
    """The marks of a run after a snapshot. See `advance_marks`."""
    ended = snapshot.stats.done + snapshot.stats.dead
    counted = [(snapshot.run.run_id, ended, snapshot.changed_at), (_key(snapshot, "processes"), snapshot.processes, at)]
    counted.append((_key(snapshot, "login"), int(snapshot.logs_in), at))
    for output in snapshot.outputs:
        if output.lag:
            counted.append((_key(snapshot, output.name), output.written, at))
            counted.append((_key(snapshot, output.name, "held"), int(output.held), at))
    return {key: (count, _unchanged_since(marks, key, count, since)) for key, count, since in counted}


def _unchanged_since(marks: Mapping[str, Mark], key: str, count: int, since: float) -> float:
    mark = marks.get(key)
    return min(mark[1], since) if mark is not None and mark[0] == count else since


def _key(snapshot: RunSnapshot, *what: str) -> str:
    return "/".join((snapshot.run.run_id, *what))
