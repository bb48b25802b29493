"""Notices when tasks may have been lost: a worker is gone with those that it had fetched ahead, or the broker was away
and may have forgotten some. Celery itself tells nobody before the visibility time-out."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from shoal.errors import ShoalError
from shoal.tasks.settings import QUEUE

log = logging.getLogger("shoal.tasks")

_LOOK_EVERY = 4.0
_ANSWER_WITHIN = 1.0
_MISSED = 2  # looks in a row at which a worker that does not answer counts as gone


class BrokerAwayError(ShoalError):
    """Celery's broker can't be reached."""


class CeleryWatch:
    """Asks the workers of our queue now and then, over one connection that it keeps. Others may use the broker too."""

    def __init__(self) -> None:
        self.lost_at = 0.0
        """The moment (of the monotonic clock) before which tasks that nobody has begun may be lost."""
        self.workers: int | None = None
        """How many answered the last time; None while the broker does not answer."""
        self._missed: dict[tuple[str, int], int] = {}
        """Workers by name and process, and how often in a row they did not answer."""
        self._connection: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-celery-watch")
        self._looking: asyncio.Task[int] | None = None

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            try:
                await self.look()
            except BrokerAwayError as exc:
                log.debug("broker: %s", exc)
            await asyncio.sleep(max(0.0, before + _LOOK_EVERY - time.monotonic()))

    async def look(self) -> int:
        """How many workers answer. BrokerAwayError if there is nobody to ask through. One look serves all who ask
        meanwhile."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)

    def _looked(self, look: asyncio.Task[int]) -> None:
        self._looking = None
        if not look.cancelled():
            look.exception()  # told to those who waited, if anyone still does

    async def _look(self) -> int:
        try:
            there = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
        except Exception as exc:  # whatever kombu's transports raise: they have no error in common
            self.workers = None
            self.lost_at = time.monotonic()
            raise BrokerAwayError(f"{type(exc).__name__}: {exc}") from exc
        if not there:
            self.close()  # a broker that was emptied has forgotten where answers go: ask anew the next time
        self.workers = len(there)
        self._compare(there)
        return len(there)

    def _compare(self, there: set[tuple[str, int]]) -> None:
        missed = {
            worker: 0 if worker in there else self._missed.get(worker, 0) + 1 for worker in {*self._missed, *there}
        }
        gone = [worker for worker, times in missed.items() if times >= _MISSED]
        for worker in gone:
            log.warning("worker %s (pid %d) is gone; tasks that it had not begun are sent again", *worker)
            del missed[worker]
            self.lost_at = time.monotonic()
        self._missed = missed

    def _ask(self) -> set[tuple[str, int]]:
        from shoal.tasks.app import app

        try:
            if self._connection is None:
                self._connection = app.connection_for_write()
                self._connection.ensure_connection(max_retries=1, timeout=_ANSWER_WITHIN)
            ask = partial(app.control.broadcast, reply=True, timeout=_ANSWER_WITHIN, connection=self._connection)
            queues = {name: found for answer in ask("active_queues") for name, found in answer.items()}
            ours = [name for name, found in queues.items() if any(queue.get("name") == QUEUE for queue in found)]
            answers = ask("stats", destination=ours, limit=len(ours)) if ours else []
        except BaseException:
            self.close()
            raise
        return {(name, stats.get("pid", 0)) for answer in answers for name, stats in answer.items()}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.release()
            self._connection = None
