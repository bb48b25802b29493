"""Batches on this machine: each session has an engine, and the sessions share the places for pages in flight."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from msgspec.structs import replace

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.results import Result, SessionResults
from shoal.api.batch.service import BatchService
from shoal.api.batch.session import Session
from shoal.config import Config
from shoal.crawling.onion import SharedFetcher
from shoal.crawling.run_queue import RunQueue
from shoal.crawling.stats import Counters
from shoal.frontier.memory import MemoryStore
from shoal.ports import Frontier, Leased
from shoal.runs.lifecycle import RunLifecycle
from shoal.runs.plan import Output, Plan
from shoal.runs.worker_session import new_worker_id
from shoal.urls.normalize import Scope

# Shares hosts and page slots fairly among sessions.
#
# The frontier gives a free host to the first session that asks. A session with a thousand pages of a host asks
# whenever one of them is done, and would get the host again and again. A session with three pages polls now and
# then, and would find the host busy each time. So a session that got fewer leases than it wanted enters a queue,
# and the sessions in the queue ask first.


_MAX_OFFERS = 4  # queued sessions that may ask before another one: all would cost too much if there are hundreds
_OFFER_TIMEOUT = 0.1  # seconds in which a session must ask after an offer; else it loses its place in the queue
_POLL_EVERY = 0.5  # seconds after which a queued session asks anyway: other processes may have released the host


def divide_slots(callers: Mapping[str, str], total: int) -> dict[str, int]:
    """Divide ``total`` slots among sessions, given the caller of each.

    Callers get equal shares, however many sessions they have, and the sessions of a caller divide its share. Each
    session gets at least one.
    """
    sessions: dict[str, list[str]] = {}
    for session, caller in callers.items():
        sessions.setdefault(caller, []).append(session)
    return {
        session: max(1, slots)
        for own, share in zip(sessions.values(), _split(total, len(sessions)), strict=True)
        for session, slots in zip(own, _split(share, len(own)), strict=True)
    }


def _split(total: int, parts: int) -> list[int]:
    """Integers that are as equal as possible; the first ones get the remainder."""
    return [total // parts + (number < total % parts) for number in range(parts)]


class Participant(NamedTuple):
    """A session that shares hosts with others."""

    caller: str
    session: str
    ask: Callable[[], None]
    """Makes the session ask for leases now."""


class RoundRobin:
    """The queue of one process. Callers take turns, and so do the sessions of each caller."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, OrderedDict[str, Participant]] = OrderedDict()
        """Participants by caller and session."""
        self._offers: dict[str, asyncio.Future[None]] = {}
        """Sessions that may ask now, until they do."""
        self._turn = asyncio.Lock()
        """Held by a session that asks without an offer. Two at a time would take hosts that the queue was offered."""

    async def lease(self, participant: Participant, ask: Callable[[], Awaitable[tuple[Leased, bool]]]) -> Leased:
        """Call ``ask`` when it is the participant's turn. It returns leases and whether the session wants more."""
        self.leave(participant)
        offer = self._offers.pop(participant.session, None)
        if offer is None:
            async with self._turn:
                await self._offer_to_queue()
                leased, wants_more = await ask()
        else:
            try:
                leased, wants_more = await ask()
            finally:
                if not offer.done():
                    offer.set_result(None)
        if not wants_more:
            return leased
        self._queue.setdefault(participant.caller, OrderedDict())[participant.session] = participant
        wait = _POLL_EVERY if leased.wait is None else min(leased.wait, _POLL_EVERY)
        return replace(leased, wait=wait, poll_after=0.0)

    def leave(self, participant: Participant) -> None:
        """Remove a participant from the queue."""
        sessions = self._queue.get(participant.caller)
        if sessions is not None:
            sessions.pop(participant.session, None)
            if not sessions:
                del self._queue[participant.caller]

    async def _offer_to_queue(self) -> None:
        """Let the first participants in the queue ask, one after the other."""
        for _ in range(min(_MAX_OFFERS, sum(map(len, self._queue.values())))):
            if not self._queue:  # they asked in the meantime
                return
            caller, sessions = next(iter(self._queue.items()))
            self._queue.move_to_end(caller)
            participant = next(iter(sessions.values()))
            self.leave(participant)
            offer = self._offers[participant.session] = asyncio.get_running_loop().create_future()
            try:
                participant.ask()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_OFFER_TIMEOUT):
                        await offer
            finally:
                if self._offers.get(participant.session) is offer:
                    del self._offers[participant.session]


class FairQueue(RunQueue):
    """The queue of a session that shares hosts with others."""

    def __init__(
        self,
        session: Session,
        scope: Scope,
        round_robin: RoundRobin,
        participant: Participant,
        *,
        ttl: float,
        max_pages: int | None,
    ) -> None:
        super().__init__(session.frontier, scope, ttl=ttl, max_pages=max_pages, shared=session.shared)
        self._quota = session.quota
        self._round_robin = round_robin
        self._participant = participant

    async def next_requests(self, limit: int, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        if self._quota.must_wait:  # until the store has room; the pages stay in the frontier
            await self._quota.room.measure()
            return Leased([], wait=_POLL_EVERY, poll_after=_POLL_EVERY)
        return await self._round_robin.lease(self._participant, lambda: self._ask(limit, counts_attempt, nonce))

    async def _ask(self, limit: int, counts_attempt: bool, nonce: bytes) -> tuple[Leased, bool]:
        leased = await super().next_requests(limit, counts_attempt=counts_attempt, nonce=nonce)
        return leased, len(leased.leases) < limit and (await self.frontier.stats()).ready > 0


class _Notifier:
    """Notifies callers that wait for results of a session."""

    role = ""

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

    async def abandon(self) -> None:
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

        def make_queue(frontier: Frontier) -> RunQueue:
            return FairQueue(
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
            make_queue=make_queue,
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


# Tries one URL as a batch of its own: in this process, without a server.


_EVERYWHERE = ("0.0.0.0/0", "::/0")


@asynccontextmanager
async def private_service(config: Config) -> AsyncIterator[BatchService]:
    """Batches of the user of this process, in memory. Unlike a server, it may contact every address, and render."""
    config = replace(config, serve=replace(config.serve, allow=_EVERYWHERE, render=True))
    fetcher = SharedFetcher(config, _EVERYWHERE)
    work = LocalWork(config, fetcher, new_worker_id(), config.serve.max_in_flight)
    service = BatchService(MemoryStore(), work, config, distributed=False)
    try:
        yield service
    finally:
        await service.close()
        await fetcher.close()


async def try_url(service: BatchService, url: str, options: BatchOptions, seconds: float) -> Result:
    """The result of one URL. After ``seconds`` without one, the batch is cancelled."""
    session = await service.create([url], options, caller="")
    await session.wait(seconds)
    if not await session.is_over():
        await service.cancel(session)
    entries = await anext((await SessionResults(session).read_all()).portions)
    return entries[0].decode(True)
