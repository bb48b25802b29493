"""What needs attention: a pure function from what is known of a store to a list of problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.crawling.outcome import Outcome
from shoal.monitoring.limits import LimitReached
from shoal.monitoring.snapshot import OutputState, RunSnapshot, StoreSnapshot
from shoal.ports import HostState, Run, Stats
from shoal.printable import printable

ProblemKind: TypeAlias = Literal[
    "finished", "degraded", "failed", "stalled", "failure_rate", "few_items", "low_coverage", "worker_lost",
    "output_lagging", "unbalanced", "store_went_back", "store_away", "schedule_missed", "channel_failing",
]  # fmt: skip
Severity: TypeAlias = Literal["info", "warning", "critical"]

ONCE: frozenset[ProblemKind] = frozenset(
    {"finished", "degraded", "failed", "few_items", "low_coverage", "worker_lost", "store_went_back", "schedule_missed"}
)
"""Problems that happen at one moment. Those of other kinds last until they are resolved."""
MAX_PROBLEMS = 500
_MAX_NAME = 100
_MAX_TEXT = 1000
_SILENT_SESSIONS = 0.5
"""A worker that disappears counts as lost after this many sessions without a heartbeat. It sends three in each."""


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
    failure_pages: int = 50
    """Pages that must have ended before the rate counts."""
    item_drop: float = 0.5
    """By which share a run may have fewer items than the last good run."""
    coverage_drop: float = 0.2
    """By how much the share of items with a field may be smaller than in the last good run."""
    output_lag: int = 10_000
    """Items that are not written to an output yet."""


class RunResult(Struct, frozen=True, kw_only=True):
    """What a run achieved."""

    run: Run
    stats: Stats
    outcome: Outcome
    coverage: Mapping[str, float] = {}
    """For each field, the part of the items that have it. Empty if that is not known."""
    limit: LimitReached | None = None
    """At which limit it stopped."""


class RunFailure(Struct, frozen=True):
    """An error that ended a process's part in a run."""

    run_id: str
    spider: str
    at: float
    error: str


class Ending(Struct, frozen=True):
    """A run that has ended, and the last good run of its spider before it."""

    result: RunResult
    good: RunResult | None = None
    failures: tuple[RunFailure, ...] = ()
    """Errors of its processes."""


class LostProcess(Struct, frozen=True):
    """A process of an active run that stopped reporting without a last report."""

    run_id: str
    spider: str
    name: str
    at: float
    """Its last report."""


class MissedTime(Struct, frozen=True):
    """A time of a schedule at which no run began."""

    schedule: str
    spider: str
    at: float
    reason: str


class FailingChannel(Struct, frozen=True):
    """A notification channel that does not deliver."""

    name: str
    failures: int
    since: float
    error: str


Mark: TypeAlias = tuple[int, float]
"""A count, and since when it has been the same."""


class Facts(Struct, frozen=True, kw_only=True):
    """What a snapshot does not show. All of it is optional."""

    since: float = 0.0
    """Failures, ended runs and lost processes before this time are not reported."""
    marks: Mapping[str, Mark] = {}
    """See `advance_marks`."""
    endings: tuple[Ending, ...] = ()
    failures: tuple[RunFailure, ...] = ()
    lost: tuple[LostProcess, ...] = ()
    missed: tuple[MissedTime, ...] = ()
    channels: tuple[FailingChannel, ...] = ()
    forbidden: Mapping[str, int] = {}
    """Per run, the failed pages that robots.txt or the scope forbids."""


LimitsFor: TypeAlias = Callable[[str, str], ProblemLimits]
"""The limits for a run by its id and its spider."""


def default_limits(run_id: str, spider: str) -> ProblemLimits:
    return ProblemLimits()


def find_problems(
    snapshot: StoreSnapshot,
    before: StoreSnapshot | None = None,
    facts: Facts = Facts(),
    limits: LimitsFor = default_limits,
) -> list[Problem]:
    """All problems at the time of a snapshot, each under its own key. ``before``: the snapshot before."""
    found: dict[str, Problem] = {}
    earlier = {each.run.run_id: each for each in before.runs} if before is not None else {}
    for problem in _all_problems(snapshot, earlier, facts, limits):
        found.setdefault(problem.key, problem)
        if len(found) == MAX_PROBLEMS:
            break
    return list(found.values())


def _all_problems(
    snapshot: StoreSnapshot, earlier: Mapping[str, RunSnapshot], facts: Facts, limits: LimitsFor
) -> Iterator[Problem]:
    if snapshot.away:
        yield store_away(snapshot.at, snapshot.away)
        return  # the runs are those of the snapshot before
    for seen in snapshot.runs:
        of_run = limits(seen.run.run_id, seen.run.spider)
        yield from _run_problems(seen, earlier.get(seen.run.run_id), facts, of_run)
    for failure in facts.failures:
        if failure.at >= facts.since:
            yield _failed(failure.run_id, failure.spider, failure.at, failure.error)
    for ending in facts.endings:
        ended_at = ending.result.run.ended_at
        if ended_at is not None and ended_at >= facts.since and ending.result.run.state == "finished":
            run = ending.result.run
            yield from _ending_problems(ending, ended_at, limits(run.run_id, run.spider))
    for process in facts.lost:
        if process.at >= facts.since:
            yield _worker_lost(process.run_id, process.spider, process.name, process.at)
    yield from map(_schedule_missed, facts.missed)
    yield from map(_channel_failing, facts.channels)


def _run_problems(
    seen: RunSnapshot, before: RunSnapshot | None, facts: Facts, limits: ProblemLimits
) -> Iterator[Problem]:
    yield from _stalled(seen, facts.marks, limits)
    yield from _failure_rate(seen, facts.forbidden.get(seen.run.run_id, 0), limits)
    yield from _lost_workers(seen, before, facts.since)
    for output in seen.outputs:
        yield from _output_lagging(seen, output, facts.marks, limits)
    if not seen.stats.balanced and before is not None and not before.stats.balanced:
        yield _unbalanced(seen)
    for number, rewind in enumerate(seen.rewinds, 1):
        if rewind.at >= facts.since:
            lost = "an unknown time" if rewind.lost_seconds is None else f"up to {rewind.lost_seconds:.1f} s"
            yield _of_run(
                seen.run, "store_went_back", "critical", "the store went back in time",
                f"The store lost {lost} of changes. Pages of that time are crawled again, and outputs were set back. "
                "Repeat what other programs changed in that time.", rewind.at, about=str(number),
            )  # fmt: skip


# -- active runs


def _stalled(seen: RunSnapshot, marks: Mapping[str, Mark], limits: ProblemLimits) -> Iterator[Problem]:
    stats = seen.stats
    since = _unchanged_since(marks, seen.run.run_id, stats.done + stats.dead, seen.changed_at)
    silence = seen.at - since
    if seen.run.state != "running" or not stats.remaining or silence < limits.stalled_after:
        return
    if not stats.ready + stats.leased + stats.incoming or _all_wait(seen.hosts, limits.stalled_after):
        return  # retries and blocked hosts wait for their time
    count = seen.processes
    workers = "No process works" if not count else "1 process works" if count == 1 else f"{count} processes work"
    yield _of_run(
        seen.run, "stalled", "critical", "stalled",
        f"No page was done or failed for {_duration(silence)}. {stats.remaining} requests are left: {stats.ready} "
        f"ready, {stats.waiting} waiting, {stats.leased} in flight. {workers} on it.", since, figure=silence,
    )  # fmt: skip


def _all_wait(hosts: Iterable[HostState], seconds: float) -> bool:
    """Whether each host with ready requests is blocked, or has a delay of at least this."""
    busy = [host for host in hosts if host.ready]
    return bool(busy) and all(host.blocked_for > 0 or host.delay >= seconds for host in busy)


def _failure_rate(seen: RunSnapshot, forbidden: int, limits: ProblemLimits) -> Iterator[Problem]:
    dead = max(0, seen.stats.dead - forbidden)
    ended = seen.stats.done + dead
    if ended < limits.failure_pages or dead <= limits.failure_rate * ended:
        return
    rate = dead / ended
    yield _of_run(
        seen.run, "failure_rate", "critical" if rate >= 0.9 else "warning", f"{rate:.0%} of the pages fail",
        f"{dead} of {ended} pages failed; the limit is {limits.failure_rate:.0%}. `shoal audit {seen.run.run_id}` "
        "lists the kinds of failures.", seen.at, figure=rate,
    )  # fmt: skip


def _lost_workers(seen: RunSnapshot, before: RunSnapshot | None, since: float) -> Iterator[Problem]:
    """Workers that sent no heartbeat for a session, and workers that were fenced because of that."""
    silent = {each.worker: each for each in seen.workers if 0 < each.session < each.silent_for}
    present = {each.worker for each in seen.workers}
    for each in before.workers if before is not None else ():
        if each.worker not in present and 0 < each.session * _SILENT_SESSIONS < each.silent_for:
            silent.setdefault(each.worker, each)
    for worker in silent.values():
        at = seen.at - worker.silent_for
        if at >= since:
            yield _worker_lost(seen.run.run_id, seen.run.spider, worker.worker, at)


def _worker_lost(run_id: str, spider: str, name: str, at: float) -> Problem:
    return _problem(
        "worker_lost", "warning", f"worker {_short(name)} is lost",
        "It was killed, or cannot reach the store. Other workers take over its pages; if there are none, start one.",
        at, run_id=run_id, spider=spider, about=name,
    )  # fmt: skip


def _output_lagging(
    seen: RunSnapshot, output: OutputState, marks: Mapping[str, Mark], limits: ProblemLimits
) -> Iterator[Problem]:
    if output.finished or not output.lag:
        return
    since = _unchanged_since(marks, _output_key(seen, output), output.written, seen.at)
    stands_still = seen.at - since >= limits.stalled_after and seen.run.state == "running"
    if output.lag < limits.output_lag and not stands_still:
        return
    writer = "A process writes to it" if output.held else "No process writes to it"
    still = f" Nothing was written for {_duration(seen.at - since)}." if stands_still else ""
    yield _of_run(
        seen.run, "output_lagging", "critical" if stands_still else "warning", f"output {_short(output.name)} lags",
        f"{output.lag} items are not written yet, {output.written} are.{still} {writer}.", since,
        figure=float(output.lag), about=output.name,
    )  # fmt: skip


def _unbalanced(seen: RunSnapshot) -> Problem:
    stats = seen.stats
    return _of_run(
        seen.run, "unbalanced", "critical", "the ledger does not balance",
        f"{stats.pushed} requests were pushed, but {stats.ready} ready + {stats.waiting} waiting + {stats.leased} in "
        f"flight + {stats.done} done + {stats.dead} failed do not add up to that. `shoal audit {seen.run.run_id}` "
        "recounts them.", seen.at,
    )  # fmt: skip


# -- ended runs


def _ending_problems(ending: Ending, ended_at: float, limits: ProblemLimits) -> Iterator[Problem]:
    run, stats, outcome = ending.result.run, ending.result.stats, ending.result.outcome
    title = "finished" if ending.result.limit is None else "stopped at a limit"
    text = f"{stats.pages} pages, {stats.items} items, in {_duration(ended_at - run.created_at)}."
    if ending.result.limit is not None:
        text = f"{text} It {ending.result.limit}."
    if outcome.reasons:
        text = f"{'; '.join(outcome.reasons)}. {text}"
    if outcome.verdict == "failed":
        yield _failed(run.run_id, run.spider, ended_at, text)
        if stats.pages <= 0:
            return
    elif outcome.verdict == "degraded":
        yield _of_run(run, "degraded", "warning", f"{title}, degraded", text, ended_at)
    else:
        yield _of_run(run, "finished", "info", title, text, ended_at)
    good = ending.good
    if good is None:
        return
    if stats.items < (1 - limits.item_drop) * good.stats.items:
        yield _of_run(
            run, "few_items", "warning" if stats.items else "critical", "fewer items than before",
            f"{stats.items} items; run {good.run.run_id} had {good.stats.items}.", ended_at,
        )  # fmt: skip
    if fields := _dropped_fields(ending.result.coverage, good.coverage, limits.coverage_drop):
        listed = ", ".join(f"{_short(name)} {good.coverage[name]:.0%} -> {now:.0%}" for name, now in fields[:10])
        yield _of_run(
            run, "low_coverage", "warning", "fields are missing in more items than before",
            f"Compared with run {good.run.run_id}: {listed}.", ended_at,
        )  # fmt: skip


def _dropped_fields(now: Mapping[str, float], good: Mapping[str, float], drop: float) -> list[tuple[str, float]]:
    """The fields that fewer items have, the largest difference first. Empty if the current coverage is unknown."""
    if not now:
        return []
    found = [(name, now.get(name, 0.0)) for name, before in good.items() if before - now.get(name, 0.0) > drop]
    return sorted(found, key=lambda pair: pair[1] - good[pair[0]])


def _failed(run_id: str, spider: str, at: float, error: str) -> Problem:
    return _problem("failed", "critical", "failed", error, at, run_id=run_id, spider=spider, about=f"{at:.0f}")


# -- the rest


def store_away(since: float, reason: str) -> Problem:
    """The store does not answer."""
    return _problem("store_away", "critical", "the store does not answer", reason, since)


def _schedule_missed(missed: MissedTime) -> Problem:
    return _problem(
        "schedule_missed", "warning", f"schedule {_short(missed.schedule)} missed a time", missed.reason, missed.at,
        spider=missed.spider, about=f"{missed.schedule} {missed.at:.0f}",
    )  # fmt: skip


def _channel_failing(channel: FailingChannel) -> Problem:
    return _problem(
        "channel_failing", "warning", f"notification channel {_short(channel.name)} fails",
        f"{channel.failures} messages in a row were not delivered: {channel.error}", channel.since,
        figure=float(channel.failures), about=channel.name,
    )  # fmt: skip


def advance_marks(marks: Mapping[str, Mark], snapshot: StoreSnapshot) -> dict[str, Mark]:
    """The marks after a snapshot: since when runs and outputs have made no progress. With them, a process needs only
    the last snapshot."""
    found: dict[str, Mark] = {}
    for seen in snapshot.runs:
        ended = seen.stats.done + seen.stats.dead
        counted = [(seen.run.run_id, ended, seen.changed_at)]
        counted += [(_output_key(seen, output), output.written, snapshot.at) for output in seen.outputs if output.lag]
        for key, count, since in counted:
            found[key] = (count, _unchanged_since(marks, key, count, since))
    return found


def _unchanged_since(marks: Mapping[str, Mark], key: str, count: int, since: float) -> float:
    known = marks.get(key)
    return min(known[1], since) if known is not None and known[0] == count else since


def _output_key(seen: RunSnapshot, output: OutputState) -> str:
    return f"{seen.run.run_id}/{output.name}"


def _of_run(
    run: Run, kind: ProblemKind, severity: Severity, title: str, text: str, since: float, *, figure: float = 0.0,
    about: str = "",
) -> Problem:  # fmt: skip
    return _problem(
        kind, severity, title, text, since, figure=figure, about=about, run_id=run.run_id, spider=run.spider
    )


def _problem(
    kind: ProblemKind, severity: Severity, title: str, text: str, since: float, *, figure: float = 0.0,
    about: str = "", run_id: str = "", spider: str = "",
) -> Problem:  # fmt: skip
    run_id, spider, about = map(_encodable, (run_id, spider, about))
    of = f"{_short(spider)}: " if spider else ""
    return Problem(
        key="/".join(filter(None, (kind, run_id, about))), kind=kind, severity=severity, run_id=run_id, spider=spider,
        title=_short(f"{of}{title}", 2 * _MAX_NAME), text=_short(text, _MAX_TEXT), since=since, figure=figure,
        about=about,
    )  # fmt: skip


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _short(text: str, limit: int = _MAX_NAME) -> str:
    """One printable line."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"
