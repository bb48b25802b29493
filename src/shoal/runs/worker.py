"""A worker of a fleet: leases, fetches, parses, completes, beside any number of others, until the run is finished."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from shoal.config import Config
from shoal.crawling.assembly import make_engine, make_fetcher, make_scheduler
from shoal.crawling.engine import Engine
from shoal.crawling.retrying import Persistence
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.seeder import start_requests
from shoal.crawling.stats import Counters, Snapshot, Summary, Vitals
from shoal.errors import FrontierError, RunError, ShoalError, StoreRewoundError
from shoal.frontier import open_store
from shoal.ports import Frontier, Holder, Run, Store
from shoal.runs.start import RunSettings, find_run
from shoal.runs.trust import check_outputs, guarded_spider
from shoal.sinks import open_sink, sink_id
from shoal.sinks.takeover import StandbyDrainer
from shoal.spider import Spider

log = logging.getLogger("shoal.worker")

GRACE = 0.5  # seconds that what is in flight has when a worker is asked to stop, unless it is told otherwise
_WATCH_EVERY = 1.0
_WATCH_PAUSED = 4.0
_SEED_LOOKS = 10  # of these between two looks at who seeds
_ROLE_TTL = 60.0
_LAST_WORD = 1.2  # seconds that outputs have after a stop
_CLOSING = 0.5


class Worker:
    """One process's part in a run. ``await worker.run()`` once; ``stop`` ends it in good order."""

    def __init__(
        self,
        spider: Spider,
        config: Config,
        run_id: str,
        *,
        outputs: Sequence[str] = (),
        keep_alive: bool = False,
        allow_changed: bool = False,
        grace: float = GRACE,
        holder: Holder | None = None,
        may_work: Callable[[], bool] = lambda: True,
    ) -> None:
        """``outputs`` are written by this worker, beside those that the run was started with. ``keep_alive``: stay when
        the run is finished. ``allow_changed``: also when the spider's file is not the one that the run began with.
        A node of a cluster works as ``holder`` of a slot, as long as ``may_work``."""
        self.spider = spider
        self.config = config
        self.run_id = run_id
        self.worker_id = new_worker_id()
        self.outputs = tuple(outputs)
        self.summary: Summary | None = None
        self.error: ShoalError | None = None
        self._keep_alive = keep_alive
        self._allow_changed = allow_changed
        self._grace = grace
        self._holder = holder
        self._may_work = may_work
        self._starting: Persistence | None = None
        """Repeats the steps before there is an engine."""
        self._engine: Engine | None = None
        self._frontier: Frontier | None = None
        self._asked = asyncio.Event()

    def stop(self) -> None:
        """Give back what is leased: at once, but for what ends within the grace."""
        self._asked.set()
        if self._engine is None and self._starting is not None:
            self._starting.give_up()
        if self._engine is not None and not self._engine.stopping:
            log.warning("stopping: leases are given back")
            self._engine.stop(self._grace)

    def abort(self) -> None:
        """Stop in this moment: the slot is lost."""
        self._asked.set()
        if self._engine is None and self._starting is not None:
            self._starting.give_up()
        if self._engine is not None:
            self._engine.abort()

    @property
    def engine(self) -> Engine | None:
        """What does the work, once it has begun."""
        return self._engine

    async def snapshot(self) -> Snapshot | None:
        """The worker at this moment; None before it has begun."""
        return None if self._engine is None else await self._engine.snapshot()

    def vitals(self) -> Vitals:
        """What it knows of itself."""
        engine = self._engine
        return Vitals(
            worker=self.worker_id,
            run_id=self.run_id,
            spider=self.spider.spider_name(),
            counters=Counters() if engine is None else engine.counters,
            in_flight=0 if engine is None else engine.in_flight,
            went_round=None if engine is None else engine.went_round,
            frontier=self._frontier,
        )

    def __await__(self) -> Generator[Any, None, Summary]:
        return self.run().__await__()

    async def run(self) -> Summary:
        """Work until the run is finished, cancelled, or ``stop``. What made it impossible to go on is in ``error``."""
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            store = await open_store(self.config.frontier)
            stack.push_async_callback(_close_quietly, store)
            persist = self._starting = Persistence(shared=store.shared)
            finding = partial(find_run, store, self.run_id, self.spider, allow_changed=self._allow_changed)
            run, settings = await persist(finding)
            check_outputs(run.run_id, settings.outputs, self.outputs, self.config)
            self.config = self.config.with_settings(settings.shared_settings())
            guarded_spider(self.spider, self.config)
            opening = partial(store.frontier, run.run_id, settings.options, self._holder)
            frontier = self._frontier = await persist(opening)
            await persist(partial(self._succeed, frontier))
            scheduler = make_scheduler(self.spider, self.config, frontier, shared=store.shared)
            drains = self._drains(frontier, settings)
            fetcher = make_fetcher(self.config, settings.networks)
            stack.push_async_callback(fetcher.close)
            engine = self._engine = make_engine(
                self.spider, self.config, scheduler, stack, drains,
                source=(lambda: start_requests(self.spider)) if settings.seeds == "spider" else None,
                shared=store.shared, keep_items=settings.keep_items, stay=self._keep_alive,
                may_work=self._may_work, fetcher=fetcher,
            )  # fmt: skip
            await persist(partial(self._begin, store, run, frontier))
            log.info("worker %s works on run %s of %s", self.worker_id, run.run_id, run.spider)
            watch = asyncio.create_task(self._watch(store, frontier))
            try:
                until = await self._work(engine, store, frontier, scheduler, drains)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            self.summary = await self._summarize(run, frontier, scheduler, started, until)
        return self.summary

    async def _work(
        self, engine: Engine, store: Store, frontier: Frontier, scheduler: Scheduler, drains: Sequence[StandbyDrainer]
    ) -> float:
        """To the end of the run, and of its outputs. Until when the summary may take, on the loop's clock."""
        while True:
            try:
                if self._asked.is_set():
                    engine.stop(self._grace)
                await engine.run()
            except ShoalError as exc:
                self.error = exc
            until = asyncio.get_running_loop().time() + _LAST_WORD
            try:
                await self._end(store, frontier, scheduler, drains)
                return until
            except StoreRewoundError as exc:
                if self.error is not None or engine.stopping:
                    log.error("%s", exc)
                    return until
                try:
                    await engine.start_over()
                except ShoalError as failure:
                    self.error = failure
                    return until

    async def _succeed(self, frontier: Frontier) -> None:
        """Take what the slot's last holder had: it may be dead, or believe that it still has it."""
        if self._holder is not None:
            count = await frontier.fence(self._holder.slot, self._holder.epoch)
            log.log(logging.WARNING if count else logging.DEBUG, "%d leases of the last holder were given back", count)

    def _drains(self, frontier: Frontier, settings: RunSettings) -> list[StandbyDrainer]:
        specs = {sink_id(spec): spec for spec in (*settings.outputs, *self.outputs)}
        ttl = min(_ROLE_TTL, self.config.lease.ttl)
        make_sink = partial(open_sink, run_id=self.run_id, on_reject=self._count_rejects)
        return [
            StandbyDrainer(frontier, partial(make_sink, spec), identity, ttl=ttl) for identity, spec in specs.items()
        ]

    def _count_rejects(self, count: int) -> None:
        """Items that an output can't take."""
        if self._engine is not None:
            self._engine.counters.item_errors += count

    async def _begin(self, store: Store, run: Run, frontier: Frontier) -> None:
        if run.state == "queued" or (run.state == "finished" and not (await frontier.stats()).finished):
            with suppress(RunError):  # another worker was first
                await store.transition(run.run_id, "running")

    async def _watch(self, store: Store, frontier: Frontier) -> None:
        """See what others do to the run. A halted one gives no leases anyway: what was leased ahead goes back."""
        state, looks = "running", 0
        while True:
            seldom = 0.0 if self._engine is None else 4 * self._engine.poll_after  # many idle workers
            await asyncio.sleep(max(seldom, _WATCH_PAUSED if state == "paused" else _WATCH_EVERY))
            try:
                found = await store.run_state(self.run_id)
                if found is None or found == "cancelled":
                    log.warning("run %s was %s", self.run_id, found or "removed")
                    return self.stop()
                if found == "queued":  # the store went back in time to before somebody began
                    await self._leave_queued(store)
                    found = "running"
                if found != state:
                    log.warning("run %s is %s", self.run_id, found)
                    state = found
                    if self._engine is not None:
                        self._engine.halt(state == "paused")
                looks += 1
                if looks % _SEED_LOOKS == 0 and await self._is_unseeded(frontier):
                    log.warning("seeding is incomplete and no process is seeding; run `shoal start` again")
                if self._keep_alive and state in ("running", "finished"):
                    await self._show_state(store, state, finished=(await frontier.stats()).finished)
            except FrontierError as exc:
                log.debug("could not look at the run: %s", exc)

    async def _leave_queued(self, store: Store) -> None:
        """Somebody works on the run."""
        if await store.run_state(self.run_id) == "queued":
            await store.transition(self.run_id, "running")

    async def _is_unseeded(self, frontier: Frontier) -> bool:
        if not (await frontier.stats()).seeding:
            return False
        return not any(role.held for role in await frontier.roles() if role.role == "seed")

    async def _show_state(self, store: Store, state: str, *, finished: bool) -> None:
        """A worker that stays sees its run end, and go on."""
        if finished != (state == "finished"):
            with suppress(RunError):
                await store.transition(self.run_id, "finished" if finished else "running")

    async def _end(
        self, store: Store, frontier: Frontier, scheduler: Scheduler, drains: Sequence[StandbyDrainer]
    ) -> None:
        stopped = self._asked.is_set() or self.error is not None
        work = asyncio.create_task(self._finish(store, frontier, scheduler, drains, stopped=stopped))
        asked = asyncio.create_task(self._asked.wait())
        try:
            if not stopped:  # an output that is down is waited for
                await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            done, _ = await asyncio.wait({work}, timeout=_LAST_WORD)
            if not done:
                log.warning("an output or the frontier's server is away: another worker goes on with the outputs")
            elif (exc := work.exception()) is not None:
                raise exc
        except StoreRewoundError:
            raise
        except ShoalError as exc:
            self.error = self.error or exc
        finally:
            asked.cancel()
            work.cancel()  # and not waited for: it may want to tidy up with a server that does not answer

    async def _finish(
        self, store: Store, frontier: Frontier, scheduler: Scheduler, drains: Sequence[StandbyDrainer], *, stopped: bool
    ) -> None:
        persist = Persistence(shared=store.shared)
        ended = not stopped and (
            (await persist(frontier.stats)).finished or await self._limit_is_kept(scheduler, persist)
        )
        if not stopped and not ended:  # the engine ended, so perhaps the store went back since: this call would notice
            await persist(lambda: frontier.lease(0, self.config.lease.ttl))
        for drain in drains:
            await drain.finish(finished=ended)
        if ended:
            with suppress(RunError):
                await persist(partial(self._leave_queued, store))
                await persist(lambda: store.transition(self.run_id, "finished"))
            try:
                await persist(lambda: frontier.lease(0, self.config.lease.ttl))
            except StoreRewoundError:  # in this moment: the run may have more to do
                with suppress(RunError):
                    await persist(lambda: store.transition(self.run_id, "running"))
                raise

    async def _limit_is_kept(self, scheduler: Scheduler, persist: Persistence) -> bool:
        """Whether the page limit ended the run: not while another worker still has some of the pages."""
        return scheduler.limit_reached and not (await persist(scheduler.frontier.stats)).leased

    async def _summarize(
        self, run: Run, frontier: Frontier, scheduler: Scheduler, started: float, until: float
    ) -> Summary:
        from shoal.ports import Stats

        assert self._engine is not None
        state, stats, kinds = "stopped", Stats(), {}
        with suppress(FrontierError, TimeoutError):
            async with asyncio.timeout_at(until if self._asked.is_set() else None):
                stats, kinds = await frontier.stats(), await frontier.dead_kinds()
                state = "finished" if stats.finished else "limit" if scheduler.limit_reached else "stopped"
        return Summary(
            run_id=run.run_id,
            spider=run.spider,
            state="failed" if self.error is not None else state,
            error="" if self.error is None else str(self.error),
            stats=stats,
            dead_kinds=kinds,
            counters=self._engine.counters,
            elapsed=time.monotonic() - started,
            outputs=self.outputs,
        )


def new_worker_id() -> str:
    """Unique in the fleet, and says where it is."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


async def _close_quietly(store: Store) -> None:
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout(_CLOSING):
            await store.close()
