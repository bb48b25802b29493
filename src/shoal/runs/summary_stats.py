"""Reads the figures for the summary of a run. It does not wait for a store that does not answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from shoal.errors import FrontierError
from shoal.ports import Frontier, Stats

_MAX_FAILED = 100
"""Failed requests that are read to find one for the summary."""


async def last_stats(frontier: Frontier, deadline: float | None) -> tuple[Stats, dict[str, int]]:
    """Counters and kinds of dead requests for a summary. Empty ones if the store does not answer until ``deadline``, on
    the clock of the event loop."""
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout_at(deadline):
            return await frontier.stats(), await frontier.dead_kinds()
    return Stats(seeding=True), {}


async def failed_url(frontier: Frontier, deadline: float | None) -> str:
    """The URL of a failed request, if possible of one that robots.txt allows. Empty if the store does not answer."""
    url = ""
    with suppress(FrontierError, TimeoutError):
        async with asyncio.timeout_at(deadline):
            left = _MAX_FAILED
            async for history in frontier.dead():
                url = url or history.url
                left -= 1
                if not history.reason.startswith("robots.txt"):
                    return history.url
                if not left:
                    break
    return url
