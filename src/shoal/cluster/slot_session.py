"""The time in which a node has a slot, and the session that it depends on."""

from __future__ import annotations

import asyncio
import logging
import time

from shoal.ports import Holder
from shoal.runs.worker import Worker

log = logging.getLogger("shoal.cluster")

_MARGIN = 1 / 8  # of a session: so long before its end the work stops, whether or not the coordinator answers
_BEATS = 3  # in a session


def now() -> float:
    """Seconds of a clock that never steps, and goes on while the machine is suspended, where there is such a one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Session:
    """Until when the coordinator takes this node for alive, as far as the node can know: counted from the moment before
    the last heartbeat was sent."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._heard = float("-inf")

    def renewed(self, sent: float) -> None:
        self._heard = sent

    def lost(self) -> None:
        self._heard = float("-inf")

    @property
    def left(self) -> float:
        """Seconds for which the node may still work."""
        return max(0.0, self._heard + self.ttl * (1 - _MARGIN) - now())

    @property
    def is_good(self) -> bool:
        return self.left > 0

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return self.ttl / _BEATS


class Tenure:
    """A worker that works for a slot, and is stopped in time when the session can't be renewed."""

    def __init__(self, index: int, holder: Holder, worker: Worker, session: Session) -> None:
        self.index = index
        self.holder = holder
        self.worker = worker
        self.was_ended = False
        """By the node, not by the worker itself."""
        self._session = session
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        work = asyncio.ensure_future(self.worker.run())
        try:
            while not work.done() and self._session.is_good:
                await asyncio.wait({work}, timeout=self._session.left)
            if not work.done():
                log.warning("slot %d is no longer safe: nothing more is fetched for it", self.index)
                self.cut()
            await work
        finally:
            work.cancel()

    def stop(self) -> None:
        """End in good order."""
        self.was_ended = True
        self.worker.stop()

    def cut(self) -> None:
        """The slot is another's now, or soon."""
        self.was_ended = True
        self.worker.abort()

    @property
    def doing(self) -> str:
        engine = self.worker.engine
        if engine is None:
            return "begins to work"
        if engine.away:
            return "waits for the frontier's server"
        return f"works: {engine.counters.fetched} pages, {engine.in_flight} in flight"
