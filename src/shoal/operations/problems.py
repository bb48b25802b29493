"""What needs attention: a pure function from what is known of a store to a list of problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from shoal.crawling.outcome import Outcome
from shoal.crawling.stats import LimitReached
from shoal.operations.active_runs import (
    Mark,
    RunActivity,
    find_blocked,
    find_code_errors,
    find_failed_logins,
    find_failing_hosts,
    find_failure_rate,
    find_lost_workers,
    find_output_problems,
    find_stalls,
    is_heard,
    marks_of,
    worker_lost,
)
from shoal.operations.problem import Problem, ProblemLimits, duration, make_problem, of_run, short
from shoal.operations.snapshot import RunSnapshot, StoreSnapshot
from shoal.ports import Run, Stats

MAX_PROBLEMS = 500


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


class Facts(Struct, frozen=True, kw_only=True):
    """What a snapshot does not show. Every fact is optional."""

    since: float = 0.0
    """Failures and ended runs before this time are not reported."""
    marks: Mapping[str, Mark] = {}
    """See `advance_marks`."""
    endings: tuple[Ending, ...] = ()
    failures: tuple[RunFailure, ...] = ()
    others: tuple[Problem, ...] = ()
    """Problems that need no snapshot: of lost processes, schedules and channels."""
    forbidden: Mapping[str, int] = {}
    """Per run, the failed pages that robots.txt or the scope forbids."""
    activity: Mapping[str, RunActivity] = {}
    """Per run, what its processes have done lately."""
    answering_since: float = 0.0
    """Until this time the store was away, as far as the reader knows. Silence before it does not count."""
    reporting: frozenset[tuple[str, str]] = frozenset()
    """Run and name of each process that has reported since the facts were last read."""


_NO_ACTIVITY = RunActivity()
_COMPARED = 100
"""How many characters of a reason are compared: reports have only the beginning of an error."""


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
    """All problems at the time of a snapshot, each with a key of its own. ``before``: the previous snapshot."""
    by_key: dict[str, Problem] = {}
    earlier = {run_snapshot.run.run_id: run_snapshot for run_snapshot in before.runs} if before is not None else {}
    for problem in _all_problems(snapshot, earlier, facts, limits):
        by_key.setdefault(problem.key, problem)
        if len(by_key) == MAX_PROBLEMS:
            break
    return list(by_key.values())


def _all_problems(
    snapshot: StoreSnapshot, earlier: Mapping[str, RunSnapshot], facts: Facts, limits: LimitsFor
) -> Iterator[Problem]:
    if snapshot.away:
        yield store_away(snapshot.at, snapshot.away)
        return  # the runs are those of the previous snapshot
    for run_snapshot in snapshot.runs:
        run = run_snapshot.run
        yield from _run_problems(run_snapshot, earlier.get(run.run_id), facts, limits(run.run_id, run.spider))
    for failure in facts.failures:
        if failure.at >= facts.since and not _is_of_login(failure, facts.activity.get(failure.run_id, _NO_ACTIVITY)):
            yield _failed(failure.run_id, failure.spider, failure.at, failure.error)
    for ending in facts.endings:
        ended_at = ending.result.run.ended_at
        if ended_at is not None and ended_at >= facts.since and ending.result.run.state == "finished":
            run = ending.result.run
            yield from _ending_problems(ending, ended_at, limits(run.run_id, run.spider))
    yield from facts.others


def _run_problems(
    snapshot: RunSnapshot, before: RunSnapshot | None, facts: Facts, limits: ProblemLimits
) -> Iterator[Problem]:
    run_id = snapshot.run.run_id
    activity = facts.activity.get(run_id, _NO_ACTIVITY)
    yield from find_stalls(snapshot, activity, facts.marks, limits, facts.answering_since)
    yield from find_failure_rate(snapshot, activity, facts.forbidden.get(run_id, 0), limits)
    yield from find_code_errors(snapshot, activity, limits)
    yield from find_failing_hosts(snapshot, activity, limits)
    yield from find_failed_logins(snapshot, activity.failed_logins)
    yield from find_blocked(snapshot, activity.blocked, limits)
    yield from find_lost_workers(snapshot, before, facts.since, facts.answering_since)
    for output in snapshot.outputs:
        yield from find_output_problems(snapshot, output, facts.marks, limits)
    if not snapshot.stats.balanced and before is not None and not before.stats.balanced:
        yield _unbalanced(snapshot)
    for number, rewind in enumerate(snapshot.rewinds, 1):
        if rewind.at >= facts.since:
            lost = "an unknown time" if rewind.lost_seconds is None else f"up to {rewind.lost_seconds:.1f} s"
            yield of_run(
                snapshot.run, "store_went_back", "critical", "the store went back in time",
                f"The store lost {lost} of changes. Pages of that time are crawled again, and outputs were set back. "
                "Repeat what other programs changed in that time.", rewind.at, about=str(number),
            )  # fmt: skip


def _unbalanced(snapshot: RunSnapshot) -> Problem:
    stats = snapshot.stats
    return of_run(
        snapshot.run, "unbalanced", "critical", "the ledger does not balance",
        f"{stats.pushed} requests were pushed, but {stats.ready} ready + {stats.waiting} waiting + {stats.leased} in "
        f"flight + {stats.done} done + {stats.dead} failed do not add up to that. `shoal audit {snapshot.run.run_id}` "
        "recounts them.", snapshot.at,
    )  # fmt: skip


# -- ended runs


def _ending_problems(ending: Ending, ended_at: float, limits: ProblemLimits) -> Iterator[Problem]:
    run, stats, outcome = ending.result.run, ending.result.stats, ending.result.outcome
    title = "finished" if ending.result.limit is None else "stopped at a limit"
    text = f"{stats.pages} pages, {stats.items} items, in {duration(ended_at - run.created_at)}."
    if ending.result.limit is not None:
        text = f"{text} It {ending.result.limit}."
    if outcome.reasons:
        text = f"{'; '.join(outcome.reasons)}. {text}"
    if outcome.verdict == "failed":
        yield _failed(run.run_id, run.spider, ended_at, text)
        if stats.pages <= 0:
            return
    elif outcome.verdict == "degraded":
        yield of_run(run, "degraded", "warning", f"{title}, degraded", text, ended_at)
    else:
        yield of_run(run, "finished", "info", title, text, ended_at)
    good = ending.good
    if good is None:
        return
    if stats.items < (1 - limits.item_drop) * good.stats.items:
        yield of_run(
            run, "few_items", "warning" if stats.items else "critical", "fewer items than before",
            f"{stats.items} items; run {good.run.run_id} had {good.stats.items}.", ended_at,
        )  # fmt: skip
    if fields := _dropped_fields(ending.result.coverage, good.coverage, limits.coverage_drop):
        drops = ", ".join(f"{short(name)} {good.coverage[name]:.0%} -> {now:.0%}" for name, now in fields[:10])
        yield of_run(
            run, "low_coverage", "warning", "fields are missing in more items than before",
            f"Compared with run {good.run.run_id}: {drops}.", ended_at,
        )  # fmt: skip


def _dropped_fields(now: Mapping[str, float], good: Mapping[str, float], drop: float) -> list[tuple[str, float]]:
    """The fields that fewer items have than before, the largest drop first. Empty if the coverage now is unknown."""
    if not now:
        return []
    fields = [(name, now.get(name, 0.0)) for name, before in good.items() if before - now.get(name, 0.0) > drop]
    return sorted(fields, key=lambda field: field[1] - good[field[0]])


def _is_of_login(failure: RunFailure, activity: RunActivity) -> bool:
    """Whether a failed login ended a process. The login is a problem of its own."""
    logins = activity.failed_logins.values()
    return any(login.stopped and login.reason[:_COMPARED] in failure.error for login in logins)


def _failed(run_id: str, spider: str, at: float, error: str) -> Problem:
    return make_problem("failed", "critical", "failed", error, at, run_id=run_id, spider=spider, about=f"{at:.0f}")


# -- the rest


def store_away(since: float, reason: str) -> Problem:
    """The store does not answer."""
    return make_problem("store_away", "critical", "the store does not answer", reason, since)


def schedule_missed(schedule: str, spider: str, at: float, reason: str) -> Problem:
    """No run began at a time of a schedule."""
    return make_problem(
        "schedule_missed", "warning", f"schedule {short(schedule)} missed a time", reason, at, spider=spider,
        about=f"{schedule} {at:.0f}",
    )  # fmt: skip


def channel_failing(name: str, failures: int, since: float, error: str) -> Problem:
    """A notification channel does not deliver."""
    return make_problem(
        "channel_failing", "warning", f"notification channel {short(name)} fails",
        f"{failures} messages in a row were not delivered: {error}", since, figure=float(failures), about=name,
    )  # fmt: skip


def workers_back(snapshot: StoreSnapshot, facts: Facts) -> set[str]:
    """The keys of ``worker_lost`` for all processes that are certainly alive: they send heartbeats, or have reported
    since the last check."""
    alive = {
        (run_snapshot.run.run_id, worker.worker)
        for run_snapshot in snapshot.runs
        for worker in run_snapshot.workers
        if is_heard(worker)
    }
    return {worker_lost(run_id, "", name, 0.0).key for run_id, name in alive | facts.reporting}


def taken_back(problem: Problem) -> Problem:
    """The message to send when a lost worker turns out to be alive."""
    spider = f"{short(problem.spider)}: " if problem.spider else ""
    text = "It reports again: it was not killed, but could not work or reach the store for a while. It needs nothing."
    return replace(problem, title=f"{spider}worker {short(problem.about)} is back", text=text)


def advance_marks(marks: Mapping[str, Mark], snapshot: StoreSnapshot) -> dict[str, Mark]:
    """The marks after a snapshot. They say since when runs and outputs have made no progress, so that a process needs
    no earlier snapshot."""
    return {
        key: mark for run_snapshot in snapshot.runs for key, mark in marks_of(marks, run_snapshot, snapshot.at).items()
    }
