"""A node before it runs: a thread keeps it in its cluster, so that its name and role are known."""

from __future__ import annotations

import asyncio
import atexit
import logging
from contextlib import suppress

from shoal.errors import CoordinatorError, ShoalError
from shoal.ports import ClusterEvent, ClusterView, Coordinator, Counts, Member
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.election import Role
from shoal.runs.cluster.membership import Membership
from shoal.runs.cluster.slots import HeldSlot
from shoal.runs.loop_thread import LoopThread

log = logging.getLogger("shoal.cluster")

_CLOSE_TIMEOUT = 2.0
"""Seconds for leaving and closing at the end of the process."""


class ThreadCoordinator:
    """A coordinator on the event loop of a thread, for callers on other event loops. See `shoal.ports.Coordinator`."""

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


class Candidate:
    """Takes part in the election of a cluster. It never crawls: it holds its slot for the node that will.

    A thread sends the heartbeats, whatever the program does meanwhile. They end with ``close`` and with the process.
    """

    def __init__(self, coordinator: str, cluster: str, session: float, counts: Counts) -> None:
        """``coordinator`` is a URL."""
        self._place = (coordinator, cluster, session)
        self._counts = counts
        self._thread = LoopThread("shoal-election")
        self._coordinator: Coordinator | None = None
        self._member: Membership | None = None
        self._slot: HeldSlot | None = None
        self._living: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        assert self._member is not None
        return self._member.name

    @property
    def role(self) -> Role | None:
        """The current role; None while it may not be a member."""
        assert self._member is not None
        return self._member.role

    @property
    def members(self) -> tuple[Member, ...]:
        """The members in the last view of the cluster."""
        assert self._member is not None
        return self._member.members

    @property
    def slot(self) -> HeldSlot:
        assert self._slot is not None
        return self._slot

    # -- for a program without an event loop

    def join(self, name: str) -> None:
        """Join the cluster, and wait until the role is decided. See `shoal.runs.cluster.open_coordinator` for errors.
        NameTakenError if another member has this name."""
        atexit.register(self.close)
        try:
            self._thread.wait(self._join(name))
        except BaseException:
            self.close()
            raise

    async def _join(self, name: str) -> None:
        url, cluster, session = self._place
        self._coordinator = coordinator = await open_coordinator(url, cluster, ttl=session)
        self._slot = HeldSlot(cluster, coordinator)
        self._member = Membership(name, cluster, self._counts, coordinator, None, self._slot)
        self._living = living = asyncio.create_task(self._member.live())
        living.add_done_callback(self._log_error)
        settled = asyncio.create_task(self._member.settled.wait())
        await asyncio.wait({living, settled}, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        if living.done():
            living.result()

    def _log_error(self, living: asyncio.Task[None]) -> None:
        if not living.cancelled() and living.exception() is not None:
            log.error("%s is not in the cluster any more: %s", self.name, living.exception())

    def close(self) -> None:
        """Leave the cluster, and end the thread."""
        atexit.unregister(self.close)
        if self._thread.is_running:
            with suppress(TimeoutError):
                self._thread.wait(asyncio.wait_for(self._close(), _CLOSE_TIMEOUT))
            self._thread.stop(_CLOSE_TIMEOUT)

    def close_soon(self) -> None:
        """Close without waiting. For the garbage collector, which may run in any thread, even in that of the loop."""
        atexit.unregister(self.close)
        if self._thread.is_running:
            self._thread.start(self._close_and_stop())

    async def _close_and_stop(self) -> None:
        try:
            await self._close()
        finally:
            self._thread.stop()

    async def _close(self) -> None:
        if self._member is not None and self._living is not None:
            self._member.over.set()
            with suppress(ShoalError):
                await self._living
        if self._coordinator is not None:
            with suppress(CoordinatorError):
                await self._coordinator.close()

    # -- for a node that runs

    @property
    def coordinator(self) -> Coordinator:
        """Its coordinator, for another event loop."""
        assert self._coordinator is not None
        return ThreadCoordinator(self._coordinator, self._thread)

    async def hand_over(self) -> Membership:
        """End the election here, but stay a member: the caller continues the membership and sends the heartbeats."""
        return await self._thread.call(self._hand_over())

    async def _hand_over(self) -> Membership:
        assert self._member is not None
        assert self._living is not None
        self._member.hand_over()
        await self._living
        return self._member
