"""The active runs of a store at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import asdict, replace

from shoal.config import Config
from shoal.crawling.stats import LimitReached
from shoal.errors import RunError
from shoal.fetch.sessions.login import LOGIN_ROLE
from shoal.operations.processes import ORDER, PRESENT, RunProcess, merge_processes
from shoal.ports import Documents, Frontier, HostState, Rewind, RoleState, Run, RunState, Stats, Store, WorkerState
from shoal.runs.reports import read_processes
from shoal.runs.run_end import limit_of
from shoal.runs.samples import SampleHistory
from shoal.sinks.drainer import output_name, position_of
from shoal.system import clock

ACTIVE: tuple[RunState, ...] = ("queued", "running", "paused")
OVER: tuple[RunState, ...] = ("finished", "cancelled")
MAX_RUNS = 50
"""How many active runs a snapshot has: the newest ones."""
_HOSTS = 20
_RECENT = 10
_RATE_SECONDS = 30.0
_MIN_SECONDS = 5.0
_DETAILS_SECONDS = 5.0
"""Workers, outputs and hosts of a run are read less often than its counters: they cost the store more."""
_NEW = 15.0
"""Seconds. The processes of a younger run may not have reported yet: then it is read again with each snapshot."""
_RUNS_PER_SECOND = 5.0
_DETAILS_PER_SECOND = 1.0
"""With many active runs each is read less often, so that a dashboard never costs the store much."""


class OutputState(Struct, frozen=True, kw_only=True):
    """An output of a run."""

    name: str
    written: int
    """Items of the run's log that are durable in the output."""
    lag: int
    """Items that are not written yet."""
    held: bool
    """Whether a process writes to it now."""
    finished: bool


class RunSnapshot(Struct, frozen=True, kw_only=True):
    """A run at one moment."""

    run: Run
    at: float
    stats: Stats
    workers: tuple[WorkerState, ...] = ()
    """The workers that send heartbeats."""
    processes: int = 0
    """How many processes work on it: workers, or the crawl or server that has it alone."""
    outputs: tuple[OutputState, ...] = ()
    logs_in: bool = False
    """Whether a process logs in now. The run is on hold meanwhile."""
    hosts: tuple[HostState, ...] = ()
    """The busiest hosts."""
    rewinds: tuple[Rewind, ...] = ()
    pages_per_second: float = 0.0
    """The speed over the last half minute, as far as it was observed."""
    items_per_second: float = 0.0
    changed_at: float = 0.0
    """When a page was last seen to be done or failed, or the first snapshot of the run."""
    details_at: float | None = None
    """When workers, outputs and hosts were read, if that was earlier."""

    @property
    def seconds_left(self) -> float | None:
        """How long the current queue takes at the current speed. None if that is unknown."""
        if self.run.state != "running" or self.pages_per_second <= 0:
            return None
        return self.stats.remaining / self.pages_per_second


class StoreSnapshot(Struct, frozen=True, kw_only=True):
    """The active runs of a store at one moment, newest first."""

    at: float
    runs: tuple[RunSnapshot, ...] = ()
    recent: tuple[Run, ...] = ()
    """The runs that ended last."""
    limits: Mapping[str, LimitReached] = {}
    """At which limits some of them stopped, by ``run_id``."""
    away: str = ""
    """Why the store could not be read; empty if it could. If not, the runs are those of the snapshot before."""
    age: float = 0.0
    """If the store could not be read: seconds since it last could; 0 if never."""


class SnapshotTaker:
    """Takes snapshots of a store, one after the other. Speeds are the differences between them."""

    def __init__(self, store: Store, config: Config, *, without: Sequence[str] = ()) -> None:
        """``without``: names of spiders whose runs are left out."""
        self._store = store
        self._config = config
        self._without = without
        self._seen: dict[str, list[tuple[float, int, int]]] = {}
        self._changed: dict[str, tuple[int, float]] = {}
        self._details: dict[str, RunSnapshot] = {}
        self._last: dict[str, RunSnapshot] = {}
        self._frontiers: dict[str, Frontier] = {}
        self._ended: tuple[float, list[Run]] = (-_DETAILS_SECONDS, [])
        self._limits: dict[tuple[str, float | None], LimitReached | None] = {}
        """Of the runs that ended last."""

    async def take(self, now: float | None = None) -> StoreSnapshot:
        """A snapshot. StoreAwayError if the store does not answer."""
        now = clock.time() if now is None else now
        project = self._config.project_name
        active = self._shown(await self._store.list_runs(project=project, states=ACTIVE, limit=2 * MAX_RUNS))
        if not 0 <= now - self._ended[0] < _DETAILS_SECONDS:
            ended = await self._store.list_runs(project=project, states=OVER, limit=2 * _RECENT)
            self._ended = now, self._shown(ended)[:_RECENT]
            await self._read_limits(self._ended[1])
        snapshots = []
        count = min(len(active), MAX_RUNS)
        for run in active[:count]:
            last = self._last.get(run.run_id)
            if last is not None and last.run == run and 0 <= now - last.at < count / _RUNS_PER_SECOND:
                snapshots.append(last)
                continue
            try:
                snapshot = await self._take_run(run, now, max(_DETAILS_SECONDS, count / _DETAILS_PER_SECOND))
            except RunError:  # deleted in the meantime
                self._frontiers.pop(run.run_id, None)
                continue
            self._last[run.run_id] = snapshot
            snapshots.append(snapshot)
        listed = {snapshot.run.run_id for snapshot in snapshots}
        for by_run in (self._seen, self._changed, self._details, self._last, self._frontiers):
            for run_id in by_run.keys() - listed:
                del by_run[run_id]
        limits = {run_id: limit for (run_id, _), limit in self._limits.items() if limit is not None}
        return StoreSnapshot(at=now, runs=tuple(snapshots), recent=tuple(self._ended[1]), limits=limits)

    async def _read_limits(self, runs: Sequence[Run]) -> None:
        """Read at which limits these runs stopped, each once per ending."""
        before, self._limits = self._limits, {}
        for run in runs:
            key = run.run_id, run.ended_at
            self._limits[key] = before[key] if key in before else await limit_of(self._store, run)

    def _shown(self, runs: Sequence[Run]) -> list[Run]:
        return [run for run in runs if run.spider not in self._without]

    async def _take_run(self, run: Run, now: float, details_every: float) -> RunSnapshot:
        frontier = self._frontiers.get(run.run_id)
        if frontier is None:
            frontier = await self._store.frontier(run.run_id)
            self._frontiers[run.run_id] = frontier
        stats = await frontier.stats()
        if run.run_id not in self._seen:
            self._seen[run.run_id] = await self._seen_before(run.run_id, now)
        pages, items = self._speed(run.run_id, now, stats)
        details = self._details.get(run.run_id)
        awaits_report = now - run.created_at < _NEW and details is not None and not details.processes
        if details is None or awaits_report or not 0 <= now - details.at < details_every:
            workers = tuple(await frontier.workers())
            roles = await frontier.roles()
            details = self._details[run.run_id] = RunSnapshot(
                run=run, at=now, stats=stats, workers=workers, processes=await self._processes(run, workers, now),
                outputs=tuple(_output(role, stats) for role in roles if role.role.startswith("sink:")),
                logs_in=any(role.held for role in roles if role.role.startswith(LOGIN_ROLE)),
                hosts=tuple(await frontier.host_states(_HOSTS)),
                rewinds=tuple(await frontier.rewinds()) if stats.rewinds else (),
            )  # fmt: skip
        return replace(
            details, run=run, at=now, stats=stats, pages_per_second=pages, items_per_second=items,
            changed_at=self._changed[run.run_id][1], details_at=details.at,
        )  # fmt: skip

    async def _processes(self, run: Run, workers: Sequence[WorkerState], now: float) -> int:
        """How many processes work on a run. A crawl or a server with a store of its own sends no heartbeats, so its
        reports are counted."""
        if workers or run.state == "queued":
            return len(workers)
        processes = merge_processes((), await read_processes(self._store, run.run_id), now)
        return sum(process.state in PRESENT for process in processes)

    async def _seen_before(self, run_id: str, now: float) -> list[tuple[float, int, int]]:
        """A recent sample of the run, so that the first snapshot has a speed. Another clock may have timed it."""
        for sample in await SampleHistory(self._store, run_id).read_newest():
            if _MIN_SECONDS <= now - sample.at <= _RATE_SECONDS:
                return [(sample.at, sample.done + sample.dead, sample.items)]
        return []

    def _speed(self, run_id: str, now: float, stats: Stats) -> tuple[float, float]:
        ended = stats.done + stats.dead
        points = self._seen.setdefault(run_id, [])
        if self._changed.get(run_id, (-1, 0.0))[0] != ended:
            self._changed[run_id] = (ended, now)
        points.append((now, ended, stats.items))
        while len(points) > 2 and now - points[1][0] >= _RATE_SECONDS:
            del points[0]
        then, pages, items = points[0]
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, ended - pages) / seconds, max(0, stats.items - items) / seconds


def _output(role: RoleState, stats: Stats) -> OutputState:
    position = min(position_of(role.cursor), stats.items)
    return OutputState(
        name=output_name(role.role), written=position, lag=stats.items - position, held=role.held,
        finished=role.finished,
    )  # fmt: skip


# The processes of all active runs of a store.


_FORGOTTEN = 3600.0
"""Seconds after which a process that was lost or ended is not listed any more."""


class FleetProcess(RunProcess, frozen=True, kw_only=True):
    """A process of one of the active runs."""

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
    reports = await asyncio.gather(
        *(read_processes(documents, run_snapshot.run.run_id) for run_snapshot in snapshot.runs)
    )
    processes = [
        FleetProcess(run_id=run_snapshot.run.run_id, **asdict(process))
        for run_snapshot, own in zip(snapshot.runs, reports, strict=True)
        for process in merge_processes(run_snapshot.workers, own, snapshot.at)
        if process.state in PRESENT or process.last_seen < _FORGOTTEN
    ]
    return sorted(processes, key=lambda process: (ORDER[process.state], process.machine, process.name))
