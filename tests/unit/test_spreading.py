"""Which tests run in the same process, and which start first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spreading import TOGETHER, group_of, turn_of

KILLS = "tests/acceptance/test_fleet_kills.py::test_killed_between_two_steps"


@pytest.mark.parametrize("name", TOGETHER)
def test_what_stays_together_is_there(name: str) -> None:
    assert Path(__file__).parent.parent.joinpath(name).exists()


def test_groups() -> None:
    assert group_of("tests/acceptance/test_api.py::test_a") == group_of("tests/acceptance/test_api.py::test_b[x]")
    assert group_of("tests/unit/test_links.py::test_a") == group_of("tests/unit/test_links.py::test_b")
    assert group_of("tests/acceptance/test_runs.py::test_a") != group_of("tests/acceptance/test_runs.py::test_b")
    assert group_of(f"{KILLS}[leased-redis]") == group_of(f"{KILLS}[parsed-redis]")
    assert group_of(f"{KILLS}[leased-redis]") != group_of(f"{KILLS}[leased-postgresql]")


def test_long_ones_come_first() -> None:
    nodes = [
        "acceptance/test_api.py::a",
        "acceptance/test_runs.py::a",
        "contracts/test_redis.py::a",
        "unit/test_x.py::a",
    ]
    turns = [turn_of(f"tests/{node}") for node in nodes]
    assert turns == sorted(set(turns))
