"""Every frontier keeps every law."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from shoal.testing import FrontierContract, Harness
from shoal.testing.machine import SETTINGS, check_machine
from tests.contracts.conftest import BACKENDS


class TestFrontier(FrontierContract):
    """On the backends of the ``harness`` fixture."""


@pytest.mark.timeout(600)  # after a failure, hypothesis searches for the shortest sequence of steps
@pytest.mark.parametrize("make_harness", list(BACKENDS.values()), ids=list(BACKENDS))
def test_random_steps_agree_with_the_model(make_harness: Callable[[], Harness], thorough: bool) -> None:
    """All examples in memory. The other backends have the same model, and run fewer unless ``--thorough``."""
    few = settings(SETTINGS, max_examples=SETTINGS.max_examples // 5)
    check_machine(make_harness, SETTINGS if thorough or make_harness is BACKENDS["memory"] else few)
