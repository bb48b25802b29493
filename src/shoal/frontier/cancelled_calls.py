"""Release leases and roles that a store grants to a caller that was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TypeVar

from shoal.errors import ShoalError

T = TypeVar("T")


async def release_if_cancelled(call: Coroutine[object, None, T], release: Callable[[T], Awaitable[object]]) -> T:
    """Return the result of ``call``, which grants leases or a role. If the caller is cancelled, finish the call and
    pass its result to ``release``.

    A call that was sent to a store happens even if its caller is cancelled. Without this, nobody would work on those
    leases until they expire.
    """
    job = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        with suppress(ShoalError):
            await release(await job)
        raise
