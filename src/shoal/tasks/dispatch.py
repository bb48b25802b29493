"""Gives the pages of a session to Celery, in the pace that their hosts bear.

A page becomes a task when its lease is given: so what waits for a host, a retry or a Retry-After waits in the frontier,
and no worker's place is taken by waiting. The lease travels with the task. While the task is in the broker the lease is
renewed here, and if it runs out all the same, that costs no attempt. Whoever begins with it has it reissued, and then
it is that worker's to renew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

from msgspec import Struct

from shoal.batch.session import OVER, Session
from shoal.config import Config
from shoal.crawling.retrying import Persistence
from shoal.crawling.scheduler import make_scheduler
from shoal.errors import FrontierError, RunError, StoreRewoundError
from shoal.ports import Lease, Stats
from shoal.tasks.broker import publish, queue_is_empty
from shoal.tasks.settings import distributed_frontier, store_name
from shoal.tasks.watch import CeleryWatch
from shoal.tasks.worker import lease_ttl

log = logging.getLogger("shoal.tasks")

_WINDOW = (16, 200)
"""Pages of one session that are with Celery at a time, at least and at most: as many as are done in half a second. So
the queue is short where workers are slow, and a large session leaves room for others."""
_LOOK = (0.01, 0.25)  # seconds between looks at a session, at least and at most
_SEND_AGAIN = 600.0  # seconds after which a task that nobody began is sent once more, whatever the reason
_UNHEARD = 15.0
"""Seconds after which a task that nobody began and that is not in the queue is taken for lost: a worker may have
dropped it when its connection broke. Then twice as long, and so on: it may as well wait for the rate limit."""
_BROKER_AWAY = 1.0
_STATE_EVERY = 1.0  # seconds between looks at whether the session was cancelled


class _Sent(Struct):
    """A task in the broker."""

    lease: Lease
    at: float
    patience: float = _UNHEARD

    def is_late(self) -> bool:
        return time.monotonic() - self.at > self.patience

    def is_lost(self, lost_at: float) -> bool:
        """Whether it may be."""
        return self.at < lost_at or time.monotonic() - self.at > _SEND_AGAIN


class Pace:
    """How many pages are done in a second, lately."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._count: int | None = None
        self._began = self._at = 0.0

    def note(self, count: int, now: float) -> bool:
        """``count`` of all that are done by now; whether that is more than the last time."""
        before, self._count = self._count, count
        if before is None or now <= self._at:
            self._began = self._at = now
            return bool(count)
        share = min(1.0, (now - self._at) / min(1.0, now - self._began))  # the last second counts
        self.per_second += share * ((count - before) / (now - self._at) - self.per_second)
        self._at = now
        return count != before


class Dispatcher:
    """Sees sessions through to their end. If it dies, another goes on when the leases in the broker have run out."""

    def __init__(self, config: Config, watch: CeleryWatch) -> None:
        self._config = config
        self._watch = watch
        self._at_work: dict[str, _Dispatch] = {}

    def stop(self, session_id: str) -> None:
        if session_id in self._at_work:
            self._at_work[session_id].stop()

    async def run(self, session: Session) -> None:
        dispatch = self._at_work[session.id] = _Dispatch(session, self._config, self._watch)
        try:
            await dispatch.run()
        finally:
            del self._at_work[session.id]


class _Dispatch:
    """One session's."""

    def __init__(self, session: Session, config: Config, watch: CeleryWatch) -> None:
        self._store = store_name(distributed_frontier(config))
        self._renew_every = lease_ttl(config) / 4
        ttl = lease_ttl(config)
        config = session.config(config).with_settings({"lease.ttl": ttl})
        self._watch = watch
        self._session = session
        self._frontier = session.frontier
        self._ttl = ttl
        self._stopped = False
        self._look_at_state = 0.0
        self._scheduler = make_scheduler(session.spider(""), config, session.frontier, shared=True)
        self._persist = Persistence(shared=True)
        self._sent: dict[bytes, _Sent] = {}
        self._renew_at = time.monotonic() + self._renew_every
        self._pace = Pace()
        self._pause = _LOOK[0]
        self._out = 0

    def stop(self) -> None:
        self._stopped = True

    async def run(self) -> None:
        while not self._stopped and not await self._was_ended():
            try:
                if await self._look():
                    break
            except StoreRewoundError:
                log.warning("session %s: the store went back in time; its tasks are sent anew", self._session.id)
                self._sent.clear()
                self._scheduler.forget()
                await self._persist(self._frontier.recover)
                await self._persist(self._session.reopen)
            await asyncio.sleep(self._pause)
        await self._take_back()

    async def _look(self) -> bool:
        """Do what there is to do now. True when the session is complete."""
        stats = await self._persist(self._frontier.stats)
        if stats.seeding:  # the store went back in time and has lost URLs of the session
            await self._persist(self._session.seed)
        if self._may_be_complete(stats) and await self._persist(self._session.is_complete):
            await self._persist(self._session.finish)
            await self._persist(lambda: self._frontier.lease(0, self._ttl))  # raises if the store went back meanwhile
            return True
        await self._step(stats)
        if time.monotonic() >= self._renew_at:
            await self._renew()
        return False

    async def _was_ended(self) -> bool:
        """By somebody: it was cancelled, or removed."""
        if time.monotonic() < self._look_at_state:
            return False
        self._look_at_state = time.monotonic() + _STATE_EVERY
        try:
            return await self._persist(self._session.state) in OVER
        except RunError:
            return True

    def _may_be_complete(self, stats: Stats) -> bool:
        if stats.finished:
            return True
        options = self._session.options
        return bool(options.depth) and stats.done >= options.max_pages and not stats.leased

    async def _step(self, stats: Stats) -> None:
        """Send what may be sent, and say when to look again."""
        if moved := self._pace.note(stats.done + stats.dead, time.monotonic()):
            self._session.changed.set()
        least, most = _WINDOW
        room = max(least, min(most, int(self._pace.per_second / 2))) - stats.leased
        sent, wait = 0, None
        if room > 0:
            nonce = os.urandom(16)
            leased = await self._persist(lambda: self._scheduler.next_requests(room, begun=False, nonce=nonce))
            sent, wait = len(leased.leases), leased.wait
            if sent:
                await self._send(leased.leases)
        more = stats.ready + stats.waiting > sent
        self._pause = self._next_pause(stats.leased, sent, wait, moved=moved, more=more)
        self._out = stats.leased + sent

    def _next_pause(self, left: int, sent: int, wait: float | None, *, moved: bool, more: bool) -> float:
        """Seconds until the next look. ``left``: of what was out after the last one. While there is more to send, half
        of that may be done in between; at the end it is looked as often as something happens."""
        pause = self._pause
        if more and (left or sent):
            if 2 * left < self._out:
                pause /= 2
            elif 4 * left > 3 * self._out:
                pause *= 1.5
        else:
            pause = _LOOK[0] if moved or sent else 1.5 * pause
        if wait is not None:
            pause = min(wait, pause)
        return min(_LOOK[1], max(_LOOK[0], pause))

    async def _send(self, leases: Sequence[Lease]) -> None:
        """What the broker does not take goes back, without using up an attempt."""
        sent = await publish(self._session.id, self._store, leases)
        now = time.monotonic()
        for lease in leases[:sent]:
            self._sent[lease.fingerprint] = _Sent(lease, now)
        rest = leases[sent:]
        if rest:
            log.warning("the broker does not take tasks; trying again")
            await self._persist(lambda: self._frontier.release(rest))
            await asyncio.sleep(_BROKER_AWAY)

    async def _renew(self) -> None:
        """Of the leases in the broker. One that is lost was begun, is done, or will be leased again."""
        self._renew_at = time.monotonic() + self._renew_every
        held = list(self._sent.values())
        try:
            await self._frontier.lease(0, self._ttl)  # what ran out comes back, also while there is no room for more
            renewed = await self._frontier.renew([each.lease for each in held], self._ttl) if held else []
        except StoreRewoundError:
            raise
        except FrontierError as exc:
            log.warning("leases could not be renewed: %s", exc)
            return
        lost, late = [], []
        for each, lease in zip(held, renewed, strict=True):
            if lease is None:
                if self._sent.get(each.lease.fingerprint) is each:
                    del self._sent[each.lease.fingerprint]
                continue
            each.lease = lease
            if each.is_lost(self._watch.lost_at):
                lost.append(each)
            elif each.is_late():
                late.append(each)
        if late and await queue_is_empty():
            lost += late
        if lost:
            count = await publish(self._session.id, self._store, [each.lease for each in lost])
            log.warning("%d tasks that nobody began were sent once more", count)
            for each in lost[:count]:
                each.at, each.patience = time.monotonic(), 2 * each.patience

    async def _take_back(self) -> None:
        """What nobody has begun. A task that comes later finds its lease gone."""
        leases = [each.lease for each in self._sent.values()]
        if leases:
            try:
                await self._frontier.release(leases)
            except FrontierError as exc:
                log.warning("leases were not given back, they run out by themselves: %s", exc)
