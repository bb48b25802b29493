"""The harness of the ZooKeeper coordinator, on the shared server."""

from __future__ import annotations

from uuid import uuid4

from shoal.ports import Coordinator
from shoal.runs.cluster.zookeeper import ZookeeperCoordinator
from shoal.testing import CoordinatorHarness
from shoal.testing.coordination import TTL
from tests.acceptance.faults import Wire
from tests.support.databases import ZookeeperServer, shared


class ZookeeperCoordination(CoordinatorHarness):
    """Each test has its own path. Each client has its own connection, which can be cut: its threads keep the session
    alive as long as they reach the server."""

    def __init__(self) -> None:
        super().__init__()
        self._path = f"contract-{uuid4().hex}"
        self._wires: dict[Coordinator, Wire] = {}

    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        wire = Wire(shared(ZookeeperServer).port)
        made = await ZookeeperCoordinator.open(f"zookeeper://127.0.0.1:{wire.port}/{self._path}", cluster, ttl)
        self._wires[made] = wire
        return made

    async def abandon(self, coordinator: Coordinator) -> None:
        self._wires[coordinator].fall_silent()

    async def close(self) -> None:
        await super().close()
        for wire in self._wires.values():
            wire.close()
