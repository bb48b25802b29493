"""The session of a worker: it sends heartbeats, and may work while they arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from shoal.config import Config
from shoal.config.checks import frontier_kind
from shoal.errors import FencedError, ShoalError
from shoal.frontier import open_store
from shoal.ports import Frontier, Heartbeat, Holder
from shoal.system import chance, clock, threads

log = logging.getLogger("shoal.worker")

_BEATS = 4
"""Heartbeats in a session."""
_MARGIN = 1 / 8
"""Part of a session. The worker stops this long before its end."""
_LEAVE_TIMEOUT = 0.3


def new_worker_id() -> str:
    """A name that is unique in the fleet and shows where the worker runs."""
    return f"{socket.gethostname()}-{os.getpid()}-{chance.token_hex(2)}"


def machine_of(worker: str) -> str:
    """The host name in an id of `new_worker_id`."""
    return worker.rsplit("-", 2)[0]


def has_heartbeats(frontier: str) -> bool:
    """Whether workers on this store need heartbeats. A local store checks for itself which processes are alive."""
    return frontier_kind(frontier) not in ("memory", "sqlite", "local")


def make_worker_session(config: Config, run_id: str, worker: str) -> WorkerSession | None:
    """The session of a worker; None if its store needs none."""
    if not has_heartbeats(config.frontier):
        return None
    return WorkerSession(config.frontier, run_id, worker, config.worker.session)


class WorkerSession:
    """Sends the heartbeats of a worker, and fences workers that are silent.

    Heartbeats use the connections of the worker. When one is late, because a callback blocks the event loop, a thread
    sends the next ones, each on a new connection. ``may_work`` turns false before the session ends, whether or not the
    store answers. A worker that was fenced calls ``rejoin``: it gets new leases under the next epoch.
    """

    def __init__(self, url: str, run_id: str, worker: str, seconds: float) -> None:
        """``url``: of the store."""
        self.worker = worker
        self.on_fenced: Callable[[], None] = lambda: None
        """Called in the event loop of ``join`` when the worker was fenced."""
        self._url = url
        self._run_id = run_id
        self._seconds = seconds
        self._interval = seconds / _BEATS
        self._epoch = 1
        self._sent = 0.0
        """When the last heartbeat was sent that the store has answered."""
        self._until = 0.0
        """When work must stop without another heartbeat, on `shoal.system.clock`."""
        self._frontier: Frontier | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = threading.Event()

    # -- for the worker

    @property
    def holder(self) -> Holder:
        return Holder(self.worker, self._epoch)

    def may_work(self) -> bool:
        """Whether the session is valid: nobody has fenced this worker, and nobody will do so soon."""
        return clock.now() < self._until

    async def join(self, frontier: Frontier) -> None:
        """Send the first heartbeat, and then one after another. ``frontier`` leases for this worker."""
        self._frontier = frontier
        try:
            await self._beat(frontier)
        except FencedError:  # a worker of the same name died
            await self.rejoin()
        self._loop = asyncio.get_running_loop()
        self._keeping = asyncio.create_task(self._keep(frontier))
        threads.start(self._watch, "heartbeats")

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
        self._stopping.set()
        self._until = 0.0
        if self._keeping is not None:
            self._keeping.cancel()
        if self._frontier is not None:
            with suppress(ShoalError, TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT):
                    await self._frontier.leave(self.worker, self._epoch)

    async def _beat(self, frontier: Frontier) -> float | None:
        """Send a heartbeat, and fence dead workers of all runs. Returns the seconds until the next one, if another
        worker is late."""
        if self._stopping.is_set():
            return None
        epoch, sent = self._epoch, clock.now()
        heartbeat = Heartbeat(
            worker=self.worker, epoch=epoch, session=self._seconds, machine=socket.gethostname(), pid=os.getpid()
        )
        due = await frontier.beat(heartbeat)
        self._sent = max(self._sent, sent)
        if epoch == self._epoch:
            self._until = max(self._until, sent + self._seconds * (1 - _MARGIN))
        if due == 0:
            for silent in await frontier.fence_silent():
                of_run = "" if silent.run_id == self._run_id else f" of run {silent.run_id}"
                if silent.leases:
                    log.warning(
                        "worker %s%s is silent: its %d pages are released", silent.worker, of_run, silent.leases
                    )
                else:
                    log.info("worker %s%s is silent; it held no pages", silent.worker, of_run)
        return due or None

    # -- sending

    async def _keep(self, frontier: Frontier) -> None:
        """Send heartbeats. Runs until it is cancelled."""
        pause = self._interval
        while True:
            await asyncio.sleep(pause)
            pause = await self._try_to_beat(partial(self._beat, frontier), self._interval / 2)

    async def _try_to_beat(self, beat: Callable[[], Awaitable[float | None]], seconds: float) -> float:
        """Send a heartbeat within so many seconds. Returns the pause before the next one."""
        epoch, loop = self._epoch, self._loop
        assert loop is not None
        try:
            async with asyncio.timeout(seconds):
                due = await beat()
        except FencedError:
            if epoch == self._epoch:  # otherwise it has joined again already
                self._until = 0.0
                loop.call_soon_threadsafe(self.on_fenced)
        except (ShoalError, OSError) as exc:  # also a timeout
            log.debug("a heartbeat could not be sent: %s", exc)
        else:
            # Another worker may be dead then. Not all workers wake up at the same moment.
            return (
                self._interval if due is None else min(self._interval, due + min(1.0, due) * chance.uniform(0.05, 0.3))
            )
        return self._interval / 4

    def _watch(self) -> None:
        """Send a heartbeat from a thread whenever one is late: a callback blocks the event loop, or the store is
        slow."""
        while not self._stopping.wait(self._interval / 4):
            if clock.now() - self._sent > 1.5 * self._interval:
                with suppress(RuntimeError):  # the event loop has ended
                    asyncio.run(self._try_to_beat(self._beat_alone, self._interval))

    async def _beat_alone(self) -> float | None:
        """Send a heartbeat on a new connection."""
        store = await open_store(self._url)
        try:
            return await self._beat(await store.frontier(self._run_id))
        finally:
            await store.close()
