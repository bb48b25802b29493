"""Simulations with seeds that nobody has tried. A seed that fails is printed, and tried first in the next run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.testing.simulation.search import SCENARIOS, Search, new_seeds, simulate

PARTS = 2
SECONDS = 30.0 / len(SCENARIOS)
"""CPU time of a part: one minute for all of them, plus the last seed of each."""
TRACE = """
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from shoal.testing.simulation.search import SCENARIOS
from shoal.testing.simulation.world import World

with TemporaryDirectory() as folder:
    world = World(int(sys.argv[2]), Path(folder))
    world.run(SCENARIOS[sys.argv[1]])
    print(*world.trace, *world.site.visits, sep="\\n")
"""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_law_holds(scenario: str, part: int, pytestconfig: pytest.Config) -> None:
    key = f"simulation/{scenario}-{part}"
    seed = pytestconfig.cache.get(key, None)
    failure = Search(scenario, SECONDS).first_failure() if seed is None else simulate(scenario, seed)
    pytestconfig.cache.set(key, failure and failure.seed)
    assert failure is None, str(failure)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_decides_everything(scenario: str) -> None:
    seed = str(next(new_seeds()))
    first, second = (
        subprocess.run(
            [sys.executable, "-c", TRACE, scenario, seed],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
        )
        for hash_seed in ("1", "2")
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == second.stdout.splitlines(), f"{scenario}, seed {seed}"
