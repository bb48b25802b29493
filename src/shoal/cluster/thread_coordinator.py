"""A coordinator on the event loop of a thread, for callers on other event loops."""

from __future__ import annotations

from shoal.ports import ClusterEvent, ClusterView, Coordinator, Counts
from shoal.runs.loop_thread import LoopThread


class ThreadCoordinator:
    """Passes each call to the thread. See `shoal.ports.Coordinator`."""

    def __init__(self, coordinator: Coordinator, thread: LoopThread) -> None:
        self.ttl = coordinator.ttl
        self._coordinator = coordinator
        self._thread = thread

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        await self._thread.call(self._coordinator.join(name, counts, where, again=again))

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        return await self._thread.call(self._coordinator.beat(doing, fit=fit))

    async def take(self, index: int) -> int | None:
        return await self._thread.call(self._coordinator.take(index))

    async def retire(self) -> None:
        await self._thread.call(self._coordinator.retire())

    async def leave(self) -> None:
        await self._thread.call(self._coordinator.leave())

    async def scale(self, counts: Counts) -> None:
        await self._thread.call(self._coordinator.scale(counts))

    async def observe(self) -> ClusterView:
        return await self._thread.call(self._coordinator.observe())

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        return await self._thread.call(self._coordinator.events(limit))

    async def wait(self, seconds: float) -> None:
        await self._thread.call(self._coordinator.wait(seconds))

    async def close(self) -> None:
        """Close the coordinator. The thread continues."""
        await self._thread.call(self._coordinator.close())
