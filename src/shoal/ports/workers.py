"""The workers of runs: their heartbeats, and what becomes of a worker that is silent."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Heartbeat(Struct, frozen=True, kw_only=True):
    """What a worker sends to show that it is alive. It leases as ``Holder(worker, epoch)``."""

    worker: str
    epoch: int
    session: float
    """Seconds of silence after which the worker is dead."""
    machine: str = ""
    pid: int = 0


class WorkerState(Struct, frozen=True, kw_only=True):
    """A worker of a run, as its store knows it."""

    worker: str
    machine: str = ""
    pid: int = 0
    session: float = 0.0
    """0: it sends no heartbeats."""
    silent_for: float = 0.0
    """Seconds since its last heartbeat."""
    leases: int
    """Requests that it has leased."""


class SilentWorker(Struct, frozen=True):
    """A worker that was fenced because it was silent, and how many requests it had leased."""

    run_id: str
    worker: str
    leases: int


class Workers(Protocol):
    """The workers of a run that send heartbeats. Those of all runs of the store watch each other, so that what a dead
    worker holds blocks no other run.

    The store's clock measures silence. It counts only while heartbeats of other workers, of any run, arrive: if none
    arrives for half a session, the store may have been away, and the silence of all workers with that session, or a
    shorter one, begins anew with the next heartbeat.
    """

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        """Record a heartbeat. FencedError if the worker was fenced under a later epoch; then nothing is recorded.

        Returns the seconds after which to send the next one, if another worker of the store is late: silent for half
        its session. Until it is dead, heartbeats must come often enough for its session. 0 if one is dead now. None: no
        other worker is late."""
        ...

    async def fence_silent(self) -> list[SilentWorker]:
        """Fence the dead workers of all runs, each under the epoch after its own: see ``Queue.fence``. A worker whose
        heartbeat arrives first is not fenced. If very many are dead, the next call continues."""
        ...

    async def leave(self, worker: str, epoch: int) -> None:
        """Forget a worker that stops. What it still holds expires. Has no effect if it joined under a later epoch."""
        ...

    async def workers(self) -> list[WorkerState]:
        """All workers that joined, except those that left or were fenced, by name; and all others that hold leases:
        slots of clusters, and workers without heartbeats."""
        ...
