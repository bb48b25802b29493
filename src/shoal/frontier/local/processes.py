"""The processes that hold leases: who they are, and whether they still run.

A lease that a client takes belongs to its process: it is held under a slot that names the process. When the process
has ended, that slot is fenced, so its leases and roles are free at once. Nobody waits until they expire.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from shoal.errors import FencedError, FrontierError, RunError
from shoal.ports import Holder

log = logging.getLogger("shoal.frontier")

_PREFIX = "pid"
_POLL = 0.2
"""Seconds between two checks whether the processes are alive."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ProcessSlot(NamedTuple):
    """One client of one process. Its name is the slot of its leases; no cluster has a slot of such a name."""

    pid: int
    started: int
    """When the process was started, so that a later process with the same number is not taken for it. 0: unknown."""
    client: str

    @property
    def holder(self) -> Holder:
        return Holder(f"{_PREFIX}:{self.pid}:{self.started}:{self.client}", 0)

    @property
    def is_alive(self) -> bool:
        return started_at(self.pid) == self.started

    @classmethod
    def of(cls, holder: Holder) -> ProcessSlot | None:
        """The process behind a holder. None for a slot of a cluster."""
        with suppress(ValueError):
            prefix, pid, started, client = holder.slot.split(":")
            if prefix == _PREFIX and "/" not in client:
                return cls(int(pid), int(started), client)
        return None


def started_at(pid: int) -> int | None:
    """When a process was started, in clock ticks since the system booted. None if it has ended; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else _answers(pid)
    except ProcessLookupError:
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters, as `ps` and `top` show it. On systems without /proc it keeps
    its name."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _answers(pid: int) -> int | None:
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return 0


def peer_of(connection: socket.socket, stated: int) -> int:
    """The process id at the other end of a connection; 0 if unknown. ``stated``: the id that the client sent, for
    systems that do not report it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return stated
    pid: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))[0]
    return pid


Fence = Callable[[str, int], Awaitable[int]]


class ProcessWatch:
    """Fences the slots of processes that have ended."""

    def __init__(self) -> None:
        self._held: dict[ProcessSlot, dict[str, Fence]] = {}
        """For each client, the runs in which it may hold something."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, slot: ProcessSlot, run_id: str, fence: Fence) -> None:
        """Call ``fence`` with the name of the slot and a later epoch when the process has ended."""
        self._held.setdefault(slot, {})[run_id] = fence

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_POLL)
            for slot in [slot for slot in list(self._held) if not slot.is_alive]:
                await self._fence(slot, self._held.pop(slot))

    async def _fence(self, slot: ProcessSlot, runs: dict[str, Fence]) -> None:
        for run_id, fence in runs.items():
            try:
                count = await fence(slot.holder.slot, slot.holder.epoch + 1)
            except (FencedError, RunError):  # it was fenced before, or the run was deleted
                continue
            except FrontierError as exc:
                log.warning("cannot release the leases of process %d, which has ended; trying again: %s", slot.pid, exc)
                self.add(slot, run_id, fence)
                continue
            if count:
                log.warning("released %d leases of process %d, which has ended", count, slot.pid)
