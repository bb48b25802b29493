"""A frontier that lives in this process, composed of parts; and its view for the holder of a cluster slot."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from shoal.ports import Claim, Holder, Hosts, Inspection, ItemLog, Leased, Queue, Rewind, Roles, Workers


class LocalQueue(Queue, Protocol):
    """The queue of a run, shared by all its workers. A lease names its holder."""

    async def lease(
        self, limit: int, ttl: float, holder: Holder | None = None, *, counts_attempt: bool = True, nonce: bytes = b""
    ) -> Leased: ...


class LocalRoles(Roles, Protocol):
    """The roles of a run, shared by all its workers. A claim names its holder."""

    async def claim(
        self, role: str, ttl: float, holder: Holder | None = None, *, nonce: bytes = b"", above: int = 0
    ) -> Claim | None: ...


class FencedWorkers(Workers, Protocol):
    """The workers of a run, and the fences of their slots and of those of clusters."""

    async def fence(self, slot: str, epoch: int) -> int: ...


class ComposedFrontier:
    """See `shoal.ports.Frontier`. Each part serves its own slice of the calls."""

    def __init__(
        self,
        queue: LocalQueue,
        roles: LocalRoles,
        workers: FencedWorkers,
        items: ItemLog,
        hosts: Hosts,
        inspection: Inspection,
    ) -> None:
        self.push, self.lease, self.renew, self.reissue = queue.push, queue.lease, queue.renew, queue.reissue
        self.store_cookies = queue.store_cookies
        self.complete, self.fail, self.release, self.fence = queue.complete, queue.fail, queue.release, workers.fence
        self.beat, self.leave, self.workers = workers.beat, workers.leave, workers.workers
        self.fence_silent = workers.fence_silent
        self.claim, self.advance, self.relinquish = roles.claim, roles.advance, roles.relinquish
        self.forget, self.roles = roles.forget, roles.roles
        self.read_items, self.trim_items = items.read_items, items.trim_items
        self.update_host, self.host_states, self.host_state = hosts.update_host, hosts.host_states, hosts.host_state
        self.remember, self.recall = hosts.remember, hosts.recall
        self.stats, self.audit, self.rewinds = inspection.stats, inspection.audit, inspection.rewinds
        self.repair = inspection.repair
        self.find, self.dead_kinds, self.dead = inspection.find, inspection.dead_kinds, inspection.dead
        self.retry_dead, self.lease_outcomes = inspection.retry_dead, inspection.lease_outcomes
        self.waits = inspection.waits

    def hold(self, holder: Holder) -> None:
        """ValueError: all callers share this object, so it has no holder."""
        raise ValueError("this frontier was opened without a holder")

    async def recover(self) -> Rewind | None:
        """None: only this process has the store, so it never goes back in time."""
        return None

    async def close(self) -> None:
        """Does nothing: the requests belong to the store, where another worker may continue."""


class FencedFrontier(ComposedFrontier):
    """The same frontier for the holder of a slot: the leases and roles that it grants belong to the holder, so that
    ``fence`` can revoke them."""

    def __init__(self, frontier: ComposedFrontier, holder: Holder) -> None:
        super().__init__(frontier, frontier, frontier, frontier, frontier, frontier)
        self._shared = frontier
        self.hold(holder)

    def hold(self, holder: Holder) -> None:
        self.lease = partial(self._shared.lease, holder=holder)
        self.claim = partial(self._shared.claim, holder=holder)
