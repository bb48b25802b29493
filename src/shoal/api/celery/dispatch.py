"""Sends the pages of a session to Celery, no faster than their hosts allow.

A page becomes a task when it is leased. So a page that waits for its host, a retry or a Retry-After waits in the
frontier, and occupies no worker. The task carries the lease. While the task is in the broker, the dispatcher renews the
lease. If the lease expires there, no attempt is lost. The worker that starts the task has the lease reissued, and
renews it from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import Struct

from shoal.api.batch.session import OVER, Session
from shoal.api.celery.broker import publish, queue_is_empty
from shoal.api.celery.page_worker import lease_ttl
from shoal.api.celery.settings import ROBOTS_TASK, TASK, distributed_frontier, store_name
from shoal.api.celery.watch import CeleryWatch
from shoal.config import Config
from shoal.crawling.leases import Persistence
from shoal.crawling.run_queue import make_run_queue
from shoal.errors import FrontierError, RunError, StoreRewoundError
from shoal.fetch.layers.robots import fact_name
from shoal.ports import Lease, Stats
from shoal.system import chance, clock
from shoal.urls.normalize import origin_of

log = logging.getLogger("shoal.tasks")

_WINDOW = (16, 200)
"""Pages of one session in the broker and on workers, at least and at most. Between the limits: as many as are done in
half a second. So the queue stays short, and a large session leaves room for others."""
_POLL_EVERY = (0.01, 0.25)  # seconds, at least and at most
_RESEND_AFTER = 600.0  # seconds after which a task that no worker started is resent in any case
_LOST_AFTER = 15.0
"""Seconds after which a task that no worker started and that is not in the queue counts as lost: a worker may have
dropped it when its connection broke. Doubled with each resend, as it may also wait for the rate limit."""
_BROKER_RETRY_EVERY = 1.0
_ROBOTS_KNOWN = 30.0  # seconds for which the frontier is not asked again whether it has a robots.txt
_MAX_ORIGINS = 10_000
_STATE_EVERY = 1.0  # seconds between checks whether the session was cancelled


class _SentTask(Struct):
    """A task in the broker."""

    lease: Lease
    sent_at: float
    task: str
    late_after: float = _LOST_AFTER

    def is_late(self) -> bool:
        return clock.monotonic() - self.sent_at > self.late_after

    def is_lost(self, lost_at: float) -> bool:
        """Whether it may be lost. ``lost_at``: see `CeleryWatch`."""
        return self.sent_at < lost_at or clock.monotonic() - self.sent_at > _RESEND_AFTER


class Pace:
    """Measures how many pages per second were done in about the last second."""

    def __init__(self) -> None:
        self.per_second = 0.0
        self._count: int | None = None
        self._began = self._at = 0.0

    def update(self, count: int, now: float) -> bool:
        """Update the speed. ``count``: all pages done so far. Returns whether it has changed."""
        before, self._count = self._count, count
        if before is None or now <= self._at:
            self._began = self._at = now
            return bool(count)
        share = min(1.0, (now - self._at) / min(1.0, now - self._began))  # average of about the last second
        self.per_second += share * ((count - before) / (now - self._at) - self.per_second)
        self._at = now
        return count != before


class Dispatcher:
    """Dispatches sessions until they are over. If its process dies, another continues when the leases expire."""

    def __init__(self, config: Config, watch: CeleryWatch) -> None:
        self._config = config
        self._watch = watch
        self._running: dict[str, _Dispatch] = {}

    def stop(self, session_id: str) -> None:
        if session_id in self._running:
            self._running[session_id].stop()

    async def run(self, session: Session) -> None:
        dispatch = self._running[session.id] = _Dispatch(session, self._config, self._watch)
        try:
            await dispatch.run()
        finally:
            del self._running[session.id]


class _Dispatch:
    """The dispatch loop of one session."""

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
        self._check_state_at = 0.0
        self._queue = make_run_queue(session.spider(""), config, session.frontier, shared=True)
        self._persist = Persistence(shared=True)
        self._sent: dict[bytes, _SentTask] = {}
        self._renew_at = clock.monotonic() + self._renew_every
        self._pace = Pace()
        self._pause = _POLL_EVERY[0]
        self._outstanding = 0
        self._obeys_robots = config.robots.obey
        self._robots_known: dict[str, float] = {}
        """Until when the frontier has the robots.txt of an origin."""

    def stop(self) -> None:
        self._stopped = True

    async def run(self) -> None:
        while not self._stopped and not await self._is_over():
            try:
                if await self._poll():
                    break
            except StoreRewoundError:
                log.warning("session %s: the store was rewound; resending its tasks", self._session.id)
                self._sent.clear()
                self._queue.forget()
                await self._persist(self._frontier.recover)
                await self._persist(self._session.reopen)
            await asyncio.sleep(self._pause)
        await self._release_all()

    async def _poll(self) -> bool:
        """Send, renew or finish, whatever is due. True when the session is complete."""
        stats = await self._persist(self._frontier.stats)
        if stats.seeding:  # the store was rewound and has lost URLs of the session
            await self._persist(self._session.seed)
        if self._session.is_complete(stats) and self._session.is_complete(await self._persist(self._frontier.stats)):
            await self._persist(self._session.finish)
            await self._persist(
                lambda: self._frontier.lease(0, self._ttl)
            )  # raises if the store was rewound in the meantime
            return True
        await self._step(stats)
        if clock.monotonic() >= self._renew_at:
            await self._renew()
        return False

    async def _is_over(self) -> bool:
        """Whether the session was cancelled or deleted."""
        if clock.monotonic() < self._check_state_at:
            return False
        self._check_state_at = clock.monotonic() + _STATE_EVERY
        try:
            return await self._persist(self._session.state) in OVER
        except RunError:
            return True

    async def _step(self, stats: Stats) -> None:
        """Send the pages that are due, and set the pause until the next poll."""
        if has_changed := self._pace.update(stats.done + stats.dead, clock.monotonic()):
            self._session.changed.set()
        smallest, largest = _WINDOW
        free = max(smallest, min(largest, int(self._pace.per_second / 2))) - stats.leased
        sent, wait = 0, None
        await self._session.quota.room.measure()
        if free > 0 and not self._session.quota.must_wait:  # pages wait in the frontier until the store has room
            nonce = chance.token_bytes(16)
            leased = await self._persist(lambda: self._queue.next_requests(free, counts_attempt=False, nonce=nonce))
            sent, wait = len(leased.leases), leased.wait
            if sent:
                await self._send(leased.leases)
        has_more = stats.ready + stats.waiting > sent
        self._pause = self._next_pause(stats.leased, sent, wait, has_changed=has_changed, has_more=has_more)
        self._outstanding = stats.leased + sent

    def _next_pause(self, remaining: int, sent: int, wait: float | None, *, has_changed: bool, has_more: bool) -> float:
        """Seconds until the next poll. ``left``: how many of the pages outstanding after the last poll are not done.
        While there is more to send, about half of them should be done between polls. At the end, each change makes the
        next poll come sooner."""
        pause = self._pause
        if has_more and (remaining or sent):
            if 2 * remaining < self._outstanding:
                pause /= 2
            elif 4 * remaining > 3 * self._outstanding:
                pause *= 1.5
        else:
            pause = _POLL_EVERY[0] if has_changed or sent else 1.5 * pause
        if wait is not None:
            pause = min(wait, pause)
        return min(_POLL_EVERY[1], max(_POLL_EVERY[0], pause))

    async def _send(self, leases: Sequence[Lease]) -> None:
        """Send leases as tasks. Those that the broker does not accept are released without counting an attempt."""
        first, pages = await self._robots_first(leases)
        rest = [*await self._publish(first, ROBOTS_TASK), *await self._publish(pages, TASK)]
        if rest:
            await self._persist(lambda: self._frontier.release(rest))
            await asyncio.sleep(_BROKER_RETRY_EVERY)

    async def _publish(self, leases: Sequence[Lease], task: str) -> Sequence[Lease]:
        """Send leases as tasks of this type. Returns those that the broker does not accept."""
        sent = await publish(self._session.id, self._store, leases, task) if leases else 0
        now = clock.monotonic()
        for lease in leases[:sent]:
            self._sent[lease.fingerprint] = _SentTask(lease, now, task)
        return leases[sent:]

    async def _robots_first(self, leases: Sequence[Lease]) -> tuple[list[Lease], list[Lease]]:
        """Split leases into those whose robots.txt has to be fetched first, one per origin, and those that can be
        fetched now. Further leases of such an origin are released: they wait in the frontier."""
        if not self._obeys_robots:
            return [], list(leases)
        unknown = await self._unknown_origins({origin_of(lease.request.url) for lease in leases})
        first: dict[str, Lease] = {}
        pages, waiting = [], []
        for lease in leases:
            origin = origin_of(lease.request.url)
            if origin not in unknown:
                pages.append(lease)
            elif first.setdefault(origin, lease) is not lease:
                waiting.append(lease)
        if waiting:
            await self._persist(lambda: self._frontier.release(waiting))
        return list(first.values()), pages

    async def _unknown_origins(self, origins: Iterable[str]) -> set[str]:
        now = clock.monotonic()
        unsure = [origin for origin in origins if self._robots_known.get(origin, 0.0) <= now]
        texts = await asyncio.gather(*(self._persist(partial(self._frontier.recall, fact_name(o))) for o in unsure))
        known = {origin: now + _ROBOTS_KNOWN for origin, text in zip(unsure, texts, strict=True) if text is not None}
        if len(self._robots_known) > _MAX_ORIGINS:
            self._robots_known.clear()
        self._robots_known |= known
        return set(unsure) - known.keys()

    async def _renew(self) -> None:
        """Renew the leases in the broker, and resend tasks that may be lost. A lease that cannot be renewed was
        started, is done, or will be leased again."""
        self._renew_at = clock.monotonic() + self._renew_every
        held = list(self._sent.values())
        try:
            await self._frontier.lease(0, self._ttl)  # returns expired leases to the queue, even if the window is full
            renewed = await self._frontier.renew([task.lease for task in held], self._ttl) if held else []
        except StoreRewoundError:
            raise
        except FrontierError as exc:
            log.warning("could not renew leases: %s", exc)
            return
        lost, late = [], []
        for sent_task, lease in zip(held, renewed, strict=True):
            if lease is None:
                if self._sent.get(sent_task.lease.fingerprint) is sent_task:
                    del self._sent[sent_task.lease.fingerprint]
                continue
            sent_task.lease = lease
            if sent_task.is_lost(self._watch.lost_at):
                lost.append(sent_task)
            elif sent_task.is_late():
                late.append(sent_task)
        if late and await queue_is_empty():
            lost += late
        if lost:
            for task in (ROBOTS_TASK, TASK):
                await self._resend([sent_task for sent_task in lost if sent_task.task == task], task)

    async def _resend(self, lost: list[_SentTask], task: str) -> None:
        leases = [sent_task.lease for sent_task in lost]
        count = await publish(self._session.id, self._store, leases, task) if leases else 0
        if count:
            log.warning("resent %d tasks that no worker had started", count)
        for sent_task in lost[:count]:
            sent_task.sent_at, sent_task.late_after = clock.monotonic(), 2 * sent_task.late_after

    async def _release_all(self) -> None:
        """Release the leases that no worker has started. A worker that receives such a task later is refused."""
        leases = [task.lease for task in self._sent.values()]
        if leases:
            try:
                await self._frontier.release(leases)
            except FrontierError as exc:
                log.warning("could not release leases; they will expire: %s", exc)
