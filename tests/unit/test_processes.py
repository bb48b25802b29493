"""The processes of a run, from their reports and their heartbeats."""

from __future__ import annotations

from shoal.monitoring.processes import ProcessState, process_states
from shoal.monitoring.reports import EARLIER, ProcessReport
from shoal.ports import WorkerState

NOW = 1_700_000_000.0


def report(name: str, **changes: object) -> ProcessReport:
    values: dict[str, object] = {
        "machine": "m", "pid": 7, "role": "worker", "slot": name, "epoch": 1, "started_at": NOW - 100, "at": NOW - 2,
        "pages": 50, "pages_per_second": 4.0, "memory": 1000, **changes,
    }  # fmt: skip
    return ProcessReport(name=name, **values)  # type: ignore[arg-type]


def states(*reports: ProcessReport, workers: list[WorkerState] | None = None) -> list[ProcessState]:
    return process_states("run", workers or [], reports, NOW)


def test_worker_with_heartbeats_is_judged_by_the_clock_of_the_store() -> None:
    beats = [
        WorkerState(worker="a", session=10, silent_for=1.5, leases=3),
        WorkerState(worker="b", session=10, silent_for=11, leases=2),
    ]
    a, b = states(report("b"), report("a", at=NOW - 500), workers=beats)  # the clock of a is wrong
    assert (a.name, a.condition, a.silent_for, a.leases, a.pages_per_second) == ("a", "active", 1.5, 3, 4.0)
    assert (b.name, b.condition, b.silent_for, b.leases, b.pages_per_second) == ("b", "lost", 11, 2, 0.0)


def test_fenced_worker_is_lost_when_it_stops_reporting() -> None:
    fresh, silent = states(report("a", at=NOW - 14), report("b", at=NOW - 16))
    assert (fresh.condition, silent.condition) == ("active", "lost")


def test_ended_process_is_not_lost() -> None:
    (state,) = states(report("a", at=NOW - 600, ended=True))
    assert state.condition == "ended"


def test_what_ended_long_ago_is_left_out() -> None:
    assert states(report("a", at=NOW - 4000, ended=True), report("b", at=NOW - 4000), report(EARLIER)) == []


def test_runner_that_was_replaced_is_lost_at_once() -> None:
    held = WorkerState(worker="books/0", leases=5)
    before = report("x", role="runner", slot="books/0", epoch=3)
    after = report("y", role="runner", slot="books/0", epoch=4)
    active, lost = states(before, after, workers=[held])
    assert (active.name, active.cluster, active.slot, active.epoch, active.leases) == ("y", "books", "0", 4, 5)
    assert (lost.name, lost.condition, lost.leases) == ("x", "lost", 0)


def test_worker_without_a_report_is_shown() -> None:
    beats = [
        WorkerState(worker="new", machine="m", pid=9, session=10, silent_for=0.1, leases=0),
        WorkerState(worker="old", session=10, silent_for=20, leases=4),
    ]
    new, old = states(workers=beats)
    assert (new.name, new.machine, new.pid, new.role, new.condition) == ("new", "m", 9, "", "active")
    assert (old.condition, old.leases) == ("lost", 4)
