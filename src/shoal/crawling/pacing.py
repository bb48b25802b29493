"""When the engine leases and settles: one strategy for a store in this process, one for a store on a server. Both wait
for outputs that are far behind."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence, Sized
from functools import partial
from typing import NamedTuple, Protocol

from shoal.crawling.retrying import Persistence
from shoal.ports import ItemSource, Leased, RoleState
from shoal.sinks.drainer import COLLECTORS, PREFIX, output_name, position_of

log = logging.getLogger("shoal.engine")


_GIVE_UP_AFTER = 0.4
"""Seconds that releasing leases may take after the grace period."""
_MAX_LAG = 50_000
"""Items that the slowest drainer may be behind before leasing pauses."""
_IDLE_FACTOR = 8
"""An idle item log is polled up to this many times less often."""


class Waker:
    """Lets the loop sleep until something happens."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None
        self._woken = False

    def reset(self) -> None:
        """Forget earlier events: only later ones end the next sleep."""
        self._woken = False

    def wake(self) -> None:
        """Wake the loop: something happened."""
        self._woken = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def sleep(self, seconds: float) -> None:
        """Sleep until something happens, at most ``seconds``. Events since the last ``reset`` count."""
        if self._woken:
            return
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = loop.call_later(max(0.001, seconds), self.wake)
        try:
            await self._future
        finally:
            self._future = None
            timer.cancel()


class Pacing(Protocol):
    """Decides how many leases the engine asks for, and when it settles finished pages."""

    poll_after: float
    """Seconds between polls that the store asks for because many workers are idle. 0: no limit."""
    give_up_after: float | None
    """Seconds after the grace period of a stop at which the store is no longer waited for. None: never."""

    overlaps: bool
    """Whether the engine may lease before its settlements are answered."""

    async def let_pages_end(self, settled: Sized, active: Sized, concurrency: int) -> None:
        """Let pages end that are about to, so that they are settled together with those in ``settled``."""
        ...

    def linger(self, settled: int, since: float, busy: int, concurrency: int) -> float:
        """Seconds to wait for more settlements before all of them are stored together."""
        ...

    def room(self, free: int, ahead: int, concurrency: int) -> int:
        """How many requests to lease now. ``ahead``: leases that have not begun."""
        ...

    def pause(self) -> float | None:
        """Seconds until the next poll, when nothing is leased now. None: until something happens."""
        ...

    def after(self, leased: Leased, *, short: bool, has_place: bool) -> float | None:
        """Seconds until the next poll after an answer. ``short``: fewer leases than asked for. None: until something
        happens."""
        ...

    def poll_now(self) -> None:
        """Lease again without waiting for the next poll."""
        ...


class LocalPacing:
    """The store is in this process: lease whenever a place is free, and settle at once."""

    def __init__(self) -> None:
        self.poll_after = 0.0
        self.give_up_after: float | None = None
        self.overlaps = False

    async def let_pages_end(self, settled: Sized, active: Sized, concurrency: int) -> None:
        # Settling costs nearly the same for one page and for ten. So it waits while pages end one after the other, as
        # long as enough others are in flight.
        ended = 0
        while ended < len(settled) and 4 * len(active) > concurrency:
            ended = len(settled)
            await asyncio.sleep(0)

    def linger(self, settled: int, since: float, busy: int, concurrency: int) -> float:
        return 0.0

    def room(self, free: int, ahead: int, concurrency: int) -> int:
        return free

    def pause(self) -> float | None:
        return None

    def after(self, leased: Leased, *, short: bool, has_place: bool) -> float | None:
        return leased.wait

    def poll_now(self) -> None:
        pass


class RoundTrip(NamedTuple):
    """Times in seconds that fit a store at some distance."""

    linger: float
    """How long a settlement waits for others while there is enough to do."""
    first_poll: float
    """Until the second poll of a queue that other processes may fill."""
    last_poll: float
    """Between two polls, at most."""
    ahead: float
    """The share of the places for which requests are leased ahead. They count as in flight at their hosts."""
    enough: float
    """With work for a larger share of the places there is enough to do."""


_ON_A_SERVER = RoundTrip(0.02, 0.05, 0.5, 1.0, 0.75)
_ON_THIS_MACHINE = RoundTrip(0.005, 0.002, 0.01, 0.25, 0.25)


class RemotePacing:
    """The store is a round trip away, and other processes use it too.

    Settlements wait for each other for a moment. Some requests are leased ahead, so that no place stays empty during a
    round trip. A queue without due requests is polled, less often if the store asks for it.
    """

    def __init__(self, batch: int, *, near: bool = False) -> None:
        """``batch``: requests in one call, at most. ``near``: another process of this machine has the store."""
        self.poll_after = 0.0
        self.give_up_after: float | None = _GIVE_UP_AFTER
        self.overlaps = near  # the owner begins calls in order, and nothing can rewind its store
        self._batch = batch
        self._times = _ON_THIS_MACHINE if near else _ON_A_SERVER
        self._poll = self._times.first_poll
        self._next_poll = 0.0
        """The earliest time of the next poll, on the monotonic clock. 0: now."""

    async def let_pages_end(self, settled: Sized, active: Sized, concurrency: int) -> None:
        pass  # `linger` says how long they have

    def linger(self, settled: int, since: float, busy: int, concurrency: int) -> float:
        if busy <= self._times.enough * concurrency or 4 * settled >= self._batch:
            return 0.0
        return max(0.0, since + self._times.linger - time.monotonic())

    def room(self, free: int, ahead: int, concurrency: int) -> int:
        # Lease only a few ahead: other workers need requests too.
        most_ahead = min(self._batch, math.ceil(self._times.ahead * concurrency))
        if 2 * ahead > most_ahead or time.monotonic() < self._next_poll:
            return 0
        return min(self._batch, free + most_ahead - ahead)

    def pause(self) -> float | None:
        return max(0.0, self._next_poll - time.monotonic()) if self._next_poll else None

    def after(self, leased: Leased, *, short: bool, has_place: bool) -> float | None:
        if not short:
            self._next_poll, self._poll = 0.0, self._times.first_poll
            return 0.0 if has_place else None
        wait = self._poll if leased.wait is None else min(leased.wait, self._poll)
        self._poll = self._times.first_poll
        self.poll_after = 0.0 if leased.leases else leased.poll_after
        if not leased.leases:
            wait = max(wait, leased.poll_after * random.uniform(0.75, 1.25))
            self._poll = min(self._times.last_poll, 1.5 * wait)
        self._next_poll = time.monotonic() + wait
        return wait

    def poll_now(self) -> None:
        self._next_poll = 0.0


class ItemLogKeeper:
    """Decides when leasing must wait for a drainer, of any process. Trims the items that all drainers have written,
    unless ``keep``."""

    def __init__(self, frontier: ItemSource, persist: Persistence, *, keep: bool, every: float) -> None:
        self._frontier = frontier
        self._persist = persist
        self._keep = keep
        self._every = every
        self._expects = True
        self.far_behind = False
        """Whether a running drainer is so far behind that the engine should lease nothing."""
        self._unwritten: set[str] = set()
        """The outputs that nobody writes, of which a warning told."""

    def expect_items(self) -> None:
        """Poll again: pages of this process may have items."""
        self._expects = True

    async def run(self) -> None:
        trimmed, pause, before = 0, self._every, None
        while True:
            await asyncio.sleep(pause)
            if not self._expects:  # an idle process leaves the polling to others
                continue
            roles = [role for role in await self._persist(self._frontier.roles) if role.role.startswith("sink:")]
            logged = (await self._persist(self._frontier.stats)).items if roles else 0
            now = (roles, logged)
            pause = min(_IDLE_FACTOR * self._every, 2 * pause) if now == before and not self.far_behind else self._every
            before = now
            self._expects = any(position_of(role.cursor) < logged for role in roles)
            if not roles:
                continue
            self._judge(logged, [position_of(role.cursor) for role in roles if role.held])
            self._warn_of_unwritten(logged, roles)
            passed = min((position_of(role.cursor) for role in roles if _counts(role)), default=0)
            if not self._keep and passed > trimmed:
                cursors = {role.role: role.cursor for role in roles}
                await self._persist(partial(self._frontier.trim_items, passed, cursors=cursors))
                trimmed = passed

    def _judge(self, logged: int, positions: list[int]) -> None:
        lag = logged - min(positions, default=logged)
        if lag > _MAX_LAG and not self.far_behind:
            log.warning("an output is %d items behind; fetching pauses until it has caught up", lag)
        self.far_behind = lag > _MAX_LAG

    def _warn_of_unwritten(self, logged: int, roles: Sequence[RoleState]) -> None:
        """Tell once of an output that nobody writes, for which the log keeps growing. Fetching goes on: perhaps its
        machine is gone."""
        for role in roles:
            lag = logged - position_of(role.cursor)
            if not role.held and _counts(role) and lag > _MAX_LAG and role.role not in self._unwritten:
                self._unwritten.add(role.role)
                name = role.role.removeprefix(PREFIX)
                log.warning(
                    "no process writes %s, and %d items wait for it in the log; start one that does, or forget the "
                    "output: `shoal outputs RUN forget '%s'`", output_name(name), lag, name,
                )  # fmt: skip


def _counts(role: RoleState) -> bool:
    """Whether items must be kept for this role."""
    return role.held or not role.role.startswith(COLLECTORS)
