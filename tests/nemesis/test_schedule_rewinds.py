"""The store goes back in time while servers that start the runs of a schedule are killed."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from shoal.errors import StoreAwayError
from tests.acceptance.scheduling_servers import Servers, add_schedule, judge, read_schedule
from tests.nemesis.servers import KINDS

pytestmark = pytest.mark.timeout(240)

PATIENCE = 180.0
REWINDS = 2


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_each_time_has_one_run_in_the_store_that_survives(kind: str, tmp_path: Path) -> None:
    """A time that the store forgot is due again, with its run: so it fires a second time, and the store has it once."""
    server = KINDS[kind]()
    try:
        asyncio.run(add_schedule(server.url))
        server.keep()
        servers = Servers(server.url, tmp_path)
        try:
            for _ in range(REWINDS):
                wait_for(server.url, fired(server.url) + 60, servers)
                server.set_back(random.uniform(0.5, 1.5))
                servers.kill_one()
            wait_for(server.url, fired(server.url) + 100, servers)
        finally:
            servers.close()
        judge(*asyncio.run(read_schedule(server.url)))
        created = servers.created.read_text().split()
        assert len(created) > len(set(created))  # the store did forget some
        assert servers.kills >= REWINDS
    finally:
        server.close()


def fired(url: str) -> int:
    """How often the schedule fired, as the store knows it. It may just be starting again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return asyncio.run(read_schedule(url))[0].fired
        except StoreAwayError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def wait_for(url: str, count: int, servers: Servers) -> None:
    deadline = time.monotonic() + PATIENCE
    while fired(url) < count:
        assert time.monotonic() < deadline, servers.said()
        time.sleep(random.uniform(0.1, 0.6))
        if random.random() < 0.3:
            servers.kill_one()
