"""Runs that crawl in this process, at the same time, on the server's store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct

from shoal.api.batch.admission import TooManySessionsError
from shoal.api.batch.session import OVER
from shoal.api.batch.urls import redacted
from shoal.config import Config
from shoal.errors import FrontierError, RunError, ShoalError
from shoal.operations.schedules.runner import ServerRun, run_maker
from shoal.operations.schedules.service import Schedules
from shoal.ports import Claim, Frontier, Run, RunState, Store
from shoal.runs.crawl import Crawl
from shoal.runs.lifecycle import GRACE
from shoal.runs.orchestrator import Chosen, Orchestrator
from shoal.system import clock

log = logging.getLogger("shoal.server")

_CLOSE_TIMEOUT = 5.0
_MAX_RESUMABLE = 1000
"""Runs whose requests are kept, so that the server can resume them."""


class _JobRequest(Struct, frozen=True):
    """What a caller asked for."""

    chosen: Chosen
    urls: Sequence[str] | None


class Job(Struct, frozen=True):
    """A crawl and its task, which returns the error that ended the crawl."""

    crawl: Crawl
    task: asyncio.Task[Exception | None]


class Jobs:
    """The crawls of this server. They contact no private address outside ``networks``."""

    def __init__(self, store: Store, networks: Sequence[str], limit: int) -> None:
        """``limit``: how many crawls may run at the same time."""
        self._store = store
        self._networks = networks
        self._limit = limit
        self._jobs: dict[str, Job] = {}
        self._requests: dict[str, _JobRequest] = {}
        self._failures: dict[str, str] = {}
        self._admission = asyncio.Lock()
        """Prevents concurrent starts from exceeding the limit or resuming the same run."""

    def failure(self, run_id: str) -> str:
        """Why a run failed in this server, or an empty string."""
        return self._failures.get(run_id, "")

    async def start(self, chosen: Chosen, urls: Sequence[str] | None, *, new_run: bool) -> Run:
        """Start a run. It crawls when this returns.

        Without ``new_run``, an interrupted run that was started with the same arguments is resumed instead. If the
        crawl cannot start, the error is raised and no new run is left behind. TooManySessionsError: the server is at
        its limit.
        """
        await self._wait_for_ended()
        job_request = _JobRequest(chosen, urls)
        async with self._admission:
            crawl = self._make_crawl(job_request)
            interrupted = None if new_run else await self._find_interrupted(crawl)
            run = interrupted or await crawl.choose_run(self._store)
            job = self._add(run, crawl, job_request)
        try:
            await _wait_until_started(job)
        except BaseException:
            if interrupted is None:
                with suppress(FrontierError, RunError):
                    await self._store.delete_run(run.run_id)
            raise
        return run

    async def resume(self, run: Run) -> None:
        """Continue a run that was started in this server. Runs of other processes are left to them."""
        job = self._jobs.get(run.run_id)
        if job is not None and not job.crawl.stopping:
            await self.poll_state(run.run_id)
            return
        if job is not None:  # it was cancelled a moment ago
            await asyncio.wait({job.task})
        await self._wait_for_ended()
        job_request = self._requests.get(run.run_id)
        if job_request is not None and run.run_id not in self._jobs:
            await _wait_until_started(self._add(run, self._make_crawl(job_request), job_request))

    async def take(self, run: Run, chosen: Chosen) -> Job:
        """Start to crawl a run of the store. Its heartbeats tell other servers that it is taken. TooManySessionsError:
        the server is at its limit."""
        await self._wait_for_ended()
        async with self._admission:
            job_request = _JobRequest(chosen, None)
            crawl = self._make_crawl(job_request)
            crawl.has_heartbeats = True
            return self._add(run, crawl, job_request)

    def has(self, run_id: str) -> bool:
        """Whether this server crawls a run."""
        return run_id in self._jobs

    async def _wait_for_ended(self) -> None:
        """Wait for crawls whose run is already over. The state of a run is visible shortly before its crawl has
        released its output and its place in this server; a caller that saw the state may start the next run at once."""
        ending = {job.task for job in self._jobs.values() if job.crawl.stopping}
        for run_id, job in list(self._jobs.items()):
            if job.task not in ending and await self._store.run_state(run_id) in (None, *OVER):
                ending.add(job.task)
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_TIMEOUT)

    def _make_crawl(self, job_request: _JobRequest) -> Crawl:
        if len(self._jobs) >= self._limit:
            raise TooManySessionsError(f"this server is at its limit of {self._limit} runs; try again later")
        chosen = job_request.chosen
        return Crawl(
            chosen.spider,
            chosen.resolved,
            outputs=chosen.outputs,
            new_run=True,
            collect=False,
            urls=job_request.urls,
            store=self._store,
            networks=self._networks,
        )

    async def _find_interrupted(self, crawl: Crawl) -> Run | None:
        states: tuple[RunState, ...] = ("running", "paused")
        runs = await self._store.list_runs(crawl.spider.spider_name(), crawl.config.project_name, states=states)
        own = (run for run in runs if run.settings == crawl.start_settings and run.run_id not in self._jobs)
        return next(own, None)

    def _add(self, run: Run, crawl: Crawl, job_request: _JobRequest) -> Job:
        crawl.run = run
        job = Job(crawl, asyncio.create_task(self._run(crawl, run.run_id)))
        self._jobs[run.run_id] = job
        self._requests[run.run_id] = job_request
        if len(self._requests) > _MAX_RESUMABLE:
            del self._requests[next(iter(self._requests))]
        self._failures.pop(run.run_id, None)
        return job

    async def _run(self, crawl: Crawl, run_id: str) -> Exception | None:
        failure: Exception | None
        try:
            await crawl
            failure = crawl.error
        except Exception as exc:  # the end of a task
            failure = exc
        finally:
            del self._jobs[run_id]
        if failure is not None:
            log.error("run %s failed: %s", run_id, failure)
            self._failures[run_id] = redacted(str(failure))
        return failure

    async def poll_state(self, run_id: str) -> None:
        """Apply the state of a run at once: pause, continue, or stop."""
        job = self._jobs.get(run_id)
        if job is not None:
            await job.crawl.poll_state()

    async def forget(self, run_id: str) -> None:
        """Stop the crawl of a run. The run cannot be resumed in this server afterwards."""
        job = self._jobs.get(run_id)
        if job is not None:
            job.crawl.stop(GRACE)
            await asyncio.wait({job.task}, timeout=_CLOSE_TIMEOUT)
        self._requests.pop(run_id, None)
        self._failures.pop(run_id, None)

    async def close(self) -> None:
        """Stop all crawls and release their leases. Runs in a durable store can be resumed by a later start."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.crawl.stop(GRACE)
        if jobs:
            await asyncio.wait([job.task for job in jobs], timeout=_CLOSE_TIMEOUT)
        for job in jobs:
            job.task.cancel()
        await asyncio.gather(*(job.task for job in jobs), return_exceptions=True)


async def _wait_until_started(job: Job) -> None:
    """Wait until the crawl has opened its outputs. Raise the error of a crawl that cannot start."""
    started = asyncio.create_task(job.crawl.started.wait())
    await asyncio.wait({job.task, started}, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if not job.crawl.started.is_set() and (failure := await job.task) is not None:
        raise failure


# -- runs of schedules in this server
#
# If a server dies, another one, or its restart, resumes them: a server holds the role ``server`` of each run that it
# works on, and renews it. When the server dies, the role expires, and another one takes it. Leases of the dead server
# are released when its heartbeats have been missing for too long.


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
        self.make_run = run_maker(make_orchestrator, config.serve.allow)
        self._ttl = min(_MAX_TTL, config.lease.ttl)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._checked_at = 0.0

    # -- for ScheduleRunner

    async def cancelled(self, run_id: str) -> None:
        await self._jobs.poll_state(run_id)

    async def take_over(self) -> None:
        if clock.now() - self._checked_at < _CHECK_EVERY:
            return
        self._checked_at = clock.now()
        # A paused run is taken over only after somebody resumes it.
        for run in await self._store.list_runs(project=self._schedules.project, states=("queued", "running")):
            if run.settings.get("schedule") not in self._schedules.foreign:
                await self.launch(run)

    async def launch(self, run: Run) -> None:
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
        except (TooManySessionsError, FrontierError) as exc:
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
