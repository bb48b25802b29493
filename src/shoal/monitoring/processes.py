"""The processes of runs: what they report, and what the store knows of their heartbeats and leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.monitoring.reports import EARLIER, REPORTED_EVERY, ProcessReport, read_processes
from shoal.monitoring.snapshot import Snapshot
from shoal.ports import Documents, WorkerState

Condition: TypeAlias = Literal["active", "lost", "ended"]
"""``lost``: it fell silent without having ended."""

_SILENT = 3 * REPORTED_EVERY
"""Seconds without a report after which a process that sends no heartbeats is lost."""
_RANK: dict[Condition, int] = {"active": 0, "lost": 1, "ended": 2}


_FORGOTTEN = 3600.0
"""Seconds after which a process that was lost or ended is not listed any more."""


class ProcessState(Struct, frozen=True, kw_only=True):
    """A process of a run."""

    run_id: str
    name: str
    machine: str = ""
    pid: int = 0
    role: str = ""
    """See `ProcessReport.role`. Empty if it reports nothing."""
    condition: Condition = "active"
    cluster: str = ""
    """The cluster of a Runner."""
    slot: str = ""
    """The number of its slot in the cluster."""
    epoch: int = 0
    silent_for: float = 0.0
    """Seconds since its last heartbeat or report."""
    leases: int = 0
    started_at: float | None = None
    pages: int = 0
    items: int = 0
    failed: int = 0
    pages_per_second: float = 0.0
    memory: int = 0
    browser: str = ""
    tor: str = ""


async def read_process_states(documents: Documents, snapshot: Snapshot) -> list[ProcessState]:
    """The processes of all runs in a snapshot: see `process_states`."""
    found = []
    for each in snapshot.runs:
        reports = await read_processes(documents, each.run.run_id)
        found += process_states(each.run.run_id, each.workers, reports, snapshot.at)
    return sorted(found, key=_order)


def process_states(
    run_id: str, workers: Sequence[WorkerState], reports: Iterable[ProcessReport], now: float
) -> list[ProcessState]:
    """The processes of a run: active ones first, then lost ones, then those that ended, each by name. One that was lost
    or ended more than an hour ago is left out."""
    known = {worker.worker: worker for worker in workers}
    listed = [report for report in reports if report.name != EARLIER]
    newest: dict[str, int] = {}
    for report in listed:
        newest[report.slot] = max(report.epoch, newest.get(report.slot, 0))
    states = []
    for report in listed:
        is_replaced = bool(report.slot) and report.epoch < newest[report.slot]
        worker = None if is_replaced else known.pop(report.slot or report.name, None)
        states.append(_state(run_id, report, worker, now, is_replaced=is_replaced))
    states += [_unreported(run_id, worker) for worker in known.values()]
    shown = [state for state in states if state.condition == "active" or state.silent_for < _FORGOTTEN]
    return sorted(shown, key=_order)


def _order(state: ProcessState) -> tuple[int, str]:
    return _RANK[state.condition], state.name


def _state(
    run_id: str, report: ProcessReport, worker: WorkerState | None, now: float, *, is_replaced: bool
) -> ProcessState:
    has_heartbeats = worker is not None and worker.session > 0
    silent_for = worker.silent_for if worker is not None and has_heartbeats else max(0.0, now - report.at)
    limit = worker.session if worker is not None and has_heartbeats else _SILENT
    condition: Condition = "ended" if report.ended else "lost" if is_replaced or silent_for > limit else "active"
    cluster, _, slot = report.slot.rpartition("/") if report.role == "runner" else ("", "", "")
    return ProcessState(
        run_id=run_id, name=report.name, machine=report.machine, pid=report.pid, role=report.role, condition=condition,
        cluster=cluster, slot=slot, epoch=report.epoch, silent_for=silent_for,
        leases=worker.leases if worker is not None else 0, started_at=report.started_at, pages=report.pages,
        items=report.items, failed=report.failed,
        pages_per_second=report.pages_per_second if condition == "active" else 0.0, memory=report.memory,
        browser=report.browser, tor=report.tor,
    )  # fmt: skip


def _unreported(run_id: str, worker: WorkerState) -> ProcessState:
    """A worker that has not reported yet, or only holds leases."""
    condition: Condition = "lost" if 0 < worker.session < worker.silent_for else "active"
    return ProcessState(
        run_id=run_id, name=worker.worker, machine=worker.machine, pid=worker.pid, condition=condition,
        silent_for=worker.silent_for, leases=worker.leases,
    )  # fmt: skip
