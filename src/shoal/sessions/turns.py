"""Requests outside of the queue that keep the delay of their host, such as those of a login.

The host is blocked for all runs until its pages in flight have ended and its delay is over, during the request, and for
one delay after it. Blocks are short and renewed, so that one of a process that died ends soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.http import Request, Response
from shoal.ports import Fetch, Hosts, HostUpdate
from shoal.urls.normalize import host_of

_BLOCK = 1.0  # seconds; a longer delay takes its place
_POLL = 0.05
REASON = "a login"
"""Why the host is blocked."""


class HostTurns:
    """Takes turns of hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    async def fetch(self, request: Request, fetch: Fetch) -> Response:
        """Fetch a page when its host is free."""
        host = host_of(request.url)
        delay = (await self._hosts.host_state(host)).delay
        if not delay:
            return await fetch(request)
        async with self._blocked(host, delay):
            while (await self._hosts.host_state(host)).in_flight:
                await asyncio.sleep(_POLL)
            await asyncio.sleep(delay)
            return await fetch(request)

    @asynccontextmanager
    async def _blocked(self, host: str, delay: float) -> AsyncIterator[None]:
        """Keep a host blocked, and leave it blocked for its delay."""
        waits = (await self._hosts.host_state(host)).blocked_for
        if waits:  # somebody else blocks it
            await asyncio.sleep(waits)
        await self._block(host, delay)
        renewing = asyncio.create_task(self._renew(host, delay))
        try:
            yield
        finally:
            renewing.cancel()
            await self._block(host, delay)

    async def _renew(self, host: str, delay: float) -> None:
        while True:
            await asyncio.sleep(_BLOCK / 3)
            await self._block(host, delay)

    async def _block(self, host: str, delay: float) -> None:
        await self._hosts.update_host(host, HostUpdate(block_for=max(delay, _BLOCK), block_reason=REASON))
