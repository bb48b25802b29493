"""The processes of a run: what they report, together with what the store knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from shoal.frontier.local.places import ProcessSlot
from shoal.ports import Documents, Holder, Workers, WorkerState
from shoal.runs.reports import LATE, ProcessFigures, ProcessReport, read_processes
from shoal.system import clock

ProcessState: TypeAlias = Literal["working", "stuck", "silent", "lost", "ended"]
"""``stuck``: its event loop is blocked, mostly by a callback. ``silent``: its heartbeat or report is late. ``lost``: it
was killed, or cut off from the store. ``ended``: it stopped normally."""

PRESENT: tuple[ProcessState, ...] = ("working", "stuck", "silent")
"""States of processes that are there."""
ORDER: dict[str, int] = {state: number for number, state in enumerate(get_args(ProcessState))}


class RunProcess(ProcessFigures, frozen=True, kw_only=True):
    """A process that works or worked on a run."""

    role: Literal["crawl", "worker", "runner", "server"]
    """``runner``: a node of a cluster. ``server``: a run in a server."""
    state: ProcessState
    """``stuck``: a callback blocks it. ``silent``: its heartbeat is late. ``lost``: it was killed or cut off.
    ``ended``: it stopped normally."""
    started_at: float | None = None
    """Unix time. None if it has not reported yet."""
    last_seen: float
    """Seconds since its last heartbeat or report."""
    leases: int = 0
    """Requests that it has leased."""


async def read_run_processes(documents: Documents, frontier: Workers, run_id: str) -> list[RunProcess]:
    """The processes of a run, those that work first."""
    return merge_processes(await frontier.workers(), await read_processes(documents, run_id), clock.time())


def merge_processes(workers: Sequence[WorkerState], reports: Sequence[ProcessReport], now: float) -> list[RunProcess]:
    """Combine the reports of processes with what the store knows of them. ``reports``: the newest first."""
    unreported = {worker.worker: worker for worker in workers}
    epochs: dict[str, int] = {}
    for report in reports:
        epochs[report.slot] = max(report.epoch, epochs.get(report.slot, 0))
    processes = [
        _process(
            report, _pop(unreported, report), now, is_replaced=bool(report.slot) and report.epoch < epochs[report.slot]
        )
        for report in sorted(reports, key=lambda report: -report.epoch)
        if report.role != "earlier"
    ]
    processes += [_without_report(worker) for worker in unreported.values()]
    return sorted(processes, key=lambda process: (ORDER[process.state], process.machine, process.name))


def _pop(unreported: dict[str, WorkerState], report: ProcessReport) -> WorkerState | None:
    """Remove and return what the store knows of the process of a report. Call it for the newest reports first."""
    if report.ended:
        return None
    for name, worker in unreported.items():
        if name in (report.name, report.slot) or _pid(worker) == report.pid:
            return unreported.pop(name)
    return None


def _pid(worker: WorkerState) -> int:
    """The process id of a worker that uses a store of this machine; -1 for another worker."""
    process = ProcessSlot.of(Holder(worker.worker, 0))
    return -1 if process is None else process.pid


def _process(report: ProcessReport, worker: WorkerState | None, now: float, *, is_replaced: bool) -> RunProcess:
    """The process of a report. ``is_replaced``: another process has its slot now."""
    age = max(0.0, now - report.at)
    silence = age if worker is None or not worker.session else min(age, worker.silent_for)
    figures = {name: getattr(report, name) for name in ProcessFigures.__struct_fields__}
    state = "lost" if is_replaced and not report.ended else _state(report, worker, age)
    if state == "working" and report.loop_age and age <= LATE:
        state = "stuck"
    if age > LATE or is_replaced:
        figures["pages_per_second"] = 0.0
    return RunProcess(
        **figures,
        state=state,
        started_at=report.started_at,
        last_seen=round(silence, 1),
        leases=0 if worker is None else worker.leases,
    )


def _state(report: ProcessReport, worker: WorkerState | None, age: float) -> ProcessState:
    if report.ended:
        return "ended"
    if worker is not None and worker.session:  # the clock of the store decides
        return "silent" if worker.silent_for > worker.session / 2 else "working"
    if age <= LATE:
        return "working"
    return "lost" if worker is None else "silent"


def _without_report(worker: WorkerState) -> RunProcess:
    silent = worker.session > 0 and worker.silent_for > worker.session / 2
    return RunProcess(
        name=worker.worker, state="silent" if silent else "working", role="worker", machine=worker.machine,
        pid=worker.pid or max(0, _pid(worker)), last_seen=round(worker.silent_for, 1), leases=worker.leases,
    )  # fmt: skip
