"""How hosts are treated, and what follows for the lanes: the queues of runs for hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from shoal.errors import RunError
from shoal.frontier.redis.records import pack_update, storable
from shoal.frontier.redis.server import Server
from shoal.ports import HostUpdate

_RUNS_AT_ONCE = 200


class Lanes:
    """Puts lanes where they belong when what they go by has changed. Some at a time: Redis does nothing else
    meanwhile. ``run`` takes a step of the frontier's own run."""

    def __init__(self, run: Callable[..., Awaitable[Any]], server: Server, options: bytes) -> None:
        self._run = run
        self._server = server
        self._options = options

    async def update_host(self, host: str, update: HostUpdate) -> None:
        words = (storable(host), pack_update(update), storable(update.block_reason))
        number = await self._run("host", *words)
        if number < 0:  # no lane of another run can be due sooner than it stands
            return
        runs = await self._run("numbers")
        if number:
            for first in range(0, len(runs), _RUNS_AT_ONCE):
                await self._run("place_host", number, *runs[first : first + _RUNS_AT_ONCE])
            return
        for run in runs:
            with suppress(RunError):  # which was deleted meanwhile
                await self.place(run)

    async def place(self, run: bytes) -> None:
        """All lanes of a run."""
        cursor = b"0"
        while True:
            cursor = await self._server.run("place", run, self._options, cursor)
            if cursor == b"0":
                return
