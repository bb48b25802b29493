"""Accepts batches, runs them to their end, and finds them again.

It also lists sessions with their progress, and sends a signed message to the caller's webhook when a batch ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec
from msgspec import Struct

from shoal.api.batch.admission import Admission, Ownership
from shoal.api.batch.options import BatchOptions
from shoal.api.batch.quota import room_of, size_of
from shoal.api.batch.results import SessionResults
from shoal.api.batch.session import OVER, Progress, Session, SessionSettings, Webhook, progress_of
from shoal.api.batch.spider import BatchSpider
from shoal.config import Config
from shoal.errors import FrontierError, RunError, ShoalError, StoreAwayError, StoreRewoundError
from shoal.operations.notifications.channels import post_signed
from shoal.ports import Claim, Fetcher, Run, RunState, Store
from shoal.system import clock

MAX_LISTED = 200
"""How many of the newest sessions of a store a list may search."""


class SessionSummary(Struct, frozen=True, kw_only=True):
    """A batch in a list."""

    session_id: str
    state: RunState
    distributed: bool
    caller: str
    """Name of the token that it belongs to; empty for the main token, or without tokens."""
    created_at: float
    """Unix time, in seconds."""
    ended_at: float | None
    urls: int
    """Number of URLs that were sent."""
    first_url: str
    progress: Progress


async def list_sessions(store: Store, project: str, caller: str | None, limit: int) -> list[SessionSummary]:
    """The newest sessions of a caller. None: of all callers."""
    sessions: list[SessionSummary] = []
    for run in await store.list_runs(BatchSpider.name, project, limit=MAX_LISTED):
        if len(sessions) == limit:
            break
        if caller is None or run.settings.get("caller") == caller:
            try:
                sessions.append(await _summary(store, run))
            except RunError:  # deleted in the meantime, or of another version
                continue
    return sessions


async def _summary(store: Store, run: Run) -> SessionSummary:
    settings = SessionSettings.of(run)
    stats = await (await store.frontier(run.run_id)).stats()
    return SessionSummary(
        session_id=run.run_id, state=run.state, distributed=settings.distributed, caller=settings.caller,
        created_at=run.created_at, ended_at=run.ended_at, urls=len(settings.urls),
        first_url=settings.urls[0] if settings.urls else "", progress=progress_of(stats, len(settings.invalid)),
    )  # fmt: skip


log = logging.getLogger("shoal.batch")

_SWEEP_EVERY = 30.0
_ROOM_EVERY = 1.0
_SEED_RETRY_EVERY = 1.0
_NOTIFY_RETRY_EVERY = 5.0
_CLOSE_TIMEOUT = 3.0


class Executor(Protocol):
    """Fetches the pages of sessions: in this process, or on Celery workers."""

    async def run(self, session: Session) -> None:
        """Work until the session is over, or until ``stop``."""
        ...

    def stop(self, session_id: str) -> None: ...


class BatchService:
    """The local sessions of a store, or the distributed ones."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        config: Config,
        *,
        distributed: bool,
        notify: Callable[[Session], Awaitable[bool]] | None = None,
    ) -> None:
        """``notify`` is called when a session is over, and again until it returns true."""
        self._store = store
        self._executor = executor
        self._config = config
        self._distributed = distributed
        self._notify = notify
        self._keep_results = config.serve.keep_results
        self._project = config.project_name
        self._room = room_of(store)
        self._admission = Admission(config, self._room)
        self._ownership = Ownership(store, config.lease.ttl, distributed=distributed)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._notifications: set[asyncio.Task[None]] = set()
        self._ended: dict[str, float] = {}
        """When each ended session ended, or when this process first saw its end."""
        self._background: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def open(self) -> None:
        """Resume the sessions and webhooks that an earlier process has left."""
        for run in reversed(await self._store.list_runs(BatchSpider.name, self._project)):
            if run.state not in OVER or run.settings.get("webhook"):
                await self._ownership.watch(run.run_id)
        await self._take_over()
        await self._room.measure(now=True)
        limit, own = self._admission.session_limit, self._config.serve.max_session_bytes
        if limit < own:
            log.info("sessions may hold %d bytes, not %d (serve.max_session_bytes): the store is small", limit, own)
        loops = (self._sweep_forever(), self._take_over_forever(), self._watch_room_forever())
        self._background = [asyncio.create_task(loop) for loop in loops]

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def sessions(self) -> list[Session]:
        """The running sessions."""
        return self._admission.sessions

    async def create(
        self, urls: Sequence[str], options: BatchOptions, *, caller: str, address: str = "",
        webhook: Webhook | None = None,
    ) -> Session:  # fmt: skip
        """Start a batch. When this returns, its URLs are in the store. TooManySessionsError if a limit is reached.
        StoreFullError if the store has no room."""
        await self._room.check(size_of(urls))
        with self._admission.starting(caller or address):
            session = await Session.create(
                self._store, self._config, urls, options, caller=caller, address=address,
                distributed=self._distributed, webhook=webhook, max_bytes=self._admission.session_limit,
            )  # fmt: skip
            claim = await self._ownership.claim(session)
            if claim is not None:  # else another process has already taken it
                self._start(session, claim)
        return session

    async def find(self, session_id: str) -> Session | None:
        """Find a session of this project. Any process may own it."""
        session = self._admission.find(session_id) or await Session.find(self._store, session_id)
        return None if session is None or session.run.project != self._project else session

    async def list(self, caller: str | None, limit: int) -> Sequence[SessionSummary]:
        """The newest sessions of a caller in this project. None: of all callers."""
        return await list_sessions(self._store, self._project, caller, limit)

    async def cancel(self, session: Session) -> None:
        await session.cancel()
        self._executor.stop(session.id)

    # -- running a session

    def _start(self, session: Session, claim: Claim) -> None:
        job = asyncio.create_task(self._run_owned(session, claim))
        self._jobs[session.id] = job
        self._admission.add(session)
        job.add_done_callback(lambda _: self._end(session))

    def _end(self, session: Session) -> None:
        del self._jobs[session.id]
        self._admission.end(session)
        self._ownership.forget(session)
        self._ended[session.id] = clock.monotonic()
        session.changed.set()

    async def _run_owned(self, session: Session, claim: Claim) -> None:
        """Run the session while this process owns it."""
        heartbeat = asyncio.create_task(self._ownership.keep(session, claim, partial(self._executor.stop, session.id)))
        try:
            await self._run(session)
        finally:
            heartbeat.cancel()
            await self._ownership.release(session, claim)

    async def _run(self, session: Session) -> None:
        try:
            if not await self._wait_until_seeded(session):
                return
            await self._executor.run(session)
        except ShoalError as exc:
            log.error("session %s stopped: %s", session.id, exc)
            return
        except Exception:  # a bug costs only this session
            log.exception("internal error session=%s", session.id)
            return
        self._start_notifying(session)

    async def _wait_until_seeded(self, session: Session) -> bool:
        """Wait until all URLs are pushed. If the process that pushes them dies, its claim expires, and this process
        pushes the rest. False if this process shuts down or loses the session first."""
        while not self._is_closing and not self._ownership.is_lost(session):
            try:
                if await session.seed() or await session.state() in OVER:
                    return not self._ownership.is_lost(session)
            except StoreAwayError:
                pass
            except StoreRewoundError:
                with suppress(StoreAwayError):
                    await session.frontier.recover()
            await asyncio.sleep(_SEED_RETRY_EVERY)
        return False

    def _start_notifying(self, session: Session) -> None:
        task = asyncio.create_task(self._notify_until_done(session))  # a slow receiver must not block the session
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _notify_until_done(self, session: Session) -> None:
        while True:
            try:
                if self._notify is None or await session.state() not in OVER or await self._notify(session):
                    return
            except StoreAwayError:
                pass
            except StoreRewoundError:
                await _log_errors(session.frontier.recover)
            except ShoalError as exc:  # the session was deleted
                log.warning("could not send the webhook of session %s: %s", session.id, exc)
                return
            await asyncio.sleep(_NOTIFY_RETRY_EVERY)

    # -- room in the store

    async def is_full(self) -> bool:
        """Whether the store has no room for results."""
        await self._room.measure()
        return self._room.is_full

    async def _watch_room_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_EVERY):
                    await self._room.has_grown.wait()
            self._room.has_grown.clear()
            await _log_errors(self._watch_room)

    async def _watch_room(self) -> None:
        """End the sessions that hold too much of the store."""
        await self._room.measure()
        if self._distributed and self._room.free is not None:
            for session in self.sessions:  # the workers have counted what they store
                await session.quota.sync()
        for session, reason in self._admission.to_close():
            log.warning("session %s ends: %s", session.id, reason)
            await session.quota.close(reason)

    # -- sessions of other processes

    async def _take_over_forever(self) -> None:
        while self._store.shared or self._ownership.others:
            await asyncio.sleep(self._ownership.ttl / 3)
            await _log_errors(self._take_over)

    async def _take_over(self) -> None:
        """Start the sessions that have no live owner, up to the limit of running sessions."""
        for session_id in self._ownership.others:
            if self._admission.is_full:
                return
            if session_id in self._jobs:
                continue
            try:
                claim = await self._ownership.claim_other(session_id)
                if claim is None:
                    continue
                session = await self._ownership.find(session_id)
                if session is not None and await session.state() in OVER:
                    self._start_notifying(session)
                elif session is not None:
                    log.warning("session %s: taken over", session_id)
                    self._start(session, claim)
            except RunError:  # the session was deleted
                pass
            self._ownership.unwatch(session_id)

    # -- removing old sessions

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_EVERY, self._keep_results, 2 * self._ownership.ttl))
            await _log_errors(self._sweep)

    async def _sweep(self) -> None:
        """Watch the sessions that other processes have created, and delete expired sessions."""
        states = await self._store.run_states(BatchSpider.name, self._project)
        if self._store.shared:
            running = {session_id for session_id, state in states.items() if state not in OVER}
            await self._ownership.watch_new(running, self._jobs)
        await self._delete_expired([session_id for session_id, state in states.items() if state in OVER])

    async def _delete_expired(self, over: Sequence[str]) -> None:
        now = clock.monotonic()
        self._ended = {session_id: self._ended.get(session_id, now) for session_id in over}
        self._admission.keep_only(self._ended)
        expired = [session_id for session_id, ended_at in self._ended.items() if now - ended_at > self._keep_results]
        for session_id in expired:
            with suppress(RunError):  # another process was first
                await self._store.delete_run(session_id)

    # -- shutting down

    def stop_waiting(self) -> None:
        """Wake all callers that wait for a session."""
        for session in self.sessions:
            session.stop_waiting()

    async def close(self) -> None:
        """Release the leases in flight. Sessions in a persistent store resume when the store is opened again."""
        self._is_closing = True
        for task in self._background:
            task.cancel()
        for session_id in self._jobs:
            self._executor.stop(session_id)
        tasks = [*self._jobs.values(), *self._notifications]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _log_errors(step: Callable[[], Awaitable[object]]) -> None:
    """Run one step of a loop, and log its errors: the next step tries again."""
    try:
        await step()
    except FrontierError as exc:
        log.debug("could not check the sessions: %s", exc)
    except Exception:
        log.exception("internal error")


_RETRY_DELAYS = (1.0, 5.0, 25.0)  # seconds
_TIMEOUT = 10.0
_ROLE = "webhook"
_ROLE_MARGIN = 5.0  # seconds that the role lasts beyond an attempt


async def send_webhook(fetcher: Fetcher, session: Session) -> bool:
    """Send the webhook of a session that is over, with retries. Only one process sends it, however many try. Returns
    False while another process holds the role, even if that process has died: try again later."""
    webhook = session.settings.webhook
    if webhook is None:
        return True
    claim = await session.frontier.claim(_ROLE, _TIMEOUT + _ROLE_MARGIN)
    if claim is None:
        return any(role.role == _ROLE and role.finished for role in await session.frontier.roles())
    is_done = False
    try:
        error = await _deliver(fetcher, session, webhook, claim)
        is_done = True
    finally:
        await session.frontier.relinquish(claim, finished=is_done)
    if error:
        log.warning("the webhook of session %s was not delivered: %s", session.id, error)
    return True


async def _deliver(fetcher: Fetcher, session: Session, webhook: Webhook, claim: Claim) -> str:
    """Deliver the message. Each attempt renews the role. Returns why the delivery failed, or an empty string."""
    message = {
        "event": "batch.done",
        "session_id": session.id,
        "state": await session.state(),
        "stats": (await SessionResults(session).read_all()).stats,  # the same as in the answer
    }
    body = msgspec.json.encode(message)
    error = ""
    for delay in (0.0, *_RETRY_DELAYS):
        if not await session.frontier.advance(claim, b"", delay + _TIMEOUT + _ROLE_MARGIN):
            return "another process has taken over"
        await asyncio.sleep(delay)
        failure = await post_signed(fetcher, webhook.url, webhook.secret, body, timeout=_TIMEOUT)
        if failure is None:
            return ""
        error = failure.reason
        if not failure.retryable:
            break
    return error
