"""Limits how many sessions run, in all and per caller, and how many bytes their results may use.

A store that knows how large it is limits the bytes too. One session may use a quarter of what the store can hold, and
one caller a third. So no caller alone fills the store. If callers fill it together, batches are refused, and sessions
wait for room. Room comes from results that expire. If too few will, the largest session ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from shoal.api.batch.quota import FULL, StoreRoom
from shoal.api.batch.session import Session
from shoal.config import Config
from shoal.errors import RunError, ShoalError
from shoal.ports import Claim, Frontier, Store
from shoal.system import clock

_SESSION_PART, _CALLER_PART = 4, 3
"""The parts of a store that one session and one caller may use: a quarter and a third."""
_EXPIRING_PART = 8
"""At least this part of what sessions hold must expire when the store is full. Otherwise the largest one ends."""
_PATIENCE = 30.0  # seconds for which a store may be full that does not know how large it is


class TooManySessionsError(ShoalError):
    """The limit of running sessions or of stored results is reached."""


class Holding(NamedTuple):
    """Bytes of a session, and whose they are."""

    owner: str
    size: int


class Admission:
    """Counts the sessions of this process and refuses new ones beyond the limits."""

    def __init__(self, config: Config, room: StoreRoom | None = None) -> None:
        """``room``: that of the store."""
        self._room = StoreRoom() if room is None else room
        self._max_session_bytes = config.serve.max_session_bytes
        self._max_sessions = config.serve.max_sessions
        self._max_per_caller = config.serve.max_sessions_per_caller
        self._max_kept_bytes = config.serve.max_kept_bytes if config.frontier.startswith("memory:") else None
        self._starting: Counter[str] = Counter()
        """Sessions that are being created, by owner."""
        self._running: dict[str, Session] = {}
        self._kept: dict[str, Holding] = {}
        """The results of ended sessions."""
        self._kept_by: Counter[str] = Counter()
        """Their bytes, by owner."""

    @property
    def is_full(self) -> bool:
        return len(self._running) >= self._max_sessions

    @property
    def sessions(self) -> list[Session]:
        """The running sessions."""
        return list(self._running.values())

    @property
    def kept_bytes(self) -> int:
        """Approximate bytes of the results of all sessions that ran in this process."""
        return self._kept_by.total() + sum(session.quota.used for session in self._running.values())

    def _bytes_of(self, owner: str) -> int:
        """What the sessions of an owner hold that ran in this process."""
        running = (session.quota.used for session in self._running.values() if session.settings.owner == owner)
        return self._kept_by[owner] + sum(running)

    @property
    def session_limit(self) -> int:
        """Bytes that a new session may hold."""
        return self._part(_SESSION_PART, self._max_session_bytes)

    def _part(self, part: int, otherwise: int) -> int:
        return max(1, min(otherwise, self._room.capacity // part)) if self._room.capacity else otherwise

    def to_close(self) -> list[tuple[Session, str]]:
        """The sessions that must store no more, each with the reason."""
        limit = self._part(_CALLER_PART, sys.maxsize)
        going = [session for session in self._running.values() if not session.quota.closed]
        owners = {session.settings.owner for session in going}
        greedy = {owner for owner in owners if self._bytes_of(owner) > limit}
        if not greedy and going and self._is_filled:
            largest = max(going, key=lambda session: session.quota.used)
            return [(largest, f"{FULL}, and this session held the most of it")]
        return [(session, _caller_reason(limit)) for session in going if session.settings.owner in greedy]

    @property
    def _is_filled(self) -> bool:
        """Whether sessions have filled the store, and too few of them expire."""
        full_since = self._room.full_since
        if full_since is None or self._expiring >= self.kept_bytes // _EXPIRING_PART:
            return False
        if self._room.capacity:
            # Otherwise other programs or servers have filled it.
            return self.kept_bytes > self._room.capacity // _EXPIRING_PART
        return clock.monotonic() - full_since > _PATIENCE  # it does not know who: give it some time

    @property
    def _expiring(self) -> int:
        """Bytes of results that will be deleted: of sessions that are over or end now."""
        ending = (session.quota.used for session in self._running.values() if session.quota.closed)
        return self._kept_by.total() + sum(ending)

    def find(self, session_id: str) -> Session | None:
        return self._running.get(session_id)

    @contextmanager
    def starting(self, owner: str) -> Iterator[None]:
        """Count a session of ``owner`` while it is created. TooManySessionsError if a limit is reached."""
        self._check(owner)
        self._starting[owner] += 1
        try:
            yield
        finally:
            self._starting[owner] -= 1

    def _check(self, owner: str) -> None:
        if len(self._running) + self._starting.total() >= self._max_sessions:
            raise TooManySessionsError(
                f"the limit of {self._max_sessions} running sessions is reached (serve.max_sessions); try again later"
            )
        own = sum(session.settings.owner == owner for session in self._running.values())
        if own + self._starting[owner] >= self._max_per_caller:
            raise TooManySessionsError(
                f"{self._max_per_caller} sessions of yours are running, which is the limit "
                "(serve.max_sessions_per_caller); try again later"
            )
        limit = self._part(_CALLER_PART, sys.maxsize)
        if self._bytes_of(owner) > limit:
            raise TooManySessionsError(f"{_caller_reason(limit)}; try again when they have expired")
        if self._max_kept_bytes is not None and self.kept_bytes >= self._max_kept_bytes:
            raise TooManySessionsError(
                f"stored results have reached the limit of {self._max_kept_bytes} bytes (serve.max_kept_bytes); "
                "try again later"
            )

    def add(self, session: Session) -> None:
        """A session has started, or was taken over from another process. Take-overs are not refused here."""
        self._running[session.id] = session

    def end(self, session: Session) -> None:
        """A session runs no longer in this process. Its results count until `keep_only` drops it."""
        del self._running[session.id]
        self._kept[session.id] = holding = Holding(session.settings.owner, session.quota.used)
        self._kept_by[holding.owner] += holding.size

    def keep_only(self, session_ids: Collection[str]) -> None:
        """Drop the bytes of ended sessions that the store no longer has."""
        self._kept = {session_id: holding for session_id, holding in self._kept.items() if session_id in session_ids}
        self._kept_by.clear()
        for owner, size in self._kept.values():
            self._kept_by[owner] += size


def _caller_reason(limit: int) -> str:
    return f"the sessions of this caller have reached their limit of {limit} bytes, a third of what the store can hold"


# Decides which process works on a session: the one that holds its role ``work``.
#
# The owner renews the role as a heartbeat. When a process dies, the role expires and another process takes it.


log = logging.getLogger("shoal.batch")

_ROLE = "work"
_MAX_TTL = 15.0  # seconds without a heartbeat after which the role expires, at most
_RELEASE_TIMEOUT = 1.0


class Ownership:
    """The sessions that this process owns, and those of other processes that it may have to take over."""

    def __init__(self, store: Store, lease_ttl: float, *, distributed: bool) -> None:
        self.ttl = min(_MAX_TTL, lease_ttl)
        self._store = store
        self._distributed = distributed
        self._others: dict[str, Frontier] = {}
        """Frontiers of sessions that other processes own."""
        self._ignored: set[str] = set()
        """Sessions of the other kind (local or distributed), and sessions that cannot be read."""
        self._lost: set[str] = set()
        """Sessions that another process took over while this one worked on them."""

    @property
    def others(self) -> list[str]:
        """Sessions that other processes own, or owned before they died."""
        return list(self._others)

    async def find(self, session_id: str) -> Session | None:
        """The session, if it is of this kind and can be read."""
        try:
            session = await Session.find(self._store, session_id)
        except RunError as exc:
            log.error("session ignored: %s", exc)
            return None
        return session if session is not None and session.settings.distributed == self._distributed else None

    async def watch(self, session_id: str) -> None:
        """Add a session to ``others``, unless this process cannot work on it."""
        session = await self.find(session_id)
        if session is None:
            self._ignored.add(session_id)
        else:
            self._others[session_id] = session.frontier

    async def watch_new(self, running: set[str], own: Collection[str]) -> None:
        """Watch those of the ``running`` sessions that are new: other processes have created them."""
        self._ignored &= running
        for session_id in running - self._ignored - set(own) - self._others.keys():
            await self.watch(session_id)

    def unwatch(self, session_id: str) -> None:
        self._others.pop(session_id, None)

    async def claim(self, session: Session) -> Claim | None:
        """Claim a session. None if another process owns it."""
        return await session.frontier.claim(_ROLE, self.ttl)

    async def claim_other(self, session_id: str) -> Claim | None:
        """Claim a session of ``others``. None while its owner is alive."""
        return await self._others[session_id].claim(_ROLE, self.ttl)

    async def keep(self, session: Session, claim: Claim, on_lost: Callable[[], None]) -> None:
        """Renew the role until cancelled. Calls ``on_lost`` and returns when another process has taken it."""
        while self._store.shared:
            await asyncio.sleep(self.ttl / 3)
            with suppress(ShoalError):
                if not await session.frontier.advance(claim, b"", self.ttl):
                    log.warning("session %s: another process has taken over", session.id)
                    self._others[session.id] = session.frontier
                    self._lost.add(session.id)
                    on_lost()
                    return

    async def release(self, session: Session, claim: Claim) -> None:
        with suppress(ShoalError, TimeoutError):  # deleted, or the store is away: then the claim expires
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await session.frontier.relinquish(claim)

    def is_lost(self, session: Session) -> bool:
        return session.id in self._lost

    def forget(self, session: Session) -> None:
        """Forget that a session was lost: this process has stopped working on it."""
        self._lost.discard(session.id)
