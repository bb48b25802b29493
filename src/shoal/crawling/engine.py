"""The loop: lease, fetch, parse, settle. Read it from top to bottom.

`Engine.run` starts the helper tasks (seeder, lease keeper, item log, drainers) and then loops: it settles finished
pages with the frontier in one batch, fills free places with new leases, and starts one task for each lease. A task
waits only for its own page. A request that must wait, for a delay, a retry or a block, waits in the frontier.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from msgspec import Struct

from shoal.config import Config
from shoal.crawling.leases import LeaseKeeper, Persistence, Settler, StorageWatch, lease_of, lost_before
from shoal.crawling.onion import Onion
from shoal.crawling.pacing import FIRST_REPORT, ItemLogKeeper, Pacing, RemotePacing, WaitWatch, Waker
from shoal.crawling.page import PageHandler, ParsedPage, ReleasedLease, Settlement
from shoal.crawling.run_queue import RunQueue
from shoal.crawling.seeder import Seeder, Source
from shoal.crawling.stats import Counters, CrawlSnapshot
from shoal.errors import FencedError, FileStoreError, FrontierError, SinkError, StoreAwayError, StoreRewoundError
from shoal.ports import Frontier, Lease, Leased
from shoal.sinks.patience import HURRY, Patience
from shoal.spider import Spider
from shoal.system import chance, clock

if TYPE_CHECKING:
    from shoal.sinks.warc import WarcArchive

log = logging.getLogger("shoal.engine")

_POLLS_PER_CHECK = 4
"""Polls between two checks whether the run is finished, where many idle workers poll."""
_MAX_SLEEP = 15.0  # seconds within which the loop runs at least once, so that health checks see it alive
_IDLE_POLL = 5.0  # seconds between two calls of ``Spider.idle`` while the spider keeps a finished run open
_WAIT_FOR_ROUTE = 0.5  # seconds between two checks whether the route to the network is ready
_RECENT = 1000  # settled leases that are released again if the store goes back in time


class Drain(Protocol):
    """The parts of a drainer that the engine uses. Its owner starts and finishes it."""

    @property
    def role(self) -> str:
        """The role that it takes in the run. Empty: none."""
        ...

    def nudge(self) -> None:
        """Report new items."""

    async def run(self) -> None: ...

    async def start_over(self) -> None:
        """After the store went back in time, continue from the cursor that it has now. ``run`` is not running."""
        ...


class Participation(Struct, frozen=True, kw_only=True):
    """How an engine takes part in a run. A `Plan` is one: it also says how the process begins and ends its part."""

    spider: Spider
    config: Config
    source: Source | None = None
    """Start requests. None: another process pushes them."""
    run_id: str = ""
    """For reports why the engine has nothing to do. Empty: it makes none."""
    shared: bool = False
    """Other processes, or other crawls of this process, use the frontier too."""
    near: bool = False
    """Another process of this machine owns the frontier."""
    keep_items: bool = True
    """Keep the item log after all drainers have passed it."""
    stays: bool = False
    """Stay when the run is finished: it may get more requests."""
    may_work: Callable[[], bool] | None = None
    """Whether this process still holds its slot in a cluster, or its session as a worker. Checked before each page.
    None: it needs neither."""
    on_settled: Callable[[], Awaitable[None]] | None = None
    """Called after pages were stored: the run may have reached a limit."""
    archive: WarcArchive | None = None
    """Where the exchanges of pages are kept. None: nowhere."""
    rejoin: Callable[[], Awaitable[None]] | None = None
    """Called when this process was fenced; then it starts over. None: a fence ends the work."""


class Engine:
    """Crawls one run with one spider until the run is finished, a stop, or a failure."""

    def __init__(self, part: Participation, queue: RunQueue, onion: Onion, drains: Sequence[Drain] = ()) -> None:
        spider, config, archive = part.spider, part.config, part.archive
        self.counters = Counters()
        self.concurrency = config.concurrency
        """How many pages may be in flight. You may change it at any time."""
        self.looped_at = clock.monotonic()
        """When the loop last ran, on the monotonic clock."""
        self.stopping = False
        self._waker = Waker()
        self._config = config
        self._queue = queue
        self._frontier: Frontier = queue.frontier
        self._onion = onion
        self._drains = drains
        self._part = part
        self.pacing = RemotePacing(config.lease.batch, near=part.near) if part.shared else Pacing()
        self._persist = Persistence(shared=part.shared, on_return=self._waker.wake)
        self._storage = StorageWatch(Patience(config.items.patience), self._waker.wake, self._fail)
        self.handler = PageHandler(
            spider,
            config,
            queue,
            onion.fetch,
            self.counters,
            captures=archive is not None,
            on_store_failure=self._files_failed,
        )
        self._settler = Settler(
            queue,
            self.counters,
            self._persist,
            on_items=self._items_stored,
            archive=archive,
            session=onion.session,
        )
        self._seeder = Seeder(
            part.source, queue, config, self.counters, self._persist, self._waker.wake, shared=part.shared
        )
        self._leases = LeaseKeeper(self._frontier, config.lease.ttl, self._drop, part.may_work)
        self._log = ItemLogKeeper(
            self._frontier,
            self._persist,
            [drain.role for drain in drains if drain.role],
            keep=part.keep_items,
            every=1.0 if part.shared else 0.2,
        )
        self._waiting = WaitWatch(self._frontier, part.run_id)
        self._idle_since = 0.0
        """When the engine ran out of work, on the monotonic clock. 0: it has work."""
        self._leased: Leased | None = None
        """The answer to the last lease call, if it held no leases."""
        self._active: dict[int, tuple[asyncio.Task[None], Lease]] = {}
        """The leases that have begun, by token."""
        self._ahead: deque[Lease] = deque()
        """Leases that have not begun."""
        self._settled: list[Settlement] = []
        self._settled_since = 0.0
        self._recent: deque[Lease] = deque(maxlen=_RECENT)
        """The leases that were settled last."""
        self._kept_open = False  # the spider wants to wait for more requests
        self._isolating = False
        """Whether a request on its last attempt may kill its worker. It must be in flight alone."""
        self._check_again, self._halted, self._helpers = 0.0, False, list[asyncio.Task[None]]()
        self._failure: BaseException | None = None
        self._interruption: FrontierError | None = None
        """Why to start over: the store went back in time, or this process was fenced."""
        self.identities = onion.identities
        if onion.identities is not None:
            onion.identities.on_exhausted = self._fail
        if onion.session.login is not None:
            onion.session.login.on_hold, onion.session.login.on_ready = self.release_ahead, self.poll_now

    # -- the loop

    async def run(self) -> None:
        """Crawl until the run is finished, it reaches its page limit, or ``stop``. Release unfinished leases.

        Raises the error that ended the crawl: of the frontier, of a sink, or of the spider's ``start``. If the store
        went back in time, or the process was fenced, the engine starts over from the store's state.
        """
        while True:
            try:
                await self._run()
            except (StoreRewoundError, FencedError) as error:
                if not self.can_start_over(error):
                    raise
                await self._start_over(error)
                if not self.stopping:
                    continue
            failure = self._failure or self._seeder.failure
            if failure is not None:
                raise failure
            return

    async def _run(self) -> None:
        if self._interruption is not None:
            raise self._interruption
        for work in (
            self._seeder.keep(),
            self._leases.run(),
            self._log.run(),
            *(route.keep() for route in self._onion.routes),
            *(drain.run() for drain in self._drains),
        ):
            task = asyncio.create_task(work)
            task.add_done_callback(self._helper_ended)
            self._helpers.append(task)
        try:
            await self._pump()
        except StoreAwayError:
            if not self.stopping:  # a stop gives up on purpose, and the leases expire
                raise
        finally:
            await self._wind_down()
        if self._interruption is not None:
            raise self._interruption

    def interrupt(self, error: FrontierError) -> None:
        """Start over soon, or with the next ``run``: the store went back in time, or this process was fenced."""
        self._interruption = error
        self._waker.wake()

    def can_start_over(self, error: BaseException) -> bool:
        """Whether the process can start over after this error."""
        fenced = isinstance(error, FencedError) and self._part.rejoin is not None
        return fenced or isinstance(error, StoreRewoundError)

    async def _start_over(self, error: FrontierError) -> None:
        """Drop all work and all that is cached from the store. After a rewind, record it. After a fence, join again.
        Then continue from the store's state, like a new process."""
        log.error("%s", error)
        leases = [lease_of(settlement) for settlement in self._settled]
        # A rewound store may still hold the leases that were settled last. No other process would release them.
        leases += self._recent
        self._recent.clear()
        self._settled, self._interruption = [], None
        self._leases.clear()
        self._onion.forget()
        if isinstance(error, FencedError) and self._part.rejoin is not None:
            await self._persist(self._part.rejoin)
        else:
            rewind = await self._persist(self._frontier.recover)
            lost = "" if rewind is None or rewind.lost_seconds is None else f" by up to {rewind.lost_seconds:.1f} s"
            log.error("the store went back in time%s: this process starts over from the store's state", lost)
        await self._persist(lambda: self._frontier.release(leases, contacted=True))
        await self._seeder.start_over()
        if not self.stopping:
            await self.reopen()

    async def reopen(self) -> None:
        """Prepare another ``run``: the run has requests again after its outputs were finished, or the store changed."""
        self._queue.forget()
        for drain in self._drains:
            await drain.start_over()

    async def _pump(self) -> None:
        while True:
            self.looped_at = clock.monotonic()
            self._waker.reset()
            if self._interruption is not None:
                raise self._interruption
            if self._settled:
                await self.pacing.let_pages_end(self._settled, self._active, self.concurrency)
            linger = self._linger()
            wait = await self._settle_and_lease(lingers=linger > 0)
            self._fill()  # leases that waited for the store to come back
            if not self._active and not self._ahead and not self._settled:
                if await self._is_over():
                    return
                wait = await self._explain_wait(wait)
            wait = _IDLE_POLL if self._kept_open else wait
            if linger:
                wait = linger if wait is None else min(wait, linger)
            if linger or not self._settled:
                await self._waker.sleep(_MAX_SLEEP if wait is None else min(_MAX_SLEEP, wait))

    async def _explain_wait(self, wait: float | None) -> float | None:
        """Log why there is nothing to do. Returns the seconds until there may be more to say, at most ``wait``."""
        if self._leased is None or self._halted or self._kept_open:
            self._end_wait()
            return wait
        self._idle_since = self._idle_since or self.looped_at
        pause = self._idle_since + FIRST_REPORT - self.looped_at
        if pause <= 0:
            pause = await self._waiting.wait(self._leased)
        return pause if wait is None or pause < wait else wait

    def _end_wait(self) -> None:
        """End the wait: there is work, or the engine rests for another reason."""
        if self._idle_since and self._waiting.reason:
            self._waiting.work()
        self._idle_since = 0.0

    async def _settle_and_lease(self, *, lingers: bool) -> float | None:
        """Settle finished pages, unless ``lingers``, and fill the free places. Returns what `_lease_more` returns."""
        leases = not self.stopping and not self._halted
        if self.pacing.overlaps and lingers:
            return None  # later, one round trip does both
        if self.pacing.overlaps and self._settled and leases and not self._isolating:
            results = await asyncio.gather(self._settle(), self._lease_more(), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            return cast("float | None", results[1])
        if self._settled and not lingers:
            await self._settle()
        return await self._lease_more() if leases and not self.stopping else None

    def _linger(self) -> float:
        """Seconds to wait for more settlements, so that they are stored together."""
        if not self._settled or self.stopping:
            return 0.0
        busy = len(self._active) + len(self._ahead)
        return self.pacing.linger(len(self._settled), self._settled_since, busy, self.concurrency)

    async def _is_over(self) -> bool:
        if self.stopping or self._queue.limit_reached:
            return True
        if self.pacing.poll_after and clock.monotonic() < self._check_again:
            return False
        self._check_again = clock.monotonic() + _POLLS_PER_CHECK * self.pacing.poll_after
        stats = await self._persist(self._frontier.stats)
        self._kept_open = stats.finished and not self._part.stays and await self._part.spider.idle()
        if stats.finished and not self._part.stays:
            return not self._kept_open
        return self._seeder.failure is not None and stats.remaining == 0

    @property
    def _held_by(self) -> str:
        """Why no page can be fetched now. Empty if pages can."""
        return next((route.reason or "not ready" for route in self._onion.routes if not route.ready), "")

    def _room(self) -> int:
        """How many requests to lease now."""
        if self._isolating:
            return 0 if self._active or self._ahead or self._settled else 1
        return self.pacing.room(self.concurrency - len(self._active), len(self._ahead), self.concurrency)

    async def _lease_more(self) -> float | None:
        """Fill the free places. Returns the seconds until the next poll. None: sleep until something happens."""
        room = self._room()
        if room <= 0:
            return self.pacing.pause()
        self._leased = None
        may_work = self._part.may_work
        if self._log.far_behind or (may_work is not None and not may_work()):
            return 0.05
        if self._storage.is_down:
            return None
        if self._held_by:
            return _WAIT_FOR_ROUTE
        nonce = chance.token_bytes(16)  # so that a repeat after a lost answer returns the same leases
        leased = await self._persist(lambda: self._queue.next_requests(room, nonce=nonce))
        if leased.leases:
            self._onion.session.jars.seen(leased.cookies)
        leases = await self._isolate_suspects(leased.leases)
        if self.stopping:  # the stop came during the call
            self._settled.extend(ReleasedLease(lease, contacted=False) for lease in leases)
            return None
        if leases:
            self._log.expect_items()
            self._end_wait()
        else:
            self._leased = leased
        for lease in leases:
            self._onion.on_lease(lease)
            self._leases.add(lease)
            self._ahead.append(lease)
        self._fill()
        has_place = len(self._active) < self.concurrency
        return self.pacing.after(leased, short=len(leased.leases) < room, has_place=has_place)

    async def _isolate_suspects(self, leases: list[Lease]) -> list[Lease]:
        """Return the leases without suspects. A suspect is a request on its last attempt that has lost a worker.

        Release the suspects. The engine then leases them one by one, when nothing else is in flight. So a page that
        kills its worker never costs another page its last attempt."""
        max_attempts = self._config.retry.max_attempts
        last = [lease for lease in leases if lease.attempt >= max_attempts > 1]
        suspects = await self._persist(lambda: lost_before(self._frontier, last)) if last else []
        if self._isolating and not suspects:
            self._waker.wake()  # to lease more than one again
        self._isolating = bool(suspects)
        if suspects and (len(leases) > 1 or self._active or self._ahead):
            self._settled.extend(ReleasedLease(lease, contacted=False) for lease in suspects)
            return [lease for lease in leases if lease not in suspects]
        return leases

    def _fill(self) -> None:
        """Start tasks for leases that have not begun, while places are free.

        While the store is away, start none: it may come back older, and then each host needs a pause before its next
        page.
        """
        while self._ahead and len(self._active) < self.concurrency and not self.stopping and not self._persist.away:
            lease = self._ahead.popleft()
            task = asyncio.get_running_loop().create_task(self._work(lease))
            if not task.done():  # an eager task may have ended
                self._active[lease.token] = task, lease

    def stop(self, grace: float | None = None) -> None:
        """Lease nothing more. Pages in flight have ``grace`` seconds to end (default ``shutdown_grace``). Then they are
        released."""
        if self.stopping:
            return
        self.stopping = True
        grace = self._config.shutdown_grace if grace is None else grace
        loop = asyncio.get_running_loop()
        loop.call_later(grace, self._cancel_active)
        if (patience := self.pacing.give_up_after) is not None:
            loop.call_later(grace + patience, self._give_up)
            loop.call_later(grace + 2 * patience, self._persist.give_up)
        else:
            loop.call_later(grace + HURRY, self._persist.give_up_if_away)  # a local file, if its disk is full
        self.release_ahead()

    def abort(self) -> None:
        """Stop now. Drop the pages in flight, and release them if the store still answers."""
        self.stop(0.0)
        self._cancel_active()

    @property
    def away(self) -> bool:
        """Whether the server of the frontier did not answer the last call."""
        return self._persist.away

    @property
    def why_nothing(self) -> str:
        """Why the run has no requests at all. Empty if it has some, or if another process seeds it."""
        return self._seeder.why_nothing

    @property
    def in_flight(self) -> int:
        return len(self._active)

    def halt(self, halted: bool) -> None:
        """While the run is paused, lease nothing. Pages in flight end normally."""
        self._halted = halted
        if halted:
            self.release_ahead()
        self._waker.wake()

    def poll_now(self) -> None:
        """Lease without waiting for the next poll: requests may be due."""
        self.pacing.poll_now()
        self._waker.wake()

    def release_ahead(self) -> None:
        """Release the leases that have not begun."""
        for lease in self._ahead:
            self._leases.remove(lease)
            self._settled.append(ReleasedLease(lease, contacted=False))
        self._ahead.clear()
        self._waker.wake()

    def _cancel_active(self) -> None:
        self._cancel([task for task, _ in self._active.values()])

    def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        asyncio.get_running_loop().call_soon(self._settle_unbegun)

    def _settle_unbegun(self) -> None:
        """Settle leases whose task was cancelled before it began."""
        for lease in [lease for task, lease in self._active.values() if task.done()]:
            self._ended(ReleasedLease(lease, contacted=False), lease)

    def _give_up(self) -> None:
        """Stop waiting for a server that does not answer: the leases expire."""
        if self._persist.away or self._active or self._settled:
            self._persist.give_up()

    def _drop(self, lease: Lease) -> None:
        """Stop work on a lost lease."""
        for ahead in self._ahead:  # a renewal may have replaced ``lease``
            if ahead.fingerprint == lease.fingerprint and ahead.token == lease.token:
                self._ahead.remove(ahead)
                # If the lease is still ours, its release costs no attempt.
                self._settled.append(ReleasedLease(ahead, contacted=False))
                self._waker.wake()
                break
        if lease.token in self._active:
            self._cancel([self._active[lease.token][0]])

    # -- one request

    async def _work(self, lease: Lease) -> None:
        """Handle one lease. Every lease ends as a settlement."""
        settlement: Settlement = ReleasedLease(lease, contacted=True)
        try:
            good = self._leases.is_good(lease)
            settlement = await self.handler.handle(lease) if good else ReleasedLease(lease, contacted=False)
        except asyncio.CancelledError:
            pass
        finally:  # whatever was raised
            self._ended(settlement, lease)

    def _ended(self, settlement: Settlement, lease: Lease) -> None:
        self._active.pop(lease.token, None)
        self._leases.remove(lease)
        if not self._settled:
            self._settled_since = clock.monotonic()
        self._settled.append(settlement)
        self._fill()
        self._waker.wake()

    # -- settling

    async def _settle(self) -> None:
        """Store all pages that have ended since the last call, in one batch."""
        batch, self._settled = self._settled, []
        self.pacing.poll_now()
        self._recent.extend(map(lease_of, batch))
        try:
            await self._settler.settle(batch)
            if self._part.on_settled is not None and not self.stopping:
                await self._part.on_settled()
        except StoreRewoundError:
            self._settled = batch + self._settled  # `_start_over` releases their leases
            raise
        except SinkError as error:
            self._archive_failed(error, batch)

    def _files_failed(self, error: FileStoreError) -> None:
        self._storage.failed(error, self.handler.files.keeper.retry)
        self.release_ahead()

    def _archive_failed(self, error: SinkError, batch: list[Settlement]) -> None:
        """Release the pages that the archive did not store. Nothing of the batch was settled."""
        archive = self._part.archive
        assert archive is not None
        parsed = [settlement for settlement in batch if isinstance(settlement, ParsedPage)]
        pages = [(page.completion.lease, page.exchange) for page in parsed if page.exchange is not None]

        async def store_again() -> None:
            await archive.store(pages)
            archive.settled([lease for lease, _ in pages], [False] * len(pages))

        released: list[Settlement] = [
            ReleasedLease(lease_of(settlement), contacted=True) if isinstance(settlement, ParsedPage) else settlement
            for settlement in batch
        ]
        self._settled = released + self._settled
        self._storage.failed(error, store_again)
        self.release_ahead()

    def _items_stored(self) -> None:
        self._log.expect_items()
        for drain in self._drains:
            drain.nudge()

    # -- helpers

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            if isinstance(error, FrontierError) and self.can_start_over(error):
                self.interrupt(error)
                return
            if self.stopping and isinstance(error, StoreAwayError):
                return  # the stop gave up on purpose
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the crawl with this error. Its requests stay in the frontier."""
        self._failure = self._failure or error
        self.stop()

    async def _wind_down(self) -> None:
        """Release all leases."""
        self.release_ahead()  # first, so that no page begins when another ends
        tasks = [*self._helpers, *(task for task, _ in self._active.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._settle_unbegun()
        self._helpers = []
        while self._settled and self._interruption is None:
            try:
                await self._settle()
            except StoreRewoundError as error:
                self._interruption = error
            except StoreAwayError as error:
                log.warning("leases could not be released; they will expire: %s", error)
        self._storage.stop()

    async def snapshot(self, hosts: int = 8) -> CrawlSnapshot:
        """The state of the crawl now."""
        return CrawlSnapshot(
            stats=await self._frontier.stats(),
            hosts=await self._frontier.host_states(hosts),
            in_flight=len(self._active),
            counters=self.counters,
            waiting=self._held_by or self._waiting.reason,
        )
