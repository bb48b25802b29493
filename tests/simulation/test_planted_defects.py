"""A simulation that finds nothing may be blind, so it must find defects that are planted. ``bench/simulate --planted
all`` looks for each of them; here are those that it finds within seconds."""

from __future__ import annotations

import pytest

from shoal.testing.simulation.search import Search, simulate
from tests.simulation.planted import DEFECTS, Defect

SECONDS = 120.0
QUICK = ["early trim", "missing fence"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_its_line_is_there(defect: Defect) -> None:
    with defect.planted():
        pass


@pytest.mark.parametrize("name", QUICK)
def test_it_is_found_and_its_seed_finds_it_again(name: str) -> None:
    defect = next(defect for defect in DEFECTS if defect.name == name)
    with defect.planted():
        failure = Search(defect.scenario, SECONDS, defect.backend).first_failure()
        assert failure is not None, defect.effect
        again = simulate(defect.scenario, failure.seed, defect.backend)
    assert again is not None
    assert again.trace == failure.trace
    assert simulate(defect.scenario, failure.seed, defect.backend) is None
