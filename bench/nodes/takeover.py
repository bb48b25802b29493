"""The time without a worker after the Runner of a slot is killed."""

from __future__ import annotations

import asyncio
import random
import sys
from statistics import median
from typing import Any

from nodes.cluster import Cluster, cluster
from nodes.load import Load
from nodes.site import Site, site
from shoal.ports import Counts

PHASES = ("lost", "elected", "page", "whole")
_BEATS = 4  # in a session: a kill comes at any moment between two of them
_TIMEOUT = 30.0  # seconds beyond the session


async def measure(job: dict[str, Any], rounds: int, session: float) -> dict[str, Any]:
    """One Runner and one Backup Runner. A killed node is started again and becomes the Backup Runner."""
    async with site() as target, cluster(job, Counts(1, 1), session, target.urls) as made:
        await made.fork("crawler_1")
        await made.fork("crawler_2")
        found = []
        with Load(nodes=made.fork_server.pid, **job["servers"]) as load:
            for number in range(1, rounds + 1):
                found.append(await one_round(made, target))
                phases = "  ".join(f"{name} {found[-1][name]:6.3f}" for name in PHASES)
                print(
                    f"{job['kind']:<11}session {session:g} s  round {number:>2}  {phases}", file=sys.stderr, flush=True
                )
    return {
        "act": "takeover", "session": session, "rounds": rounds,
        **{name: spread([each[name] for each in found]) for name in PHASES}, **load.figure(), "all": found,
    }  # fmt: skip


async def one_round(made: Cluster, target: Site) -> dict[str, float]:
    """Seconds between the events, all by the clock of the machine, which the servers use, too.

    Do not query the cluster during the round: on Redis and PostgreSQL a query may be what detects the lost node.
    """
    view = await made.wait_until_complete()
    runner = view.slots[0].holder
    backup = next(member.name for member in view.members if member.name != runner)
    await asyncio.sleep(random.uniform(0, made.session / _BEATS))
    visit = target.first_visit(backup)
    killed = made.kill(runner)
    visited = await asyncio.wait_for(visit, made.session + _TIMEOUT)
    last = {(event.what, event.member): event.at for event in await made.observer.events()}
    lost, elected = last["lost", runner], last["took over", backup]
    await made.fork(runner)
    return {"lost": lost - killed, "elected": elected - lost, "page": visited - elected, "whole": visited - killed}


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": median(seconds), "best": min(seconds), "worst": max(seconds)}
