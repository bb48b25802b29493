"""Which tests run in the same process, and which start first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.spreading import TOGETHER, Spreading, group_of, turn_of

KILLS = "tests/acceptance/test_fleet_kills.py::test_killed_between_two_steps"


@pytest.mark.parametrize("name", TOGETHER)
def test_what_stays_together_is_there(name: str) -> None:
    assert Path(__file__).parent.parent.joinpath(name).exists()


def test_groups() -> None:
    assert group_of("tests/acceptance/test_api.py::test_a") == group_of("tests/acceptance/test_api.py::test_b[x]")
    assert group_of("tests/urls/test_links.py::test_a") == group_of("tests/urls/test_links.py::test_b")
    assert group_of("tests/acceptance/test_runs.py::test_a") != group_of("tests/acceptance/test_runs.py::test_b")
    assert group_of(f"{KILLS}[leased-redis]") == group_of(f"{KILLS}[parsed-redis]")
    assert group_of(f"{KILLS}[leased-redis]") != group_of(f"{KILLS}[leased-postgresql]")


def test_long_ones_come_first() -> None:
    nodes = [
        "acceptance/test_api.py::a",
        "acceptance/test_runs.py::a",
        "contracts/test_redis.py::a",
        "config/test_x.py::a",
    ]
    turns = [turn_of(f"tests/{node}") for node in nodes]
    assert turns == sorted(set(turns))


# -- a process that dies


class FakeProcess:
    """What the scheduler knows of a process of pytest-xdist. It begins a test when it knows the next one."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.tests = tests
        self.queue: list[str] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self.queue += [self.tests[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True

    def next_test(self) -> str | None:
        return self.queue.pop(0) if len(self.queue) > 1 or (self.queue and self.shutting_down) else None


def run_all(scheduler: Any, *processes: FakeProcess, rounds: int = 100) -> list[str]:
    """Let each process run a test, this many times or until none of them does. Returns the tests."""
    done: list[str] = []
    for _ in range(rounds):
        if scheduler.tests_finished:
            for each in processes:
                each.shutdown()
        for each in processes:
            if (test := each.next_test()) is not None:
                done.append(test)
                scheduler.mark_test_complete(each, each.tests.index(test))
    return done


@pytest.mark.parametrize("died_after", range(8))
def test_the_tests_of_a_dead_process_run_in_others(died_after: int) -> None:
    """But not the one that it died of."""
    alone = [f"tests/acceptance/test_runs.py::test_{number}" for number in range(6)]
    grouped = [f"tests/acceptance/test_api.py::test_{number}" for number in range(5)]
    tests = sorted([*grouped, *alone], key=turn_of)
    scheduler: Any = Spreading(SimpleNamespace(option=SimpleNamespace(), getvalue=lambda _: ["2*popen"]))  # type: ignore[arg-type]
    first, second = FakeProcess(tests), FakeProcess(tests)
    for process in (first, second):
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    done = run_all(scheduler, first, second, rounds=died_after)
    died_of = first.queue[0] if first.queue else None
    assert scheduler.remove_node(first) == died_of
    third = FakeProcess(tests)
    scheduler.add_node(third)
    scheduler.add_node_collection(third, tests)
    scheduler.schedule()
    done += run_all(scheduler, second, third)
    assert sorted([*done, *filter(None, [died_of])]) == sorted(tests)
    assert scheduler.tests_finished
