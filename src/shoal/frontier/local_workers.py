"""The workers of a run that lives in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from shoal.frontier.rules import HEARD_GAP, check_fence
from shoal.ports import Heartbeat, Holder, WorkerState


class LocalWorkers:
    """See `shoal.ports.Workers`. ``fence_slot`` ends the leases and roles of a slot, ``holders`` returns the holder of
    each lease."""

    def __init__(
        self,
        clock: Callable[[], float],
        fence_slot: Callable[[str, int], Awaitable[int]],
        holders: Callable[[], Sequence[Holder | None]],
    ) -> None:
        self._clock = clock
        self._fence_slot = fence_slot
        self._holders = holders
        self._known: dict[str, tuple[Heartbeat, float]] = {}
        """The last heartbeat of each worker, and its time."""
        self._epochs: dict[str, int] = {}
        """The first valid epoch of each slot that was fenced."""
        self._heard, self._since = 0.0, 0.0
        """The time of the last heartbeat of any worker, and since when they came without a long gap."""

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        check_fence(heartbeat.worker, heartbeat.epoch, self._epochs.get(heartbeat.worker))
        now = self._clock()
        if now - self._heard > heartbeat.session * HEARD_GAP:
            self._since = now
        self._heard = now
        self._known[heartbeat.worker] = heartbeat, now
        others = [self._dead_at(*known) for worker, known in self._known.items() if worker != heartbeat.worker]
        return max(0.0, min(others) - now) if others else None

    def _dead_at(self, heartbeat: Heartbeat, beat_at: float) -> float:
        return max(beat_at, self._since) + heartbeat.session

    async def fence_silent(self) -> dict[str, int]:
        now = self._clock()
        dead = [
            heartbeat
            for heartbeat, beat_at in self._known.values()
            if self._dead_at(heartbeat, beat_at) <= now and now - self._heard <= heartbeat.session * HEARD_GAP
        ]
        for heartbeat in dead:  # all at once: from now on their heartbeats are refused
            self._forget(heartbeat.worker, heartbeat.epoch + 1)
        return {each.worker: await self._fence_slot(each.worker, each.epoch + 1) for each in dead}

    async def fence(self, slot: str, epoch: int) -> int:
        """See `shoal.ports.Queue`."""
        count = await self._fence_slot(slot, epoch)
        self._forget(slot, epoch)
        return count

    def _forget(self, slot: str, epoch: int) -> None:
        self._epochs[slot] = max(epoch, self._epochs.get(slot, 0))
        known = self._known.get(slot)
        if known is not None and known[0].epoch < epoch:
            del self._known[slot]

    async def leave(self, worker: str, epoch: int) -> None:
        known = self._known.get(worker)
        if known is not None and known[0].epoch <= epoch:
            del self._known[worker]

    async def workers(self) -> list[WorkerState]:
        now = self._clock()
        leases = Counter(holder.slot for holder in self._holders() if holder is not None)
        states = {worker: WorkerState(worker=worker, leases=count) for worker, count in leases.items()}
        for worker, (heartbeat, beat_at) in self._known.items():
            states[worker] = WorkerState(
                worker=worker,
                machine=heartbeat.machine,
                pid=heartbeat.pid,
                session=heartbeat.session,
                silent_for=max(0.0, now - beat_at),
                leases=leases[worker],
            )
        return [states[worker] for worker in sorted(states)]
