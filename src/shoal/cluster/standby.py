"""What one who stands by has to know of the frontier: whether it could work, and whether there is work left."""

from __future__ import annotations

import asyncio
import logging

from shoal.errors import FrontierError
from shoal.ports import Store

log = logging.getLogger("shoal.cluster")


class FrontierWatch:
    """Looks at a run when it is told to."""

    def __init__(self, store: Store, run_id: str, patience: float, *, keep_alive: bool) -> None:
        """``patience``: seconds that the frontier has to answer. ``keep_alive``: a run that is finished may go on."""
        self.fit = True
        """Whether the frontier could be reached the last time."""
        self.ended = asyncio.Event()
        """The run is finished, cancelled or gone."""
        self._store = store
        self._run_id = run_id
        self._patience = patience
        self._keep_alive = keep_alive

    async def look(self) -> bool:
        """Whether there is something to work on, and a way to it."""
        try:
            async with asyncio.timeout(self._patience):
                run = await self._store.get_run(self._run_id)
        except (FrontierError, TimeoutError) as exc:
            self.lost(str(exc) or "no answer")
            return False
        self.fit = True
        if run is None or run.state == "cancelled" or (run.state == "finished" and not self._keep_alive):
            log.info("run %s is %s", self._run_id, "removed" if run is None else run.state)
            self.ended.set()
        return not self.ended.is_set()

    def lost(self, why: str) -> None:
        """The frontier can't be reached."""
        if self.fit:
            log.warning("the frontier can't be reached: %s", why)
        self.fit = False
