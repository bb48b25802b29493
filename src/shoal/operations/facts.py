"""Reads what a snapshot does not show, for `find_problems`: ended runs, errors, lost processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from shoal.config import Config
from shoal.crawling.outcome import NOT_COUNTED
from shoal.errors import RunError
from shoal.fetch.sessions.stored import read_logins
from shoal.operations.active_runs import (
    SILENT,
    HostFailures,
    Mark,
    RunActivity,
    Trend,
    failing_hosts,
    find_trends,
    sum_forbidden,
    summarize_reports,
    worker_lost,
)
from shoal.operations.problem import Problem, ProblemLimits
from shoal.operations.problems import Ending, Facts, LimitsFor, RunFailure, RunResult
from shoal.operations.snapshot import RunSnapshot, StoreSnapshot
from shoal.ports import Run, Store
from shoal.runs.reports import LATE, ProcessReport, field_coverage, read_processes
from shoal.runs.run_end import limit_of, read_outcome
from shoal.runs.samples import SampleHistory

RECENT = 86400.0
"""How long a run that has ended is included, in seconds."""
_ENDED = 50
_GOOD_AMONG = 20
_KINDS_FRESH = 30.0
"""Seconds. Counting failed pages by kind costs the store more than a counter."""


class FactReader:
    """Reads the facts around snapshots of one store, one after the other. Results of ended runs are read once."""

    def __init__(self, store: Store, config: Config, limits: LimitsFor, *, without: Sequence[str] = ()) -> None:
        """``without``: names of spiders whose runs are left out."""
        self._store = store
        self._config = config
        self._limits = limits
        self._without = without
        self._endings: dict[tuple[str, float], Ending] = {}
        self._kinds: dict[str, tuple[float, dict[str, int]]] = {}
        self._reported: dict[tuple[str, str], float] = {}
        """The last report of each process."""
        self._active: set[str] = set()

    async def read(
        self, snapshot: StoreSnapshot, *, since: float = 0.0, marks: Mapping[str, Mark] = {},
        bad: Collection[str] = (), answering_since: float = 0.0,
    ) -> Facts:  # fmt: skip
        """The facts at the time of a snapshot. ``bad``: runs that no other run is compared with. ``answering_since``:
        the store was away until then. StoreAwayError if the store does not answer."""
        since = max(since, snapshot.at - RECENT)
        ended = await self._ended_runs(snapshot, since)
        failures: list[RunFailure] = []
        lost: list[Problem] = []
        forbidden: dict[str, int] = {}
        activity: dict[str, RunActivity] = {}
        reported: dict[tuple[str, str], float] = {}
        for run_snapshot in snapshot.runs:
            run = run_snapshot.run
            reports = await read_processes(self._store, run.run_id)
            reported.update({(run.run_id, report.name): report.at for report in reports})
            failures += _failures(run, reports)
            lost += _lost_workers(run, reports, snapshot.at, answering_since)
            activity[run.run_id] = run_activity = await self._read_activity(run_snapshot, reports, snapshot.at)
            if _fails_often(run_snapshot, run_activity.trends, self._limits(run.run_id, run.spider)):
                kinds = await self._dead_kinds(run, snapshot.at)
                forbidden[run.run_id] = sum(count for kind, count in kinds.items() if kind in NOT_COUNTED)
        before, self._reported = self._reported, reported
        back = {process for process, at in reported.items() if before.get(process, at) != at}
        self._kinds = {run_id: kinds for run_id, kinds in self._kinds.items() if run_id in activity}
        endings = []
        for run in ended:
            ending = self._endings.get(_ending_key(run)) or await self._read_ending(run, snapshot.at, bad)
            if ending is not None:
                endings.append(ending)
                failures += ending.failures
        self._endings = {_ending_key(ending.result.run): ending for ending in endings}
        return Facts(
            since=since, marks=marks, endings=tuple(endings), failures=tuple(failures), forbidden=forbidden,
            others=tuple(problem for problem in lost if problem.since >= since), activity=activity,
            answering_since=answering_since, reporting=frozenset(back),
        )  # fmt: skip

    async def _ended_runs(self, snapshot: StoreSnapshot, since: float) -> list[Run]:
        """Runs that ended since a time: the newest ones, and those that were active in the snapshot before."""
        listed = await self._store.list_runs(project=self._config.project_name, states=("finished",), limit=_ENDED)
        runs = {run.run_id: run for run in listed if run.spider not in self._without}
        active = {run_snapshot.run.run_id for run_snapshot in snapshot.runs}
        for run_id in sorted(self._active - active - runs.keys()):
            if (run := await self._store.get_run(run_id)) is not None:
                runs[run_id] = run
        recent = [run for run in runs.values() if run.state == "finished" and (run.ended_at or 0.0) >= since]
        self._active = active | {run.run_id for run in recent}
        return recent

    async def _read_activity(self, snapshot: RunSnapshot, reports: Sequence[ProcessReport], now: float) -> RunActivity:
        """What the processes of a run did lately."""
        run, stats, activity = snapshot.run, snapshot.stats, summarize_reports(reports, now)
        if stats.dead:
            samples = await SampleHistory(self._store, run.run_id).read_newest()
            activity = replace(activity, trends=find_trends(run, stats, samples, sum_forbidden(reports), now))
        if stats.dead and activity.callback_errors.total:
            kinds = await self._dead_kinds(run, now)
            activity = replace(activity, failed_in_callback=kinds.get("callback", 0))
        logins = await read_logins(self._store, run.run_id)
        activity = replace(activity, failed_logins={jar: login for jar, login in logins.items() if login.failures})
        failing = failing_hosts(activity.hosts, now, self._limits(run.run_id, run.spider))
        return replace(activity, hosts=tuple([await self._with_waiting(snapshot, host) for host in failing]))

    async def _with_waiting(self, snapshot: RunSnapshot, failing: HostFailures) -> HostFailures:
        """The host with the number of requests that wait for it."""
        state = next((host for host in snapshot.hosts if host.host == failing.host), None)
        try:
            if state is None:
                frontier = await self._store.frontier(snapshot.run.run_id)
                state = await frontier.host_state(failing.host)
        except RunError:  # deleted in the meantime
            return failing
        return replace(failing, waiting=state.ready)

    async def _dead_kinds(self, run: Run, now: float) -> dict[str, int]:
        """The failed pages of a run by kind, as of some seconds ago."""
        read_at, kinds = self._kinds.get(run.run_id, (0.0, {}))
        if not 0 <= now - read_at < _KINDS_FRESH:
            try:
                frontier = await self._store.frontier(run.run_id)
                kinds = await frontier.dead_kinds()
            except RunError:  # deleted in the meantime
                return {}
            self._kinds[run.run_id] = now, kinds
        return kinds

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
        several = len({field.type for field in fields}) > 1
        coverage = {f"{field.type}.{field.field}" if several else field.field: field.share for field in fields}
        limit = await limit_of(self._store, run)
        return RunResult(run=run, stats=stats, outcome=outcome, coverage=coverage, limit=limit)


def _lost_workers(run: Run, reports: Sequence[ProcessReport], now: float, answering_since: float) -> list[Problem]:
    """Processes of an active run that stopped reporting, not only because the store was away."""
    return [
        worker_lost(run.run_id, run.spider, report.name, report.at)
        for report in reports
        if not report.ended and now - max(report.at, answering_since) > SILENT and run.state in ("running", "paused")
    ]


def _fails_often(snapshot: RunSnapshot, trends: Sequence[Trend], limits: ProblemLimits) -> bool:
    """Whether so many pages fail that it matters which of them nobody wanted."""
    total = Trend(0.0, snapshot.stats.done + snapshot.stats.dead, snapshot.stats.dead)
    return any(trend.is_bad(limits) for trend in (total, *trends))


def _failures(run: Run, reports: Sequence[ProcessReport]) -> list[RunFailure]:
    return [RunFailure(run.run_id, run.spider, report.at, report.error) for report in reports if report.error]


def _ending_key(run: Run) -> tuple[str, float]:
    """Identifies one end of a run: it may be resumed, and end again."""
    return run.run_id, run.ended_at or 0.0
