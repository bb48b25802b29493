"""A frontier that lives in this process, composed of parts; its view for the holder of a slot; and its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import Protocol

from msgspec import Struct

from shoal.frontier.politeness import F, OpenRuns
from shoal.frontier.rules import HEARD_GAP, MAX_HELD, check_fence
from shoal.ports import (
    Claim,
    Heartbeat,
    Holder,
    Hosts,
    Inspection,
    ItemLog,
    Leased,
    LeaseHolder,
    Queue,
    Rewind,
    Roles,
    SilentWorker,
    Workers,
    WorkerState,
)


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


# The workers of runs that live in this process.


class _KnownWorker(Struct, frozen=True):
    """The last heartbeat of a worker, and its time."""

    workers: LocalWorkers
    heartbeat: Heartbeat
    beat_at: float

    def is_late(self, now: float) -> bool:
        return now - self.beat_at >= self.heartbeat.session * HEARD_GAP


class LocalSessions:
    """The workers of all runs of a store."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.known: dict[tuple[str, str], _KnownWorker] = {}
        """By run and name."""
        self._heard = 0.0
        """The time of the last heartbeat of any worker."""
        self._since: dict[float, float] = {}
        """For each length of a session: since when heartbeats came without a gap that is long for it."""

    def beat(self, workers: LocalWorkers, heartbeat: Heartbeat) -> float | None:
        """See `shoal.ports.Workers`."""
        now = self.clock()
        self._since.setdefault(heartbeat.session, now)
        for session in self._since:
            if now - self._heard > session * HEARD_GAP:
                self._since[session] = now
        self._heard = now
        self.known[workers.run_id, heartbeat.worker] = _KnownWorker(workers, heartbeat, now)
        late = [worker for worker in self.known.values() if worker.is_late(now)]
        return min((min(self._dead_in(k, now), k.heartbeat.session * HEARD_GAP / 2) for k in late), default=None)

    def _dead_in(self, worker: _KnownWorker, now: float) -> float:
        """Seconds until a worker is dead if it stays silent."""
        session = worker.heartbeat.session
        return max(0.0, max(worker.beat_at, self._since[session]) + session - now)

    def dead(self) -> list[_KnownWorker]:
        now = self.clock()
        return [
            worker
            for worker in self.known.values()
            if self._dead_in(worker, now) == 0 and now - self._heard <= worker.heartbeat.session * HEARD_GAP
        ]

    def holders(self, runs: OpenRuns[F], hosts: Collection[str]) -> list[LeaseHolder]:
        """The workers that hold leases on these hosts. ``runs`` are open in this process."""
        counts = Counter((run_id, *held) for run_id, run in list(runs.items()) for held in run.held_at(hosts))
        return [
            LeaseHolder(
                host=host, run_id=run_id, worker=worker, leases=leases, silent_for=self._late_for(run_id, worker)
            )
            for (run_id, host, worker), leases in islice(counts.items(), MAX_HELD)
        ]

    def _late_for(self, run_id: str, worker: str) -> float:
        """Seconds since the last heartbeat of a late worker. 0: it is not late, or sends none."""
        now, last = self.clock(), self.known.get((run_id, worker))
        return now - last.beat_at if last is not None and last.is_late(now) else 0.0

    def forget_run(self, run_id: str) -> None:
        """Forget the workers of a run that was deleted."""
        self.known = {key: worker for key, worker in self.known.items() if key[0] != run_id}


class LocalWorkers:
    """See `shoal.ports.Workers`. ``fence_slot`` ends the leases and roles of a slot, ``holders`` returns the holder of
    each lease."""

    def __init__(
        self,
        run_id: str,
        sessions: LocalSessions,
        fence_slot: Callable[[str, int], Awaitable[int]],
        holders: Callable[[], Sequence[Holder | None]],
    ) -> None:
        self.run_id = run_id
        self._sessions = sessions
        self._fence_slot = fence_slot
        self._holders = holders
        self._epochs: dict[str, int] = {}
        """The first valid epoch of each slot that was fenced."""

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        check_fence(heartbeat.worker, heartbeat.epoch, self._epochs.get(heartbeat.worker))
        return self._sessions.beat(self, heartbeat)

    async def fence_silent(self) -> list[SilentWorker]:
        dead = [
            (worker.workers, worker.heartbeat.worker, worker.heartbeat.epoch + 1) for worker in self._sessions.dead()
        ]
        for workers, name, epoch in dead:  # all at once: from now on their heartbeats are refused
            workers._forget(name, epoch)
        return [
            SilentWorker(workers.run_id, name, await workers._fence_slot(name, epoch)) for workers, name, epoch in dead
        ]

    async def fence(self, slot: str, epoch: int) -> int:
        """See `shoal.ports.Queue`."""
        count = await self._fence_slot(slot, epoch)
        self._forget(slot, epoch)
        return count

    def _forget(self, slot: str, epoch: int) -> None:
        self._epochs[slot] = max(epoch, self._epochs.get(slot, 0))
        worker = self._sessions.known.get((self.run_id, slot))
        if worker is not None and worker.heartbeat.epoch < epoch:
            del self._sessions.known[self.run_id, slot]

    async def leave(self, worker: str, epoch: int) -> None:
        known_worker = self._sessions.known.get((self.run_id, worker))
        if known_worker is not None and known_worker.heartbeat.epoch <= epoch:
            del self._sessions.known[self.run_id, worker]

    async def workers(self) -> list[WorkerState]:
        now = self._sessions.clock()
        leases = Counter(holder.slot for holder in self._holders() if holder is not None)
        states = {worker: WorkerState(worker=worker, leases=count) for worker, count in leases.items()}
        for (run_id, worker), known_worker in self._sessions.known.items():
            if run_id == self.run_id:
                states[worker] = WorkerState(
                    worker=worker,
                    machine=known_worker.heartbeat.machine,
                    pid=known_worker.heartbeat.pid,
                    session=known_worker.heartbeat.session,
                    silent_for=max(0.0, now - known_worker.beat_at),
                    leases=leases[worker],
                )
        return [states[worker] for worker in sorted(states)]
