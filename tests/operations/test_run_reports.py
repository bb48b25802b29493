"""The processes of a run, and two runs side by side."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.operations.compare import Difference, RunFigures, compare
from shoal.operations.processes import merge_processes
from shoal.ports import Stats, WorkerState
from shoal.runs.reports import FieldCoverage, ProcessReport

NOW = 1_700_000_000.0


def report(name: str, age: float = 1.0, **more: Any) -> ProcessReport:
    values = {"machine": "m", "pid": 7, "role": "worker", "started_at": 0.0, "pages_per_second": 5.0, **more}
    return ProcessReport(name=name, at=NOW - age, **values)


def worker(name: str, silent_for: float = 0.0, session: float = 10.0, leases: int = 3) -> WorkerState:
    return WorkerState(worker=name, machine="m", pid=7, session=session, silent_for=silent_for, leases=leases)


@pytest.mark.parametrize(
    ("reported", "known", "state", "leases"),
    [
        (report("a"), [worker("a", 1)], "working", 3),
        (report("a", age=100), [worker("a", 1)], "working", 3),  # its clock is wrong, or it writes no reports
        (report("a"), [worker("a", 6)], "silent", 3),
        (report("a", loop_age=7.0), [worker("a", 1)], "stuck", 3),
        (report("a", loop_age=7.0), [], "stuck", 0),
        (report("a", loop_age=7.0, age=41), [worker("a", 1)], "working", 3),
        (report("a"), [], "working", 0),
        (report("a", age=41), [], "lost", 0),
        (report("a", age=100, ended=True), [], "ended", 0),
        (report("a", slot="cluster/0", role="runner"), [worker("cluster/0", session=0)], "working", 3),
        (report("a", age=50, slot="cluster/0"), [worker("cluster/0", session=0)], "silent", 3),
        (report("a", pid=12, role="crawl"), [worker("pid:12:99:c", session=0)], "working", 3),
    ],
)  # fmt: skip
def test_the_state_of_a_process(reported: ProcessReport, known: list[WorkerState], state: str, leases: int) -> None:
    (found,) = merge_processes(known, [reported], NOW)
    assert (found.name, found.state, found.leases) == ("a", state, leases)


def test_processes_without_a_report_are_listed_too() -> None:
    found = merge_processes([worker("new"), worker("quiet", 9)], [report("a"), report("b", ended=True)], NOW)
    assert [(each.name, each.state) for each in found] == [
        ("a", "working"), ("new", "working"), ("quiet", "silent"), ("b", "ended")
    ]  # fmt: skip
    assert found[1].started_at is None


def test_a_slot_belongs_to_its_last_holder() -> None:
    old, new = (report(name, age, slot="c/0", epoch=epoch) for name, age, epoch in (("old", 60, 1), ("new", 1, 2)))
    found = merge_processes([worker("c/0", session=0)], [new, old], NOW)
    assert [(each.name, each.state, each.leases) for each in found] == [("new", "working", 3), ("old", "lost", 0)]


def test_the_speed_of_a_process_that_is_gone_is_zero() -> None:
    (found,) = merge_processes([], [report("a", age=100)], NOW)
    assert found.pages_per_second == 0


# -- comparing


def figures(**more: Any) -> RunFigures:
    values: dict[str, Any] = {"run_id": "r", "spider": "s", "state": "finished", "created_at": 0.0, "seconds": 10.0}
    return RunFigures(**{**values, "stats": Stats(), **more})


def test_two_runs_side_by_side() -> None:
    title = FieldCoverage(type="item", field="title", filled=9, items=10)
    price = FieldCoverage(type="Book", field="price", filled=1, items=4)
    a = figures(stats=Stats(pushed=11, done=10, dead=1, items=10), failed_kinds={"dns": 1}, coverage=[title])
    b = figures(
        stats=Stats(pushed=7, done=5, dead=2, items=4), failed_kinds={"timeout": 2}, coverage=[price], seconds=5
    )
    found = {each.name: (each.a, each.b, each.change) for each in compare(a, b).differences}
    assert found == {
        "pages": (10, 5, -0.5), "items": (10, 4, -0.6), "failed": (1, 2, 1.0), "failed: dns": (1, 0, -1.0),
        "failed: timeout": (0, 2, None), "left": (0, 0, 0.0), "duration": (10, 5, -0.5), "speed": (1, 1, 0.0),
        "field title": (0.9, None, None), "field Book.price": (None, 0.25, None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "stats", "ending"),
    [
        ("finished", Stats(pushed=1, done=1), "finished"),
        ("finished", Stats(pushed=3, done=1, ready=2), "finished with 2 left"),
        ("cancelled", Stats(pushed=3, done=1, ready=2), "cancelled"),
    ],
)
def test_how_a_run_ended(state: Any, stats: Stats, ending: str) -> None:
    assert figures(state=state, stats=stats).ending == ending
    assert figures(state=state, stats=stats, outcome="failed").ending == f"{ending}, failed"


def test_a_change_from_nothing_has_no_percentage() -> None:
    changes = [Difference(name="x", unit="count", a=a, b=b).change for a, b in ((0, 0), (0, 5), (None, 5), (4, 5))]
    assert changes == [0.0, None, None, 0.25]
