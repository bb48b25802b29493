"""Runs in this process: each a crawl of its own, beside the others, on the server's store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct

from shoal.batch.admission import TooManySessionsError
from shoal.batch.redaction import redacted
from shoal.errors import FrontierError, RunError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http import HttpFetcher
from shoal.ports import Run, Store
from shoal.runs.crawl import Crawl
from shoal.runs.lifecycle import GRACE
from shoal.runs.orchestrator import Chosen

log = logging.getLogger("shoal.server")

_CLOSING = 5.0
_REMEMBERED = 1000  # runs that were begun here, and can be begun again


class _Order(Struct, frozen=True):
    """What was asked for."""

    chosen: Chosen
    urls: Sequence[str] | None


class _Job(Struct, frozen=True):
    """A crawl at work. Its task ends with what went wrong before or after it began."""

    crawl: Crawl
    task: asyncio.Task[Exception | None]


class Jobs:
    """The crawls of this server. Whatever callers ask for, they contact no address that ``guard`` refuses."""

    def __init__(self, store: Store, guard: AddressGuard, most: int) -> None:
        """``most``: so many at a time."""
        self._store = store
        self._guard = guard
        self._most = most
        self._jobs: dict[str, _Job] = {}
        self._orders: dict[str, _Order] = {}
        self._failures: dict[str, str] = {}

    def failure(self, run_id: str) -> str:
        """Why a run could not go on here, or nothing."""
        return self._failures.get(run_id, "")

    async def start(self, chosen: Chosen, urls: Sequence[str] | None, *, new_run: bool) -> Run:
        """Begin, or go on with what was begun by the same words and nobody here works on, unless ``new_run``.

        TooManySessionsError when it would be one too many. It works when this returns: what keeps it from that is
        raised, and then there is no new run.
        """
        order = _Order(chosen, urls)
        crawl, fetcher = self._make(order)
        found = None if new_run else await self._unfinished(crawl)
        if found is not None:
            return await self._begin(found, crawl, fetcher, order)
        run = await crawl.choose_run(self._store)
        try:
            return await self._begin(run, crawl, fetcher, order)
        except BaseException:
            with suppress(FrontierError, RunError):
                await self._store.delete_run(run.run_id)
            raise

    async def resume(self, run: Run) -> None:
        """Work again on a run that was begun here. One that others work on is theirs."""
        job = self._jobs.get(run.run_id)
        if job is not None and not job.crawl.stopping:
            await self.poll_state(run.run_id)
            return
        if job is not None:  # it was cancelled a moment ago
            await asyncio.wait({job.task})
        order = self._orders.get(run.run_id)
        if order is not None and run.run_id not in self._jobs:
            await self._begin(run, *self._make(order), order)

    def _make(self, order: _Order) -> tuple[Crawl, HttpFetcher]:
        if len(self._jobs) >= self._most:
            raise TooManySessionsError(
                f"{len(self._jobs)} runs are in this server, which is the limit; try again later"
            )
        config = order.chosen.config
        fetcher = HttpFetcher(config.http, config.user_agent, self._guard)
        crawl = Crawl(
            order.chosen.spider, config, outputs=order.chosen.outputs, new_run=True, collect=False, urls=order.urls,
            store=self._store, fetcher=fetcher,
        )  # fmt: skip
        return crawl, fetcher

    async def _unfinished(self, crawl: Crawl) -> Run | None:
        for run in await self._store.list_runs(crawl.spider.spider_name()):
            if (
                run.state in ("running", "paused")
                and run.settings == crawl.start_settings
                and run.run_id not in self._jobs
            ):
                return run
        return None

    async def _begin(self, run: Run, crawl: Crawl, fetcher: HttpFetcher, order: _Order) -> Run:
        crawl.run = run
        task = asyncio.create_task(self._see_through(crawl, fetcher, run.run_id))
        self._jobs[run.run_id] = _Job(crawl, task)
        self._orders[run.run_id] = order
        if len(self._orders) > _REMEMBERED:
            del self._orders[next(iter(self._orders))]
        self._failures.pop(run.run_id, None)
        started = asyncio.create_task(crawl.started.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not crawl.started.is_set() and (failure := await task) is not None:
            raise failure
        return run

    async def _see_through(self, crawl: Crawl, fetcher: HttpFetcher, run_id: str) -> Exception | None:
        failure: Exception | None
        try:
            await crawl
            failure = crawl.error
        except Exception as exc:  # the end of a task
            failure = exc
        finally:
            del self._jobs[run_id]
            await fetcher.close()
        if failure is not None:
            log.error("run %s failed: %s", run_id, failure)
            self._failures[run_id] = redacted(str(failure))
        return failure

    async def poll_state(self, run_id: str) -> None:
        """Do at once what the state of a run asks for: pause, continue, or stop."""
        job = self._jobs.get(run_id)
        if job is not None:
            await job.crawl.poll_state()

    async def leave(self, run_id: str) -> None:
        """Stop working on a run, and forget it."""
        job = self._jobs.get(run_id)
        if job is not None:
            job.crawl.stop(GRACE)
            await asyncio.wait({job.task}, timeout=_CLOSING)
        self._orders.pop(run_id, None)
        self._failures.pop(run_id, None)

    async def close(self) -> None:
        """What is in flight is given back. Runs in a store that lasts go on when they are started again."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.crawl.stop(GRACE)
        if jobs:
            await asyncio.wait([job.task for job in jobs], timeout=_CLOSING)
        for job in jobs:
            job.task.cancel()
        await asyncio.gather(*(job.task for job in jobs), return_exceptions=True)
