"""Runs of schedules in this server. If a server dies, another one, or its restart, resumes them.

A server holds the role ``server`` of each run that it works on, and renews it. When the server dies, the role expires,
and another one takes it. Leases of the dead server are released when its heartbeats have been missing for too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from shoal import clock
from shoal.batch.admission import TooManySessionsError
from shoal.batch.redaction import redacted
from shoal.config import Config
from shoal.errors import FrontierError, RunError, ShoalError
from shoal.ports import Claim, Frontier, Run
from shoal.runs.lifecycle import GRACE
from shoal.runs.orchestrator import Orchestrator
from shoal.schedules.runs import ServerRun, run_maker
from shoal.schedules.schedule import Schedule
from shoal.schedules.service import Schedules
from shoal.server.jobs import Job, Jobs

log = logging.getLogger("shoal.server")

_ROLE = "server"
_MAX_TTL = 15.0
"""The longest time in seconds without a renewal before another server takes over a run."""
_CHECK_EVERY = 2.0
"""The shortest time in seconds between two searches for runs that no server crawls."""
_RELEASE_TIMEOUT = 1.0


class ScheduledRuns:
    """Creates the runs of schedules, and crawls those that are not for workers."""

    def __init__(
        self, schedules: Schedules, jobs: Jobs, config: Config, make_orchestrator: Callable[[], Orchestrator]
    ) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        """Called when the work on a run ended."""
        self._schedules = schedules
        self._store = schedules.store
        self._jobs = jobs
        self._make_orchestrator = make_orchestrator
        self._make_run = run_maker(make_orchestrator, config.serve.allow)
        self._ttl = min(_MAX_TTL, config.lease.ttl)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._checked_at = 0.0

    # -- for ScheduleRunner

    async def make_run(self, schedule: Schedule, due: float) -> Run:
        return await self._make_run(schedule, due)

    async def launch(self, run: Run) -> None:
        self._begin(run)

    async def cancelled(self, run_id: str) -> None:
        await self._jobs.poll_state(run_id)

    async def take_over(self) -> None:
        if clock.now() - self._checked_at < _CHECK_EVERY:
            return
        self._checked_at = clock.now()
        # A paused run is taken over only after somebody resumes it.
        for run in await self._store.list_runs(project=self._schedules.project, states=("queued", "running")):
            if run.settings.get("schedule") not in self._schedules.foreign:
                self._begin(run)

    def _begin(self, run: Run) -> None:
        """Start to crawl a run, unless it is for workers, or this server already crawls it."""
        if "registered" not in run.settings or run.run_id in self._tasks or self._jobs.has(run.run_id):
            return
        task = self._tasks[run.run_id] = asyncio.create_task(self._work(run))
        task.add_done_callback(partial(self._end, run.run_id))

    def _end(self, run_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run %s stopped", run_id, exc_info=error)
        self.on_ended()

    async def close(self) -> None:
        """Wait until the roles are released. Close the jobs first: then the crawls have stopped."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=2 * _RELEASE_TIMEOUT)
        for task in list(self._tasks.values()):
            task.cancel()

    # -- one run

    async def _work(self, run: Run) -> None:
        try:
            frontier = await self._store.frontier(run.run_id)
            claim = await frontier.claim(_ROLE, self._ttl)
        except ShoalError as exc:  # the store is away, or the run was deleted
            log.debug("cannot take over run %s: %s", run.run_id, exc)
            return
        if claim is None:
            return  # another server works on it
        try:
            await self._work_alone(run, frontier, claim)
        finally:
            with suppress(ShoalError, TimeoutError):  # then it expires
                async with asyncio.timeout(_RELEASE_TIMEOUT):
                    await frontier.relinquish(claim)

    async def _work_alone(self, run: Run, frontier: Frontier, claim: Claim) -> None:
        name = str(run.settings.get("schedule", ""))
        try:
            if await self._store.run_state(run.run_id) not in ("queued", "running"):
                return  # it ended since it was listed
            settings = ServerRun.of(run)
            assert settings is not None
            job = await self._jobs.take(run, await settings.choose(self._make_orchestrator()))
        except TooManySessionsError as exc:
            log.warning("run %s waits: %s", run.run_id, exc)
            return
        except FrontierError as exc:
            log.warning("run %s waits: %s", run.run_id, exc)
            return
        except ShoalError as exc:
            await self._fail(run, name, exc)
            return
        keeping = asyncio.create_task(self._keep(frontier, claim, job))
        try:
            failure = await asyncio.shield(job.task)
        finally:
            keeping.cancel()
        if failure is not None and not isinstance(failure, FrontierError):
            await self._fail(run, name, failure)

    async def _keep(self, frontier: Frontier, claim: Claim, job: Job) -> None:
        """Renew the role. If another server has taken it, stop the crawl."""
        while True:
            await asyncio.sleep(self._ttl / 3)
            with suppress(ShoalError):
                if not await frontier.advance(claim, b"", self._ttl):
                    log.warning("this server stops a crawl: another server has taken over its run")
                    job.crawl.stop(GRACE)
                    return

    async def _fail(self, run: Run, name: str, error: Exception) -> None:
        """Cancel a run that cannot be crawled. Otherwise it would be restarted forever and block its schedule."""
        log.error("run %s of schedule %s failed: %s", run.run_id, name, error)
        with suppress(FrontierError, RunError):
            await self._store.transition(run.run_id, "cancelled")
            await self._schedules.report_error(name, redacted(f"run {run.run_id}: {error}"))
