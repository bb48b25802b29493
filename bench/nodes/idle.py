"""The cost of a large idle cluster, and the time until it is complete."""

from __future__ import annotations

import asyncio
import time
from statistics import mean
from typing import Any

from nodes.cluster import cluster
from nodes.load import Load, memory_of
from shoal.ports import Counts

NOWHERE = "http://127.0.0.1:9/"
"""The only page of the run. The run is paused, so nobody requests it."""
SETTLING = 10.0
"""Seconds until the last nodes have started and are idle."""
SECONDS = 20.0


async def measure(job: dict[str, Any], members: int, runners: int, session: float) -> dict[str, Any]:
    """Measure the nodes of a paused run. ``runners`` of them hold a slot."""
    async with cluster(job, Counts(runners, members - runners), session, [NOWHERE], paused=True) as made:
        began = time.monotonic()
        for number in range(1, members + 1):
            await made.fork(f"crawler_{number}")
        forked = time.monotonic() - began
        await made.wait_until_complete()
        formed = time.monotonic() - began
        await asyncio.sleep(SETTLING)
        with Load(nodes=made.fork_server.pid, **job["servers"]) as load:
            await asyncio.sleep(SECONDS)
        await made.wait_until_complete()  # nobody was lost
        memory = [memory_of(pid) for pid in made.pids.values()]
    return {
        "act": "idle", "session": session, "members": members, "runners": runners, "forked": forked, "formed": formed,
        **load.figure(),
        **{name: mean(each[name] for each in memory) for name in ("rss", "pss")},
    }  # fmt: skip
