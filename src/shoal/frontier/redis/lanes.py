"""Changes to hosts, and to the lanes that depend on them. A lane is the queue of one run for one host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from shoal.errors import RunError
from shoal.frontier.redis.records import pack_update
from shoal.frontier.redis.scripts import FrontierScripts
from shoal.ports import HostUpdate
from shoal.stores.redis.client import Answer, storable_bytes

_RUNS_PER_CALL = 200
_ALL_HOSTS = bytes(4)


class Lanes:
    """Moves lanes after a change of their host or options. In small steps, as Redis does nothing else meanwhile.

    ``run`` runs a script on the frontier's own run.
    """

    def __init__(self, run: Callable[..., Awaitable[Answer]], scripts: FrontierScripts, options: bytes) -> None:
        self._run = run
        self._scripts = scripts
        self._options = options

    async def update_host(self, host: str, update: HostUpdate) -> None:
        words = (storable_bytes(host), pack_update(update), storable_bytes(update.block_reason))
        number = await self._run("host", *words)
        if not number:  # no lane of another run can be due earlier
            return
        runs = await self._scripts.run("value", b"", self._options, "HVALS", "runs")
        if number != _ALL_HOSTS:
            for first in range(0, len(runs), _RUNS_PER_CALL):
                await self._run("place_host", number, *runs[first : first + _RUNS_PER_CALL])
            return
        for run in runs:
            with suppress(RunError):  # it was deleted meanwhile
                await self.place(run)

    async def place(self, run: bytes) -> None:
        """Move all lanes of a run to where they belong."""
        cursor = b"0"
        while True:
            cursor = await self._scripts.run("place", run, self._options, cursor)
            if cursor == b"0":
                return
