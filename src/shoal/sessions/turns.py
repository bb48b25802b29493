"""Requests outside of the queue that keep the delay of their host, such as those of a login.

The host is blocked for all runs until its pages in flight have ended and its delay is over, during the request, and for
one delay after it. Blocks are short and renewed, so that one of a process that died ends soon.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from shoal.http import Request, Response
from shoal.ports import Fetch, Hosts, HostState, HostUpdate
from shoal.urls.normalize import host_of

T = TypeVar("T")

_BLOCK = 1.0  # seconds; a longer delay takes its place
_POLL = 0.05
REASON = "a login"
"""Why the host is blocked."""


class Persist(Protocol):
    """Repeats a call of the store while it is away."""

    async def __call__(self, step: Callable[[], Awaitable[T]], /) -> T: ...


class HostTurns:
    """Takes turns of hosts."""

    def __init__(self, hosts: Hosts, persist: Persist) -> None:
        self._hosts = hosts
        self._persist = persist

    async def fetch(self, request: Request, fetch: Fetch) -> Response:
        """Fetch a page when its host is free."""
        host = host_of(request.url)
        state = await self._state(host)
        while state.blocked_for:  # by somebody else
            await asyncio.sleep(min(state.blocked_for, 10 * _POLL))
            state = await self._state(host)
        if not state.delay:
            return await fetch(request)
        async with self._blocked(host, state.delay):
            while (await self._state(host)).in_flight:
                await asyncio.sleep(_POLL)
            await asyncio.sleep(state.delay)
            return await fetch(request)

    @asynccontextmanager
    async def _blocked(self, host: str, delay: float) -> AsyncIterator[None]:
        """Keep a host blocked, and leave it blocked for its delay."""
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

    async def _state(self, host: str) -> HostState:
        return await self._persist(lambda: self._hosts.host_state(host))

    async def _block(self, host: str, delay: float) -> None:
        update = HostUpdate(block_for=max(delay, _BLOCK), block_reason=REASON)
        await self._persist(lambda: self._hosts.update_host(host, update))
