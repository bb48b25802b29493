"""How far the drainers of a run are behind its item log, whichever processes they are in."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from shoal.crawling.retrying import Persistence
from shoal.ports import ItemSource, RoleState
from shoal.sinks.drainer import position_of

log = logging.getLogger("shoal.engine")

_MAX_LAG = 50_000  # items that the slowest drainer may be behind before leasing pauses
_SELDOM = 8  # times as long between two looks while nothing happens
_PASSING = "sink:collect-"  # roles of programs that took the items for themselves: nobody goes on with them


class ItemLogKeeper:
    """Says when leasing has to wait for a drainer, and forgets what all of them have unless it is to be kept."""

    def __init__(self, frontier: ItemSource, persist: Persistence, *, keep: bool, every: float) -> None:
        self._frontier = frontier
        self._persist = persist
        self._keep = keep
        self._every = every
        self._expects = True
        self.far_behind = False
        """Some drainer that is at work is so far behind that nothing more should be leased."""

    def expect_items(self) -> None:
        """This process crawls: its pages may have items."""
        self._expects = True

    async def run(self) -> None:
        trimmed, pause, before = 0, self._every, None
        while True:
            await asyncio.sleep(pause)
            if not self._expects:  # an idle process leaves it to the others
                continue
            roles = [role for role in await self._persist(self._frontier.roles) if role.role.startswith("sink:")]
            logged = (await self._persist(self._frontier.stats)).items if roles else 0
            now = (roles, logged)
            pause = min(_SELDOM * self._every, 2 * pause) if now == before and not self.far_behind else self._every
            before = now
            self._expects = any(position_of(role.cursor) < logged for role in roles)
            if not roles:
                continue
            self._judge(logged, [position_of(role.cursor) for role in roles if role.held])
            passed = min((position_of(role.cursor) for role in roles if _counts(role)), default=0)
            if not self._keep and passed > trimmed:
                cursors = {role.role: role.cursor for role in roles}
                await self._persist(partial(self._frontier.trim_items, passed, cursors=cursors))
                trimmed = passed

    def _judge(self, logged: int, positions: list[int]) -> None:
        lag = logged - min(positions, default=logged)
        if lag > _MAX_LAG and not self.far_behind:
            log.warning("an output is %d items behind; no more pages are fetched until it has caught up", lag)
        self.far_behind = lag > _MAX_LAG


def _counts(role: RoleState) -> bool:
    return role.held or not role.role.startswith(_PASSING)
