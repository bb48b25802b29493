"""One process's part in a run, from its first lease to its summary.

Only `RunLifecycle` builds the engine of a run, watches the state of the run, ends its outputs, moves the run to its
final state, and makes the summary. `Participant` is the base of `Crawl` and `Worker`. These, a local batch and a run of
the server say in a `Plan` how they take part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from shoal.config import Config
from shoal.crawling.callbacks import SpiderHooks
from shoal.crawling.engine import Engine
from shoal.crawling.leases import Persistence
from shoal.crawling.onion import Route, make_onion, open_fetcher
from shoal.crawling.outcome import Outcome, RunFacts, decide
from shoal.crawling.run_queue import RunQueue, make_run_queue
from shoal.crawling.stats import Counters, CrawlSnapshot, LimitReached, Standing, Summary, Vitals
from shoal.errors import FencedError, FrontierError, RunError, ShoalError, StoreRewoundError, describe
from shoal.fetch.sessions.session import Session, make_session
from shoal.frontier.memory.store import MemoryStore
from shoal.http import Request
from shoal.http.rendering import Render, render_choice
from shoal.ports import Frontier, Holder, Run, RunState, Sink, Stats, Store
from shoal.runs import run_end
from shoal.runs.plan import Output, Plan
from shoal.runs.recorder import RecordedProcess, RunRecorder, recording
from shoal.runs.run_choice import finished_at
from shoal.runs.worker_session import new_worker_id
from shoal.selector.selectors import QueryUsage
from shoal.selector.selectors import current as current_queries
from shoal.sinks import open_sink, sink_id
from shoal.sinks.downloads import check_store
from shoal.sinks.drainer import ItemsLostError
from shoal.sinks.identity import output_role
from shoal.sinks.patience import HURRY
from shoal.sinks.takeover import ROLE_TTL, StandbyDrainer
from shoal.spider import Spider
from shoal.system import clock

if TYPE_CHECKING:
    from shoal.sinks.warc import WarcArchive

log = logging.getLogger("shoal.run")

_POLL = 1.0
"""Seconds between two polls of the run's state."""
_POLL_PAUSED = 4.0
_SEEDING_POLLS = 10
"""Polls between two checks that seeding is complete."""
GRACE = 0.5
"""Seconds that pages in flight have when a worker stops, or a run is cancelled."""


class RunLifecycle:
    """Works on one run until it is finished, cancelled, or ``stop``. Use it once."""

    _engine: Engine
    _frontier: Frontier
    queue: RunQueue
    """These three exist when the work begins."""

    def __init__(self, store: Store, run: Run, plan: Plan) -> None:
        self.run_id = run.run_id
        self.error: ShoalError | None = None
        """Why the work ended early."""
        self.is_over = False
        """Whether the run has ended, so that this process leases no more of it."""
        self.engine: Engine | None = None
        self.frontier: Frontier | None = None
        self._store = store
        self._run = run
        self._plan = plan
        self._stop_asked = asyncio.Event()
        self._persist = Persistence(shared=store.shared)
        self._outputs: Sequence[Output] = ()
        self._abandoning: list[asyncio.Task[None]] = []
        """Release outputs that had no time to finish: this process may live on, and another one needs their files and
        roles. Nobody waits for that, as an output may hang."""
        self._shown = "running"
        """The state of the run at the last poll."""
        self._polls = 0
        self._tor: Route | None = None
        self._browser_status: Callable[[], str] = lambda: ""
        self._recorder: RunRecorder | None = None
        self.queries = QueryUsage()
        self._outcome: Outcome | None = None
        self.limit: LimitReached | None = None
        """The limit at which the run ends although requests are left. ``scope.max_pages`` is not among them."""
        self._announcing: asyncio.Task[None] | None = None
        self._decided_on: Stats | None = None
        """The run's counters when its outcome was decided."""
        self._deadline: float | None = None
        """When a stopped process no longer waits for outputs and the summary, on the clock of the event loop."""

    # -- control

    def stop(self, grace: float | None = None) -> None:
        """Lease nothing more. Pages in flight have ``grace`` seconds to end (default: those of the plan)."""
        grace = self._plan.grace if grace is None else grace
        self._stop_asked.set()
        if self.engine is None:
            self._persist.give_up()
        elif not self.engine.stopping:
            seconds = self._plan.config.shutdown_grace if grace is None else grace
            log.warning("stopping: pages in flight have %g s to end", seconds)
            self.engine.stop(grace)

    def abort(self) -> None:
        """Stop now, and drop the pages in flight."""
        self._stop_asked.set()
        if self.engine is None:
            self._persist.give_up()
        else:
            self.engine.abort()

    @property
    def stopping(self) -> bool:
        return self._stop_asked.is_set()

    def end_run(self, limit: LimitReached, *, announces: bool = True) -> None:
        """End the run in all its processes, although requests are left. Pages in flight end normally."""
        if self.limit is not None or self.engine is None:
            return
        self.limit = limit
        why = f"{limit.setting}={limit.value:g} is reached" if limit.setting else f"the spider says: {limit.reason}"
        log.warning("ending the run: %s", why)
        self.queue.end()
        self.engine.release_ahead()
        self.engine.poll_now()
        if announces and self._plan.shared:
            announcing = partial(run_end.announce_end, self._store, self.run_id, limit)
            self._announcing = asyncio.create_task(self._persist(announcing))

    async def check_limits(self, counters: Counters | None = None) -> None:
        """End the run if it has reached a limit. ``counters``: of all processes (default: of this process)."""
        scope = self._plan.config.scope
        if self.limit is not None or self.engine is None:
            return
        items = (await self._persist(self._frontier.stats)).items if scope.max_items is not None else 0
        limit = run_end.passed_limit(scope, counters or self.engine.counters, items)
        if limit is not None:
            self.end_run(limit)

    async def check_end(self) -> None:
        """End the run if another process has announced its end."""
        if self.limit is None and self._plan.shared:
            limit = await run_end.announced_end(self._store, self.run_id)
            if limit is not None:
                self.end_run(limit, announces=False)

    async def snapshot(self) -> CrawlSnapshot | None:
        """The state of the crawl now. None before it begins."""
        return None if self.engine is None else await self.engine.snapshot()

    def vitals(self, worker: str, standing: Standing | None = None) -> Vitals:
        """What this process knows of itself, without a call to the store."""
        engine = self.engine
        watch = None if self._recorder is None else self._recorder.loop_watch
        return Vitals(
            worker=worker, run_id=self.run_id, spider=self._run.spider, frontier=self.frontier, standing=standing,
            counters=Counters() if engine is None else engine.counters,
            in_flight=0 if engine is None else engine.in_flight,
            looped_at=None if engine is None else engine.looped_at,
            identities=None if engine is None or engine.identities is None else engine.identities.counts,
            holder=self._plan.holder if self._plan.session is None else self._plan.session.holder,
            browser=self._browser_status(),
            tor="" if self._tor is None else "ready" if self._tor.ready else "not ready",
            error="" if self.error is None else str(self.error),
            loop_age=None if watch is None else watch.age,
            blocked_by="" if watch is None else watch.blocked_by,
        )  # fmt: skip

    def count_rejects(self, count: int) -> None:
        """Count items that an output rejected."""
        if self.engine is not None:
            self.engine.counters.item_errors += count

    async def role_of(self, spec: str) -> str:
        """The role of an output's drainer. In a private run, the name of the output is enough: no other process ever
        takes part."""
        if self._plan.is_private:
            return sink_id(spec)
        return await self._persist(partial(output_role, spec, self._frontier, self.run_id))

    # -- work

    async def work(self) -> Summary:
        """Take part in the run. An error that ends it is in ``error`` and in the summary."""
        started = clock.monotonic()
        async with AsyncExitStack() as stack:
            await self._prepare(stack)
            watch = asyncio.create_task(self._watch()) if self._plan.watches else None
            self._plan.on_begin()
            if self._plan.process is not None:
                self._recorder = self._make_recorder(self._plan.process)
                await stack.enter_async_context(recording(self._recorder))
            hooks = SpiderHooks(self._plan.spider, self._engine.handler.callbacks.pipelines)
            stack.push_async_callback(hooks.close, "failed")  # if this work is cancelled
            try:
                await self._open_and_work(hooks)
            finally:
                if watch is not None:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
            for line in self._engine.handler.callbacks.unyielded.report():
                log.warning("%s", line)
            summary = await self._summarize(started)
            failure = await hooks.close(summary.state)
            if failure is not None and self.error is None:
                self.error = failure
                summary = msgspec.structs.replace(summary, state="failed", error=str(failure), outcome=None)
                await self._spoil_outcome(str(failure))
            return msgspec.structs.replace(summary, own_counters=dict(self._plan.spider.stats.own))

    def _make_session(self, frontier: Frontier, *, keeps: bool) -> Session:
        """``keeps``: the cookies belong to the run, not only to this process."""
        plan = self._plan
        documents = self._store if keeps and not isinstance(self._store, MemoryStore) else None

        async def stop_run() -> None:
            if self._store.shared and not plan.near:  # so that new processes do not log in again
                await self._move_to("paused")

        return make_session(plan.spider, plan.config, self.run_id, frontier, documents, self._persist, stop_run)

    def _make_recorder(self, process: RecordedProcess) -> RunRecorder:
        config = self._plan.config
        recorded = msgspec.structs.replace(process, user_agent=config.user_agent, obeys_robots=config.robots.obey)
        return RunRecorder(self._store, self.run_id, recorded, lambda: self.vitals(process.name), self._frontier.stats)

    async def _prepare(self, stack: AsyncExitStack) -> None:
        plan, session = self._plan, self._plan.session
        holder, may_work = (plan.holder, plan.may_work) if session is None else (session.holder, session.may_work)
        opening = partial(self._store.frontier, self.run_id, plan.options, holder)
        frontier = await self._persist(opening) if plan.frontier is None else plan.frontier
        self.frontier = self._frontier = frontier
        if session is not None:
            await self._persist(partial(session.join, frontier))
            stack.push_async_callback(session.close)
        elif plan.holder is not None:
            await self._persist(partial(self._fence, plan.holder))
        if plan.make_queue is None:
            queue = make_run_queue(plan.spider, plan.config, frontier, shared=plan.shared)
        else:
            queue = plan.make_queue(frontier)
        self.queue = queue
        fetcher, tor, config = plan.fetcher, None, plan.config
        render = render_choice(plan.spider.render)
        if isinstance(render, Render) and render.mode == "always":  # more pages would wait for the browser
            config = config.with_settings({"concurrency": min(config.concurrency, config.browser.max_pages)})
        if fetcher is None:
            await check_store(config.files)
            routing, tor = await open_fetcher(stack, plan.config, self.run_id, frontier, plan.networks, render)
            fetcher, self._tor, self._browser_status = routing, tor, routing.browser_status
        self._outputs = await plan.open_outputs(frontier)
        archive = await self._open_archive(stack, frontier) if plan.fetcher is None else None
        cookies = self._make_session(frontier, keeps=plan.fetcher is None and tor is None)
        if cookies.jars.is_stored and not self._store.shared:
            await self._persist(cookies.jars.open)
        if plan.imported is not None:
            from shoal.fetch.sessions.stored import new_epoch, usable_cookies  # few crawls need them

            jar = cookies.jars.jar(plan.imported.jar)
            imported = {cookie.key: cookie for cookie in usable_cookies(plan.imported.file)}
            await cookies.jars.publish(jar, imported, new_epoch())
        part = msgspec.structs.replace(
            plan,
            config=config,
            run_id=self.run_id if plan.frontier is None else "",
            may_work=may_work,
            archive=archive,
            rejoin=None if session is None else session.rejoin,
            on_settled=self.check_limits if config.scope.max_items or config.scope.max_bytes else None,
        )
        onion = make_onion(plan.spider, plan.config, frontier, fetcher, may_work, tor, cookies)
        engine = self.engine = self._engine = Engine(part, queue, onion, self._outputs)
        if session is not None:
            fenced = FencedError(f"worker {session.worker} was silent for too long")
            session.on_fenced = partial(engine.interrupt, fenced)
        await self._persist(self._mark_running)
        await self._persist(self.check_end)
        if plan.resumes:
            await self._report_resumed()

    async def _open_archive(self, stack: AsyncExitStack, frontier: Frontier) -> WarcArchive | None:
        """The WARC files of this process, if it writes any."""
        config = self._plan.config
        if config.warc.folder is None:
            return None
        from shoal.sinks.warc import WarcArchive

        archive = WarcArchive(
            config.warc,
            self._run,
            frontier,
            durable=not self._plan.is_private,
            user_agent=config.sent_user_agent,
        )
        await archive.open()
        stack.push_async_callback(archive.close)
        return archive

    async def _open_and_work(self, hooks: SpiderHooks) -> None:
        """Open the spider and its pipelines, then work. If one of them fails to open, only end the outputs."""
        self._plan.spider.stats.bind(self._engine.counters.numbers)
        control = _Control(self, is_private=self._plan.is_private and not self._plan.shared)
        self._plan.spider._control = control
        self._plan.spider.joined(control)
        before = current_queries.set(self.queries)
        timer = self._limit_time()
        try:
            self.error = await hooks.open()
            await (self._work() if self.error is None else self._end())
        finally:
            current_queries.reset(before)
            if timer is not None:
                timer.cancel()
            self._abandoning = [asyncio.create_task(_abandon(output)) for output in self._outputs]

    def _limit_time(self) -> asyncio.TimerHandle | None:
        seconds = self._plan.config.scope.max_seconds
        if seconds is None:
            return None

        def end() -> None:
            self.end_run(LimitReached(setting="scope.max_seconds", value=seconds, at=clock.time()))

        return asyncio.get_running_loop().call_later(seconds, end)

    async def _report_resumed(self) -> None:
        """If an earlier process began the run, log how far it got."""
        stats = await self._persist(self._frontier.stats)
        if stats.pushed and stats.remaining:
            failed = f", {stats.dead} failed" if stats.dead else ""
            log.info("resuming run %s: %d done%s, %d left", self.run_id, stats.done, failed, stats.remaining)

    async def _fence(self, holder: Holder) -> None:
        """Release the leases of the slot's last holder. It may be dead, or believe that it still holds the slot."""
        count = await self._frontier.fence(holder.slot, holder.epoch)
        log.log(logging.WARNING if count else logging.DEBUG, "released %d leases of the last holder", count)

    async def _mark_running(self) -> None:
        state = await self._store.run_state(self.run_id)
        has_more = state == "finished" and not (await self._frontier.stats()).finished
        if has_more and self._plan.resumes:
            await run_end.announce_end(self._store, self.run_id, None)
        elif has_more and await run_end.announced_end(self._store, self.run_id) is not None:
            has_more = False  # a worker does not undo what ended the run; `shoal resume` does
        if state is not None and (has_more or state == "queued" or (state == "paused" and self._plan.resumes)):
            await self._move_to("running", among=[state])

    async def _move_to(self, state: RunState, *, among: Sequence[RunState] | None = None) -> None:
        """``among``: see `shoal.ports.Store.transition`. By default a run that somebody has paused or cancelled
        meanwhile does not begin again."""
        if state == "running" and among is None:
            among = ("queued", "finished")
        with suppress(RunError):  # another process was first, or the run was cancelled
            await self._store.transition(self.run_id, state, among=among)
            self._plan.on_state(state)

    async def _work(self) -> None:
        """Run the engine and end the outputs. Repeat that after a rewind of the store or a fence, or if the run got
        requests while its outputs ended."""
        engine = self._engine
        while True:
            try:
                if self._stop_asked.is_set():
                    engine.stop(self._plan.grace)
                await engine.run()
            except ShoalError as exc:
                self.error = exc
            if self._plan.output_timeout is not None:
                self._deadline = asyncio.get_running_loop().time() + self._plan.output_timeout
            try:
                if await self._end():
                    return
                await engine.reopen()
            except (StoreRewoundError, FencedError) as exc:
                if self.error is not None or engine.stopping:
                    log.error("%s", exc)
                    return
                engine.interrupt(exc)  # the next `run` starts over

    # -- the end

    async def _end(self) -> bool:
        """Finish the outputs and the run. A stopped process waits for that only as long as its plan allows. False: the
        run continues in this process."""
        finishing = asyncio.create_task(self._finish())
        stop_asked = asyncio.create_task(self._stop_asked.wait())
        try:
            if not self._stop_asked.is_set() and self.error is None:  # the run waits for an output that is down
                await asyncio.wait({finishing, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                for output in self._outputs:
                    output.hurry()
                asyncio.get_running_loop().call_later(HURRY, self._persist.give_up_if_away)
            if not await self._in_time(finishing):
                log.warning("an output or the server of the frontier does not answer; the next process continues")
                return True
            return finishing.result()
        except ShoalError as exc:
            if self._engine.can_start_over(exc):
                raise
            self.error = self.error or exc
            return True
        finally:
            stop_asked.cancel()
            finishing.cancel()  # not awaited: it may wait for a server that does not answer

    async def _in_time(self, finishing: asyncio.Task[bool]) -> bool:
        """Wait for the outputs. False if their time is up, or if none of them has written anything for too long."""
        timeout, silence = self._plan.output_timeout, self._plan.output_silence
        if timeout is not None or silence is None:
            return bool((await asyncio.wait({finishing}, timeout=timeout))[0])
        while True:
            cursors = await self._cursors()
            if (await asyncio.wait({finishing}, timeout=silence))[0]:
                return True
            if await self._cursors() == cursors:
                return False

    async def _cursors(self) -> dict[str, bytes]:
        return {role.role: role.cursor for role in await self._frontier.roles()}

    async def _finish(self) -> bool:
        if self._announcing is not None:
            await self._announcing
        has_ended = self.error is None and await self._has_ended()
        if not has_ended and not self.stopping and self.error is None:
            await self._check_store()  # the engine ended, but the run has not: the store may have been rewound
        failure: ShoalError | None = None
        lost: ItemsLostError | None = None
        for output in self._outputs:
            try:
                await output.finish(finished=has_ended or (self._plan.is_private and not self._has_failed_at_once))
            except ItemsLostError as exc:  # no process can write these items, so the run ends
                lost = lost or exc
            except ShoalError as exc:
                if self._engine.can_start_over(exc):
                    raise
                failure = failure or exc
        if failure is not None:
            raise failure
        is_over = await self._mark_finished() if has_ended else True
        if lost is not None and is_over:
            raise lost
        return is_over

    @property
    def _has_failed_at_once(self) -> bool:
        """Whether the work failed before its first item. Then the outputs stay as they were."""
        return self.error is not None and self.engine is not None and not self.engine.counters.items

    async def _has_ended(self) -> bool:
        """Whether nothing remains for any process: all requests are settled, or the page limit is reached and no
        request is leased. A leased request may come back."""
        stats = await self._persist(self._frontier.stats)
        return stats.finished or (self.queue.limit_reached and not stats.leased)

    async def _mark_finished(self) -> bool:
        """Move the run to ``finished``. False: somebody queued failed requests again while the outputs ended, and this
        process fetches them. StoreRewoundError if the store went back in time meanwhile: the run may have requests
        again, so it is moved back to ``running``."""
        await self._persist(self._store_limit)
        if await self._persist(partial(self._store.run_state, self.run_id)) == "queued":
            await self._persist(partial(self._move_to, "running"))
        await self._persist(self._decide)
        await self._persist(partial(self._move_to, "finished"))
        try:
            await self._check_store()
        except StoreRewoundError:
            self._outcome = None
            await self._persist(partial(self._move_to, "running"))
            raise
        stats = await self._persist(self._frontier.stats)
        self.is_over = stats.finished or self.queue.limit_reached
        if self.is_over:
            return True
        log.warning("run %s got %d more requests while it ended, so it continues", self.run_id, stats.remaining)
        self._outcome = None
        await self._persist(partial(self._move_to, "running"))
        return self.stopping or self.engine is None or not self.engine.concurrency  # others crawl

    async def _store_limit(self) -> None:
        """Store with the run the limit at which it stops, if any. See `shoal.runs.run_end`."""
        if self._plan.process is not None:  # not for a batch, which has its own limits
            stats = await self._frontier.stats()
            limit = run_end.page_limit(self._plan.config.scope.max_pages, stats)
            if self.limit is not None and not stats.finished:
                limit = msgspec.structs.replace(self.limit, left=stats.remaining)
            await run_end.store_limit(self._store, self.run_id, limit)

    async def _decide(self) -> None:
        """Decide the outcome of the run, and store it with the run."""
        plan, counters = self._plan, self._engine.counters
        facts = await run_end.read_facts(self._frontier, expects_items=bool(plan.output_names or plan.spider.pipelines))
        facts = msgspec.structs.replace(
            facts,
            why_nothing=self._engine.why_nothing,
            dropped=counters.dropped,
            drop_reasons=tuple(name for name, _ in counters.drop_reasons.most_common(3)),
        )
        facts = msgspec.structs.replace(facts, rule=self._ask_spider(facts))
        self._outcome, self._decided_on = decide(facts, plan.config.outcome.max_failed), facts.stats
        await run_end.store_outcome(self._store, self.run_id, self._outcome)

    async def _spoil_outcome(self, reason: str) -> None:
        """Make the outcome failed, because a hook of the spider or of a pipeline failed after the end."""
        if self._outcome is not None:
            self._outcome = self._outcome.with_failed_hooks((reason,))
            with suppress(FrontierError):
                await run_end.store_outcome(self._store, self.run_id, self._outcome)

    def _ask_spider(self, facts: RunFacts) -> str:
        try:
            return self._plan.spider.judge(facts) or ""
        except Exception as exc:  # the user's code may raise anything: nobody can tell then whether the run is good
            return f"the rule of the spider raised {describe(exc, 'judge')}"

    async def _check_store(self) -> None:
        """Raise StoreRewoundError if the store does not know the last completion of this process."""
        await self._persist(lambda: self._frontier.lease(0, self._plan.config.lease.ttl))

    async def _summarize(self, started: float) -> Summary:
        deadline = self._deadline if self.stopping else None
        stats, kinds = await run_end.last_stats(self._frontier, deadline)
        at_limit = self.queue.limit_reached or self.limit is not None
        state = "finished" if stats.finished else "limit" if at_limit else "stopped"
        return Summary(
            run_id=self.run_id,
            spider=self._run.spider,
            state="failed" if self.error is not None else state,
            error="" if self.error is None else str(self.error),
            stats=stats,
            dead_kinds=kinds,
            counters=self._engine.counters,
            elapsed=clock.monotonic() - started,
            outputs=self._plan.output_names,
            keeps_items=bool(self._outputs or self._plan.spider.pipelines or self._plan.keep_items),
            failed_url=await run_end.failed_url(self._frontier, deadline) if kinds else "",
            unmatched=self.queries.unmatched(),
            limit=self.limit,
            outcome=self._outcome if self.error is None else None,
        )

    # -- the state of the run

    async def _watch(self) -> None:
        """Follow other processes when they pause, resume, cancel or remove the run."""
        while not self.stopping:
            idle = 0.0 if self.engine is None else 4 * self.engine.pacing.poll_after  # many idle workers poll seldom
            await asyncio.sleep(max(idle, _POLL_PAUSED if self._shown == "paused" else _POLL))
            try:
                await self.poll_state()
            except FrontierError as exc:
                log.debug("could not poll the state of the run: %s", exc)

    async def poll_state(self) -> None:
        """Read the state of the run, and pause, continue, or stop."""
        state = await self._store.run_state(self.run_id)
        if state is None or state == "cancelled":
            log.warning("run %s was %s", self.run_id, state or "removed")
            self.stop(GRACE if self._plan.grace is None else None)
            return
        if state == "queued":  # the store went back to a time before the run began
            await self._move_to("running")
            state = "running"
        if state != self._shown:
            log.log(logging.INFO if state == "finished" else logging.WARNING, "run %s is %s", self.run_id, state)
            self._shown = state
            if self.engine is not None:
                self.engine.halt(state == "paused")
        await self.check_end()
        self._polls += 1
        if self._polls % _SEEDING_POLLS == 0 and self._plan.on_unseeded is not None:
            await self._check_seeding(self._plan.on_unseeded)
        if self._plan.stays and state in ("running", "finished"):
            await self._update_state(state)

    async def _check_seeding(self, on_unseeded: Callable[[], Awaitable[object]]) -> None:
        if not (await self._frontier.stats()).seeding:
            return
        if not any(role.held for role in await self._frontier.roles() if role.role == "seed"):
            await on_unseeded()

    async def _update_state(self, state: str) -> None:
        """Move the run between ``running`` and ``finished``. Only a process that stays after the end calls this."""
        if self.engine is not None and self.queue.limit_reached:
            return  # the run ends
        stats = await self._frontier.stats()
        if stats.finished and state == "finished":
            if self._decided_on not in (None, stats):  # the run got requests, and ended again between two polls
                await self._move_to("running")
                state = "running"
            self._decided_on = stats
        if stats.finished and state != "finished":
            await self._decide()
            await self._store_limit()
        if stats.finished != (state == "finished"):
            await self._move_to("finished" if stats.finished else "running")


async def _abandon(output: Output) -> None:
    with suppress(ShoalError, OSError):
        await output.abandon()


class Participant:
    """A crawl or a worker. You can see and stop its part in a run, even before that part begins."""

    def __init__(self, spider: Spider, config: Config) -> None:
        self.spider = spider
        self.config = config
        self.address = config.frontier
        """Where other processes find the store. If the crawl serves its store: known once it has started."""
        self.error: ShoalError | None = None
        """Why the work ended early. The summary says it too."""
        self._life: RunLifecycle | None = None
        self._worker_id = new_worker_id()
        self._stop_asked = False

    @property
    def _run_id(self) -> str:
        """Empty if the run is not known yet."""
        raise NotImplementedError

    def stop(self, grace: float | None = None) -> None:
        """Shut down. Pages in flight have ``grace`` seconds (default ``shutdown_grace``). Other leases are released."""
        self._stop_asked = True
        if self._life is not None:
            self._life.stop(grace)

    async def snapshot(self) -> CrawlSnapshot | None:
        """The state of the crawl now. None before it begins."""
        return None if self._life is None else await self._life.snapshot()

    def vitals(self) -> Vitals:
        """What this process knows of itself, without a call to the store."""
        if self._life is not None:
            return self._life.vitals(self._worker_id)
        spider = self.spider.spider_name()
        return Vitals(worker=self._worker_id, run_id=self._run_id, spider=spider, counters=Counters())

    async def _take_part(self, store: Store, run: Run, plan: Plan) -> Summary:
        life = self._life = RunLifecycle(store, run, plan)
        if self._stop_asked:
            life.stop()
        summary = await life.work()
        self.error = life.error
        return summary

    async def _report_finished(self, store: Store, run: Run, next_step: str) -> None:
        """Log if the run is already finished. Its outputs are still completed."""
        end_time = await finished_at(run, await store.frontier(run.run_id)) if run.state == "finished" else None
        if end_time is not None:
            log.warning("run %s already finished at %s; %s", run.run_id, end_time, next_step)

    async def _standby_drainer(self, frontier: Frontier, spec: str) -> StandbyDrainer:
        """A drainer that writes an output while no other process of the run does."""
        assert self._life is not None
        make_sink = partial(self._open_sink, spec)
        ttl, patience = min(ROLE_TTL, self.config.lease.ttl), self.config.items.patience
        return StandbyDrainer(frontier, make_sink, await self._life.role_of(spec), ttl=ttl, patience=patience)

    def _open_sink(self, spec: str) -> Sink:
        assert self._life is not None
        return open_sink(spec, run_id=self._life.run_id, on_reject=self._life.count_rejects)


class _Control:
    """The part of a lifecycle that a spider may use. See `RunControl`."""

    def __init__(self, life: RunLifecycle, *, is_private: bool) -> None:
        self._life = life
        self._queue = life.queue
        self.config = life._plan.config
        self.is_private = is_private

    def stop(self) -> None:
        self._life.stop()

    def end(self, reason: str) -> None:
        self._life.end_run(LimitReached(setting="", reason=reason or "no reason given", at=clock.time()))

    def is_known(self, url: str) -> bool:
        return self._queue.is_known(url)

    def is_in_scope(self, url: str) -> bool:
        return self._queue.scope.refuses(url) is None

    async def push(self, requests: Sequence[Request]) -> int:
        added = await self._queue.enqueue_requests(requests)
        if added and self._life.engine is not None:
            self._life.engine.poll_now()
        return added
