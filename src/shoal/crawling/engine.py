"""The loop: lease, fetch, parse, complete. Read it from top to bottom.

`Engine.run` starts the helpers (seeder, lease keeper, drainers) and pumps: what has been worked on is settled with the
frontier in one batch, free places are filled with new leases, and each lease is a task of its own. No task waits for
anything but its own page: delays, backoff and blocks are waited for in the frontier.

A frontier on a server is a round trip away: then settlements are held back for a moment to go together, and some leases
are taken ahead, so that no place is empty meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.config import Config
from shoal.crawling.backpressure import ItemLogKeeper
from shoal.crawling.leases import LeaseKeeper, lost_before
from shoal.crawling.page import Handler, Parsed, Released, Settlement
from shoal.crawling.retrying import Persistence
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.seeder import Seeder, Source
from shoal.crawling.stats import Counters, Snapshot
from shoal.errors import StoreAwayError, StoreRewoundError
from shoal.ports import Completion, Failure, Fetch, Frontier, Lease, Leased
from shoal.spider import Spider

log = logging.getLogger("shoal.engine")

_LINGER = 0.02  # seconds that a settlement waits for others, while there is enough to do
_POLL = (0.05, 0.5)  # seconds between looks at a queue that others may fill, first and at most
_SELDOM = 4  # polls between two checks whether the run is over, where many idle workers poll
_ROUND = 15.0  # seconds in which the loop goes round at least once: also an idle one is seen to live
_RECENT = 1000  # settled leases that are released once more if the store goes back in time
_LAST_WORD = 0.4  # seconds that giving back may take when the process was asked to stop


class Drain(Protocol):
    """What the engine needs of a drainer: it is started and finished by whoever made it."""

    def nudge(self) -> None: ...

    async def run(self) -> None: ...

    async def start_over(self) -> None:
        """The store went back in time: continue from the cursor that it has now. ``run`` is not running."""
        ...


def _lease_of(settlement: Settlement) -> Lease:
    return settlement.completion.lease if isinstance(settlement, Parsed) else settlement.lease


class Engine:
    """Crawls one run with one spider until it is finished, asked to stop, or has failed."""

    def __init__(
        self,
        spider: Spider,
        config: Config,
        scheduler: Scheduler,
        fetch: Fetch,
        drains: Sequence[Drain] = (),
        *,
        source: Source | None = None,
        shared: bool = False,
        keep_items: bool = True,
        stay: bool = False,
        on_lease: Callable[[Lease], None] = lambda lease: None,
        on_rewind: Callable[[], None] = lambda: None,
        may_work: Callable[[], bool] = lambda: True,
    ) -> None:
        """``source`` gives the start requests; None: somebody else pushes them. ``shared``: the frontier is a server's,
        and others work on it too. ``keep_items``: the item log stays after all drains have passed it. ``stay``: also
        when the run is finished, as it may get more to do. ``on_rewind`` is called when the store went back in time.
        ``may_work``: whether this process still has its slot in a cluster; asked before each page."""
        self.counters = Counters()
        self.concurrency = config.concurrency
        """How many pages may be in flight; it may be changed at any time."""
        self.went_round = time.monotonic()
        """When the loop last did, on the monotonic clock."""
        self._config = config
        self._scheduler = scheduler
        self._frontier: Frontier = scheduler.frontier
        self._handler = Handler(spider, config, scheduler, fetch, self.counters)
        self._drains = drains
        self._persist = Persistence(shared=shared)
        self._seeder = Seeder(source, scheduler, config, self.counters, self._persist, self._wake, shared=shared)
        self._leases = LeaseKeeper(self._frontier, config.lease.ttl, self._drop, may_work)
        self._log = ItemLogKeeper(self._frontier, self._persist, keep=keep_items, every=1.0 if shared else 0.2)
        self._shared = shared
        self._stay = stay
        self._on_lease = on_lease
        self._on_rewind = on_rewind
        self._active: dict[asyncio.Task[None], Lease] = {}
        self._ahead: deque[Lease] = deque()
        self._settled: list[Settlement] = []
        self._recent: deque[Lease] = deque(maxlen=_RECENT)
        """Leases that were settled last."""
        self._settled_since = 0.0
        self._lease_again = 0.0
        """Not before this moment, unless something was settled."""
        self._careful = False
        """The last chance of a request that lost its workers is waiting: nothing else may be in flight beside it."""
        self._poll = _POLL[0]
        self.poll_after = 0.0
        """Seconds between polls that the store asks for, as many workers are idle; 0: no more than usual."""
        self._check_again = 0.0
        self._helpers: list[asyncio.Task[None]] = []
        self._waker: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._rewound = False
        self._woken = False
        self._halted = False
        self.stopping = False

    # -- the loop

    async def run(self) -> None:
        """Until the run is finished, its page limit is reached, or ``stop``. What it could not finish is given back.

        Raises what made it impossible to go on: an error of the frontier, of a sink, or of the spider's ``start``.
        When the store went back in time, it starts over from what the store has.
        """
        while True:
            try:
                await self._run()
            except StoreRewoundError as error:
                log.error("%s", error)
                await self.start_over()
                if not self.stopping:
                    continue
            failure = self._failure or self._seeder.failure
            if failure is not None:
                raise failure
            return

    async def _run(self) -> None:
        for work in (
            self._seeder.keep(),
            self._leases.run(),
            self._log.run(),
            *(drain.run() for drain in self._drains),
        ):
            task = asyncio.create_task(work)
            task.add_done_callback(self._helper_ended)
            self._helpers.append(task)
        try:
            await self._pump()
        except StoreAwayError:
            if not self.stopping:  # else it was given up: what is leased runs out by itself
                raise
        finally:
            await self._wind_down()
        if self._rewound:
            raise StoreRewoundError("the store went back in time")

    async def start_over(self) -> None:
        """Drop all work and all knowledge of a store that went back in time, and record that it did. Then ``run`` may
        be called again: it continues from what the store has, as a new process would."""
        leases = [_lease_of(each) for each in self._settled]
        # In the store as it is now, those that were settled last may be leased still, and nobody would end them.
        leases += self._recent
        self._recent.clear()
        self._settled = []
        self._rewound = False
        self._leases.clear()
        self._scheduler.forget()
        self._on_rewind()
        rewind = await self._persist(self._frontier.recover)
        lost = "" if rewind is None or rewind.lost_seconds is None else f" by up to {rewind.lost_seconds:.1f} s"
        log.error("the store went back in time%s: this process starts over from what the store has", lost)
        await self._persist(lambda: self._frontier.release(leases, contacted=True))
        await self._seeder.start_over()
        if not self.stopping:
            for drain in self._drains:
                await drain.start_over()

    async def _pump(self) -> None:
        while True:
            self.went_round = time.monotonic()
            self._woken = False
            if self._rewound:
                raise StoreRewoundError("the store went back in time")
            linger = self._linger()
            if self._settled and not linger:
                await self._settle()
            wait = None if self.stopping or self._halted else await self._lease_more()
            if not self._active and not self._ahead and not self._settled and await self._is_over():
                return
            if linger:
                wait = linger if wait is None else min(wait, linger)
            if linger or not self._settled:
                await self._sleep(wait)

    def _linger(self) -> float:
        """How long to wait for more settlements before they go together: not while a place is empty."""
        if not self._shared or not self._settled or self.stopping:
            return 0.0
        if 4 * (len(self._active) + len(self._ahead)) <= 3 * self.concurrency:
            return 0.0
        if 4 * len(self._settled) >= self._config.lease.batch:
            return 0.0
        return max(0.0, self._settled_since + _LINGER - time.monotonic())

    async def _is_over(self) -> bool:
        if self.stopping or self._scheduler.limit_reached:
            return True
        if self.poll_after and time.monotonic() < self._check_again:
            return False
        self._check_again = time.monotonic() + _SELDOM * self.poll_after
        stats = await self._persist(self._frontier.stats)
        if stats.finished and not self._stay:
            return True
        return self._seeder.failure is not None and stats.remaining == 0

    def _wanted(self) -> int:
        """How many leases there is room for."""
        if self._careful:
            return 0 if self._active or self._ahead or self._settled else 1
        free = self.concurrency - len(self._active)
        if not self._shared:
            return free
        batch = self._config.lease.batch
        ahead = min(batch, self.concurrency)  # no more: other workers want something to do too
        if 2 * len(self._ahead) > ahead or time.monotonic() < self._lease_again:
            return 0
        return min(batch, free + ahead - len(self._ahead))

    async def _lease_more(self) -> float | None:
        """Fill the free places. How long until there may be more, if time alone can tell."""
        wanted = self._wanted()
        if wanted <= 0:
            return max(0.0, self._lease_again - time.monotonic()) if self._shared and self._lease_again else None
        if self._log.far_behind:
            return 0.05
        nonce = os.urandom(16)  # so that a repeat after a lost answer returns the same leases
        leased = await self._persist(lambda: self._scheduler.next_requests(wanted, nonce=nonce))
        leases = await self._fit_company(leased.leases)
        if self.stopping:  # asked to while the frontier was
            self._settled.extend(Released(lease, contacted=False) for lease in leases)
            return None
        if leases:
            self._log.expect_items()
        for lease in leases:
            self._on_lease(lease)
            self._leases.add(lease)
            self._ahead.append(lease)
        self._fill()
        return self._next_look(leased, short=len(leased.leases) < wanted)

    async def _fit_company(self, leases: list[Lease]) -> list[Lease]:
        """Without those that have to be alone: they go back, and are leased one by one when nothing is in flight. So a
        page that kills its worker costs its neighbours an attempt, but never the last one."""
        most = self._config.retry.max_attempts
        last = [lease for lease in leases if lease.attempt >= most > 1]
        alone = await self._persist(lambda: lost_before(self._frontier, last)) if last else []
        if self._careful and not alone:
            self._wake()  # for more than the one that was leased
        self._careful = bool(alone)
        if alone and (len(leases) > 1 or self._active or self._ahead):
            self._settled.extend(Released(lease, contacted=False) for lease in alone)
            return [lease for lease in leases if lease not in alone]
        return leases

    def _next_look(self, leased: Leased, *, short: bool) -> float | None:
        """Seconds until the next lease. A shared queue is polled, as others may fill it; less often where the store
        says that many idle workers do."""
        wait = leased.wait
        if not self._shared:
            return wait
        if not short:
            self._lease_again, self._poll = 0.0, _POLL[0]
            return 0.0 if len(self._active) < self.concurrency else None
        wait = self._poll if wait is None else min(wait, self._poll)
        self._poll = _POLL[0]
        self.poll_after = 0.0 if leased.leases else leased.poll_after
        if not leased.leases:
            wait = max(wait, leased.poll_after * random.uniform(0.75, 1.25))
            self._poll = min(_POLL[1], 1.5 * wait)
        self._lease_again = time.monotonic() + wait
        return wait

    def _fill(self) -> None:
        """Begin with what was leased ahead, as far as there are places."""
        while self._ahead and len(self._active) < self.concurrency and not self.stopping:
            lease = self._ahead.popleft()
            task = asyncio.create_task(self._work(lease))
            self._active[task] = lease
            task.add_done_callback(self._task_ended)

    def stop(self, grace: float | None = None) -> None:
        """Lease nothing more; end what is in flight, or give it back after ``grace`` (default ``shutdown_grace``)."""
        if not self.stopping:
            self.stopping = True
            grace = self._config.shutdown_grace if grace is None else grace
            loop = asyncio.get_running_loop()
            loop.call_later(grace, self._cancel_active)
            if self._shared:
                loop.call_later(grace + _LAST_WORD, self._give_up)
                loop.call_later(grace + 2 * _LAST_WORD, self._persist.give_up)
            self.give_back()

    def abort(self) -> None:
        """Stop in this moment: what is in flight is dropped, and given back if the frontier still takes it."""
        self.stop(0.0)
        self._cancel_active()

    @property
    def away(self) -> bool:
        """The frontier's server could not be reached the last time."""
        return self._persist.away

    @property
    def in_flight(self) -> int:
        return len(self._active)

    def halt(self, halted: bool) -> None:
        """While the run is paused nothing is leased, nor asked for. What is in flight is ended."""
        self._halted = halted
        if halted:
            self.give_back()
        self._wake()

    def look(self) -> None:
        """Ask for leases now: somebody knows that there may be some."""
        self._lease_again = 0.0
        self._wake()

    def give_back(self) -> None:
        """What was leased ahead and has not begun."""
        for lease in self._ahead:
            self._leases.remove(lease)
            self._settled.append(Released(lease, contacted=False))
        self._ahead.clear()
        self._wake()

    def _cancel_active(self) -> None:
        for task in self._active:
            task.cancel()

    def _give_up(self) -> None:
        """A server that is away is not waited for any longer: what it has leased to us runs out by itself."""
        if self._persist.away or self._active or self._settled:
            self._persist.give_up()

    def _drop(self, lease: Lease) -> None:
        """The lease is lost: whatever is done for it is for nothing."""
        for ahead in self._ahead:  # which may have been renewed since
            if ahead.fingerprint == lease.fingerprint and ahead.token == lease.token:
                self._ahead.remove(ahead)
                self._settled.append(Released(ahead, contacted=False))  # if it is still ours, no attempt is lost
                self._wake()
                break
        for task, held in self._active.items():
            if held.fingerprint == lease.fingerprint and held.token == lease.token:
                task.cancel()

    async def _sleep(self, seconds: float | None) -> None:
        """Until something happens, or for so long, and never for long. What happened since the top of the loop counts
        too."""
        if self._woken:
            return
        loop = asyncio.get_running_loop()
        self._waker = loop.create_future()
        timer = loop.call_later(_ROUND if seconds is None else min(_ROUND, max(0.001, seconds)), self._wake)
        try:
            await self._waker
        finally:
            self._waker = None
            timer.cancel()

    def _wake(self) -> None:
        self._woken = True
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    # -- one request

    async def _work(self, lease: Lease) -> None:
        """The life of a lease. Whatever happens, it ends as a settlement."""
        task = asyncio.current_task()
        assert task is not None
        settlement: Settlement
        try:
            good = self._leases.is_good(lease)
            settlement = await self._handler.handle(lease) if good else Released(lease, contacted=False)
        except asyncio.CancelledError:
            settlement = Released(lease, contacted=True)
        self._active.pop(task, None)
        self._ended(settlement, lease)

    def _ended(self, settlement: Settlement, lease: Lease) -> None:
        self._leases.remove(lease)
        if not self._settled:
            self._settled_since = time.monotonic()
        self._settled.append(settlement)
        self._fill()
        self._wake()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before it began has settled nothing."""
        lease = self._active.pop(task, None)
        if lease is not None:
            self._ended(Released(lease, contacted=False), lease)

    # -- settling with the frontier

    async def _settle(self) -> None:
        """One batch for all that has ended since the last; what ends meanwhile is in the next."""
        batch, self._settled = self._settled, []
        self._lease_again = 0.0
        try:
            await self._settle_batch(batch)
        except StoreRewoundError:
            self._settled = batch + self._settled  # for ``start_over``, which releases their leases
            raise

    async def _settle_batch(self, batch: list[Settlement]) -> None:
        if self._shared:
            self._recent.extend(map(_lease_of, batch))
        parsed = [each for each in batch if isinstance(each, Parsed)]
        failures = [each for each in batch if isinstance(each, Failure)]
        if parsed:
            await self._commit(parsed)
        if failures:
            states = await self._persist(lambda: self._frontier.fail(failures))
            self._scheduler.not_a_page(len(failures))
            self._count_items(failures, states)
        for contacted in (True, False):
            leases = [each.lease for each in batch if isinstance(each, Released) and each.contacted is contacted]
            if leases:
                await self._release(leases, contacted=contacted)

    async def _release(self, leases: list[Lease], *, contacted: bool) -> None:
        await self._persist(lambda: self._frontier.release(leases, contacted=contacted))
        self._scheduler.not_a_page(len(leases))

    async def _commit(self, parsed: list[Parsed]) -> None:
        completions = [each.completion for each in parsed]
        results = await self._persist(lambda: self._frontier.complete(completions))
        for each, pushed in zip(parsed, results, strict=True):
            if pushed is not None and pushed.added + pushed.duplicates:  # else it has no links, or is a repeat
                self._scheduler.learn(each.admitted)
        self._count_items(completions, results)

    def _count_items(self, settled: Sequence[Completion | Failure], results: Sequence[object]) -> None:
        count = 0
        for each, result in zip(settled, results, strict=True):
            if result is None:
                self.counters.leases_lost += 1
                log.warning("lease lost; its work is not counted url=%s", each.lease.request.url)
            elif result != "waiting":
                count += len(each.items)
        if count:
            self.counters.items += count
            self._log.expect_items()
            for drain in self._drains:
                drain.nudge()

    # -- helpers

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            if isinstance(error, StoreRewoundError):
                self._rewound = True
                self._wake()
                return
            if self.stopping and isinstance(error, StoreAwayError):
                return  # it was given up
            self._failure = error
            self.stop()

    async def _wind_down(self) -> None:
        """Give back what is still out, whatever the reason."""
        for task in (*self._helpers, *self._active):
            task.cancel()
        await asyncio.gather(*self._helpers, *self._active, return_exceptions=True)
        self._helpers = []
        self.give_back()
        if self._settled and not self._rewound:
            try:
                await self._settle()
            except StoreRewoundError:
                self._rewound = True
            except StoreAwayError as error:
                log.warning("leases were not given back, they run out by themselves: %s", error)

    async def snapshot(self, hosts: int = 8) -> Snapshot:
        """The crawl at this moment."""
        return Snapshot(
            stats=await self._frontier.stats(),
            hosts=await self._frontier.host_states(hosts),
            in_flight=len(self._active),
            counters=self.counters,
        )
