"""What needs attention: pure tests of each kind of problem."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.crawling.outcome import RunFacts, decide
from shoal.crawling.stats import CodeError, FailingHost
from shoal.fetch.sessions.login import LoginState
from shoal.operations.active_runs import (
    HostFailures,
    RunActivity,
    Trend,
    find_trends,
    summarize_reports,
    worker_lost,
)
from shoal.operations.problem import Problem, ProblemLimits
from shoal.operations.problems import (
    MAX_PROBLEMS,
    Ending,
    Facts,
    RunFailure,
    RunResult,
    advance_marks,
    channel_failing,
    find_problems,
    schedule_missed,
    workers_back,
)
from shoal.operations.snapshot import OutputState, RunSnapshot, StoreSnapshot
from shoal.ports import HostState, Rewind, Run, RunState, Stats, WorkerState
from shoal.runs.reports import CodeErrors, ProcessReport
from shoal.runs.samples import RunSample

NOW = 1_700_000_000.0


def run(name: str = "r1", state: RunState = "running", **more: Any) -> Run:
    return Run(run_id=name, spider="books", state=state, created_at=NOW - 3600, **more)


def stats(**counts: int) -> Stats:
    """Counters that balance, unless ``pushed`` is given."""
    return Stats(
        **{"pushed": sum(counts.get(each, 0) for each in ("ready", "waiting", "leased", "done", "dead")), **counts}
    )


def seen(counts: Stats | None = None, **more: Any) -> StoreSnapshot:
    values: dict[str, Any] = {"run": run(), "at": NOW, "changed_at": NOW, "processes": 1, **more}
    return StoreSnapshot(at=NOW, runs=(RunSnapshot(stats=counts or stats(ready=5, done=5), **values),))


def host(**more: Any) -> HostState:
    values: dict[str, Any] = {
        "delay": 0.0, "in_flight": 0, "ready": 5, "blocked_for": 0.0, "block_reason": "", **more
    }  # fmt: skip
    return HostState(host="a.example", why="", concurrency=8, **values)


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


LOGIN = LoginState(failures=1, reason="wrong password", failed_at=NOW - 5)


def test_a_failed_login_is_a_problem_from_the_first_attempt_on() -> None:
    facts = Facts(activity={"r1": RunActivity(failed_logins={"": LOGIN})})
    problem = one(find_problems(seen(), facts=facts))
    assert (problem.kind, problem.severity, problem.since) == ("login_failed", "warning", NOW - 5)
    assert problem.text == "1 attempt failed, the last with: wrong password."
    stopped = msgspec.structs.replace(LOGIN, failures=3, stopped=True)
    facts = Facts(activity={"r1": RunActivity(failed_logins={"#alice": stopped})})
    problem = one(find_problems(seen(run=run(state="paused")), facts=facts))
    assert (problem.severity, problem.title) == ("critical", "books: the login of #alice failed")
    assert problem.text.startswith("3 attempts failed, the last with: wrong password. The run was stopped.")


def test_a_login_that_stopped_the_run_is_listed_once() -> None:
    stopped = msgspec.structs.replace(LOGIN, failures=3, stopped=True)
    error = "the login failed 3 times (login.attempts): wrong password"
    failures = (RunFailure("r1", "books", NOW, error), RunFailure("r1", "books", NOW, "disk full"))
    facts = Facts(activity={"r1": RunActivity(failed_logins={"": stopped})}, failures=failures)
    found = find_problems(seen(run=run(state="paused")), facts=facts)
    assert [(each.kind, each.text[:9]) for each in found] == [("login_failed", "3 attempt"), ("failed", "disk full")]


@pytest.mark.parametrize(
    ("held", "silent", "is_stalled"), [(61, 61, True), (59, 300, False), (300, 59, False), (None, 300, False)]
)
def test_a_run_on_hold_for_a_login(held: float | None, silent: float, is_stalled: bool) -> None:
    """It is stalled after a minute in which somebody logs in and no page ends."""
    now = seen(changed_at=NOW - silent, hosts=(host(),), logs_in=held is not None)
    marks = {} if held is None else {"r1/login": (1, NOW - held)}
    found = find_problems(now, facts=Facts(marks=marks, activity={"r1": RunActivity(failed_logins={"": LOGIN})}))
    assert kinds(found) == (["stalled"] if is_stalled else []) + ["login_failed"]
    if is_stalled:
        assert found[0].severity == "warning"
        assert "it is on hold until a login succeeds; the last attempt failed: wrong password." in found[0].text


def test_a_login_is_on_hold_since_the_first_snapshot_that_saw_it() -> None:
    marks = advance_marks({}, seen(logs_in=False))
    assert marks["r1/login"] == (0, NOW)
    assert advance_marks({"r1/login": (1, NOW - 50)}, seen(logs_in=True))["r1/login"] == (1, NOW - 50)


def test_a_run_is_stalled_when_work_remains_and_nothing_is_done() -> None:
    problem = one(find_problems(seen(**STALLED)))
    assert (problem.kind, problem.severity, problem.run_id, problem.spider) == ("stalled", "critical", "r1", "books")
    assert problem.since == NOW - 601
    assert "10 min" in problem.text
    assert "No process works on it." in one(find_problems(seen(**STALLED, processes=0))).text
    assert "1 process works on it." in problem.text  # without heartbeats
    assert "3 processes work on it." in one(find_problems(seen(**STALLED, processes=3))).text


@pytest.mark.parametrize(
    "change",
    [
        {"changed_at": NOW - 599},
        {"run": run(state="paused")},
        {"run": run(state="queued")},
        {"counts": stats(done=10)},
        {"hosts": (host(delay=900.0),)},
        {"hosts": (host(blocked_for=30.0), host(delay=600.0))},
    ],
    ids=["recent", "paused", "queued", "nothing left", "long delay", "blocked or long delay"],
)
def test_a_run_that_waits_is_not_stalled(change: dict[str, Any]) -> None:
    assert find_problems(seen(**{**STALLED, **change})) == []


BEHIND = OutputState(name="db", written=0, lag=60_000, held=True, finished=False)
HANGS = ProcessReport(name="w1", role="worker", started_at=0.0, at=NOW, loop_age=20.0, blocked_by="parse of http://a/")


@pytest.mark.parametrize(
    ("change", "activity", "severity", "reason"),
    [
        ({"processes": 0}, {}, "critical", "no process works on it"),
        ({}, {"blocked": (HANGS,)}, "critical", "w1 is blocked by parse of http://a/"),
        ({"outputs": (BEHIND,)}, {}, "critical", "output db is 60,000 items behind, and fetching waits for it"),
        ({"counts": stats(leased=2)}, {}, "critical", "2 pages in flight did not end"),
        ({"hosts": (host(blocked_for=90.0, block_reason="answered 503"),)}, {}, "warning",
         "its host a.example is blocked, the first for 1 min more (answered 503)"),
        ({"hosts": (host(blocked_for=90.0), host(blocked_for=30.0))}, {}, "warning",
         "its 2 hosts are blocked, the first for 30 s more"),
        ({"counts": stats(waiting=5, done=5)}, {}, "warning", "5 requests wait for the time of their next attempt"),
        ({}, {}, "critical", "its processes are alive, but take no request"),
    ],
    ids=["nobody", "hangs", "output", "in flight", "blocked", "all blocked", "retries", "idle"],
)  # fmt: skip
def test_a_stall_has_a_reason(change: dict[str, Any], activity: dict[str, Any], severity: str, reason: str) -> None:
    facts = Facts(activity={"r1": RunActivity(**activity)})
    found = [each for each in find_problems(seen(**{**STALLED, **change}), facts=facts) if each.kind == "stalled"]
    assert (one(found).severity, reason in one(found).text) == (severity, True), one(found).text


def test_a_run_that_nobody_works_on() -> None:
    queued = seen(run=run(state="queued"), processes=0)
    problem = one(find_problems(queued))
    assert (problem.kind, problem.severity, problem.since) == ("no_worker", "critical", NOW - 3600)
    assert "It was never begun; 5 requests wait." in problem.text
    assert "`shoal worker FILE --run-id r1`" in problem.text
    assert find_problems(seen(run=run(state="queued"), processes=1)) == []
    assert find_problems(queued, facts=Facts(answering_since=NOW - 200)) == []  # the store was away
    left = Facts(activity={"r1": RunActivity(worked_at=NOW - 301)})
    assert (
        "No process has worked on it for 5 min; 5 requests wait."
        in one(find_problems(seen(processes=0), facts=left)).text
    )
    assert find_problems(seen(processes=0), facts=Facts(activity={"r1": RunActivity(worked_at=NOW - 299)})) == []
    assert find_problems(seen(stats(done=5), processes=0), facts=left) == []  # nothing is left
    unseeded = find_problems(seen(Stats(seeding=True), processes=0), facts=left)
    assert "its start requests are not pushed yet" in one(unseeded).text


def test_marks_know_since_when_nobody_works_on_a_run() -> None:
    marks = advance_marks({}, msgspec.structs.replace(seen(processes=0), at=NOW - 301))
    assert one(find_problems(seen(processes=0), facts=Facts(marks=marks))).since == NOW - 301


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
    [(stats(done=80, dead=20), 0), (stats(done=10, dead=9), 0), (stats(done=70, dead=30), 29)],
    ids=["at the limit", "few pages", "robots.txt forbids them"],
)
def test_failures_that_are_no_problem(counts: Stats, forbidden: int) -> None:
    assert find_problems(seen(counts), facts=Facts(forbidden={"r1": forbidden})) == []


def lately(**activity: Any) -> Facts:
    return Facts(activity={"r1": RunActivity(**activity)})


def test_a_run_that_begins_to_fail_late() -> None:
    counts = stats(ready=5, done=9000, dead=100)
    assert find_problems(seen(counts)) == []
    problem = one(find_problems(seen(counts), facts=lately(trends=(Trend(120.0, 19, 19), Trend(600.0, 120, 90)))))
    assert (problem.kind, problem.severity) == ("failure_rate", "warning")
    assert "90 of 120 pages of the last 10 min failed, 100 of 9,100 since the start; the limit is 20%" in problem.text
    problem = one(find_problems(seen(counts), facts=lately(trends=(Trend(120.0, 20, 20), Trend(600.0, 120, 90)))))
    assert (problem.severity, problem.figure) == ("critical", 1.0)
    allowed = msgspec.structs.replace(lately(trends=(Trend(600.0, 100, 90),)), forbidden={"r1": 95})
    assert find_problems(seen(counts), facts=allowed) == []


def sample(at: float, done: int, dead: int) -> RunSample:
    return RunSample.of(stats(done=done, dead=dead), at)


def test_trends_are_the_differences_to_samples() -> None:
    samples = [sample(NOW - 700, 100, 0), sample(NOW - 300, 200, 0), sample(NOW - 121, 290, 5), sample(NOW, 290, 55)]
    trends = find_trends(run(), stats(done=290, dead=60), samples, {120.0: 2, 600.0: 5}, NOW)
    assert trends == (Trend(120.0, 53, 53), Trend(600.0, 245, 55))
    young = msgspec.structs.replace(run(), created_at=NOW - 60)
    assert find_trends(young, stats(done=11, dead=55), [], {}, NOW) == (Trend(120.0, 66, 55), Trend(600.0, 66, 55))
    assert find_trends(run(), stats(done=290, dead=60), [], {}, NOW) == ()  # an old run without samples
    late = find_trends(run(), stats(done=290, dead=60), [sample(NOW - 90, 280, 30)], {}, NOW)
    assert late == (Trend(120.0, 40, 30), Trend(600.0, 40, 30))


def test_a_callback_that_raises_is_a_problem_from_the_first_page_on() -> None:
    error = CodeError(NOW - 7, "ValueError in parse: no price (spider.py, line 9)", "http://a/1")
    errors = CodeErrors(total=1, recent=1, last=error)
    problem = one(find_problems(seen(stats(ready=9, done=5, dead=1)), facts=lately(callback_errors=errors)))
    assert (problem.kind, problem.severity, problem.since) == ("callback_errors", "warning", NOW - 7)
    assert "Callbacks raised on 1 page, on 1 in the last 10 min." in problem.text
    assert "ValueError in parse: no price (spider.py, line 9), at http://a/1" in problem.text
    old = lately(callback_errors=CodeErrors(total=7, recent=0, last=error), failed_in_callback=5)
    assert "on 5 pages, on 0 in the last 10 min" in one(find_problems(seen(), facts=old)).text
    assert (
        find_problems(seen(), facts=lately(callback_errors=CodeErrors(total=7, last=error))) == []
    )  # all were retried
    patient = ProblemLimits(callback_errors=6)
    assert find_problems(seen(), facts=old, limits=lambda *_: patient) == []
    many = lately(callback_errors=CodeErrors(total=55, recent=55, last=error), trends=(Trend(600.0, 66, 0),))
    assert one(find_problems(seen(), facts=many)).severity == "critical"


def test_items_that_could_not_be_stored_count_too() -> None:
    error = CodeError(NOW, "the pipeline clean returned None", "http://a/2")
    problem = one(find_problems(seen(), facts=lately(item_errors=CodeErrors(total=3, recent=2, last=error))))
    assert (problem.kind, problem.title) == ("callback_errors", "books: items not stored: 3")
    assert "3 items could not be stored, 2 in the last 10 min. The latest: the pipeline clean" in problem.text


def failing(**more: Any) -> HostFailures:
    values: dict[str, Any] = {
        "host": "shop.example", "since": NOW - 600, "last": NOW - 5, "kinds": {"http 503": 14}, "processes": 3, **more
    }  # fmt: skip
    return HostFailures(**values)


def test_a_host_that_answers_only_errors() -> None:
    counts = stats(ready=9000, done=90_000)
    problem = one(find_problems(seen(counts), facts=lately(hosts=(failing(waiting=8442),))))
    assert (problem.kind, problem.severity, problem.about) == ("host_failing", "critical", "shop.example")
    assert problem.title == "books: shop.example answers only 503"
    assert (
        "No good answer from shop.example for 10 min: 14 attempts by 3 processes failed (http 503: 14); 8,442 requests "
        "wait for it." in problem.text
    )
    assert one(find_problems(seen(counts), facts=lately(hosts=(failing(waiting=1),)))).severity == "warning"
    mixed = one(find_problems(seen(), facts=lately(hosts=(failing(kinds={"http 503": 2, "timeout": 1}),))))
    assert (mixed.title, "(http 503: 2, timeout: 1)" in mixed.text) == (
        "books: shop.example gives no good answer",
        True,
    )
    refused = one(find_problems(seen(), facts=lately(hosts=(failing(kinds={"connect": 3}),))))
    assert refused.title == "books: shop.example refuses connections"
    proxy = one(find_problems(seen(counts, processes=4), facts=lately(hosts=(failing(waiting=8442),))))
    assert (proxy.title, proxy.severity) == (
        "books: shop.example answers only 503 to 3 of 4 processes",  # the others may reach it
        "warning",
    )
    blocked = failing(last=NOW - 599, waiting=5)  # one attempt an hour: Retry-After
    assert kinds(find_problems(seen(), facts=lately(hosts=(blocked,)))) == ["host_failing"]


@pytest.mark.parametrize(
    "change", [{"since": NOW - 299}, {"kinds": {"http 503": 2}}, {"last": NOW - 590}], ids=["young", "few", "given up"]
)
def test_hosts_that_are_no_problem(change: dict[str, Any]) -> None:
    assert find_problems(seen(), facts=lately(hosts=(failing(**change),))) == []


def test_a_broad_run_names_only_some_failing_hosts() -> None:
    hosts = tuple(failing(host=f"h{number}", waiting=number) for number in range(50))
    assert [each.about for each in find_problems(seen(), facts=lately(hosts=hosts))] == [
        "h49",
        "h48",
        "h47",
        "h46",
        "h45",
    ]


def report(name: str, **more: Any) -> ProcessReport:
    return ProcessReport(name=name, role="worker", started_at=0.0, **{"at": NOW, **more})


def test_hosts_of_several_processes_are_one() -> None:
    one_host = {"a": FailingHost(NOW - 700, NOW - 9, {"http 503": 3}), "b": FailingHost(NOW - 10, NOW, {"dns": 1})}
    other = {"a": FailingHost(NOW - 500, NOW - 2, {"http 503": 2, "timeout": 9})}
    gone = {"a": FailingHost(NOW - 1, NOW, {"reset": 99})}
    reports = [
        report("w1", hosts=one_host), report("w2", hosts=other), report("w3", hosts=gone, at=NOW - 61),
        report("w4", hosts=gone, ended=True),
    ]  # fmt: skip
    first, second = summarize_reports(reports, NOW).hosts
    assert (first.host, first.since, first.last) == ("a", NOW - 500, NOW - 2)
    assert (dict(first.kinds), first.attempts, first.processes) == ({"timeout": 9, "http 503": 5}, 14, 2)
    assert (second.host, second.attempts) == ("b", 1)


def test_errors_of_ended_processes_stay_in_the_total() -> None:
    last = CodeError(NOW - 700, "KeyError", "http://a/")
    errors = CodeErrors(total=4, recent=4, last=last)
    found = summarize_reports([report("w1", callback_errors=errors, ended=True), report("w2")], NOW)
    assert (found.callback_errors.total, found.callback_errors.recent) == (4, 0)
    errors = CodeErrors(total=4, recent=4, last=msgspec.structs.replace(last, at=NOW - 5))
    assert summarize_reports([report("w1", callback_errors=errors, ended=True)], NOW).callback_errors.recent == 1


def test_a_process_that_hangs() -> None:
    reports = [report("w1", loop_age=95.0, blocked_by="parse of http://a/"), report("w2")]
    found = summarize_reports(reports, NOW)
    problem = one(find_problems(seen(), facts=Facts(activity={"r1": found})))
    assert (problem.kind, problem.severity, problem.since) == ("worker_stuck", "critical", NOW - 95)
    assert "blocked for 1 min by parse of http://a/." in problem.text
    assert find_problems(seen(), facts=lately(blocked=(HANGS,))) == []  # 20 s are not too long


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


def test_silence_while_the_store_was_away_does_not_count() -> None:
    silent = seen(workers=(worker("w1", 40), worker("w2", 41)))
    assert len(find_problems(silent)) == 2
    assert find_problems(silent, facts=Facts(answering_since=NOW - 14)) == []
    assert len(find_problems(silent, facts=Facts(answering_since=NOW - 16))) == 2
    earlier = seen(workers=(worker("w1", 40),), details_at=NOW - 4)
    assert find_problems(earlier, facts=Facts(answering_since=NOW - 18)) == []
    assert len(find_problems(earlier, facts=Facts(answering_since=NOW - 20))) == 1
    gone = seen(workers=())
    assert len(find_problems(gone, silent)) == 2
    assert find_problems(gone, silent, Facts(answering_since=NOW - 7)) == []  # it left normally after the outage


def test_workers_that_are_alive() -> None:
    snapshot = seen(workers=(worker("heard", 7), worker("silent", 8), worker("slot", 0, 0.0)))
    back = workers_back(snapshot, Facts(reporting=frozenset({("r1", "reports")})))
    assert back == {"worker_lost/r1/heard", "worker_lost/r1/reports"}


def test_a_worker_without_heartbeats_is_never_lost() -> None:
    assert find_problems(seen(workers=(worker("slot", 1e6, 0.0),))) == []


def test_a_process_that_stopped_reporting_is_lost_once() -> None:
    facts = Facts(others=(worker_lost("r1", "books", "w1", NOW - 60),))
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


def test_an_output_that_nobody_writes_to() -> None:
    nobody = (output(lag=3, held=False),)
    before = advance_marks({}, msgspec.structs.replace(seen(outputs=nobody), at=NOW - 301))
    problem = one(find_problems(seen(outputs=nobody), facts=Facts(marks=before)))
    assert (problem.kind, problem.severity, problem.since) == ("output_missing", "critical", NOW - 301)
    assert "3 items are not written, and no process has written to it for 5 min." in problem.text
    assert find_problems(seen(outputs=(output(lag=3),)), facts=Facts(marks=before)) == []
    assert find_problems(seen(outputs=(output(held=False),)), facts=Facts(marks=before)) == []
    alone = find_problems(seen(outputs=nobody, processes=0), facts=Facts(marks=before))
    assert "output_missing" not in kinds(alone)  # that nobody works on the run is enough


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
    facts = Facts(others=(schedule_missed("nightly", "books", NOW - 60, "all servers were down"),))
    problem = one(find_problems(EMPTY, facts=facts))
    assert (problem.kind, problem.spider, problem.text) == ("schedule_missed", "books", "all servers were down")


def test_a_channel_that_fails() -> None:
    problem = one(find_problems(EMPTY, facts=Facts(others=(channel_failing("ops", 3, NOW - 90, "HTTP 500"),))))
    assert (problem.kind, problem.about, problem.figure) == ("channel_failing", "ops", 3.0)


# -- texts of strangers


@given(st.text(max_size=2000))
def test_texts_of_strangers_are_one_printable_line(text: str) -> None:
    stranger = msgspec.structs.replace(run(), spider=text)
    snapshot = seen(run=stranger, workers=(worker(text or "w", 99),), outputs=(output(name=text, lag=10**6),))
    facts = Facts(
        failures=(RunFailure("r1", text, NOW, text),),
        others=(schedule_missed(text, text, NOW, text), channel_failing(text, 3, NOW, text)),
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
