"""Decides which process works on a session: the one that holds its role ``work``.

The owner renews the role as a heartbeat. When a process dies, the role expires and another process takes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress

from shoal.batch.session import Session
from shoal.errors import RunError, ShoalError
from shoal.ports import Claim, Frontier, Store

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
