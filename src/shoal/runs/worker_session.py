"""The session of a worker: it sends heartbeats, and may work while they arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial

from shoal.config import Config
from shoal.config.checks import frontier_kind
from shoal.errors import FencedError, ShoalError
from shoal.frontier import open_store
from shoal.ports import Frontier, Heartbeat, Holder, clock

log = logging.getLogger("shoal.worker")

_BEATS = 4
"""Heartbeats in a session."""
_MARGIN = 1 / 8
"""Part of a session. The worker stops this long before its end."""
_LEAVE_TIMEOUT = 0.3


def new_worker_id() -> str:
    """A name that is unique in the fleet and shows where the worker runs."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def machine_of(worker: str) -> str:
    """The host name in an id of `new_worker_id`."""
    return worker.rsplit("-", 2)[0]


def has_heartbeats(frontier: str) -> bool:
    """Whether workers on this store need heartbeats. A local store checks for itself which processes are alive."""
    return frontier_kind(frontier) in ("redis", "postgresql")


def make_worker_session(config: Config, run_id: str, worker: str) -> WorkerSession | None:
    """The session of a worker; None if its store needs none."""
    if not has_heartbeats(config.frontier):
        return None
    return WorkerSession(config.frontier, run_id, worker, config.worker.session)


class WorkerSession:
    """Sends the heartbeats of a worker, and fences workers that are silent.

    Heartbeats use the connections of the worker. While a callback blocks the event loop, a thread sends them, each on a
    new connection. ``may_work`` turns false before the session ends, whether or not the store answers. A worker that
    was fenced calls ``rejoin``: it gets new leases under the next epoch.
    """

    def __init__(self, url: str, run_id: str, worker: str, seconds: float) -> None:
        """``url``: of the store."""
        self.worker = worker
        self.on_fenced: Callable[[], None] = lambda: None
        """Called in the event loop of ``join`` when the worker was fenced."""
        self._url = url
        self._run_id = run_id
        self._seconds = seconds
        self._epoch = 1
        self._until = 0.0
        """When work must stop without another heartbeat, on `shoal.ports.clock`."""
        self._frontier: Frontier | None = None
        self._stopping = threading.Event()

    # -- for the worker

    @property
    def holder(self) -> Holder:
        return Holder(self.worker, self._epoch)

    def may_work(self) -> bool:
        """Whether the session is valid: nobody has fenced this worker, and nobody will do so soon."""
        return clock.now() < self._until

    async def join(self, frontier: Frontier) -> None:
        """Send the first heartbeat, and start the thread. ``frontier`` leases for this worker."""
        self._frontier = frontier
        try:
            await self._beat(frontier)
        except FencedError:  # a worker of the same name died
            await self.rejoin()
        keep = partial(self._keep_alive, frontier, asyncio.get_running_loop())
        threading.Thread(target=keep, name="heartbeats", daemon=True).start()

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

    # -- for the thread

    def _keep_alive(self, frontier: Frontier, loop: asyncio.AbstractEventLoop) -> None:
        interval = self._seconds / _BEATS
        pause = interval
        while not self._stopping.wait(pause):
            epoch, pause = self._epoch, interval
            try:
                due = self._beat_anyhow(frontier, loop)
                if due is not None:  # another worker may be dead then; not all workers wake up at the same moment
                    pause = min(interval, due + min(1.0, due) * random.uniform(0.05, 0.3))
            except FencedError:
                if epoch == self._epoch:  # otherwise it has joined again already
                    self._until = 0.0
                    loop.call_soon_threadsafe(self.on_fenced)
                pause = interval / 4
            except (ShoalError, OSError) as exc:  # also a timeout
                log.debug("a heartbeat could not be sent: %s", exc)
                pause = interval / 4
            except RuntimeError:  # the event loop has ended
                return

    def _beat_anyhow(self, frontier: Frontier, loop: asyncio.AbstractEventLoop) -> float | None:
        work = self._beat(frontier)
        try:
            sent = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:
            work.close()
            raise
        try:
            return sent.result(self._seconds / _BEATS / 2)
        except TimeoutError:
            sent.cancel()
        except CancelledError:  # the event loop ends
            return None
        return asyncio.run(self._beat_alone())

    async def _beat_alone(self) -> float | None:
        """Send a heartbeat on a new connection: a callback blocks the event loop, or the store is slow."""
        async with asyncio.timeout(self._seconds / _BEATS):
            store = await open_store(self._url)
            try:
                return await self._beat(await store.frontier(self._run_id))
            finally:
                await store.close()
