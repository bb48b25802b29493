"""The slot of a node that does not run yet."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from shoal.cluster.slot_session import NodeSession
from shoal.errors import CoordinatorError
from shoal.ports import ClusterView, Coordinator, Slot

log = logging.getLogger("shoal.cluster")


class HeldSlot:
    """The slot of one node before it runs, if it has one: held, but not used."""

    def __init__(self, cluster: str, coordinator: Coordinator) -> None:
        self.name = ""
        """The name of the node, known when it is a member."""
        self.session = NodeSession(coordinator.ttl)
        self.event_counts: Counter[str] = Counter()
        self.held: Slot | None = None
        self._cluster = cluster
        self._coordinator = coordinator

    @property
    def is_over(self) -> bool:
        """Whether the node has nothing more to do."""
        return False

    @property
    def has_slot(self) -> bool:
        return self.held is not None

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The work under the slot."""
        return None

    @property
    def doing(self) -> str:
        return "waits for run()"

    # -- taking

    async def take(self, index: int) -> None:
        """Try to take a slot."""
        epoch = await self._coordinator.take(index)
        if epoch is None:
            return
        self._begin(Slot(index, self.name, epoch))
        lost = ""
        with suppress(CoordinatorError):
            mine = [event for event in await self._coordinator.events() if event.epoch == epoch]
            lost = next((event.detail for event in mine if event.what == "took over"), "")
        self.event_counts["took over" if lost else "elected"] += 1
        after = f", takes over from {lost}" if lost else ""
        log.warning("%s is a Runner of %s: slot %d%s", self.name, self._cluster, index, after)

    def _begin(self, mine: Slot) -> None:
        self.held = mine

    # -- holding

    async def check(self, mine: Slot | None, beat: Callable[[], Awaitable[object]]) -> None:
        """Adjust to the coordinator's view. ``mine``: the slot that this node holds there."""
        self.held = mine

    async def retire(self, why: str, beat: Callable[[], Awaitable[object]]) -> None:
        log.warning("%s releases its slot: %s", self.name, why)
        self.event_counts["retired"] += 1
        await self.end(beat, abort=False)
        await self._coordinator.retire()

    async def end(self, beat: Callable[[], Awaitable[object]], *, abort: bool) -> None:
        """End the work under the slot, and send heartbeats until it has ended. ``abort``: the slot was lost."""
        self.held = None

    # -- slots of other nodes

    def clear_vacant(self, view: ClusterView) -> None:
        """Release the leases of lost Runners."""

    def stop_clearing(self) -> None:
        """Cancel a release that `clear_vacant` began."""
