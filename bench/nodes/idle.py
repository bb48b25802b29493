"""What a large cluster costs that has nothing to do, and how soon it is complete."""

from __future__ import annotations

import asyncio
import time
from statistics import mean
from typing import Any

from nodes.cluster import cluster
from nodes.load import Load, memory_of
from shoal.ports import Counts

NOWHERE = "http://127.0.0.1:9/"
"""The one page of the run. As that is paused, nobody asks for it."""
SETTLING = 10.0
"""Seconds for the last ones to begin, and to find out that there is nothing to do."""
SECONDS = 20.0


async def measure(job: dict[str, Any], members: int, runners: int, session: float) -> dict[str, Any]:
    """Nodes of a run that is paused, so many of them Runners."""
    async with cluster(job, Counts(runners, members - runners), session, [NOWHERE], paused=True) as made:
        began = time.monotonic()
        for number in range(1, members + 1):
            await made.fork(f"crawler_{number}")
        forked = time.monotonic() - began
        await made.until_complete()
        formed = time.monotonic() - began
        await asyncio.sleep(SETTLING)
        with Load(nodes=made.nursery.pid, **job["servers"]) as load:
            await asyncio.sleep(SECONDS)
        await made.until_complete()  # nobody was lost
        memory = [memory_of(pid) for pid in made.pids.values()]
    return {
        "act": "idle", "session": session, "members": members, "runners": runners, "forked": forked, "formed": formed,
        **load.figure(),
        **{name: mean(each[name] for each in memory) for name in ("rss", "pss")},
    }  # fmt: skip
