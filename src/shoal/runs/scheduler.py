"""The queue and the filter of a spider's run for scripts with their own loop: one request at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from shoal.config import Config, config_for
from shoal.crawling.run_queue import RunQueue, frontier_options
from shoal.crawling.stats import STATE_NAMES
from shoal.errors import LeaseLostError, RequestError
from shoal.frontier import open_store
from shoal.http import Request
from shoal.ports import Completion, Failure, Frontier, Lease, Store
from shoal.runs.loop_thread import LoopThread
from shoal.runs.run_choice import WantedRun, choose_run, start_settings
from shoal.spider import Spider
from shoal.system import clock
from shoal.urls.normalize import Scope

log = logging.getLogger("shoal.scheduler")

T = TypeVar("T")

_PATIENCE, _PAUSE = 1.0, 0.02  # seconds


class Scheduler(RunQueue):
    """The queue and the filter of a run, for programs with their own loop.

    Complete, fail or release each request that ``next_request`` returned. LeaseLostError means that this came too late.
    `Scheduler.open` makes one for a spider.

    Every method may raise StoreAwayError: the server of the frontier cannot be reached. Nothing was changed then.
    """

    def __init__(
        self,
        frontier: Frontier,
        scope: Scope,
        *,
        ttl: float = 300.0,
        max_pages: int | None = None,
        shared: bool = False,
    ) -> None:
        """``max_pages`` and ``shared``: see `RunQueue`."""
        super().__init__(frontier, scope, ttl=ttl, max_pages=max_pages, shared=shared)
        self._out: dict[int, Lease] = {}
        self._store: Store | None = None
        """The store that ``open`` opened."""
        self.settings: Config | None = None
        """The settings of the run, if the scheduler was opened for a spider."""

    @classmethod
    async def open(
        cls,
        spider: type[Spider] | Spider,
        config: Config | Mapping[str, object] | None = None,
        *,
        new_run: bool = False,
    ) -> Self:
        """Open the queue of a spider: that of its unfinished run, or of a new one. ``close`` it at the end.

        ``config`` is a layer over the file, the spider's settings and the environment. ConfigError if a setting is
        wrong, StoreAwayError or StoreError if the frontier cannot be opened."""
        spider = spider() if isinstance(spider, type) else spider
        settings = config_for(config, spider.settings, type(spider).__name__)
        store = await open_store(settings.frontier)
        try:
            wanted = WantedRun(
                spider=spider.spider_name(),
                project=settings.project_name,
                start=start_settings(spider),
                new="always" if new_run else "after_finish",
            )
            run = await choose_run(store, wanted)
            if run.state == "queued":
                run = await store.transition(run.run_id, "running")
            frontier = await store.frontier(run.run_id, frontier_options(settings))
        except BaseException:
            await store.close()
            raise
        scope = Scope(settings.scope, spider.allowed_domains)
        max_pages = settings.scope.max_pages
        scheduler = cls(frontier, scope, ttl=settings.lease.ttl, max_pages=max_pages, shared=store.shared)
        scheduler._store, scheduler.settings = store, settings
        return scheduler

    def forget(self) -> None:
        """Drop everything learned from the frontier: it went back in time."""
        super().forget()
        self._out.clear()

    async def enqueue_request(self, request: Request) -> bool:
        """Push a request. False if it is a duplicate or out of scope. QueueFullError: the queue has ``queue.max_size``
        requests; nothing was recorded, so try again later. RequestError: the request cannot be stored."""
        return await self.enqueue_requests([request]) == 1

    async def next_request(self) -> Request | None:
        """Lease the best request whose host is due. None if there is none right now."""
        leased = await self.next_requests(1)
        if not leased.leases:
            return None
        lease = leased.leases[0]
        self._out[id(lease.request)] = lease
        return lease.request

    async def complete(self, request: Request, *, items: Sequence[bytes] = (), children: Sequence[Request] = ()) -> int:
        """Complete a request with its encoded items and its children in one step. Returns how many children were
        new."""
        completion = Completion(lease=self._lease_of(request), items=items, children=children)
        (pushed,) = await self.frontier.complete([completion])
        return self._settled(request, pushed).added

    async def fail(self, request: Request, reason: str, *, retry_in: float | None = None) -> str:
        """Record a failed attempt. The request is ready again after ``retry_in`` seconds, or failed. Returns its state:
        ``waiting`` or ``failed``."""
        failure = Failure(lease=self._lease_of(request), kind="failed", reason=reason, retry_in=retry_in)
        (answer,) = await self.frontier.fail([failure])
        self.uncount(1)
        state = self._settled(request, answer)
        return STATE_NAMES.get(state, state)

    async def release(self, request: Request) -> None:
        """Release a request unused."""
        (released,) = await self.frontier.release([self._lease_of(request)])
        self.uncount(1)
        self._settled(request, released or None)

    async def has_pending_requests(self) -> bool:
        """Whether any request is ready, waiting or leased."""
        return (await self.frontier.stats()).remaining > 0

    async def may_get_more(self) -> bool:
        """Whether a later ``next_request`` may return something: requests are queued, or others have leased some."""
        return (await self.frontier.stats()).remaining > len(self._out)

    async def idle(self) -> bool:
        """The opposite of ``has_pending_requests``."""
        return not await self.has_pending_requests()

    async def close(self) -> None:
        """Release the requests of ``next_request`` that were not settled, and what ``open`` opened."""
        try:
            if self._out:
                await self.frontier.release(list(self._out.values()))
                self._out.clear()
        finally:
            store, self._store = self._store, None
            if store is not None:
                await store.close()

    def _settled(self, request: Request, answer: T | None) -> T:
        """The answer of the frontier to a request that ``next_request`` returned. None: its lease was lost."""
        self._out.pop(id(request), None)
        if answer is None:
            raise LeaseLostError(f"the lease of {request.url} was lost; nothing was changed")
        return answer

    def _lease_of(self, request: Request) -> Lease:
        lease = self._out.get(id(request))
        if lease is None:
            raise RequestError(f"{request.url} was not returned by next_request, or is already settled")
        return lease


class SyncScheduler:
    """The queue and the filter of a spider's run, without ``await``. It runs a `Scheduler` in a thread of its own.

    ``next_request`` completes the request that it returned before, unless the script has settled it itself. So a
    request counts as done when the script asks for the next one, or closes the scheduler.
    """

    def __init__(
        self,
        spider: type[Spider] | Spider,
        config: Config | Mapping[str, object] | None = None,
        *,
        new_run: bool = False,
        settle: bool = True,
    ) -> None:
        """For ``spider``, ``config`` and ``new_run`` see `Scheduler.open`. ``settle=False``: the script completes,
        fails or releases each request itself."""
        self._settles = settle
        self._last: Request | None = None
        self._thread = LoopThread("shoal-scheduler", "the scheduler")
        try:
            self._scheduler = self._thread.wait(Scheduler.open(spider, config, new_run=new_run))
        except BaseException:
            self._thread.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._last = None  # it is released, not done
        self.close()

    def enqueue_request(self, request: Request) -> bool:
        return self._thread.wait(self._scheduler.enqueue_request(request))

    _schedule_request = enqueue_request

    def enqueue_requests(self, requests: Sequence[Request]) -> int:
        return self._thread.wait(self._scheduler.enqueue_requests(requests))

    def next_request(self) -> Request | None:
        """Lease the best request whose host is due. While hosts must wait, or other processes have the last requests,
        wait up to a second; then return None."""
        self._settle()
        until = clock.monotonic() + _PATIENCE
        while True:
            request = self._thread.wait(self._scheduler.next_request())
            if (
                request is not None
                or clock.monotonic() > until
                or not self._thread.wait(self._scheduler.may_get_more())
            ):
                self._last = request if self._settles else None
                return request
            time.sleep(_PAUSE)

    def complete(self, request: Request, *, items: Sequence[bytes] = (), children: Sequence[Request] = ()) -> int:
        self._forget(request)
        return self._thread.wait(self._scheduler.complete(request, items=items, children=children))

    def fail(self, request: Request, reason: str, *, retry_in: float | None = None) -> str:
        self._forget(request)
        return self._thread.wait(self._scheduler.fail(request, reason, retry_in=retry_in))

    def release(self, request: Request) -> None:
        self._forget(request)
        self._thread.wait(self._scheduler.release(request))

    def has_pending_requests(self) -> bool:
        """Whether any request is ready, waiting, or leased. The one that ``next_request`` completes later is not."""
        stats = self._thread.wait(self._scheduler.frontier.stats())
        return stats.remaining > (self._last is not None)

    def idle(self) -> bool:
        return not self.has_pending_requests()

    def size(self) -> int:
        return self._thread.wait(self._scheduler.size())

    def is_duplicate(self, request: Request) -> bool:
        return self._thread.wait(self._scheduler.is_duplicate(request))

    check_duplicate = _is_duplicate = is_duplicate

    @property
    def settings(self) -> Config:
        assert self._scheduler.settings is not None
        return self._scheduler.settings

    @property
    def logger(self) -> logging.Logger:
        return self._scheduler.logger

    @property
    def queue_manager(self) -> Self:
        return self

    @property
    def filter(self) -> Self:
        return self

    def close(self) -> None:
        """Complete the last request, release the others, close the store, and end the thread."""
        if self._thread.is_running:
            try:
                self._settle()
            finally:
                self._thread.wait(self._scheduler.close())
                self._thread.stop()

    def _settle(self) -> None:
        request, self._last = self._last, None
        if request is not None:
            try:
                self._thread.wait(self._scheduler.complete(request))
            except LeaseLostError as error:
                log.warning("%s", error)

    def _forget(self, request: Request) -> None:
        if request is self._last:
            self._last = None
