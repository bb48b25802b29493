"""Batches on this machine: each session has an engine, and the sessions share the places for pages in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.batch.fairness import FairScheduler, Participant, RoundRobin, divide_slots
from shoal.batch.session import Session
from shoal.config import Config
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.shared_fetcher import SharedFetcher
from shoal.crawling.stats import Counters
from shoal.ports import Frontier
from shoal.runs.lifecycle import RunLifecycle
from shoal.runs.plan import Output, Plan
from shoal.urls.scope import Scope


class _Notifier:
    """Notifies callers that wait for results of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def nudge(self) -> None:
        self._session.changed.set()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def start_over(self) -> None:
        """Do nothing: there is no cursor."""

    async def finish(self, *, finished: bool) -> None:
        """Do nothing: there is no output."""

    def hurry(self) -> None:
        """Do nothing: there is no output."""


class LocalWork:
    """Works on sessions in this process. They share its connections; the store keeps their hosts polite."""

    def __init__(self, config: Config, fetcher: SharedFetcher, worker_id: str, places: int) -> None:
        """``places``: maximum number of pages in flight, of all sessions together."""
        self._config = config
        self._fetcher = fetcher
        self._worker_id = worker_id
        self._places = places
        self._lives: dict[str, RunLifecycle] = {}
        self._rendering: set[str] = set()
        """Sessions whose pages are rendered."""
        self._ended = Counters()
        """Counters of sessions that have ended."""
        self._callers: dict[str, str] = {}
        self._round_robin = RoundRobin()

    async def run(self, session: Session) -> None:
        """Work until the session is finished or cancelled."""
        participant = Participant(session.settings.owner, session.id, lambda: self._poll(session.id))
        life = RunLifecycle(session.store, session.run, self._plan(session, participant))
        self._lives[session.id], self._callers[session.id] = life, session.settings.owner
        if session.options.render is not None and session.options.render.mode == "always":
            self._rendering.add(session.id)
        try:
            await life.work()
        finally:
            self._round_robin.leave(participant)
            del self._lives[session.id], self._callers[session.id]
            self._rendering.discard(session.id)
            self._fetcher.forget(session.id)
            if life.engine is not None:
                self._ended.add(life.engine.counters)
            self._share_out()
            session.changed.set()
        if life.error is not None:
            raise life.error

    def _plan(self, session: Session, participant: Participant) -> Plan:
        config = session.config(self._config)
        spider = session.spider(self._worker_id)
        scope = Scope(config.scope, spider.allowed_domains)

        def make_scheduler(frontier: Frontier) -> Scheduler:
            return FairScheduler(
                session, scope, self._round_robin, participant, ttl=config.lease.ttl, max_pages=config.scope.max_pages
            )

        async def open_outputs(frontier: Frontier) -> Sequence[Output]:
            return [_Notifier(session)]

        return Plan(
            spider=spider,
            config=config,
            options=session.settings.frontier_options,
            frontier=session.frontier,
            open_outputs=open_outputs,
            make_scheduler=make_scheduler,
            fetcher=session.fetcher(self._fetcher, config),
            shared=session.shared,
            watches=True,
            grace=0.0,
            on_begin=self._share_out,
            on_state=lambda state: session.changed.set(),
            on_unseeded=session.seed,
        )

    def _poll(self, session_id: str) -> None:
        engine = self._lives[session_id].engine
        if engine is not None:
            engine.poll_now()

    def stop(self, session_id: str) -> None:
        """Stop working on a session. Pages in flight are dropped."""
        if session_id in self._lives:
            self._lives[session_id].abort()

    @property
    def counters(self) -> Counters:
        """The counters of all sessions since the process began."""
        total = Counters()
        engines = (life.engine for life in self._lives.values())
        for counters in (self._ended, *(engine.counters for engine in engines if engine is not None)):
            total.add(counters)
        return total

    @property
    def in_flight(self) -> int:
        return sum(life.engine.in_flight for life in self._lives.values() if life.engine is not None)

    def _share_out(self) -> None:
        for session_id, places in divide_slots(self._callers, self._places).items():
            engine = self._lives[session_id].engine
            if engine is not None:  # pages that would wait for a tab of the browser wait in the frontier
                most = self._config.browser.max_pages if session_id in self._rendering else places
                engine.concurrency = min(places, most)
