"""Every coordinator keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.testing import CoordinatorContract, CoordinatorHarness
from tests.contracts.postgres_coordination import PostgresCoordination
from tests.contracts.redis_coordination import RedisCoordination
from tests.contracts.thread_coordination import ThreadCoordination
from tests.contracts.zookeeper_coordination import ZookeeperCoordination

COORDINATORS: dict[str, Callable[[], CoordinatorHarness]] = {
    "zookeeper": ZookeeperCoordination,
    "redis": RedisCoordination,
    "postgresql": PostgresCoordination,
    "thread": ThreadCoordination,
}


@pytest.fixture(params=list(COORDINATORS.values()), ids=list(COORDINATORS))
def coordination(request: pytest.FixtureRequest) -> CoordinatorHarness:
    """Each kind in turn."""
    made: CoordinatorHarness = request.param()
    return made


class TestCoordinator(CoordinatorContract):
    """On the kinds of the ``coordination`` fixture."""
