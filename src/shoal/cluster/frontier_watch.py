"""Checks the frontier for a node: whether it can be reached, and whether the run has ended."""

from __future__ import annotations

import asyncio
import logging
import time

from shoal.errors import FrontierError
from shoal.ports import Store

log = logging.getLogger("shoal.cluster")


class FrontierWatch:
    """Polls the state of a run on request."""

    def __init__(self, store: Store, run_id: str, timeout: float, *, keep_alive: bool) -> None:
        """``timeout``: seconds to wait for an answer. ``keep_alive``: a finished run may get more work."""
        self.fit = True
        """Whether the last poll reached the frontier."""
        self.ended = False
        """Whether the run is finished, cancelled or deleted."""
        self._store = store
        self._run_id = run_id
        self._timeout = timeout
        self._keep_alive = keep_alive
        self._away_since: float | None = None

    async def poll(self) -> bool:
        """Poll the state of the run. Returns whether it can be worked on."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                state = await self._store.run_state(self._run_id)
        except (FrontierError, TimeoutError) as exc:
            self.lost(str(exc) or f"no answer in {self._timeout:g} s", began)
            return False
        self.fit = True
        self._away_since = None
        self.ended = state in (None, "cancelled") or (state == "finished" and not self._keep_alive)
        if self.ended:
            log.info("run %s is %s", self._run_id, state or "deleted")
        return not self.ended

    def lost(self, why: str, since: float | None = None) -> None:
        """Note that the frontier cannot be reached."""
        if self.fit:
            log.warning("cannot reach the frontier: %s", why)
        self.fit = False
        if self._away_since is None:
            self._away_since = time.monotonic() if since is None else since

    @property
    def away_for(self) -> float:
        """Seconds since the frontier could not be reached; 0 if it can."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since
