"""The frontier of a run in memory, composed of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shoal.frontier.composed import ComposedFrontier
from shoal.frontier.local_workers import LocalSessions, LocalWorkers
from shoal.frontier.memory.hosts import Facts, MemoryHosts
from shoal.frontier.memory.inspection import MemoryInspection
from shoal.frontier.memory.items import ItemSpace, MemoryItemLog
from shoal.frontier.memory.queue import MemoryQueue
from shoal.frontier.memory.requests import Requests
from shoal.frontier.memory.roles import MemoryRoles
from shoal.frontier.memory.stages import MemoryStages
from shoal.frontier.politeness import Host, OpenRuns
from shoal.frontier.rules import HALTED, RESTING
from shoal.ports import Documents, FrontierOptions, RunState


class MemoryFrontier(ComposedFrontier):
    """See `shoal.ports.Frontier`."""

    def __init__(
        self,
        run_id: str,
        hosts: dict[str, Host],
        clock: Callable[[], float],
        runs: OpenRuns[MemoryFrontier],
        facts: Facts,
        sessions: LocalSessions,
        documents: Documents,
        space: ItemSpace,
    ) -> None:
        """``hosts`` and what follows ``clock`` are shared by all runs of the store."""
        self._requests = requests = Requests(FrontierOptions(), hosts, run_id)
        roles = MemoryRoles(clock)
        self._items = items = MemoryItemLog(roles, space)
        self._stages = stages = MemoryStages(requests, clock)
        self._queue = queue = MemoryQueue(
            requests, stages, items, roles, clock, lambda now: runs.expire_others(self, now), documents
        )
        self.expire_leases = queue.expire_leases
        self._clock = clock
        self.held_at = queue.held_at
        holders = partial(sessions.holders, runs)
        inspection = MemoryInspection(requests, stages, queue, roles, items, clock, holders)
        workers = LocalWorkers(run_id, sessions, queue.fence, queue.holders)
        super().__init__(queue, roles, workers, items, MemoryHosts(requests, hosts, facts, clock), inspection)

    def set_options(self, options: FrontierOptions) -> None:
        """Change the options of the run."""
        if options != self._requests.options:
            self._requests.set_options(options, self._clock())

    def enter(self, state: RunState) -> None:
        """Stop or resume leasing: the run is paused or cancelled, or runs again."""
        self._queue.halted = state in HALTED
        self._requests.lanes.is_resting = state in RESTING

    def discard(self) -> None:
        """Drop everything: the run was deleted, or the store was closed."""
        self._queue.close()
        self._items.clear()
        self._stages.clear()
        self._requests.close()
