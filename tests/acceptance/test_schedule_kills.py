"""Three servers on one store are killed or frozen at random while a schedule fires: each time has one run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.operations.schedules.schedule import Schedule
from tests.acceptance.fleets import KINDS, frontier_url
from tests.acceptance.scheduling_servers import Servers, add_schedule, judge, read_schedule

pytestmark = pytest.mark.timeout(300)

PATIENCE = 240.0
DISTURBANCES = 6


def disturb(url: str, count: int, servers: Servers, once: Callable[[], None]) -> tuple[Schedule, list[str]]:
    """Disturb the servers again and again until the schedule has fired so often. Returns it with its runs."""
    try:
        deadline = time.monotonic() + PATIENCE
        while asyncio.run(read_schedule(url))[0].fired < count or servers.kills + servers.freezes < DISTURBANCES:
            assert time.monotonic() < deadline, servers.said()
            once()
    finally:
        servers.close()
    return asyncio.run(read_schedule(url))


@pytest.mark.parametrize("kind", KINDS)
def test_each_time_has_one_run_although_servers_are_killed(kind: str, tmp_path: Path) -> None:
    url = frontier_url(kind)
    asyncio.run(add_schedule(url))
    servers = Servers(url, tmp_path)

    def kill() -> None:
        time.sleep(random.uniform(0.1, 1.0))
        servers.kill_one()

    schedule, runs = disturb(url, 600, servers, kill)
    assert len(runs) >= 600
    judge(schedule, runs)
    created = servers.created.read_text().split()
    assert len(created) == len(set(created))  # no two servers believe that they created the same run
    assert set(created) <= set(runs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_time_has_one_run_although_servers_are_frozen(kind: str, tmp_path: Path) -> None:
    """For 10 to 40 seconds of their clock: others do their work meanwhile. Then they go on where they were."""
    url = frontier_url(kind)
    asyncio.run(add_schedule(url))
    servers = Servers(url, tmp_path)
    judge(*disturb(url, 200, servers, lambda: servers.freeze_one(random.uniform(0.5, 2.0))))
    created = servers.created.read_text().split()
    assert len(created) == len(set(created))
