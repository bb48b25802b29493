"""One run, one coordinator, and the nodes of one cluster."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodes.work import Endless, config
from shoal.errors import CoordinatorError
from shoal.frontier import open_store
from shoal.ports import ClusterView, Coordinator, Counts
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.election import roles
from shoal.runs.start import start_run

BENCH = Path(__file__).parents[1]
TIMEOUT = 60.0
"""Seconds to wait for a condition before giving up."""
POLL_EVERY = 0.1


@dataclass
class Cluster:
    frontier: str
    coordinator: str
    run_id: str
    counts: Counts
    session: float
    logs: Path
    observer: Coordinator
    fork_server: asyncio.subprocess.Process
    pids: dict[str, int] = field(default_factory=dict)
    """The processes of the living nodes, by name."""

    async def fork(self, name: str) -> None:
        """Start a node, or start a killed node again."""
        order = {
            "frontier": self.frontier, "name": name, "log": str(self.logs / f"{name}.log"), "run_id": self.run_id,
            "runner": self.counts.runner, "backup": self.counts.backup, "coordinator": self.coordinator,
            "session": self.session,
        }  # fmt: skip
        assert self.fork_server.stdin is not None
        assert self.fork_server.stdout is not None
        self.fork_server.stdin.write(json.dumps(order).encode() + b"\n")
        self.pids[name] = int(await self.fork_server.stdout.readline())

    def kill(self, name: str) -> float:
        """Kill a node with SIGKILL and wait for its end. Returns the time of the signal, in seconds since the epoch."""
        death = os.pidfd_open(self.pids[name])
        try:
            killed = time.time()
            signal.pidfd_send_signal(death, signal.SIGKILL)
            select.select([death], [], [])
        finally:
            os.close(death)
        del self.pids[name]
        return killed

    async def wait_until(self, holds: Callable[[ClusterView], bool]) -> ClusterView:
        """Wait until the condition is true, and return that view of the cluster."""
        until = time.monotonic() + TIMEOUT
        shown: ClusterView | CoordinatorError
        while True:
            try:
                shown = await self.observer.observe()
                if holds(shown):
                    return shown
            except CoordinatorError as exc:  # nobody has joined yet
                shown = exc
            if time.monotonic() > until:
                raise RuntimeError(f"after {TIMEOUT:g} s the cluster is {shown}; logs of the nodes: {self.logs}")
            await asyncio.sleep(POLL_EVERY)

    async def wait_until_complete(self) -> ClusterView:
        """Wait until every slot is held and all Backup Runners have joined."""
        wanted = {"Runner": self.counts.runner, "Backup Runner": self.counts.backup}
        return await self.wait_until(lambda view: Counter(roles(view).values()) == wanted)


@asynccontextmanager
async def cluster(
    job: dict[str, Any], counts: Counts, session: float, urls: Sequence[str], *, paused: bool = False
) -> AsyncIterator[Cluster]:
    """Create a run with these URLs and a cluster without nodes. The nodes are killed when the block ends."""
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
    fork_server = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "nodes.fork_server", cwd=BENCH, stdin=PIPE, stdout=PIPE
    )
    assert fork_server.stdout is not None
    await fork_server.stdout.readline()  # it is ready
    try:
        yield Cluster(job["frontier"], job["coordinator"], run_id, counts, session, logs, observer, fork_server)
    finally:
        assert fork_server.stdin is not None
        fork_server.stdin.close()
        await fork_server.wait()
        await observer.close()
