"""One run, one coordinator, and the nodes of one cluster, seen from the program that measures."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodes.work import Endless, config
from shoal.cluster import open_coordinator
from shoal.cluster.election import roles
from shoal.errors import CoordinatorError
from shoal.frontier import open_store
from shoal.ports import ClusterView, Coordinator, Counts
from shoal.runs.start import start_run

BENCH = Path(__file__).parents[1]
PATIENCE = 60.0
"""Seconds after which a cluster that is not as it should be is given up."""
LOOK_EVERY = 0.1


@dataclass
class Cluster:
    frontier: str
    coordinator: str
    run_id: str
    counts: Counts
    session: float
    logs: Path
    observer: Coordinator
    nursery: asyncio.subprocess.Process
    pids: dict[str, int] = field(default_factory=dict)
    """Of the nodes that live, by name."""

    async def fork(self, name: str) -> None:
        """One more node; one of that name that was killed comes back."""
        order = {
            "frontier": self.frontier, "name": name, "log": str(self.logs / f"{name}.log"), "run_id": self.run_id,
            "runner": self.counts.runner, "backup": self.counts.backup, "coordinator": self.coordinator,
            "session": self.session,
        }  # fmt: skip
        assert self.nursery.stdin is not None
        assert self.nursery.stdout is not None
        self.nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self.pids[name] = int(await self.nursery.stdout.readline())

    def kill(self, name: str) -> float:
        """With SIGKILL, and until it is dead. When the signal was sent, in seconds since the epoch."""
        death = os.pidfd_open(self.pids[name])
        try:
            killed = time.time()
            signal.pidfd_send_signal(death, signal.SIGKILL)
            select.select([death], [], [])
        finally:
            os.close(death)
        del self.pids[name]
        return killed

    async def until(self, holds: Callable[[ClusterView], bool]) -> ClusterView:
        """The first view of the cluster that is so."""
        until = time.monotonic() + PATIENCE
        shown: ClusterView | CoordinatorError
        while True:
            try:
                shown = await self.observer.look()
                if holds(shown):
                    return shown
            except CoordinatorError as exc:  # nobody has joined yet
                shown = exc
            if time.monotonic() > until:
                raise RuntimeError(f"after {PATIENCE:g} s the cluster is {shown}; what the nodes say is in {self.logs}")
            await asyncio.sleep(LOOK_EVERY)

    async def until_complete(self) -> ClusterView:
        """Until every slot is held, and as many stand by as are to."""
        wanted = {"runner": self.counts.runner, "backup": self.counts.backup}
        return await self.until(lambda view: Counter(roles(view).values()) == wanted)


@asynccontextmanager
async def cluster(
    job: dict[str, Any], counts: Counts, session: float, urls: Sequence[str], *, paused: bool = False
) -> AsyncIterator[Cluster]:
    """A new run with these URLs and a cluster without nodes, until the block ends; then its nodes are killed."""
    run_id = f"{'idle' if paused else 'takeover'}-{session:g}"
    logs = BENCH / ".work/cluster" / job["kind"] / run_id
    logs.mkdir(parents=True, exist_ok=True)
    store = await open_store(job["frontier"])
    await start_run(store, Endless(), config(job["frontier"]), urls=urls, run_id=run_id)
    if paused:
        await store.transition(run_id, "running")
        await store.transition(run_id, "paused")
    await store.close()
    observer = await open_coordinator(job["coordinator"], run_id)
    nursery = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nodes.nursery", cwd=BENCH, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert nursery.stdout is not None
    await nursery.stdout.readline()  # it is ready
    try:
        yield Cluster(job["frontier"], job["coordinator"], run_id, counts, session, logs, observer, nursery)
    finally:
        assert nursery.stdin is not None
        nursery.stdin.close()
        await nursery.wait()
        await observer.close()
