"""The harness of a coordinator that is called from another event loop than its own."""

from __future__ import annotations

from shoal.ports import Coordinator
from shoal.runs.cluster.candidate import ThreadCoordinator
from shoal.runs.cluster.redis import RedisCoordinator
from shoal.runs.loop_thread import LoopThread
from shoal.testing.coordination import TTL
from tests.contracts.redis_coordination import RedisCoordination


class ThreadCoordination(RedisCoordination):
    """Each client has its own thread."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[LoopThread] = []

    async def connect(self, cluster: str = "cluster", ttl: float = TTL) -> Coordinator:
        thread = LoopThread("coordinator")
        self._threads.append(thread)
        return ThreadCoordinator(await thread.call(RedisCoordinator.open(self._url, cluster, ttl)), thread)

    async def close(self) -> None:
        await super().close()
        for thread in self._threads:
            thread.stop()
