"""The processes of all active runs of a store."""

from __future__ import annotations

import asyncio

from msgspec.structs import asdict

from shoal.monitoring.processes import ORDER, PRESENT, RunProcess, merge_processes
from shoal.monitoring.reports import read_processes
from shoal.monitoring.snapshot import StoreSnapshot
from shoal.ports import Documents

_FORGOTTEN = 3600.0
"""Seconds after which a process that was lost or ended is not listed any more."""


class FleetProcess(RunProcess, frozen=True, kw_only=True):
    """A process of one of the runs."""

    run_id: str

    @property
    def cluster(self) -> str:
        """The cluster of a Runner."""
        return self.slot.rpartition("/")[0] if self.role == "runner" else ""

    @property
    def slot_number(self) -> str:
        """The slot of a Runner in its cluster."""
        return self.slot.rpartition("/")[2] if self.role == "runner" else ""


async def read_fleet(documents: Documents, snapshot: StoreSnapshot) -> list[FleetProcess]:
    """The processes of the runs in a snapshot, those that work first. One that was lost or ended more than an hour ago
    is left out."""
    reports = await asyncio.gather(*(read_processes(documents, each.run.run_id) for each in snapshot.runs))
    found = [
        FleetProcess(run_id=each.run.run_id, **asdict(process))
        for each, own in zip(snapshot.runs, reports, strict=True)
        for process in merge_processes(each.workers, own, snapshot.at)
        if process.state in PRESENT or process.last_seen < _FORGOTTEN
    ]
    return sorted(found, key=lambda process: (ORDER[process.state], process.machine, process.name))
