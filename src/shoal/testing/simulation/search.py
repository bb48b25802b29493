"""Tries seeds until one of them breaks a law."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import Struct

from shoal.testing.simulation.crawl import crawl
from shoal.testing.simulation.schedules import schedules
from shoal.testing.simulation.world import World


async def _cluster(world: World) -> None:
    from shoal.testing.simulation.cluster import simulate_cluster  # it needs the extra of Redis

    await simulate_cluster(world)


SCENARIOS: dict[str, Callable[[World], Coroutine[Any, Any, None]]] = {
    "crawl": crawl,
    "cluster": _cluster,
    "schedules": schedules,
}
"""What can be simulated, by name."""
_SHOWN = 60
"""So many lines of the trace does a failure show."""


class Failure(Struct):
    """A seed that breaks a law. The same seed breaks it again."""

    scenario: str
    seed: int
    backend: str | None
    error: BaseException
    trace: list[str]

    def __str__(self) -> str:
        backend = f" --backend {self.backend}" if self.backend else ""
        again = f"bench/simulate --scenario {self.scenario} --seed {self.seed}{backend}"
        return "\n".join(
            [*self.trace[:1], *self.trace[1:][-_SHOWN:], f"{type(self.error).__name__}: {self.error}", again]
        )


def simulate(scenario: str, seed: int, backend: str | None = None) -> Failure | None:
    """Simulate one seed. None if every law holds. ``backend``: the store; None: the seed decides."""
    with TemporaryDirectory(prefix="shoal-") as folder, _silence():
        world = World(seed, Path(folder), backend)
        try:
            world.run(SCENARIOS[scenario])
        except Exception as error:  # whatever goes wrong is a failure of this seed
            return Failure(scenario, seed, backend, error, world.trace)
    return None


class Search:
    """Simulates one seed after another, until one fails or the time is over."""

    def __init__(self, scenario: str, seconds: float, backend: str | None = None) -> None:
        """``seconds`` of CPU time."""
        self.scenario = scenario
        self.seconds = seconds
        self.backend = backend
        self.spent = 0.0
        """Seconds of CPU time so far."""
        self.count = 0
        """Seeds so far."""

    def first_failure(self, seeds: Iterable[int] | None = None) -> Failure | None:
        """The first seed that fails. ``seeds``: by default random ones."""
        start = time.process_time()
        for seed in new_seeds() if seeds is None else seeds:
            failure = simulate(self.scenario, seed, self.backend)
            self.count += 1
            self.spent = time.process_time() - start
            if failure is not None or self.spent >= self.seconds:
                return failure
        return None


def new_seeds() -> Iterator[int]:
    """Seeds that nobody has chosen."""
    random = SystemRandom()
    while True:
        yield random.getrandbits(32)


@contextmanager
def _silence() -> Iterator[None]:
    """Thousands of runs would log millions of lines."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
