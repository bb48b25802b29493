"""Batches on this machine: an engine for each, and places that are shared out among them."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, suppress

from shoal.batch.fairness import FairScheduler, Participant, RoundRobin, divide_slots
from shoal.batch.session import OVER, Session
from shoal.config import Config
from shoal.crawling.assembly import make_engine
from shoal.crawling.engine import Engine
from shoal.crawling.stats import Counters
from shoal.errors import FrontierError, RunError, StoreRewoundError
from shoal.fetch.http import HttpFetcher
from shoal.urls.scope import Scope

_WATCH_EVERY = 1.0  # seconds between looks at what others do to a session
_SEED_EVERY = 10  # looks between checks that all its URLs are still in the store


class _Nudge:
    """Tells whoever waits for a session that there is something new."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def nudge(self) -> None:
        self._session.changed.set()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def start_over(self) -> None:
        """Nothing: it has no cursor."""


class LocalWork:
    """Works on sessions in this process. They share its connections, and their hosts' politeness by the store."""

    def __init__(self, config: Config, fetcher: HttpFetcher, worker_id: str, places: int) -> None:
        """``places``: pages in flight, of all sessions together."""
        self._config = config
        self._fetcher = fetcher
        self._worker_id = worker_id
        self._places = places
        self._engines: dict[str, Engine] = {}
        self._ended = Counters()
        """What engines did that are no more."""
        self._callers: dict[str, str] = {}
        self._round_robin = RoundRobin()

    async def run(self, session: Session) -> None:
        """To the end, or until it is cancelled."""
        config = session.config(self._config)
        spider = session.spider(self._worker_id)
        participant = Participant(session.settings.owner, session.id, lambda: self._engines[session.id].look())
        scope = Scope(config.scope, spider.allowed_domains)
        scheduler = FairScheduler(
            session, scope, self._round_robin, participant, ttl=config.lease.ttl, max_pages=config.scope.max_pages
        )
        async with AsyncExitStack() as stack:
            engine = make_engine(
                spider, config, scheduler, stack, [_Nudge(session)], source=None, shared=session.shared,
                keep_items=True, fetcher=self._fetcher.limited_to(config.http.max_body_bytes),
            )  # fmt: skip
            self._engines[session.id], self._callers[session.id] = engine, session.settings.owner
            self._share_out()
            watch = asyncio.create_task(self._watch(session))
            try:
                await self._to_the_end(session, engine)
            finally:
                watch.cancel()
                self._round_robin.leave(participant)
                del self._engines[session.id], self._callers[session.id]
                self._ended.add(engine.counters)
                self._share_out()

    async def _to_the_end(self, session: Session, engine: Engine) -> None:
        while True:
            await engine.run()
            if not await session.is_complete():
                return
            try:
                await session.finish()
                await session.frontier.lease(0, self._config.lease.ttl)
                return
            except StoreRewoundError:  # in this moment: there may be more to do
                await engine.start_over()
                await session.reopen()

    async def _watch(self, session: Session) -> None:
        """Another process may cancel a session."""
        for look in itertools.count(1):
            await asyncio.sleep(_WATCH_EVERY)
            with suppress(FrontierError):
                if look % _SEED_EVERY == 0 and (await session.frontier.stats()).seeding:
                    await session.seed()  # the store went back in time and has lost URLs of the session
                try:
                    is_over = await session.state() in OVER
                except RunError:
                    is_over = True
                if is_over:
                    self.stop(session.id)

    def stop(self, session_id: str) -> None:
        """What is in flight is dropped."""
        if session_id in self._engines:
            self._engines[session_id].abort()

    @property
    def counters(self) -> Counters:
        """What was done since the process began."""
        total = Counters()
        for counters in (self._ended, *(engine.counters for engine in self._engines.values())):
            total.add(counters)
        return total

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self._engines.values())

    def _share_out(self) -> None:
        for session_id, places in divide_slots(self._callers, self._places).items():
            self._engines[session_id].concurrency = places
