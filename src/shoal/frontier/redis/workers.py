"""The workers of runs on Redis."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from shoal.errors import RunError
from shoal.frontier.redis.layouts import WORKER, read_text
from shoal.frontier.redis.scripts import FrontierScripts
from shoal.ports import Heartbeat, SilentWorker, WorkerState
from shoal.stores.redis.client import Answer, storable_bytes


class RedisWorkers:
    """See `shoal.ports.Workers`. ``run`` runs a script on the frontier's own run."""

    def __init__(self, run: Callable[..., Awaitable[Answer]], scripts: FrontierScripts, options: bytes) -> None:
        self._run = run
        self._scripts = scripts
        self._options = options

    async def beat(self, heartbeat: Heartbeat) -> float | None:
        name, machine = storable_bytes(heartbeat.worker), storable_bytes(heartbeat.machine)
        due = await self._run("beat", name, heartbeat.epoch, heartbeat.session, heartbeat.pid, machine)
        return None if due is None else float(due)

    async def fence_silent(self) -> list[SilentWorker]:
        """See `shoal.ports.Workers`. One step for each run."""
        fenced: list[SilentWorker] = []
        for run in await self._run("silent"):
            with suppress(RunError):  # it was deleted meanwhile
                found = await self._scripts.run("fence", run, self._options)
                run_id = run.partition(b" ")[2].decode(errors="replace")
                for name, leases in zip(found[::2], found[1::2], strict=True):
                    fenced.append(SilentWorker(run_id, name.decode(errors="replace"), int(leases)))
        return fenced

    async def leave(self, worker: str, epoch: int) -> None:
        await self._run("leave", storable_bytes(worker), epoch)

    async def workers(self) -> list[WorkerState]:
        return sorted((_state(*row) for row in await self._run("workers")), key=lambda state: state.worker)


def _state(name: bytes, record: bytes, silent_for: bytes, leases: int) -> WorkerState:
    worker = name.decode(errors="replace")
    if not record:
        return WorkerState(worker=worker, leases=leases)
    _, session, _, pid = WORKER.unpack_from(record)
    return WorkerState(
        worker=worker, machine=read_text(record, WORKER.size)[0], pid=pid, session=session,
        silent_for=float(silent_for), leases=leases,
    )  # fmt: skip
