"""What needs attention: pure tests of each kind of problem."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.crawling.outcome import RunFacts, decide
from shoal.monitoring.problems import (
    MAX_PROBLEMS,
    Ending,
    Facts,
    FailingChannel,
    LostProcess,
    MissedTime,
    Problem,
    ProblemLimits,
    RunFailure,
    RunResult,
    advance_marks,
    find_problems,
)
from shoal.monitoring.snapshot import OutputState, RunSnapshot, StoreSnapshot
from shoal.ports import HostState, Rewind, Run, RunState, Stats, WorkerState

NOW = 1_700_000_000.0


def run(name: str = "r1", state: RunState = "running", **more: Any) -> Run:
    return Run(run_id=name, spider="books", state=state, created_at=NOW - 3600, **more)


def stats(**counts: int) -> Stats:
    """Counters that balance, unless ``pushed`` is given."""
    return Stats(
        **{"pushed": sum(counts.get(each, 0) for each in ("ready", "waiting", "leased", "done", "dead")), **counts}
    )


def seen(counts: Stats | None = None, **more: Any) -> StoreSnapshot:
    values: dict[str, Any] = {"run": run(), "at": NOW, "changed_at": NOW, **more}
    return StoreSnapshot(at=NOW, runs=(RunSnapshot(stats=counts or stats(ready=5, done=5), **values),))


def host(**more: Any) -> HostState:
    values: dict[str, Any] = {"delay": 0.0, "in_flight": 0, "ready": 5, "blocked_for": 0.0, **more}
    return HostState(host="a.example", why="", concurrency=8, block_reason="", **values)


def worker(name: str = "w1", silent_for: float = 1.0, session: float = 15.0) -> WorkerState:
    return WorkerState(worker=name, session=session, silent_for=silent_for, leases=0)


def one(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def kinds(problems: list[Problem]) -> list[str]:
    return [problem.kind for problem in problems]


def test_a_run_that_works_has_no_problem() -> None:
    healthy = seen(stats(ready=5, waiting=1, leased=2, done=900, dead=10), workers=(worker(),), hosts=(host(),))
    assert find_problems(healthy, healthy) == []


# -- stalled


STALLED: dict[str, Any] = {"changed_at": NOW - 601, "hosts": (host(),)}


def test_a_run_is_stalled_when_work_remains_and_nothing_is_done() -> None:
    problem = one(find_problems(seen(**STALLED)))
    assert (problem.kind, problem.severity, problem.run_id, problem.spider) == ("stalled", "critical", "r1", "books")
    assert problem.since == NOW - 601
    assert "10 min" in problem.text
    assert "No process works on it." in problem.text
    assert "1 process works on it." in one(find_problems(seen(**STALLED, processes=1))).text  # without heartbeats
    assert "3 processes work on it." in one(find_problems(seen(**STALLED, processes=3))).text


@pytest.mark.parametrize(
    "change",
    [
        {"changed_at": NOW - 599},
        {"run": run(state="paused")},
        {"run": run(state="queued")},
        {"counts": stats(done=10)},
        {"counts": stats(waiting=5, done=5)},
        {"hosts": (host(blocked_for=30.0),)},
        {"hosts": (host(delay=900.0),)},
        {"hosts": (host(blocked_for=30.0), host(delay=600.0))},
    ],
    ids=["recent", "paused", "queued", "nothing left", "retries wait", "blocked", "long delay", "all hosts wait"],
)
def test_a_run_that_waits_is_not_stalled(change: dict[str, Any]) -> None:
    assert find_problems(seen(**{**STALLED, **change})) == []


def test_one_blocked_host_is_no_excuse_for_the_others() -> None:
    assert kinds(find_problems(seen(**{**STALLED, "hosts": (host(blocked_for=30.0), host())}))) == ["stalled"]


def test_marks_know_since_when_a_run_stands_still_after_a_takeover() -> None:
    """The process that took over has seen the run for the first time just now."""
    before = seen(changed_at=NOW - 1000)
    marks = advance_marks({}, before)
    now = seen(changed_at=NOW)
    marks = advance_marks(marks, now)
    assert kinds(find_problems(now, facts=Facts(marks=marks))) == ["stalled"]
    worked = seen(stats(ready=4, done=6), changed_at=NOW)
    assert find_problems(worked, facts=Facts(marks=advance_marks(marks, worked))) == []


# -- failures


def test_a_failure_rate_above_the_limit() -> None:
    problem = one(find_problems(seen(stats(ready=5, done=70, dead=30))))
    assert (problem.kind, problem.severity, problem.figure) == ("failure_rate", "warning", 0.3)
    assert one(find_problems(seen(stats(ready=5, done=5, dead=95)))).severity == "critical"


@pytest.mark.parametrize(
    ("counts", "forbidden"),
    [(stats(done=80, dead=20), 0), (stats(done=30, dead=19), 0), (stats(done=70, dead=30), 29)],
    ids=["at the limit", "few pages", "robots.txt forbids them"],
)
def test_failures_that_are_no_problem(counts: Stats, forbidden: int) -> None:
    assert find_problems(seen(counts), facts=Facts(forbidden={"r1": forbidden})) == []


def test_limits_are_those_of_the_run() -> None:
    def limits(run_id: str, spider: str) -> ProblemLimits:
        assert (run_id, spider) == ("r1", "books")
        return ProblemLimits(failure_rate=0.01, failure_pages=10, stalled_after=5)

    found = find_problems(seen(stats(ready=1, done=90, dead=10), changed_at=NOW - 6), limits=limits)
    assert kinds(found) == ["stalled", "failure_rate"]


# -- workers and outputs


def test_a_worker_that_is_silent_for_its_session_is_lost() -> None:
    problem = one(find_problems(seen(workers=(worker("w1", 16), worker("w2", 14)))))
    assert (problem.kind, problem.key, problem.since) == ("worker_lost", "worker_lost/r1/w1", NOW - 16)


def test_a_worker_that_was_silent_and_is_gone_was_fenced() -> None:
    before = seen(workers=(worker("silent", 10), worker("left", 2), worker("stays", 2)))
    now = seen(workers=(worker("stays", 2),))
    assert [problem.about for problem in find_problems(now, before)] == ["silent"]


def test_a_worker_without_heartbeats_is_never_lost() -> None:
    assert find_problems(seen(workers=(worker("slot", 1e6, 0.0),))) == []


def test_a_process_that_stopped_reporting_is_lost_once() -> None:
    facts = Facts(lost=(LostProcess("r1", "books", "w1", NOW - 60),))
    assert [problem.key for problem in find_problems(seen(workers=(worker("w1", 16),)), facts=facts)] == [
        "worker_lost/r1/w1"
    ]


def output(**more: Any) -> OutputState:
    return OutputState(**{"name": "books.jsonl", "written": 10, "lag": 0, "held": True, "finished": False, **more})


def test_an_output_lags() -> None:
    problem = one(find_problems(seen(outputs=(output(lag=10_000, held=False),))))
    assert (problem.kind, problem.severity, problem.figure) == ("output_lagging", "warning", 10_000.0)
    assert "No process writes to it" in problem.text
    assert find_problems(seen(outputs=(output(lag=9_999), output(lag=99_999, finished=True)))) == []


def test_an_output_that_stands_still_lags_even_if_few_items_wait() -> None:
    before = advance_marks({}, msgspec.structs.replace(seen(outputs=(output(lag=3),)), at=NOW - 700))
    now = seen(outputs=(output(lag=4),))
    problem = one(find_problems(now, facts=Facts(marks=before)))
    assert (problem.kind, problem.severity) == ("output_lagging", "critical")
    moved = seen(outputs=(output(lag=4, written=11),))
    assert find_problems(moved, facts=Facts(marks=advance_marks(before, moved))) == []


# -- the store


def test_a_ledger_that_does_not_balance_twice_in_a_row() -> None:
    wrong = seen(stats(ready=5, done=5, pushed=11))
    assert find_problems(wrong) == []
    assert find_problems(wrong, seen()) == []
    assert (one(find_problems(wrong, wrong)).kind, one(find_problems(wrong, wrong)).severity) == (
        "unbalanced",
        "critical",
    )


def test_the_store_went_back_in_time() -> None:
    rewinds = (Rewind(at=NOW - 50), Rewind(at=NOW - 5, lost_seconds=2.5))
    first, second = find_problems(seen(rewinds=rewinds))
    assert (first.kind, first.severity) == ("store_went_back", "critical")
    assert first.key != second.key
    assert "unknown time" in first.text
    assert "2.5 s" in second.text
    assert [each.key for each in find_problems(seen(rewinds=rewinds), facts=Facts(since=NOW - 10))] == [second.key]


def test_a_store_that_is_away_is_the_only_problem() -> None:
    away = msgspec.structs.replace(seen(**STALLED), away="cannot reach redis://host")
    problem = one(find_problems(away))
    assert (problem.kind, problem.severity, problem.run_id) == ("store_away", "critical", "")


# -- ended runs


def ending(counts: Stats, good: Stats | None = None, coverage: Any = {}, before: Any = {}, **more: Any) -> Facts:
    ended = run(state=more.pop("state", "finished"), ended_at=NOW - 5)
    earlier = None if good is None else result(run("r0", "finished"), good, before)
    return Facts(endings=(Ending(result(ended, counts, coverage), earlier),), **more)


def result(of: Run, counts: Stats, coverage: Any) -> RunResult:
    outcome = decide(RunFacts(stats=counts, dead_kinds={"timeout": counts.dead}), 0.1)
    return RunResult(run=of, stats=counts, outcome=outcome, coverage=coverage)


EMPTY = StoreSnapshot(at=NOW)


def test_a_finished_run() -> None:
    problem = one(find_problems(EMPTY, facts=ending(stats(done=10, items=7))))
    assert (problem.kind, problem.severity, problem.since) == ("finished", "info", NOW - 5)
    assert "10 pages, 7 items" in problem.text


def test_a_run_that_is_not_good() -> None:
    problem = one(find_problems(EMPTY, facts=ending(stats(done=10, items=7, dead=1))))
    assert (problem.kind, problem.severity, problem.since) == ("degraded", "warning", NOW - 5)
    assert "1 of 11 pages failed (timeout: 1). 10 pages, 7 items" in problem.text
    problem = one(find_problems(EMPTY, facts=ending(stats(done=10, items=7, dead=9))))
    assert (problem.kind, problem.severity, problem.since) == ("failed", "critical", NOW - 5)
    assert "9 of 19 pages failed (timeout: 9); the limit is 10 %" in problem.text


def test_a_cancelled_run_and_one_that_ended_long_ago_are_not_reported() -> None:
    assert find_problems(EMPTY, facts=ending(stats(done=10), state="cancelled")) == []
    assert find_problems(EMPTY, facts=ending(stats(done=10), since=NOW)) == []


def test_a_run_without_a_page_failed() -> None:
    problem = one(find_problems(EMPTY, facts=ending(stats(dead=3), stats(done=9, items=9))))
    assert (problem.kind, problem.severity) == ("failed", "critical")
    assert "all 3 requests failed" in problem.text


def test_a_process_that_ended_with_an_error() -> None:
    failures = (RunFailure("r1", "books", NOW - 5, "cannot write books.jsonl: disk full"),)
    problem = one(find_problems(EMPTY, facts=Facts(failures=failures)))
    assert (problem.kind, problem.run_id, problem.text) == ("failed", "r1", "cannot write books.jsonl: disk full")
    again = RunFailure("r1", "books", NOW, "cannot write books.jsonl: disk full")
    assert len(find_problems(EMPTY, facts=Facts(failures=(*failures, again)))) == 2
    assert find_problems(EMPTY, facts=Facts(failures=failures, since=NOW)) == []


def test_fewer_items_than_the_last_good_run() -> None:
    good = stats(done=10, items=100)
    assert kinds(find_problems(EMPTY, facts=ending(stats(done=10, items=50), good))) == ["finished"]
    _, problem = find_problems(EMPTY, facts=ending(stats(done=10, items=49), good))
    assert (problem.kind, problem.severity) == ("few_items", "warning")
    assert "run r0 had 100" in problem.text
    assert find_problems(EMPTY, facts=ending(stats(done=10), good))[1].severity == "critical"


def test_a_field_that_fewer_items_have() -> None:
    good = stats(done=10, items=100)
    before = {"title": 1.0, "price": 0.95, "isbn": 0.1}
    _, problem = find_problems(EMPTY, facts=ending(good, good, {"title": 0.7, "isbn": 0.0}, before))
    assert problem.kind == "low_coverage"
    assert "price 95% -> 0%, title 100% -> 70%" in problem.text
    assert "isbn" not in problem.text
    assert kinds(find_problems(EMPTY, facts=ending(good, good, {}, before))) == ["finished"]  # not known


# -- schedules and channels


def test_a_missed_schedule() -> None:
    facts = Facts(missed=(MissedTime("nightly", "books", NOW - 60, "all servers were down"),))
    problem = one(find_problems(EMPTY, facts=facts))
    assert (problem.kind, problem.spider, problem.text) == ("schedule_missed", "books", "all servers were down")


def test_a_channel_that_fails() -> None:
    problem = one(find_problems(EMPTY, facts=Facts(channels=(FailingChannel("ops", 3, NOW - 90, "HTTP 500"),))))
    assert (problem.kind, problem.about, problem.figure) == ("channel_failing", "ops", 3.0)


# -- texts of strangers


@given(st.text(max_size=2000))
def test_texts_of_strangers_are_one_printable_line(text: str) -> None:
    stranger = msgspec.structs.replace(run(), spider=text)
    snapshot = seen(run=stranger, workers=(worker(text or "w", 99),), outputs=(output(name=text, lag=10**6),))
    facts = Facts(
        failures=(RunFailure("r1", text, NOW, text),), channels=(FailingChannel(text, 3, NOW, text),),
        missed=(MissedTime(text, text, NOW, text),),
    )  # fmt: skip
    found = find_problems(snapshot, facts=facts)
    assert len(found) == 5
    for problem in found:
        assert not set(problem.title + problem.text) & {"\n", "\r", "\0", "\x1b", "\u202e", "\u2028"}
        (problem.title + problem.text).encode()
        assert len(problem.title) <= 200
        assert len(problem.text) <= 1000


def test_the_number_of_problems_is_bounded() -> None:
    assert len(find_problems(seen(workers=tuple(worker(f"w{i}", 99) for i in range(2000))))) == MAX_PROBLEMS
