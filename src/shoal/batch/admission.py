"""Takes batches in, sees to it that they are worked on, and finds them again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from shoal.batch.options import BatchOptions
from shoal.batch.session import OVER, Session
from shoal.batch.settings import Webhook
from shoal.batch.spider import BatchSpider
from shoal.config import Config
from shoal.errors import FrontierError, RunError, ShoalError, StoreAwayError, StoreRewoundError
from shoal.ports import Claim, Frontier, Store

log = logging.getLogger("shoal.batch")

_SWEEP_EVERY = 30.0
_ROLE = "work"
"""Of the process that sees to a session. One that dies loses it, and another takes it."""
_MOST_KEPT = 15.0  # seconds that the role lasts without a sign of life, at most
_SEED_AGAIN = 1.0
_TELL_AGAIN = 5.0
_GIVING_BACK = 1.0  # second that the store has for that
_CLOSING = 3.0  # seconds for what is under way when the process ends


class Work(Protocol):
    """Who works on sessions: this process, or Celery's workers."""

    async def run(self, session: Session) -> None:
        """To the end of the session, or until ``stop``."""
        ...

    def stop(self, session_id: str) -> None: ...


class TooManySessionsError(ShoalError):
    """As many sessions as there may be are running already, or their results take all the room that there is."""


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
        told: Callable[[Session], Awaitable[bool]],
    ) -> None:
        """``keep``: seconds after which a session that is over is removed. ``told`` is awaited when one is over, again
        and again until it is true."""
        self.work = work
        self._store = store
        self._config = config
        self._distributed = distributed
        self._max_sessions = max_sessions
        self._keep = keep
        self._told = told
        self._max_of_caller = config.serve.max_sessions_per_caller
        self._max_kept = config.serve.max_kept_bytes if config.frontier.startswith("memory:") else None
        self._kept: dict[str, int] = {}
        """Bytes of the results of sessions that are over."""
        self._beginning: Counter[str] = Counter()
        """Sessions that are being made, by who shares what a caller may have."""
        self._closing = False
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, float] = {}
        """When each session that is over was, or was first seen to be."""
        self._role_ttl = min(_MOST_KEPT, config.lease.ttl)
        self._of_others: dict[str, Frontier] = {}
        """The frontiers of sessions that other processes see to."""
        self._left_alone: set[str] = set()
        """Sessions of the other kind, and such that can't be read."""
        self._lost: set[str] = set()
        """Sessions that another process has taken over while this one was at it."""
        self._helpers: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Go on with what an earlier process left: pages to fetch, and webhooks to send."""
        for run in reversed(await self._store.list_runs(BatchSpider.name)):
            if run.state not in OVER or run.settings.get("webhook"):
                await self._note(run.run_id)
        await self._take_over()
        self._helpers = [asyncio.create_task(self._sweep()), asyncio.create_task(self._look_after_others())]

    async def _own(self, session_id: str) -> Session | None:
        """The session, if it is one of this kind and can be read."""
        try:
            session = await Session.find(self._store, session_id)
        except RunError as exc:
            log.error("a session is left alone: %s", exc)
            return None
        return session if session is not None and session.settings.distributed == self._distributed else None

    async def _note(self, session_id: str) -> None:
        """It is to be seen to, unless another process does."""
        session = await self._own(session_id)
        if session is None:
            self._left_alone.add(session_id)
        else:
            self._of_others[session_id] = session.frontier

    async def _look_after_others(self) -> None:
        """Other processes may die."""
        while self._store.shared or self._of_others:
            await asyncio.sleep(self._role_ttl / 3)
            await self._carefully(self._take_over)

    async def _take_over(self) -> None:
        """The sessions that nobody sees to, if there is room for them."""
        for session_id, frontier in list(self._of_others.items()):
            if len(self._jobs) >= self._max_sessions:
                return
            if session_id in self._jobs:
                continue
            try:
                claim = await frontier.claim(_ROLE, self._role_ttl)
                if claim is None:
                    continue
                session = await self._own(session_id)
                if session is not None and await session.state() in OVER:
                    self._begin_to_tell(session)
                elif session is not None:
                    log.warning("session %s goes on here", session_id)
                    self._begin(session, claim)
            except RunError:  # it was removed
                pass
            self._of_others.pop(session_id, None)

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def sessions(self) -> list[Session]:
        """Those that are being worked on."""
        return list(self._sessions.values())

    async def take(
        self, urls: Sequence[str], options: BatchOptions, *, caller: str, address: str = "",
        webhook: Webhook | None = None,
    ) -> Session:  # fmt: skip
        """Begin a batch; its URLs are in the store when this returns. TooManySessionsError when that would be one too
        many."""
        sharer = caller or address
        self._check_room(sharer)
        self._beginning[sharer] += 1
        try:
            session = await Session.create(
                self._store, self._config, urls, options, caller=caller, address=address,
                distributed=self._distributed, webhook=webhook,
            )  # fmt: skip
            claim = await session.frontier.claim(_ROLE, self._role_ttl)
            if claim is not None:  # else another process has found it already
                self._begin(session, claim)
        finally:
            self._beginning[sharer] -= 1
        return session

    def _check_room(self, sharer: str) -> None:
        if len(self._jobs) + self._beginning.total() >= self._max_sessions:
            raise TooManySessionsError(
                f"{self._max_sessions} sessions are running, which is the limit; try again later"
            )
        own = sum(session.settings.sharer == sharer for session in self._sessions.values())
        if own + self._beginning[sharer] >= self._max_of_caller:
            raise TooManySessionsError(
                f"{self._max_of_caller} sessions of yours are running, which is the limit; try again later"
            )
        if self._max_kept is not None and self.kept >= self._max_kept:
            raise TooManySessionsError(
                f"the results of other sessions take {self._max_kept} bytes, which is the limit; try again later"
            )

    @property
    def kept(self) -> int:
        """Bytes of the results of all sessions, roughly, as far as they were made by this process."""
        return sum(self._kept.values()) + sum(session.room.used for session in self._sessions.values())

    async def find(self, session_id: str) -> Session | None:
        """Also one that another process works on, if the store is shared."""
        if session_id in self._sessions:
            return self._sessions[session_id]
        return await Session.find(self._store, session_id)

    async def cancel(self, session: Session) -> None:
        await session.cancel()
        self.work.stop(session.id)

    def _begin(self, session: Session, claim: Claim) -> None:
        job = asyncio.create_task(self._hold(session, claim))
        self._jobs[session.id], self._sessions[session.id] = job, session
        job.add_done_callback(lambda _: self._forget(session))

    def _forget(self, session: Session) -> None:
        del self._jobs[session.id], self._sessions[session.id]
        self._lost.discard(session.id)
        self._ended[session.id] = time.monotonic()
        self._kept[session.id] = session.room.used
        session.changed.set()

    async def _hold(self, session: Session, claim: Claim) -> None:
        """See to it for as long as it is ours."""
        keeping = asyncio.create_task(self._keep_alive(session, claim))
        try:
            await self._see_through(session)
        finally:
            keeping.cancel()
            with suppress(ShoalError, TimeoutError):  # it was removed, or the store is away: then the claim runs out
                async with asyncio.timeout(_GIVING_BACK):
                    await session.frontier.relinquish(claim)

    async def _keep_alive(self, session: Session, claim: Claim) -> None:
        """Show that somebody sees to it. Where that was not seen for too long, another process does by now."""
        while self._store.shared:
            await asyncio.sleep(self._role_ttl / 3)
            with suppress(ShoalError):
                if not await session.frontier.advance(claim, b"", self._role_ttl):
                    log.warning("session %s was taken over by another process", session.id)
                    self._of_others[session.id] = session.frontier
                    self._lost.add(session.id)
                    self.work.stop(session.id)
                    return

    async def _see_through(self, session: Session) -> None:
        try:
            if not await self._seeded(session):
                return
            await self.work.run(session)
        except ShoalError as exc:
            log.error("session %s can't go on: %s", session.id, exc)
            return
        except Exception:  # the end of a task: a bug here costs one session and says so
            log.exception("internal error session=%s", session.id)
            return
        self._begin_to_tell(session)

    async def _seeded(self, session: Session) -> bool:
        """Wait until its URLs are in the store. Whoever was to push them may have been killed: then its claim runs out,
        and they are pushed here. False if this process ends before, or another has taken over."""
        while not self._closing and session.id not in self._lost:
            try:
                if await session.seed() or await session.state() in OVER:
                    return session.id not in self._lost
            except StoreAwayError:
                pass
            except StoreRewoundError:
                with suppress(StoreAwayError):
                    await session.frontier.recover()
            await asyncio.sleep(_SEED_AGAIN)
        return False

    def _begin_to_tell(self, session: Session) -> None:
        telling = asyncio.create_task(self._tell(session))  # beside the work: whoever is told may take its time
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell(self, session: Session) -> None:
        while True:
            try:
                if await session.state() not in OVER or await self._told(session):
                    return
            except StoreAwayError:
                pass
            except StoreRewoundError:
                await self._carefully(partial(_recover, session))
            except ShoalError as exc:  # it was removed
                log.warning("nobody could be told of the end of session %s: %s", session.id, exc)
                return
            await asyncio.sleep(_TELL_AGAIN)

    async def _sweep(self) -> None:
        """Remove what nobody has to keep any longer, and see what others have taken in."""
        while True:
            await asyncio.sleep(min(_SWEEP_EVERY, self._keep, 2 * self._role_ttl))
            await self._carefully(self._look_at_all)

    async def _look_at_all(self) -> None:
        states = await self._store.run_states(BatchSpider.name)
        if self._store.shared:
            await self._note_others({session_id for session_id, state in states.items() if state not in OVER})
        await self._remove_old([session_id for session_id, state in states.items() if state in OVER])

    async def _carefully(self, look: Callable[[], Awaitable[None]]) -> None:
        """There will be another look: what goes wrong costs this one."""
        try:
            await look()
        except FrontierError as exc:
            log.debug("could not look at the sessions: %s", exc)
        except Exception:
            log.exception("internal error")

    async def _note_others(self, running: set[str]) -> None:
        """Sessions that other processes have taken in."""
        self._left_alone &= running
        for session_id in running - self._left_alone - self._jobs.keys() - self._of_others.keys():
            await self._note(session_id)

    async def _remove_old(self, over: Sequence[str]) -> None:
        now = time.monotonic()
        self._ended = {session_id: self._ended.get(session_id, now) for session_id in over}
        self._kept = {session_id: size for session_id, size in self._kept.items() if session_id in self._ended}
        for session_id in [session_id for session_id, ended in self._ended.items() if now - ended > self._keep]:
            with suppress(RunError):  # another process was first
                await self._store.delete_run(session_id)

    def leave(self) -> None:
        """Let those go who wait for a session."""
        for session in self._sessions.values():
            session.leave()

    async def close(self) -> None:
        """What is in flight is given back. Sessions in a store that lasts go on when it is opened again."""
        self._closing = True
        for helper in self._helpers:
            helper.cancel()
        for session_id in self._jobs:
            self.work.stop(session_id)
        tasks = [*self._jobs.values(), *self._telling]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _recover(session: Session) -> None:
    """Go on with a store that went back in time."""
    await session.frontier.recover()
