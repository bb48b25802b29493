"""The frontier of a run in memory, composed of its parts."""

from __future__ import annotations

from collections.abc import Callable

from shoal.frontier.memory.hosts import Facts, MemoryHosts
from shoal.frontier.memory.inspection import MemoryInspection
from shoal.frontier.memory.items import MemoryItemLog
from shoal.frontier.memory.queue import MemoryQueue
from shoal.frontier.memory.requests import Requests
from shoal.frontier.memory.roles import Fences, MemoryRoles
from shoal.frontier.politeness import Host, OpenRuns
from shoal.ports import FrontierOptions


class MemoryFrontier:
    """See `shoal.ports.Frontier`. Each part serves its own slice of the calls."""

    def __init__(
        self,
        options: FrontierOptions,
        hosts: dict[str, Host],
        clock: Callable[[], float],
        runs: OpenRuns[MemoryFrontier],
        facts: Facts,
    ) -> None:
        """``hosts``, ``runs`` and ``facts`` are shared by all runs of the store."""
        self._fences = Fences()
        self._requests = Requests(options, hosts)
        self._roles = roles = MemoryRoles(clock, self._fences)
        items = MemoryItemLog()
        self._queue = queue = MemoryQueue(
            options, self._requests, items, roles, self._fences, clock, lambda now: runs.expire_others(self, now)
        )
        self.push, self.lease, self.renew, self.reissue = queue.push, queue.lease, queue.renew, queue.reissue
        self.complete, self.fail, self.release = queue.complete, queue.fail, queue.release
        self.expire_leases = queue.expire_leases
        self.claim, self.advance, self.relinquish, self.roles = (
            roles.claim,
            roles.advance,
            roles.relinquish,
            roles.roles,
        )
        self.read_items, self.trim_items = items.read_items, items.trim_items
        host_part = MemoryHosts(self._requests, hosts, facts, clock)
        self.update_host, self.host_states = host_part.update_host, host_part.host_states
        self.remember, self.recall = host_part.remember, host_part.recall
        inspection = MemoryInspection(self._requests, queue, roles, items, clock)
        self.stats, self.audit = inspection.stats, inspection.audit
        self.recover, self.rewinds, self.find = inspection.recover, inspection.rewinds, inspection.find
        self.dead_kinds, self.dead, self.retry_dead = inspection.dead_kinds, inspection.dead, inspection.retry_dead

    async def fence(self, slot: str, epoch: int) -> int:
        self._fences.raise_to(slot, epoch)
        self._roles.fence(slot, epoch)
        return self._queue.fence(slot, epoch)

    async def close(self) -> None:
        """Do nothing: the requests belong to the store, where another worker may continue."""

    def halt(self, halted: bool) -> None:
        """Stop or resume leasing: the run is paused or cancelled, or runs again."""
        self._queue.halted = halted

    def discard(self) -> None:
        """Drop everything: the run was deleted, or the store was closed."""
        self._queue.close()
        self._requests.close()
