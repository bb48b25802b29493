"""Takes batches in, sees to it that they are worked on, and finds them again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from shoal.batch.options import BatchOptions
from shoal.batch.session import OVER, Session, Webhook
from shoal.batch.spider import BatchSpider
from shoal.config import Config
from shoal.errors import FrontierError, RunError, ShoalError
from shoal.ports import Store

log = logging.getLogger("shoal.batch")

_SWEEP_EVERY = 30.0


class Work(Protocol):
    """Who works on sessions: this process, or Celery's workers."""

    async def run(self, session: Session) -> None:
        """To the end of the session, or until ``stop``."""
        ...

    def stop(self, session_id: str) -> None: ...


class TooManySessionsError(ShoalError):
    """As many sessions as there may be are running already."""


class Desk:
    """The sessions of one kind: on one store, worked on in one way."""

    def __init__(
        self,
        store: Store,
        work: Work,
        config: Config,
        *,
        distributed: bool,
        max_sessions: int,
        keep: float,
        told: Callable[[Session], Awaitable[None]],
    ) -> None:
        """``keep``: seconds after which a session that is over is removed. ``told`` is awaited when one is over."""
        self.work = work
        self._store = store
        self._config = config
        self._distributed = distributed
        self._max_sessions = max_sessions
        self._keep = keep
        self._told = told
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, float] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Go on with what an earlier process left."""
        for run in reversed(await self._store.list_runs(BatchSpider.name)):
            if run.state not in OVER:
                session = await Session.find(self._store, run.run_id)
                if session is not None and session.settings.distributed == self._distributed:
                    await session.seed()
                    self._begin(session)
        self._sweeping = asyncio.create_task(self._sweep())

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def sessions(self) -> list[Session]:
        """Those that are being worked on."""
        return list(self._sessions.values())

    async def take(
        self, urls: Sequence[str], options: BatchOptions, *, caller: str, webhook: Webhook | None = None
    ) -> Session:
        """Begin a batch. TooManySessionsError when that would be one too many."""
        if len(self._jobs) >= self._max_sessions:
            raise TooManySessionsError(f"{len(self._jobs)} sessions are running, which is the limit; try again later")
        session = await Session.create(
            self._store, self._config, urls, options, caller=caller, distributed=self._distributed, webhook=webhook
        )
        self._begin(session)
        return session

    async def find(self, session_id: str) -> Session | None:
        """Also one that another process works on, if the store is shared."""
        if session_id in self._sessions:
            return self._sessions[session_id]
        return await Session.find(self._store, session_id)

    async def cancel(self, session: Session) -> None:
        await session.cancel()
        self.work.stop(session.id)

    def _begin(self, session: Session) -> None:
        job = asyncio.create_task(self._see_through(session))
        self._jobs[session.id], self._sessions[session.id] = job, session
        job.add_done_callback(lambda _: self._forget(session))

    def _forget(self, session: Session) -> None:
        del self._jobs[session.id], self._sessions[session.id]
        self._ended[session.id] = time.monotonic()
        session.changed.set()

    async def _see_through(self, session: Session) -> None:
        try:
            await self.work.run(session)
        except ShoalError as exc:
            log.error("session %s can't go on: %s", session.id, exc)
            return
        with suppress(RunError):
            if await session.state() in OVER:
                await self._told(session)

    async def _sweep(self) -> None:
        """Remove what nobody has to keep any longer."""
        while True:
            await asyncio.sleep(min(_SWEEP_EVERY, self._keep))
            with suppress(FrontierError):
                for run in await self._store.list_runs(BatchSpider.name):
                    if run.state in OVER and self._is_old(run.run_id, run.created_at):
                        with suppress(RunError):  # another process was first
                            await self._store.delete_run(run.run_id)
                        self._ended.pop(run.run_id, None)

    def _is_old(self, session_id: str, created_at: float) -> bool:
        ended = self._ended.get(session_id)
        return time.time() - created_at > self._keep and (ended is None or time.monotonic() - ended > self._keep)

    async def close(self) -> None:
        """What is in flight is given back. Sessions in a store that lasts go on when it is opened again."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        jobs = list(self._jobs.items())
        for session_id, _ in jobs:
            self.work.stop(session_id)
        if jobs:
            await asyncio.wait([job for _, job in jobs], timeout=5.0)
        for _, job in jobs:
            job.cancel()
        await asyncio.gather(*(job for _, job in jobs), return_exceptions=True)
