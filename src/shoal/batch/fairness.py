"""Who asks the frontier next, where sessions want the same hosts.

A host's places are the store's: whoever asks first has them. A session with a thousand pages of a host asks whenever
one of them is done, and would take that place again and again, while one with three looks now and then and finds none.
So whoever came away with less than it wanted stands in line, and is asked first.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from shoal.batch.session import Session
from shoal.crawling.scheduler import Scheduler
from shoal.ports import Leased
from shoal.urls.scope import Scope

_OFFERS = 4  # sessions in line that are asked before another: all of them would cost too much where there are hundreds
_PATIENCE = 0.1  # seconds for one that is asked; who does not come loses its place in the line
_LOOK_AGAIN = 0.5  # seconds after which a session in line looks by itself: others than these may use the store


class Taker(NamedTuple):
    """A session that takes turns."""

    caller: str
    session: str
    come: Callable[[], None]
    """Has it ask for leases now."""


class Turns:
    """The line of one process. Callers take turns in it, and so do the sessions of each caller."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, OrderedDict[str, Taker]] = OrderedDict()
        """Whoever waits, by caller and session."""
        self._asked: dict[str, asyncio.Future[None]] = {}
        """Sessions that were asked to come, until they do."""
        self._turn = asyncio.Lock()
        """Held by whoever comes unasked: two at a time would take from each other what they leave to those in line."""

    async def take(self, taker: Taker, lease: Callable[[], Awaitable[tuple[Leased, bool]]]) -> Leased:
        """What ``lease`` gives, which also says whether the session could do with more, when it is its turn."""
        self.leave(taker)
        asked = self._asked.pop(taker.session, None)
        if asked is None:
            async with self._turn:
                await self._offer()
                leased, wants_more = await lease()
        else:
            try:
                leased, wants_more = await lease()
            finally:
                if not asked.done():
                    asked.set_result(None)
        if not wants_more:
            return leased
        self._line.setdefault(taker.caller, OrderedDict())[taker.session] = taker
        return Leased(leased.leases, _LOOK_AGAIN if leased.wait is None else min(leased.wait, _LOOK_AGAIN))

    def leave(self, taker: Taker) -> None:
        """It is in line no more."""
        sessions = self._line.get(taker.caller)
        if sessions is not None:
            sessions.pop(taker.session, None)
            if not sessions:
                del self._line[taker.caller]

    async def _offer(self) -> None:
        """Let the first in line ask."""
        for _ in range(min(_OFFERS, sum(map(len, self._line.values())))):
            if not self._line:  # others have come meanwhile
                return
            caller, sessions = next(iter(self._line.items()))
            self._line.move_to_end(caller)
            taker = next(iter(sessions.values()))
            self.leave(taker)
            asked = self._asked[taker.session] = asyncio.get_running_loop().create_future()
            try:
                taker.come()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE):
                        await asked
            finally:
                if self._asked.get(taker.session) is asked:
                    del self._asked[taker.session]


class TakingTurns(Scheduler):
    """The scheduler of one session among others."""

    def __init__(
        self, session: Session, scope: Scope, turns: Turns, taker: Taker, *, ttl: float, max_pages: int | None
    ) -> None:
        super().__init__(session.frontier, scope, ttl=ttl, max_pages=max_pages, shared=session.shared)
        self._turns = turns
        self._taker = taker

    async def next_requests(self, limit: int, *, begun: bool = True, nonce: bytes = b"") -> Leased:
        return await self._turns.take(self._taker, lambda: self._lease(limit, begun, nonce))

    async def _lease(self, limit: int, begun: bool, nonce: bytes) -> tuple[Leased, bool]:
        leased = await super().next_requests(limit, begun=begun, nonce=nonce)
        return leased, len(leased.leases) < limit and (await self.frontier.stats()).ready > 0
