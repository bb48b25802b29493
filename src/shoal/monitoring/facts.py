"""Reads what a snapshot does not show, for `find_problems`: ended runs, errors, lost processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shoal.config import Config
from shoal.errors import RunError
from shoal.frontier.rules import is_retried
from shoal.monitoring.limits import limit_of
from shoal.monitoring.problems import Ending, Facts, LimitsFor, LostProcess, Mark, RunFailure, RunResult
from shoal.monitoring.reports import LATE, ProcessReport, field_coverage, read_processes
from shoal.monitoring.snapshot import RunSnapshot, StoreSnapshot
from shoal.ports import Run, Store
from shoal.runs.outcome import read_outcome

RECENT = 86400.0
"""How long a run that has ended is included, in seconds."""
_ENDED = 50
_GOOD_AMONG = 20
_SILENT = 1.5 * LATE
"""Seconds without a report after which a process is lost. Clocks of machines differ a little."""


class FactReader:
    """Reads the facts around snapshots of one store, one after the other. Results of ended runs are read once."""

    def __init__(self, store: Store, config: Config, limits: LimitsFor, *, without: Sequence[str] = ()) -> None:
        """``without``: names of spiders whose runs are left out."""
        self._store = store
        self._config = config
        self._limits = limits
        self._without = without
        self._endings: dict[tuple[str, float], Ending] = {}
        self._active: set[str] = set()

    async def read(
        self, snapshot: StoreSnapshot, *, since: float = 0.0, marks: Mapping[str, Mark] = {}, bad: Collection[str] = ()
    ) -> Facts:
        """The facts at the time of a snapshot. ``bad``: runs that no other run is compared with. StoreAwayError if the
        store does not answer."""
        since = max(since, snapshot.at - RECENT)
        ended = await self._ended_runs(snapshot, since)
        failures: list[RunFailure] = []
        lost: list[LostProcess] = []
        forbidden: dict[str, int] = {}
        for seen in snapshot.runs:
            found, gone = await self._read_processes(seen.run, snapshot.at)
            failures += found
            lost += gone
            if self._fails_often(seen):
                forbidden[seen.run.run_id] = await self._count_forbidden(seen.run)
        endings = []
        for run in ended:
            ending = self._endings.get(_ending_key(run)) or await self._read_ending(run, snapshot.at, bad)
            if ending is not None:
                endings.append(ending)
                failures += ending.failures
        self._endings = {_ending_key(ending.result.run): ending for ending in endings}
        return Facts(
            since=since, marks=marks, endings=tuple(endings), failures=tuple(failures), lost=tuple(lost),
            forbidden=forbidden,
        )  # fmt: skip

    async def _ended_runs(self, snapshot: StoreSnapshot, since: float) -> list[Run]:
        """Runs that ended since a time: the newest ones, and those that were active in the snapshot before."""
        listed = await self._store.list_runs(project=self._config.project_name, states=("finished",), limit=_ENDED)
        found = {run.run_id: run for run in listed if run.spider not in self._without}
        active = {seen.run.run_id for seen in snapshot.runs}
        for run_id in self._active - active - found.keys():
            if (run := await self._store.get_run(run_id)) is not None:
                found[run_id] = run
        recent = [run for run in found.values() if run.state == "finished" and (run.ended_at or 0.0) >= since]
        self._active = active | {run.run_id for run in recent}
        return recent

    async def _read_processes(self, run: Run, now: float) -> tuple[list[RunFailure], list[LostProcess]]:
        """Processes of an active run that ended with an error, and those that stopped reporting."""
        reports = await read_processes(self._store, run.run_id)
        lost = [
            LostProcess(run.run_id, run.spider, report.name, report.at)
            for report in reports
            if not report.ended and now - report.at > _SILENT and run.state in ("running", "paused")
        ]
        return _failures(run, reports), lost

    def _fails_often(self, seen: RunSnapshot) -> bool:
        ended = seen.stats.done + seen.stats.dead
        limits = self._limits(seen.run.run_id, seen.run.spider)
        return ended >= limits.failure_pages and seen.stats.dead > limits.failure_rate * ended

    async def _count_forbidden(self, run: Run) -> int:
        try:
            frontier = await self._store.frontier(run.run_id)
            kinds = await frontier.dead_kinds()
        except RunError:  # deleted in the meantime
            return 0
        return sum(count for kind, count in kinds.items() if not is_retried(kind, None))

    async def _read_ending(self, run: Run, now: float, bad: Collection[str]) -> Ending | None:
        """How a run ended. None if a process has not yet written its last report, or if the run was deleted."""
        reports = await read_processes(self._store, run.run_id)
        if not all(report.ended or now - report.at > LATE for report in reports):
            return None
        result = await self._result(run, reports)
        if result is None:
            return None
        failures = tuple(_failures(run, reports))
        project = self._config.project_name
        for candidate in await self._store.list_runs(run.spider, project, states=("finished",), limit=_GOOD_AMONG):
            if candidate.created_at < run.created_at and candidate.run_id not in bad:
                good = await self._result(candidate, await read_processes(self._store, candidate.run_id))
                if good is not None and good.outcome.verdict != "failed" and good.stats.items:
                    return Ending(result, good, failures)
        return Ending(result, None, failures)

    async def _result(self, run: Run, reports: Sequence[ProcessReport]) -> RunResult | None:
        try:
            frontier = await self._store.frontier(run.run_id)
            stats = await frontier.stats()
            outcome = await read_outcome(self._store, run, frontier, self._config.outcome)
        except RunError:  # deleted in the meantime
            return None
        if outcome is None:  # it is running again
            return None
        fields = field_coverage(reports)
        several = len({each.type for each in fields}) > 1
        coverage = {f"{each.type}.{each.field}" if several else each.field: each.share for each in fields}
        limit = await limit_of(self._store, run)
        return RunResult(run=run, stats=stats, outcome=outcome, coverage=coverage, limit=limit)


def _failures(run: Run, reports: Sequence[ProcessReport]) -> list[RunFailure]:
    return [RunFailure(run.run_id, run.spider, each.at, each.error) for each in reports if each.error]


def _ending_key(run: Run) -> tuple[str, float]:
    """Identifies one end of a run: it may be resumed, and end again."""
    return run.run_id, run.ended_at or 0.0
