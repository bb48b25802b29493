"""The problems of one active run: pure functions of its snapshot and of what its processes did lately."""

from __future__ import annotations

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
    live = [each for each in reports if not each.ended and now - each.at <= SILENT]
    return RunActivity(
        callback_errors=_lately(sum_errors(each.callback_errors for each in reports), live, now),
        item_errors=sum_errors(each.item_errors for each in reports),
        hosts=_failing_hosts(live),
        blocked=tuple(report for report in live if report.loop_age),
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
    seen: RunSnapshot, activity: RunActivity, marks: Mapping[str, Mark], limits: ProblemLimits, answering_since: float
) -> Iterator[Problem]:
    """A run that nobody works on, or one without a page for a while, with the reason."""
    if seen.run.state not in ("queued", "running") or (seen.run.state == "running" and seen.stats.finished):
        return
    begun = seen.run.created_at if seen.run.state == "queued" else 0.0
    idle_since = max(begun, activity.worked_at) or _unchanged_since(marks, _processes_key(seen), 0, seen.at)
    if not seen.processes and seen.at - max(idle_since, answering_since) >= limits.no_worker_after:
        yield _no_worker(seen, idle_since)
    else:
        yield from _stalled(seen, activity, marks, limits)


def _no_worker(seen: RunSnapshot, since: float) -> Problem:
    run, left = seen.run, seen.stats.remaining
    nobody = f"No process has worked on it for {duration(seen.at - since)}"
    began = "It was never begun" if run.state == "queued" else nobody
    waits = "its start requests are not pushed yet" if not left else f"{counted(left, 'request')} wait"
    return of_run(
        run, "no_worker", "critical", "no worker",
        f"{began}; {waits}. Start a worker on this store: `shoal worker FILE --run-id {run.run_id}`. If it was started "
        "with `shoal run`, repeat that command.", since, figure=seen.at - since,
    )  # fmt: skip


def _stalled(
    seen: RunSnapshot, activity: RunActivity, marks: Mapping[str, Mark], limits: ProblemLimits
) -> Iterator[Problem]:
    stats = seen.stats
    since = _unchanged_since(marks, seen.run.run_id, stats.done + stats.dead, seen.changed_at)
    silence = seen.at - since
    busy = [host for host in seen.hosts if host.ready]
    delay = min((host.delay for host in busy if host.blocked_for <= 0), default=0.0)
    held_since = _unchanged_since(marks, _login_key(seen), int(True), seen.at) if seen.logs_in else seen.at
    on_hold = seen.at - held_since >= limits.login_after
    patience = (min(limits.login_after, limits.stalled_after) if on_hold else limits.stalled_after) + 2 * delay
    if seen.run.state != "running" or not stats.remaining or silence < patience:
        return
    severity, reason = _why_stalled(seen, activity, busy, on_hold=on_hold)
    yield of_run(
        seen.run, "stalled", severity, "stalled",
        f"No page was done or failed for {duration(silence)}: {reason}. {stats.remaining} requests are left: "
        f"{stats.ready} ready, {stats.waiting} waiting, {stats.leased} in flight. {_workers(seen.processes)} on it.",
        since, figure=silence,
    )  # fmt: skip


def _why_stalled(
    seen: RunSnapshot, activity: RunActivity, busy: list[HostState], *, on_hold: bool
) -> tuple[Severity, str]:
    """How bad a stall is, and its most likely reason. A run that waits for a known time continues by itself."""
    stats = seen.stats
    if not seen.processes:
        return "critical", "no process works on it"
    if activity.blocked:
        return "critical", f"{activity.blocked[0].name} is blocked by {activity.blocked[0].blocked_by}"
    if on_hold:
        reasons = [login.reason for login in activity.failed_logins.values()]
        last = f"; the last attempt failed: {reasons[0]}" if reasons else ""
        return "warning", f"it is on hold until a login succeeds{last}"
    if behind := [output for output in seen.outputs if output.held and output.lag > _FAR_BEHIND]:
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
    seen: RunSnapshot, activity: RunActivity, forbidden: int, limits: ProblemLimits
) -> Iterator[Problem]:
    """Too many pages fail: in the last minutes, or since the start."""
    dead = max(0, seen.stats.dead - forbidden)
    total = Trend(seen.at - seen.run.created_at, seen.stats.done + dead, dead)
    recent = [
        Trend(each.seconds, each.ended - max(0, each.dead - dead), min(each.dead, dead)) for each in activity.trends
    ]
    failing = [trend for trend in (total, *recent) if trend.is_bad(limits)]
    if not failing:
        return
    worst = max(failing, key=lambda trend: trend.dead / trend.ended)
    rate = worst.dead / worst.ended
    lately = "" if worst is total else f" of the last {duration(worst.seconds)}"
    since_start = "" if worst is total else f", {total.dead:,} of {total.ended:,} since the start"
    yield of_run(
        seen.run, "failure_rate", "critical" if rate >= 0.9 else "warning", f"{rate:.0%} of the pages fail",
        f"{worst.dead:,} of {worst.ended:,} pages{lately} failed{since_start}; the limit is {limits.failure_rate:.0%}. "
        f"`shoal audit {seen.run.run_id}` lists the kinds of failures.", seen.at, figure=rate,
    )  # fmt: skip


def find_code_errors(seen: RunSnapshot, activity: RunActivity, limits: ProblemLimits) -> Iterator[Problem]:
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
    last = max((each.last for each in (errors, items) if each.last), key=lambda error: error.at, default=None)
    if last is not None:
        parts.append(f"The latest: {last.reason}, at {last.url}.")
    parts.append(f"After a fix, `shoal retry-failed {seen.run.run_id}` fetches the failed pages again.")
    recently = activity.trends[-1] if activity.trends else Trend(0.0, 0, 0)
    is_half = errors.recent >= max(1, limits.failure_pages) and 2 * errors.recent >= recently.ended
    title = f"errors in callbacks: {pages:,}" if pages else f"items not stored: {items.total:,}"
    yield of_run(
        seen.run, "callback_errors", "critical" if is_half else "warning", title, " ".join(parts),
        last.at if last is not None else seen.at, figure=float(pages + items.total),
    )  # fmt: skip


def failing_hosts(hosts: Iterable[HostFailures], now: float, limits: ProblemLimits) -> list[HostFailures]:
    """The hosts without a good answer for so long that they may be a problem."""
    return [
        each
        for each in hosts
        if now - each.since >= limits.host_failing_after and each.attempts >= limits.host_failing_attempts
    ]


def find_failing_hosts(seen: RunSnapshot, activity: RunActivity, limits: ProblemLimits) -> Iterator[Problem]:
    """Hosts that answer only errors, or not at all. One that is not tried any more, and for which nothing waits, is no
    problem: its pages failed, and count in the failure rate."""
    lasting = [
        each
        for each in failing_hosts(activity.hosts, seen.at, limits)
        if each.waiting or each.last - each.since >= limits.host_failing_after
    ]
    for each in sorted(lasting, key=lambda host: (-host.waiting, -host.attempts))[:_MAX_HOSTS]:
        name, lasted = short(each.host), duration(seen.at - each.since)
        waits = f"; {counted(each.waiting, 'request')} wait for it" if each.waiting else ""
        listed = ", ".join(f"{kind}: {count:,}" for kind, count in list(each.kinds.items())[:_MAX_KINDS])
        others = seen.processes - each.processes  # they may reach it: by another proxy, from another machine
        to = f" to {each.processes} of {seen.processes} processes" if others > 0 else ""
        yield of_run(
            seen.run, "host_failing",
            "critical" if not to and 2 * each.waiting >= seen.stats.remaining > 0 else "warning",
            f"{name} {_failure_of(each.kinds)}{to}",
            f"No good answer from {name}{to} for {lasted}: {counted(each.attempts, 'attempt')} by "
            f"{counted(each.processes, 'process')} failed ({listed}){waits}. If it blocks you, slow down or pause the "
            f"run; `shoal hosts show {name}` shows its delay.",
            each.since, figure=seen.at - each.since, about=each.host,
        )  # fmt: skip


def _failure_of(kinds: Mapping[str, int]) -> str:
    """What a host does instead of a good answer."""
    if len(kinds) > 1:
        return "gives no good answer"
    (kind,) = kinds
    return _FAILURES.get(kind, f"answers only {kind.removeprefix('http ')}")


def find_failed_logins(seen: RunSnapshot, logins: Mapping[str, LoginState]) -> Iterator[Problem]:
    """Logins whose last attempt failed. One that succeeds resolves it."""
    for jar, login in logins.items():
        of_jar = f" of {short(jar)}" if jar else ""
        text = f"{counted(login.failures, 'attempt')} failed, the last with: {login.reason.removesuffix('.')}."
        if login.stopped:
            text = (
                f"{text} The run was stopped. When the cause is gone, continue it with `shoal resume "
                f"{seen.run.run_id}`, or repeat the command of the crawl."
            )
        yield of_run(
            seen.run, "login_failed", "critical" if login.stopped else "warning", f"the login{of_jar} failed", text,
            login.failed_at, figure=float(login.failures), about=jar,
        )  # fmt: skip


def find_blocked(seen: RunSnapshot, blocked: Iterable[ProcessReport], limits: ProblemLimits) -> Iterator[Problem]:
    """Processes that hang in a callback."""
    for report in blocked:
        seconds = report.loop_age
        if seconds >= limits.stuck_after:
            yield of_run(
                seen.run, "worker_stuck", "critical", f"worker {short(report.name)} hangs",
                f"Its event loop has been blocked for {duration(seconds)} by {report.blocked_by}. Its log has the "
                "stack. Other workers get its pages when their leases end (lease.ttl). If it does not continue, kill "
                "it.", report.at - seconds, figure=seconds, about=report.name,
            )  # fmt: skip


def find_lost_workers(
    seen: RunSnapshot, before: RunSnapshot | None, since: float, answering_since: float
) -> Iterator[Problem]:
    """Workers that sent no heartbeat for a session, and workers that were fenced because of that. Nobody can send one
    while the store is away, so silence counts only since the store answers."""

    def silence(worker: WorkerState, run: RunSnapshot) -> float:
        return min(worker.silent_for, _read_at(run) - answering_since)

    silent = {each.worker: each for each in seen.workers if 0 < each.session < silence(each, seen)}
    present = {each.worker for each in seen.workers}
    if before is not None:
        for each in before.workers:
            if each.worker not in present and 0 < each.session * _SILENT_SESSIONS < silence(each, before):
                silent.setdefault(each.worker, each)
    for worker in silent.values():
        lost_at = _read_at(seen) - worker.silent_for
        if lost_at >= since:
            yield worker_lost(seen.run.run_id, seen.run.spider, worker.worker, lost_at)


def _read_at(seen: RunSnapshot) -> float:
    """When the workers of a snapshot were read: not each snapshot reads them again."""
    return seen.at if seen.details_at is None else seen.details_at


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
    seen: RunSnapshot, output: OutputState, marks: Mapping[str, Mark], limits: ProblemLimits
) -> Iterator[Problem]:
    """An output that nobody writes to, or one that lags."""
    if output.finished or not output.lag:
        return
    since = _unchanged_since(marks, _output_key(seen, output), output.written, seen.at)
    unheld_since = _unchanged_since(marks, _held_key(seen, output), 0, seen.at)
    if not output.held and seen.processes and seen.at - unheld_since >= limits.output_missing_after:
        yield of_run(
            seen.run, "output_missing", "critical", f"no process writes to output {short(output.name)}",
            f"{counted(output.lag, 'item')} are not written, and no process has written to it for "
            f"{duration(seen.at - unheld_since)}. Start a worker that reaches it. If it is not needed any more: "
            f"`shoal outputs {seen.run.run_id} forget OUTPUT`.", unheld_since, figure=float(output.lag),
            about=output.name,
        )  # fmt: skip
        return
    stands_still = seen.at - since >= limits.stalled_after and seen.run.state == "running"
    if output.lag < limits.output_lag and not stands_still:
        return
    writer = "A process writes to it" if output.held else "No process writes to it"
    still = f" Nothing was written for {duration(seen.at - since)}." if stands_still else ""
    yield of_run(
        seen.run, "output_lagging", "critical" if stands_still else "warning", f"output {short(output.name)} lags",
        f"{output.lag} items are not written yet, {output.written} are.{still} {writer}.", since,
        figure=float(output.lag), about=output.name,
    )  # fmt: skip


def marks_of(marks: Mapping[str, Mark], seen: RunSnapshot, at: float) -> dict[str, Mark]:
    """The marks of a run after a snapshot. See `advance_marks`."""
    ended = seen.stats.done + seen.stats.dead
    counted = [(seen.run.run_id, ended, seen.changed_at), (_processes_key(seen), seen.processes, at)]
    counted.append((_login_key(seen), int(seen.logs_in), at))
    for output in seen.outputs:
        if output.lag:
            counted.append((_output_key(seen, output), output.written, at))
            counted.append((_held_key(seen, output), int(output.held), at))
    return {key: (count, _unchanged_since(marks, key, count, since)) for key, count, since in counted}


def _unchanged_since(marks: Mapping[str, Mark], key: str, count: int, since: float) -> float:
    known = marks.get(key)
    return min(known[1], since) if known is not None and known[0] == count else since


def _processes_key(seen: RunSnapshot) -> str:
    return f"{seen.run.run_id}/processes"


def _login_key(seen: RunSnapshot) -> str:
    return f"{seen.run.run_id}/login"


def _output_key(seen: RunSnapshot, output: OutputState) -> str:
    return f"{seen.run.run_id}/{output.name}"


def _held_key(seen: RunSnapshot, output: OutputState) -> str:
    return f"{_output_key(seen, output)}/held"
