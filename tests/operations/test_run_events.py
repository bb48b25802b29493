"""The events of a run."""

from __future__ import annotations

from shoal.operations.actions import Action, run_events
from shoal.operations.processes import RunProcess
from shoal.ports import Rewind, Run


def process(name: str, state: str, started_at: float) -> RunProcess:
    return RunProcess(
        name=name, role="worker", machine="box", pid=7, pages=5, items=3, state=state,  # type: ignore[arg-type]
        started_at=started_at, last_seen=1.0,
    )  # fmt: skip


def test_events_of_all_kinds_newest_first() -> None:
    run = Run(run_id="r", spider="s", state="finished", created_at=9000.0, ended_at=9900.0)
    processes = [
        process("a", "working", 9100.0),
        process("b", "lost", 9200.0),
        process("c", "ended", 9300.0),
    ]
    rewinds = [Rewind(at=9500.0, lost_seconds=2.4)]
    actions = [Action(at=9600.0, who="ann", what="pause", target="r", detail="why")]
    reported = {"a": 9999.0, "b": 9400.0, "c": 9905.0}
    events = run_events(run, processes, reported, rewinds, actions, 20)
    found = [(each.at, each.who, each.what, each.detail) for each in events]
    assert found == [
        (9905.0, "c", "worker ended", "5 pages, 3 items"),
        (9900.0, "", "finished", ""),
        (9600.0, "ann", "pause", "why"),
        (9500.0, "", "the store went back in time", "at most 2 s of changes are lost"),
        (9400.0, "b", "worker was lost", "5 pages, 3 items"),
        (9300.0, "c", "worker began", "box, pid 7"),
        (9200.0, "b", "worker began", "box, pid 7"),
        (9100.0, "a", "worker began", "box, pid 7"),
        (9000.0, "", "created", ""),
    ]


def test_a_large_fleet_does_not_hide_what_users_did() -> None:
    run = Run(run_id="r", spider="s", state="running", created_at=9000.0)
    processes = [process(f"w{number}", "working", 9100.0 + number) for number in range(200)]
    actions = [Action(at=9050.0, who="ann", what="pause", target="r")]
    found = run_events(run, processes, {}, [], actions, 5)
    assert [each.who for each in found] == ["w199", "w198", "w197", "w196", "w195", "ann"]
