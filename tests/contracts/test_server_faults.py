"""Every frontier on a server survives its faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.testing import ServerFaultContract, ServerFaultHarness
from tests.contracts.fault_harnesses import PostgresFaults, RedisFaults
from tests.support.databases import DatabaseServer, PostgresServer, RedisServer

KINDS = {"redis": RedisServer, "postgresql": PostgresServer}


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def server(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    server: DatabaseServer = request.param()
    yield server
    server.close()


class TestServerFaults(ServerFaultContract):
    """On the servers of the ``server`` fixture."""

    @pytest.fixture
    def faults(self, server: DatabaseServer) -> ServerFaultHarness:
        return RedisFaults(server) if isinstance(server, RedisServer) else PostgresFaults(server)
