"""Runs that crawl in this process, at the same time, on the server's store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct

from shoal.batch.admission import TooManySessionsError
from shoal.batch.redaction import redacted
from shoal.batch.session import OVER
from shoal.errors import FrontierError, RunError
from shoal.ports import Run, Store
from shoal.runs.crawl import Crawl
from shoal.runs.lifecycle import GRACE
from shoal.runs.orchestrator import Chosen

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
            chosen.spider, chosen.resolved, outputs=chosen.outputs, new_run=True, collect=False, urls=job_request.urls,
            store=self._store, networks=self._networks,
        )  # fmt: skip

    async def _find_interrupted(self, crawl: Crawl) -> Run | None:
        for run in await self._store.list_runs(crawl.spider.spider_name(), crawl.config.project_name):
            if (
                run.state in ("running", "paused")
                and run.settings == crawl.start_settings
                and run.run_id not in self._jobs
            ):
                return run
        return None

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
