"""What a node has to know of the frontier: whether it could work, and whether there is work left."""

from __future__ import annotations

import asyncio
import logging
import time

from shoal.errors import FrontierError
from shoal.ports import Store

log = logging.getLogger("shoal.cluster")


class FrontierWatch:
    """Looks at a run when it is told to."""

    def __init__(self, store: Store, run_id: str, patience: float, *, keep_alive: bool) -> None:
        """``patience``: seconds that the frontier has to answer. ``keep_alive``: a run that is finished may go on."""
        self.fit = True
        """Whether the frontier could be reached the last time."""
        self.ended = False
        """The run is finished, cancelled or gone."""
        self.shared = store.shared
        self._store = store
        self._run_id = run_id
        self._patience = patience
        self._keep_alive = keep_alive
        self._away_since: float | None = None

    async def look(self) -> bool:
        """Whether there is something to work on, and a way to it."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._patience):
                state = await self._store.run_state(self._run_id)
        except (FrontierError, TimeoutError) as exc:
            self.lost(str(exc) or f"no answer in {self._patience:g} s", began)
            return False
        self.fit = True
        self._away_since = None
        self.ended = state in (None, "cancelled") or (state == "finished" and not self._keep_alive)
        if self.ended:
            log.info("run %s is %s", self._run_id, state or "removed")
        return not self.ended

    def lost(self, why: str, since: float | None = None) -> None:
        """The frontier can't be worked on."""
        if self.fit:
            log.warning("the frontier can't be used: %s", why)
        self.fit = False
        if self._away_since is None:
            self._away_since = time.monotonic() if since is None else since

    @property
    def away_for(self) -> float:
        """Seconds since which that is so."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since
