"""What happened to a run: its beginning and end, its processes, rewinds of its store, and what users did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from shoal.monitoring.actions import Action
from shoal.monitoring.processes import RunProcess
from shoal.ports import Rewind, Run


class RunEvent(Struct, frozen=True, kw_only=True):
    """Something that happened to a run."""

    at: float
    who: str = ""
    """A process or a user; empty for the run itself."""
    what: str
    detail: str = ""


def run_events(
    run: Run,
    processes: Iterable[RunProcess],
    reported: Mapping[str, float],
    rewinds: Iterable[Rewind],
    actions: Iterable[Action],
    limit: int,
    ending: str = "",
) -> list[RunEvent]:
    """The events of a run, newest first. ``reported``: when each process wrote its last report, by its name.

    ``limit``: how many there are besides the actions, which a large fleet must not hide. ``ending``: more about the end
    of the run."""
    found = [RunEvent(at=run.created_at, what="created")]
    if run.ended_at is not None:
        found.append(RunEvent(at=run.ended_at, what=run.state, detail=ending))
    for process in processes:
        found += _of_process(process, reported.get(process.name))
    for rewind in rewinds:
        lost = "" if rewind.lost_seconds is None else f"at most {rewind.lost_seconds:.0f} s of changes are lost"
        found.append(RunEvent(at=rewind.at, what="the store went back in time", detail=lost))
    found = sorted(found, key=_newest)[:limit]
    found += [RunEvent(at=each.at, who=each.who, what=each.what, detail=each.detail) for each in actions]
    return sorted(found, key=_newest)


def _newest(event: RunEvent) -> float:
    return -event.at


def _of_process(process: RunProcess, reported_at: float | None) -> Iterator[RunEvent]:
    where = f"{process.machine}, pid {process.pid}" if process.pid else process.machine
    if process.started_at is not None:
        yield RunEvent(at=process.started_at, who=process.name, what=f"{process.role} began", detail=where)
    if process.state in ("ended", "lost") and reported_at is not None:
        pages = f"{process.pages} pages, {process.items} items"
        what = f"{process.role} {'ended' if process.state == 'ended' else 'was lost'}"
        yield RunEvent(at=reported_at, who=process.name, what=what, detail=pages)
