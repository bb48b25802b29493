"""Which Celery workers are alive.

A task may be lost: a worker died with the tasks it had prefetched, or the broker was down and lost some. Celery itself
redelivers them only after the visibility timeout. Servers import this module also if Celery is not installed.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from msgspec import Struct

from shoal.api.celery.settings import QUEUE
from shoal.errors import ShoalError
from shoal.system import clock, threads

log = logging.getLogger("shoal.tasks")

_WATCH_EVERY = 4.0
_REPLY_TIMEOUT = 1.0
_MAX_MISSED = 2  # polls in a row without a reply after which a worker counts as gone


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
        self._connection: Any = None  # of kombu, which has no types
        self._thread = threads.Pool(1, "shoal-celery-watch")
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
            before = clock.monotonic()
            try:
                await self.count_workers()
            except BrokerAwayError as exc:
                log.debug("broker: %s", exc)
            await asyncio.sleep(max(0.0, before + _WATCH_EVERY - clock.monotonic()))

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
            workers = await self._thread.call(self._query_workers)
        except Exception as exc:  # kombu's transports have no common base error
            self.workers = None
            self.lost_at = clock.monotonic()
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
            self.lost_at = clock.monotonic()
        self._missed = missed

    def _query_workers(self) -> set[tuple[str, int]]:
        from shoal.api.celery.app import app

        try:
            if self._connection is None:
                self._connection = app.connection_for_write()
                self._connection.ensure_connection(max_retries=1, timeout=_REPLY_TIMEOUT)
            broadcast = partial(app.control.broadcast, reply=True, timeout=_REPLY_TIMEOUT, connection=self._connection)
            queues = {name: active for reply in broadcast("active_queues") for name, active in reply.items()}
            ours = [name for name, active in queues.items() if any(queue.get("name") == QUEUE for queue in active)]
            replies = broadcast("stats", destination=ours, limit=len(ours)) if ours else []
        except BaseException:
            self.close()
            raise
        return {(name, stats.get("pid", 0)) for reply in replies for name, stats in reply.items()}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.release()
            self._connection = None
