"""Hosts, how fast each may be fetched from, small facts about them; and the workers of runs."""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET, Struct, UnsetType


class HostUpdate(Struct, frozen=True, kw_only=True):
    """A change of a host's politeness. UNSET keeps a value; None resets it to the default."""

    delay: float | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET
    crawl_delay: float | UnsetType | None = UNSET
    learned_delay: float | UnsetType | None = UNSET
    block_for: float | UnsetType | None = UNSET
    """Seconds from now during which nothing of this host is leased. A longer block stays. 0 or None unblocks."""
    block_reason: str = ""


class HostState(Struct, frozen=True, kw_only=True):
    """The politeness of a host that is in force, for all runs and workers of the store."""

    host: str
    delay: float
    """Seconds from the end of one fetch to the start of the next."""
    why: str
    """Where the delay comes from."""
    concurrency: int
    in_flight: int
    ready: int
    blocked_for: float
    """Seconds; 0 if the host is not blocked."""
    block_reason: str


class Hosts(Protocol):
    """The hosts of a store, shared by all its runs and workers."""

    async def update_host(self, host: str, update: HostUpdate) -> None:
        """Change a host for all runs of the store. Delay and concurrency of the host ``*`` are the defaults of all
        others."""
        ...

    async def host_states(self, limit: int = 100) -> list[HostState]:
        """The hosts with the most ready requests first."""
        ...

    async def host_state(self, host: str) -> HostState:
        """The politeness in force for one host, whether or not the run has requests of it."""
        ...

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        """Keep a small fact for all runs and workers of the store for ``ttl`` seconds, such as a robots.txt."""
        ...

    async def recall(self, key: str) -> bytes | None:
        """A fact that was remembered. None if there is none, or its ``ttl`` is over."""
        ...


# The workers of runs: their heartbeats, and what becomes of a worker that is silent.


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
