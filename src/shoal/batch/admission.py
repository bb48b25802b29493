"""Limits how many sessions run, in all and per caller, and how many bytes of results stay in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from shoal.batch.session import Session
from shoal.config import Config
from shoal.errors import ShoalError


class TooManySessionsError(ShoalError):
    """The limit of running sessions or of stored results is reached."""


class Admission:
    """Counts the sessions of this process and refuses new ones beyond the limits."""

    def __init__(self, config: Config) -> None:
        self._max_sessions = config.serve.max_sessions
        self._max_per_caller = config.serve.max_sessions_per_caller
        self._max_kept_bytes = config.serve.max_kept_bytes if config.frontier.startswith("memory:") else None
        self._starting: Counter[str] = Counter()
        """Sessions that are being created, by owner."""
        self._running: dict[str, Session] = {}
        self._kept: dict[str, int] = {}
        """Bytes of the results of ended sessions."""

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
        return sum(self._kept.values()) + sum(session.quota.used for session in self._running.values())

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
        self._kept[session.id] = session.quota.used

    def keep_only(self, session_ids: Collection[str]) -> None:
        """Drop the bytes of ended sessions that the store no longer has."""
        self._kept = {session_id: size for session_id, size in self._kept.items() if session_id in session_ids}
