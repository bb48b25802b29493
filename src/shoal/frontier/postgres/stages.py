"""Links of very large pages: uploaded before the completion, moved into the queue after it, in short calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice

from shoal.frontier.postgres.columns import RequestColumns
from shoal.frontier.rules import CHUNK, child_fingerprint
from shoal.frontier.staging import Moved
from shoal.http import Request
from shoal.ports import Lease
from shoal.stores.postgres.client import PostgresClient

_PAUSE = 0.01


class Stages:
    """The staged links of a run."""

    def __init__(self, database: PostgresClient, run: int, offset: Callable[[], float]) -> None:
        self._database = database
        self._run = run
        self._offset = offset

    async def upload(self, lease: Lease, children: Sequence[Request]) -> None:
        """Upload the links of a page, so that its completion can refer to them. If the lease ends without a completion,
        they are deleted."""
        parent = lease.fingerprint
        named = ((child_fingerprint(child, parent, index), child) for index, child in enumerate(children))
        for number in range(-(-len(children) // CHUNK)):
            offered = RequestColumns()
            offered.add(1, islice(named, CHUNK))
            kept = await self._database.value("upload", self._run, lease.token, parent, number, *offered.as_push())
            if not kept:  # the lease was lost, or an earlier completion succeeded: the completion reports it
                return

    async def move(self, token: int) -> Moved:
        """Move all links of this completion into the queue. If this process dies, others continue."""
        before = -1
        while True:
            rows = await self._database.call("move_chunk", self._run, self._offset(), token)
            remaining, added, refused = rows[0] if rows else (0, 0, 0)
            if not remaining:
                return Moved(added, refused)
            await asyncio.sleep(_PAUSE if remaining == before else 0)  # another client moves the next chunk
            before = remaining

    async def help(self) -> bool:
        """Move a chunk of any page. Returns whether there was one."""
        return bool(await self._database.call("move_chunk", self._run, self._offset(), None))
