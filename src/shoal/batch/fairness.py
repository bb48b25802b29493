"""Shares hosts and page slots fairly among sessions.

The frontier gives a free host to the first session that asks. A session with a thousand pages of a host asks whenever
one of them is done, and would get the host again and again. A session with three pages polls now and then, and would
find the host busy each time. So a session that got fewer leases than it wanted enters a queue, and the sessions in the
queue ask first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from shoal.batch.session import Session
from shoal.crawling.scheduler import Scheduler
from shoal.ports import Leased
from shoal.urls.scope import Scope

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


class FairScheduler(Scheduler):
    """The scheduler of a session that shares hosts with others."""

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
