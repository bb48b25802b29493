"""The workers of runs in a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.frontier.rules import retry_reason
from shoal.ports import Heartbeat, LeaseHolder, SilentWorker, Waits, WorkerState
from shoal.stores.postgres.client import PostgresClient, storable_text


class PostgresWorkers:
    """See `shoal.ports.Workers`. ``offset``: seconds to add to the server's clock, for tests."""

    def __init__(self, database: PostgresClient, run: int, offset: Callable[[], float]) -> None:
        self._database = database
        self._run = run
        self._offset = offset

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        due: float | None = await self._database.value(
            "beat", self._run, self._offset(), storable_text(heartbeat.worker), heartbeat.epoch, heartbeat.session,
            heartbeat.pid, storable_text(heartbeat.machine),
        )  # fmt: skip
        return due

    async def fence_silent(self) -> list[SilentWorker]:
        """See `shoal.ports.Workers`. One step for each worker."""
        fenced: list[SilentWorker] = []
        while rows := await self._database.call("fence_silent", self._offset()):
            fenced += [SilentWorker(*row) for row in rows]
        return fenced

    async def leave(self, worker: str, epoch: int) -> None:
        await self._database.call("leave", self._run, storable_text(worker), epoch)

    async def workers(self) -> list[WorkerState]:
        rows = await self._database.call("workers", self._run, self._offset())
        return [WorkerState(**dict(row)) for row in rows]

    async def waits(self, hosts: Sequence[str]) -> Waits:
        """See `shoal.ports.Inspection`."""
        retries = await self._database.call("next_retry", self._run, self._offset())
        names = [storable_text(host) for host in hosts]
        rows = await self._database.call("lease_holders", self._offset(), names) if names else []
        holders = [LeaseHolder(**dict(row)) for row in rows]
        if not retries:
            return Waits(holders=holders)
        return Waits(holders=holders, retry_in=retries[0][0], retry_reason=retry_reason(retries[0][1]))
