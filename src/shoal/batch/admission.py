"""Limits how many sessions run, in all and per caller, and how many bytes their results may use.

A store that knows how large it is limits the bytes too. One session may use a quarter of what the store can hold, and
one caller a third. So no caller alone fills the store. If callers fill it together, batches are refused, and sessions
wait for room. Room comes from results that expire. If too few will, the largest session ends.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shoal.batch.quota import FULL, StoreRoom
from shoal.batch.session import Session
from shoal.config import Config
from shoal.errors import ShoalError

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
        return time.monotonic() - full_since > _PATIENCE  # it does not know who: give it some time

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
