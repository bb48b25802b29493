"""The leases that a worker holds: renewed in good time, and given up before they end when that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from shoal import clock
from shoal.errors import FrontierError
from shoal.frontier.rules import LOST_EVENT
from shoal.ports import Inspection, Lease, Queue

log = logging.getLogger("shoal.engine")


class LeaseKeeper:
    """Self-fencing: whoever can't renew stops working before another may begin, whether or not the store answers."""

    def __init__(
        self,
        frontier: Queue,
        ttl: float,
        drop: Callable[[Lease], None],
        may_work: Callable[[], bool] = lambda: True,
    ) -> None:
        """``drop`` is told of each lease that is lost, or is about to end without a renewal. ``may_work``: a member of
        a cluster has a slot besides, without which no lease is good."""
        self._frontier = frontier
        self._ttl = ttl
        self._drop = drop
        self._may_work = may_work
        self._held: dict[bytes, Lease] = {}

    def add(self, lease: Lease) -> None:
        self._held[lease.fingerprint] = lease

    def remove(self, lease: Lease) -> None:
        """Its work has ended; one that was taken anew meanwhile stays."""
        held = self._held.get(lease.fingerprint)
        if held is not None and held.token == lease.token:
            del self._held[lease.fingerprint]

    def is_good(self, lease: Lease) -> bool:
        """Whether work on it may begin: a process that was stopped for a while may come here before the fence does."""
        held = self._held.get(lease.fingerprint)
        good = held is not None and held.token == lease.token and held.deadline > clock.now()
        return good and self._may_work()

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()

    async def run(self) -> None:
        fencing = asyncio.create_task(self._fence())
        try:
            await self._renew()
        finally:
            fencing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 4)
            leases = list(self._held.values())
            if not leases:
                continue
            try:
                renewed = await self._frontier.renew(leases, self._ttl)
            except FrontierError as error:
                log.warning("leases could not be renewed: %s", error)
                continue
            for old, new in zip(leases, renewed, strict=True):
                held = self._held.get(old.fingerprint)
                if held is None or held.token != old.token:
                    continue
                if new is None:
                    self._lose(held)
                else:
                    self._held[old.fingerprint] = new

    async def _fence(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 20)
            soon = clock.now() + self._ttl / 8
            for lease in [lease for lease in self._held.values() if lease.deadline <= soon]:
                self._lose(lease)

    def _lose(self, lease: Lease) -> None:
        log.warning("lease lost or about to end; its work is dropped url=%s", lease.request.url)
        self.remove(lease)
        self._drop(lease)


async def lost_before(frontier: Inspection, leases: Sequence[Lease]) -> list[Lease]:
    """Those that have lost a worker. Each of them may have been what killed it, or was only in flight beside that.

    One that was not filtered is not asked for: that may be a search through the whole run.
    """
    found = []
    for lease in leases:
        if lease.fingerprint == lease.request.fingerprint():
            history = await frontier.find(lease.request)
            if history is not None and any(event.what == LOST_EVENT for event in history.events):
                found.append(lease)
    return found
