"""Sends the pages of a session to Celery, no faster than their hosts allow.

A page becomes a task when it is leased. So a page that waits for its host, a retry or a Retry-After waits in the
frontier, and occupies no worker. The task carries the lease. While the task is in the broker, the dispatcher renews the
lease. If the lease expires there, no attempt is lost. The worker that starts the task has the lease reissued, and
renews it from then on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from msgspec import Struct

from shoal.api.batch.session import OVER, Session
from shoal.api.celery.messages import publish, queue_is_empty
from shoal.api.celery.page_worker import lease_ttl
from shoal.api.celery.settings import QUEUE, ROBOTS_TASK, TASK, distributed_frontier, store_name
from shoal.config import Config
from shoal.crawling.retrying import Persistence
from shoal.crawling.scheduler import make_scheduler
from shoal.errors import FrontierError, RunError, ShoalError, StoreRewoundError
from shoal.fetch.layers.robots import fact_name
from shoal.ports import Lease, Stats
from shoal.urls.normalize import origin_of

# Detects lost tasks: a worker died with the tasks it had prefetched, or the broker was down and lost some. Celery
# itself redelivers them only after the visibility timeout.


_WATCH_EVERY = 4.0
_REPLY_TIMEOUT = 1.0
_MAX_MISSED = 2  # polls in a row without a reply after which a worker counts as gone


class _Connection(Protocol):
    """The methods of a broker connection that are used here."""

    def ensure_connection(self, *, max_retries: int, timeout: float) -> object: ...

    def release(self) -> object: ...


class CeleryWorker(Struct, frozen=True):
    """A Celery worker of this server's queue."""

    name: str
    pid: int
    answers: bool
    """It replied to the last poll."""


class BrokerAwayError(ShoalError):
    """Celery's broker does not respond."""


class CeleryWatch:
    """Polls the workers of our queue over one connection. Other applications may use the broker too."""

    def __init__(self) -> None:
        self.lost_at = 0.0
        """Tasks sent before this time (monotonic clock) and not started may be lost."""
        self.workers: int | None = None
        """How many replied to the last poll; None while the broker does not respond."""
        self._missed: dict[tuple[str, int], int] = {}
        """Polls in a row without a reply, by worker name and process ID."""
        self._connection: _Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-celery-watch")
        self._poll_task: asyncio.Task[int] | None = None

    @property
    def members(self) -> list[CeleryWorker]:
        """The workers that replied to one of the last polls. All are silent while the broker does not respond."""
        away = self.workers is None
        return [
            CeleryWorker(name, pid, not missed and not away) for (name, pid), missed in sorted(self._missed.items())
        ]

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            try:
                await self.count_workers()
            except BrokerAwayError as exc:
                log.debug("broker: %s", exc)
            await asyncio.sleep(max(0.0, before + _WATCH_EVERY - time.monotonic()))

    async def count_workers(self) -> int:
        """How many workers reply. BrokerAwayError if the broker does not respond. Concurrent callers share one poll."""
        if self._poll_task is None:
            self._poll_task = asyncio.create_task(self._poll())
            self._poll_task.add_done_callback(self._end_poll)
        return await asyncio.shield(self._poll_task)

    def _end_poll(self, poll: asyncio.Task[int]) -> None:
        self._poll_task = None
        if not poll.cancelled():
            poll.exception()  # callers get it, if any still wait; else asyncio would log it

    async def _poll(self) -> int:
        try:
            workers = await asyncio.get_running_loop().run_in_executor(self._thread, self._query_workers)
        except Exception as exc:  # kombu's transports have no common base error
            self.workers = None
            self.lost_at = time.monotonic()
            raise BrokerAwayError(f"{type(exc).__name__}: {exc}") from exc
        if not workers:
            self.close()  # a broker that was flushed has lost the reply queue: open a new connection next time
        self.workers = len(workers)
        self._find_gone(workers)
        return len(workers)

    def _find_gone(self, workers: set[tuple[str, int]]) -> None:
        missed = {
            worker: 0 if worker in workers else self._missed.get(worker, 0) + 1 for worker in {*self._missed, *workers}
        }
        gone = [worker for worker, times in missed.items() if times >= _MAX_MISSED]
        for worker in gone:
            log.warning("worker %s (pid %d) is gone; resending the tasks that it had not started", *worker)
            del missed[worker]
            self.lost_at = time.monotonic()
        self._missed = missed

    def _query_workers(self) -> set[tuple[str, int]]:
        from shoal.api.celery.app import app

        try:
            if self._connection is None:
                self._connection = app.connection_for_write()
                self._connection.ensure_connection(max_retries=1, timeout=_REPLY_TIMEOUT)
            broadcast = partial(app.control.broadcast, reply=True, timeout=_REPLY_TIMEOUT, connection=self._connection)
            queues = {name: found for reply in broadcast("active_queues") for name, found in reply.items()}
            ours = [name for name, found in queues.items() if any(queue.get("name") == QUEUE for queue in found)]
            replies = broadcast("stats", destination=ours, limit=len(ours)) if ours else []
        except BaseException:
            self.close()
            raise
        return {(name, stats.get("pid", 0)) for reply in replies for name, stats in reply.items()}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.release()
            self._connection = None


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
        return time.monotonic() - self.sent_at > self.late_after

    def is_lost(self, lost_at: float) -> bool:
        """Whether it may be lost. ``lost_at``: see `CeleryWatch`."""
        return self.sent_at < lost_at or time.monotonic() - self.sent_at > _RESEND_AFTER


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
        self._scheduler = make_scheduler(session.spider(""), config, session.frontier, shared=True)
        self._persist = Persistence(shared=True)
        self._sent: dict[bytes, _SentTask] = {}
        self._renew_at = time.monotonic() + self._renew_every
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
                self._scheduler.forget()
                await self._persist(self._frontier.recover)
                await self._persist(self._session.reopen)
            await asyncio.sleep(self._pause)
        await self._release_all()

    async def _poll(self) -> bool:
        """Send, renew or finish, whatever is due. True when the session is complete."""
        stats = await self._persist(self._frontier.stats)
        if stats.seeding:  # the store was rewound and has lost URLs of the session
            await self._persist(self._session.seed)
        if self._may_be_complete(stats) and await self._persist(self._session.is_complete):
            await self._persist(self._session.finish)
            await self._persist(
                lambda: self._frontier.lease(0, self._ttl)
            )  # raises if the store was rewound in the meantime
            return True
        await self._step(stats)
        if time.monotonic() >= self._renew_at:
            await self._renew()
        return False

    async def _is_over(self) -> bool:
        """Whether the session was cancelled or deleted."""
        if time.monotonic() < self._check_state_at:
            return False
        self._check_state_at = time.monotonic() + _STATE_EVERY
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
        """Send the pages that are due, and set the pause until the next poll."""
        if has_changed := self._pace.update(stats.done + stats.dead, time.monotonic()):
            self._session.changed.set()
        smallest, largest = _WINDOW
        free = max(smallest, min(largest, int(self._pace.per_second / 2))) - stats.leased
        sent, wait = 0, None
        await self._session.quota.room.measure()
        if free > 0 and not self._session.quota.must_wait:  # pages wait in the frontier until the store has room
            nonce = os.urandom(16)
            leased = await self._persist(lambda: self._scheduler.next_requests(free, counts_attempt=False, nonce=nonce))
            sent, wait = len(leased.leases), leased.wait
            if sent:
                await self._send(leased.leases)
        has_more = stats.ready + stats.waiting > sent
        self._pause = self._next_pause(stats.leased, sent, wait, has_changed=has_changed, has_more=has_more)
        self._outstanding = stats.leased + sent

    def _next_pause(self, left: int, sent: int, wait: float | None, *, has_changed: bool, has_more: bool) -> float:
        """Seconds until the next poll. ``left``: how many of the pages outstanding after the last poll are not done.
        While there is more to send, about half of them should be done between polls. At the end, each change makes the
        next poll come sooner."""
        pause = self._pause
        if has_more and (left or sent):
            if 2 * left < self._outstanding:
                pause /= 2
            elif 4 * left > 3 * self._outstanding:
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
        now = time.monotonic()
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
        now = time.monotonic()
        asked = [origin for origin in origins if self._robots_known.get(origin, 0.0) <= now]
        found = await asyncio.gather(*(self._persist(partial(self._frontier.recall, fact_name(o))) for o in asked))
        known = {origin: now + _ROBOTS_KNOWN for origin, text in zip(asked, found, strict=True) if text is not None}
        if len(self._robots_known) > _MAX_ORIGINS:
            self._robots_known.clear()
        self._robots_known |= known
        return set(asked) - known.keys()

    async def _renew(self) -> None:
        """Renew the leases in the broker, and resend tasks that may be lost. A lease that cannot be renewed was
        started, is done, or will be leased again."""
        self._renew_at = time.monotonic() + self._renew_every
        held = list(self._sent.values())
        try:
            await self._frontier.lease(0, self._ttl)  # returns expired leases to the queue, even if the window is full
            renewed = await self._frontier.renew([each.lease for each in held], self._ttl) if held else []
        except StoreRewoundError:
            raise
        except FrontierError as exc:
            log.warning("could not renew leases: %s", exc)
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
            for task in (ROBOTS_TASK, TASK):
                await self._resend([each for each in lost if each.task == task], task)

    async def _resend(self, lost: list[_SentTask], task: str) -> None:
        count = await publish(self._session.id, self._store, [each.lease for each in lost], task) if lost else 0
        if count:
            log.warning("resent %d tasks that no worker had started", count)
        for each in lost[:count]:
            each.sent_at, each.late_after = time.monotonic(), 2 * each.late_after

    async def _release_all(self) -> None:
        """Release the leases that no worker has started. A worker that receives such a task later is refused."""
        leases = [each.lease for each in self._sent.values()]
        if leases:
            try:
                await self._frontier.release(leases)
            except FrontierError as exc:
                log.warning("could not release leases; they will expire: %s", exc)
