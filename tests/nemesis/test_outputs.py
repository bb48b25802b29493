"""A fleet writes one output under faults: nothing is missing in it, nothing is there twice, and nothing is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nemesis.destinations import DESTINATIONS
from tests.nemesis.outputs import play


@pytest.mark.parametrize("kind", DESTINATIONS)
def test_a_round(kind: str, tmp_path: Path) -> None:
    verdict = play(kind, tmp_path, seed=1, faults=4, first=("kill", "freeze", "hold", "set back"))
    assert not verdict.problems, str(verdict)
