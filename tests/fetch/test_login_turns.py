"""A login takes the turn of its host, and keeps it while the store does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import pytest

from shoal.fetch.sessions import session
from shoal.fetch.sessions.session import HostTurns
from shoal.http import Request, Response
from shoal.ports import Hosts, HostState, HostUpdate

T = TypeVar("T")
DELAY = 0.3


class SilentHosts:
    """Hosts of a store that does not answer for a while after the first call."""

    def __init__(self) -> None:
        self.blocked_at: list[float] = []

    async def host_state(self, host: str) -> HostState:
        return HostState(
            host=host, delay=DELAY, why="", concurrency=1, in_flight=0, ready=0, blocked_for=0.0, block_reason=""
        )

    async def update_host(self, host: str, update: HostUpdate) -> None:
        if self.blocked_at and time.monotonic() < self.blocked_at[0] + 2 * DELAY:
            await asyncio.sleep(self.blocked_at[0] + 2 * DELAY - time.monotonic())
        self.blocked_at.append(time.monotonic())


async def at_once(step: Callable[[], Awaitable[T]]) -> T:
    return await step()


async def test_a_block_that_lapsed_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_BLOCK", DELAY / 2)
    hosts, fetched_at = SilentHosts(), []

    async def fetch(request: Request) -> Response:
        fetched_at.append(time.monotonic())
        return Response(request.url)

    await HostTurns(cast("Hosts", hosts), at_once).fetch(Request("http://a.example/login"), fetch)
    assert fetched_at[0] >= hosts.blocked_at[1] + DELAY
