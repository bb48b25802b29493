"""The log of user actions: who paused a run, changed a host, deleted something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from msgspec import Struct

from shoal.messages import printable
from shoal.operations.processes import RunProcess
from shoal.ports import Documents, Rewind, Run
from shoal.ports.documents import StoredValue
from shoal.system import clock

MAX_ACTIONS = 400
"""How many actions the log keeps."""
_MAX_TEXTS = {"who": 120, "what": 40, "target": 200, "detail": 200}
"""The longest text, in characters. All actions together fit into one document."""


class Action(Struct, frozen=True, kw_only=True):
    """Something that a user did. All texts are printable and short."""

    at: float
    """Unix time, in seconds."""
    who: str
    """The caller's name and address, or the user and machine of a command."""
    what: str
    """A verb, such as ``pause``."""
    target: str
    """The run, host, cluster or schedule."""
    detail: str = ""


class ActionLog:
    """The actions on the runs of one project. Several processes may add actions at the same time."""

    def __init__(self, documents: Documents, project: str) -> None:
        self._stored = StoredValue(documents, f"actions/{project}", tuple[Action, ...])

    async def add(self, who: str, what: str, target: str, detail: str = "") -> None:
        """Add an action that has been done."""
        texts = {"who": who, "what": what, "target": target, "detail": detail}
        short = {name: printable(text)[: _MAX_TEXTS[name]] for name, text in texts.items()}
        action = Action(at=clock.time(), **short)
        await self._stored.change(lambda actions: (*(actions or ())[-MAX_ACTIONS + 1 :], action))

    async def recent(self, limit: int = 100) -> list[Action]:
        """The last actions, newest first."""
        actions = await self._stored.read() or ()
        return list(reversed(actions[-limit:])) if limit > 0 else []


# What happened to a run: its beginning and end, its processes, rewinds of its store, and what users did.


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
    events = [RunEvent(at=run.created_at, what="created")]
    if run.ended_at is not None:
        events.append(RunEvent(at=run.ended_at, what=run.state, detail=ending))
    for process in processes:
        events += _of_process(process, reported.get(process.name))
    for rewind in rewinds:
        lost = "" if rewind.lost_seconds is None else f"at most {rewind.lost_seconds:.0f} s of changes are lost"
        events.append(RunEvent(at=rewind.at, what="the store went back in time", detail=lost))
    events = sorted(events, key=attrgetter("at"), reverse=True)[:limit]
    events += [RunEvent(at=action.at, who=action.who, what=action.what, detail=action.detail) for action in actions]
    return sorted(events, key=attrgetter("at"), reverse=True)


def _of_process(process: RunProcess, reported_at: float | None) -> Iterator[RunEvent]:
    where = f"{process.machine}, pid {process.pid}" if process.pid else process.machine
    if process.started_at is not None:
        yield RunEvent(at=process.started_at, who=process.name, what=f"{process.role} began", detail=where)
    if process.state in ("ended", "lost") and reported_at is not None:
        pages = f"{process.pages} pages, {process.items} items"
        what = f"{process.role} {'ended' if process.state == 'ended' else 'was lost'}"
        yield RunEvent(at=reported_at, who=process.name, what=what, detail=pages)
