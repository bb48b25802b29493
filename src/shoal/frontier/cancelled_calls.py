"""Rights that are given to somebody who does not wait for them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from shoal.errors import ShoalError

T = TypeVar("T")


async def heard(step: Coroutine[Any, Any, T], give_back: Callable[[T], Awaitable[object]]) -> T:
    """What ``step`` gives. It happens all the same when its caller is cancelled, and nobody is left to work on what it
    takes: then that is given back."""
    job = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        with suppress(ShoalError):
            await give_back(await job)
        raise
