"""The session of a node, and the worker that runs while the node holds a slot."""

from __future__ import annotations

import asyncio
import logging

from shoal import clock
from shoal.ports import Holder
from shoal.runs.worker import Worker

log = logging.getLogger("shoal.cluster")

_MARGIN = 1 / 8  # of a session: the worker stops this long before its end
_HEARTBEATS = 3  # per session


class NodeSession:
    """How long the coordinator considers this node alive, counted from just before its last heartbeat was sent."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._last_heartbeat = float("-inf")

    def renewed(self, sent: float) -> None:
        self._last_heartbeat = sent

    def lost(self) -> None:
        self._last_heartbeat = float("-inf")

    @property
    def left(self) -> float:
        """Seconds that the node may still work."""
        return max(0.0, self._last_heartbeat + self.ttl * (1 - _MARGIN) - clock.now())

    @property
    def is_good(self) -> bool:
        return self.left > 0

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return self.ttl / _HEARTBEATS


class SlotWorker:
    """A worker that runs under a slot. It is stopped before the session ends."""

    def __init__(self, index: int, holder: Holder, worker: Worker, session: NodeSession) -> None:
        self.index = index
        self.holder = holder
        self.worker = worker
        self.was_stopped = False
        """Whether the node stopped it. False if the run ended."""
        self._session = session
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        work = asyncio.ensure_future(self.worker.run())
        try:
            while not work.done() and self._session.is_good:
                await asyncio.wait({work}, timeout=self._session.left)
            if not work.done():
                log.warning("slot %d: the session is about to expire without a heartbeat; its worker stops", self.index)
                self.abort()
            await work
        finally:
            work.cancel()

    def stop(self) -> None:
        """Shut down: finish the requests in flight."""
        self.was_stopped = True
        self.worker.stop()

    def abort(self) -> None:
        """Stop at once: another node may hold the slot."""
        self.was_stopped = True
        self.worker.abort()

    @property
    def doing(self) -> str:
        engine = self.worker.engine
        if engine is None:
            return "starting"
        if engine.away:
            return "waits for the frontier"
        return f"crawling: {engine.counters.fetched} pages, {engine.in_flight} in flight"
