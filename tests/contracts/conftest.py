"""The backends that the contract suite runs on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.frontier.memory import MemoryStore
from shoal.ports import Store
from shoal.testing import FakeClock, Harness


class MemoryHarness(Harness):
    """The frontier in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = FakeClock()

    async def open_store(self) -> Store:
        return MemoryStore(clock=self._clock)

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)


BACKENDS: dict[str, Callable[[], Harness]] = {"memory": MemoryHarness}


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS))
def harness(request: pytest.FixtureRequest) -> Harness:
    """Each backend in turn."""
    made: Harness = request.param()
    return made
