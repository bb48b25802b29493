"""The coordinator of a simulated cluster keeps the contract, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shoal.ports import Coordinator
from shoal.runs.cluster import open_coordinator
from shoal.testing import CoordinatorContract, CoordinatorHarness
from shoal.testing.coordination import TTL
from shoal.testing.simulation.coordinator import URL, CoordinatorServer, coordinated
from shoal.testing.simulation.world import World

NOWHERE = Path("/nonexistent")


class SimulatedPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes the loops of simulated worlds."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: dict[asyncio.AbstractEventLoop, World] = {}

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        world = World(0, NOWHERE, "memory")
        self.worlds[world.loop] = world
        return world.loop


class SimulatedCoordination(CoordinatorHarness):
    """Its server is in the world of the loop that runs."""

    def __init__(self, worlds: dict[asyncio.AbstractEventLoop, World]) -> None:
        super().__init__()
        self._worlds = worlds
        self._replaced = ExitStack()
        self._is_simulated = False

    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        if not self._is_simulated:
            self._is_simulated = True
            world = self._worlds[asyncio.get_running_loop()]
            self._replaced.enter_context(world.ports())
            self._replaced.enter_context(coordinated(world, CoordinatorServer(world)))
        return await open_coordinator(URL, cluster, ttl=ttl)

    async def abandon(self, coordinator: Coordinator) -> None:
        """Do nothing: without further calls of `beat`, the session expires."""

    async def close(self) -> None:
        await super().close()
        self._replaced.close()


@pytest.fixture(scope="module")
def event_loop_policy() -> SimulatedPolicy:
    return SimulatedPolicy()


@pytest.fixture
def coordination(event_loop_policy: SimulatedPolicy) -> Iterator[CoordinatorHarness]:
    yield SimulatedCoordination(event_loop_policy.worlds)
    event_loop_policy.worlds.clear()


class TestSimulatedCoordinator(CoordinatorContract):
    """All cases of the contract."""
