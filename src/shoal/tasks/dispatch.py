"""Gives the pages of a session to Celery, in the pace that their hosts bear.

A page becomes a task when its lease is given: so what waits for a host, a retry or a Retry-After waits in the frontier,
and no worker's place is taken by waiting. The lease travels with the task. While the task is in the broker the lease is
renewed here, and if it runs out all the same, that costs no attempt. Whoever begins with it has it reissued, and then
it is that worker's to renew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kombu.exceptions import OperationalError
from msgspec import Struct

from shoal.assembly import make_scheduler
from shoal.batch.session import OVER, Session
from shoal.config import Config
from shoal.errors import FrontierError, RunError
from shoal.persistence import Persistence
from shoal.ports import Lease
from shoal.tasks.messages import pack
from shoal.tasks.settings import TASK
from shoal.tasks.watch import CeleryWatch
from shoal.tasks.worker import lease_ttl

log = logging.getLogger("shoal.tasks")

_WINDOW = (16, 200)
"""Pages of one session that are with Celery at a time, at least and at most: as many as are done in half a second. So
the queue is short where workers are slow, and a large session leaves room for others."""
_LOOK = (0.01, 0.25)  # seconds between looks at a session, first and at most
_SEND_AGAIN = 600.0  # seconds after which a task that nobody began is sent once more, then twice as long, and so on
_BROKER_AWAY = 1.0


class _Sent(Struct):
    """A task in the broker."""

    lease: Lease
    at: float
    patience: float = _SEND_AGAIN

    def is_lost(self, lost_at: float) -> bool:
        """Whether it may be, or at least nobody seems to get to it."""
        return self.at < lost_at or time.monotonic() - self.at > self.patience


class Pace:
    """How many pages are done in a second, lately."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._count: int | None = None
        self._at = 0.0

    def note(self, count: int, now: float) -> bool:
        """``count`` of all that are done by now; whether that is more than the last time."""
        before, self._count = self._count, count
        if before is None or now <= self._at:
            self._at = now
            return bool(count)
        share = min(1.0, now - self._at)  # of what is believed: the last second counts
        self.per_second += share * ((count - before) / (now - self._at) - self.per_second)
        self._at = now
        return count != before


class Dispatcher:
    """Sees sessions through to their end. If it dies, another goes on when the leases in the broker have run out."""

    def __init__(self, config: Config, watch: CeleryWatch) -> None:
        self._config = config
        self._watch = watch
        self._stopped: set[str] = set()

    def stop(self, session_id: str) -> None:
        self._stopped.add(session_id)

    async def run(self, session: Session) -> None:
        try:
            await _Dispatch(session, self._config, self._watch, lambda: session.id in self._stopped).run()
        finally:
            self._stopped.discard(session.id)


class _Dispatch:
    """One session's."""

    def __init__(self, session: Session, config: Config, watch: CeleryWatch, is_stopped: Callable[[], bool]) -> None:
        self._renew_every = lease_ttl(config) / 4
        ttl = lease_ttl(config)
        config = session.config(config).with_settings({"lease.ttl": ttl})
        self._watch = watch
        self._session = session
        self._frontier = session.frontier
        self._ttl = ttl
        self._is_stopped = is_stopped
        self._scheduler = make_scheduler(session.spider(""), config, session.frontier, shared=True)
        self._persist = Persistence(shared=True)
        self._sent: dict[bytes, _Sent] = {}
        self._renew_at = time.monotonic() + self._renew_every
        self._pace = Pace()

    async def run(self) -> None:
        pause = _LOOK[0]
        while not self._is_stopped() and not await self._is_over():
            moved = await self._step()
            if time.monotonic() >= self._renew_at:
                await self._renew()
            pause = _LOOK[0] if moved else min(_LOOK[1], 1.5 * pause)
            await asyncio.sleep(pause)
        await self._take_back()

    async def _is_over(self) -> bool:
        try:
            state = await self._persist(self._session.state)
        except RunError:
            return True
        if state in OVER:
            return True
        if await self._persist(self._frontier.is_finished) or (
            self._scheduler.limit_reached and not (await self._persist(self._frontier.stats)).leased
        ):
            await self._persist(self._session.finish)
            return True
        return False

    async def _step(self) -> bool:
        """Send what may be sent; whether anything has happened since the last time."""
        stats = await self._persist(self._frontier.stats)
        moved = self._pace.note(stats.done + stats.dead, time.monotonic())
        if moved:
            self._session.changed.set()
        least, most = _WINDOW
        room = max(least, min(most, int(self._pace.per_second / 2))) - stats.leased
        if room <= 0:
            return moved
        leased = await self._persist(lambda: self._scheduler.next_requests(room, begun=False))
        if leased.leases:
            await self._send(leased.leases)
        return moved or bool(leased.leases)

    async def _send(self, leases: Sequence[Lease]) -> None:
        """What the broker does not take goes back, without using up an attempt."""
        sent = await asyncio.to_thread(_publish, self._session.id, leases)
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
        if not held:
            return
        try:
            renewed = await self._frontier.renew([each.lease for each in held], self._ttl)
        except FrontierError as exc:
            log.warning("leases could not be renewed: %s", exc)
            return
        late = []
        for each, lease in zip(held, renewed, strict=True):
            if lease is None:
                if self._sent.get(each.lease.fingerprint) is each:
                    del self._sent[each.lease.fingerprint]
                continue
            each.lease = lease
            if each.is_lost(self._watch.lost_at):
                late.append(each)
        if late:
            count = await asyncio.to_thread(_publish, self._session.id, [each.lease for each in late])
            log.info("%d tasks that nobody began were sent once more", count)
            for each in late[:count]:
                each.at, each.patience = time.monotonic(), 2 * each.patience

    async def _take_back(self) -> None:
        """What nobody has begun. A task that comes later finds its lease gone."""
        leases = [each.lease for each in self._sent.values()]
        if leases:
            try:
                await self._frontier.release(leases)
            except FrontierError as exc:
                log.warning("leases were not given back, they run out by themselves: %s", exc)


def _publish(session_id: str, leases: Sequence[Lease]) -> int:
    """How many were sent."""
    from shoal.tasks.app import app

    count = 0
    try:
        with app.producer_or_acquire() as producer:
            for lease in leases:
                app.send_task(TASK, (session_id, lease.request.url, pack(lease)), producer=producer)
                count += 1
    except OperationalError as exc:
        log.debug("broker: %s", exc)
    return count
