"""Pages with more links than fit into one short step: uploaded before it, and moved into the queue after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from shoal.frontier.postgres.columns import CHUNK, Offered
from shoal.frontier.postgres.connection import Database
from shoal.frontier.rules import child_fingerprint
from shoal.http import Request
from shoal.ports import Lease

_PAUSE = 0.01


class Stages:
    """The links of a run that are on their way into the queue."""

    def __init__(self, database: Database, run: int, offset: Callable[[], float]) -> None:
        self._database = database
        self._run = run
        self._offset = offset

    async def upload(self, lease: Lease, children: Sequence[Request]) -> None:
        """Send its links, so that its completion can refer to them. They go when the lease ends without it."""
        parent = lease.fingerprint
        named = ((child_fingerprint(child, parent, index), child) for index, child in enumerate(children))
        for number in range(-(-len(children) // CHUNK)):
            offered = Offered()
            offered.add(1, islice(named, CHUNK))
            kept = await self._database.value("upload", self._run, lease.token, parent, number, *offered.as_push())
            if not kept:  # the lease is lost, or its end was not heard of: the completion will tell
                return

    async def move(self, token: int) -> int:
        """Move all links of this completion into the queue; how many were new. Others help, and finish it if this
        process dies."""
        before = -1
        while True:
            rows = await self._database.call("move_chunk", self._run, self._offset(), token)
            remaining, added = rows[0] if rows else (0, 0)
            if not remaining:
                return int(added)
            await asyncio.sleep(_PAUSE if remaining == before else 0)  # somebody else has the next chunk
            before = remaining

    async def help(self) -> bool:
        """Move some links of anybody's; whether there were any."""
        return bool(await self._database.call("move_chunk", self._run, self._offset(), None))
