"""The session of a worker: heartbeats that a thread sends, and the right to work while they arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from shoal import clock
from shoal.errors import FencedError, ShoalError
from shoal.frontier import open_store
from shoal.ports import Frontier, FrontierOptions, Heartbeat, Holder, Store

log = logging.getLogger("shoal.worker")

_BEATS = 4
"""Heartbeats in a session."""
_MARGIN = 1 / 8
"""Part of a session. The worker stops this long before its end."""
_LEAVE_TIMEOUT = 0.3


def new_worker_id() -> str:
    """A name that is unique in the fleet and shows where the worker runs."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class WorkerSession:
    """Keeps a worker alive in the eyes of the others, and fences workers that are silent.

    A thread sends the heartbeats, on a connection of its own, so a callback that blocks the event loop does not end the
    session. ``may_work`` turns false before the session ends, whether or not the store answers. A worker that was
    fenced calls ``rejoin``: it gets new leases under the next epoch.
    """

    def __init__(self, url: str, run_id: str, worker: str, seconds: float, options: FrontierOptions) -> None:
        """``url``: of the store. ``options``: of the run."""
        self.worker = worker
        self.on_fenced: Callable[[], None] = lambda: None
        """Called in the event loop of ``join`` when the worker was fenced."""
        self._url = url
        self._run_id = run_id
        self._seconds = seconds
        self._options = options
        self._epoch = 1
        self._until = 0.0
        """When work must stop without another heartbeat, on `shoal.clock`."""
        self._frontier: Frontier | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._beating: asyncio.AbstractEventLoop | None = None
        """The event loop of the thread."""
        self._stopping: asyncio.Event | None = None

    # -- for the event loop of the worker

    @property
    def holder(self) -> Holder:
        return Holder(self.worker, self._epoch)

    def may_work(self) -> bool:
        """Whether the session is valid: nobody has fenced this worker, and nobody will do so soon."""
        return clock.now() < self._until

    async def join(self, frontier: Frontier) -> None:
        """Send the first heartbeat through ``frontier``, which leases for this worker, and start the thread."""
        self._frontier = frontier
        self._loop = asyncio.get_running_loop()
        await self._beat(frontier)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="heartbeats", daemon=True)
            self._thread.start()

    async def rejoin(self) -> None:
        """Continue under the next epoch after a fence."""
        assert self._frontier is not None
        while True:
            self._epoch += 1
            self._frontier.hold(self.holder)
            with suppress(FencedError):
                await self._beat(self._frontier)
                log.warning("worker %s was silent for too long and lost its pages; it joins again", self.worker)
                return

    async def close(self) -> None:
        """Stop the heartbeats and leave the run. Call it when nothing is leased any more."""
        if self._thread is not None:
            if self._beating is not None and self._stopping is not None:
                with suppress(RuntimeError):  # its loop has ended
                    self._beating.call_soon_threadsafe(self._stopping.set)
            await asyncio.to_thread(self._thread.join, 2 * _LEAVE_TIMEOUT)
        self._until = 0.0

    # -- for both

    async def _beat(self, frontier: Frontier) -> float | None:
        epoch, sent = self._epoch, clock.now()
        due = await frontier.beat(
            Heartbeat(
                worker=self.worker, epoch=epoch, session=self._seconds, machine=socket.gethostname(), pid=os.getpid()
            )
        )
        if epoch == self._epoch:
            self._until = max(self._until, sent + self._seconds * (1 - _MARGIN))
        return due

    # -- for the thread

    def _run_thread(self) -> None:
        asyncio.run(self._keep_alive())

    async def _keep_alive(self) -> None:
        self._beating, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        store: Store | None = None
        frontier: Frontier | None = None
        pause = self._seconds / _BEATS
        while not await self._stops_within(pause):
            pause = self._seconds / _BEATS
            epoch = self._epoch
            try:
                async with asyncio.timeout(self._seconds / _BEATS):
                    store = store or await open_store(self._url)
                    frontier = frontier or await store.frontier(self._run_id, self._options)
                    due = await self._beat(frontier)
                    if due == 0:
                        await self._fence_silent(frontier)
                    elif due is not None:  # be there when a worker is dead, but not all at the same moment
                        pause = min(pause, due + random.uniform(0.05, 0.3))
            except FencedError:
                self._fenced(epoch)
                pause = self._seconds / _BEATS / 4
            except (ShoalError, OSError) as exc:  # also a timeout
                log.debug("a heartbeat could not be sent: %s", exc)
                pause = self._seconds / _BEATS / 4
        await self._leave(store, frontier)

    async def _stops_within(self, seconds: float) -> bool:
        assert self._stopping is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _fence_silent(self, frontier: Frontier) -> None:
        for worker, leases in (await frontier.fence_silent()).items():
            log.warning("worker %s is silent: its %d pages are released", worker, leases)

    def _fenced(self, epoch: int) -> None:
        if epoch != self._epoch:  # it has joined again already
            return
        self._until = 0.0
        if self._loop is not None:
            with suppress(RuntimeError):  # the worker has ended
                self._loop.call_soon_threadsafe(self.on_fenced)

    async def _leave(self, store: Store | None, frontier: Frontier | None) -> None:
        with suppress(ShoalError, OSError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                if frontier is not None:
                    await frontier.leave(self.worker, self._epoch)
                if store is not None:
                    await store.close()
