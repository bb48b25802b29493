"""Runs and their frontiers in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar

from shoal.clock import steady_time
from shoal.frontier.composed import FencedFrontier
from shoal.frontier.local_workers import LocalSessions
from shoal.frontier.memory.documents import MemoryDocuments
from shoal.frontier.memory.frontier import MemoryFrontier
from shoal.frontier.memory.hosts import Facts
from shoal.frontier.memory.items import ItemSpace
from shoal.frontier.politeness import Host, OpenRuns
from shoal.frontier.rules import belongs, check_transition, moved, no_run, run_exists
from shoal.ports import Frontier, FrontierOptions, Holder, Room, Run, RunState


class MemoryStore(MemoryDocuments):
    """Runs and their frontiers in this process. They are lost when it ends. See `shoal.ports.Store`."""

    shared: ClassVar[bool] = False

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or steady_time()
        self._runs: dict[str, Run] = {}
        super().__init__(self._runs)
        self._frontiers: OpenRuns[MemoryFrontier] = OpenRuns()
        self._hosts: dict[str, Host] = {}
        self._facts: Facts = {}
        self._sessions = LocalSessions(self._clock)
        self.item_space = ItemSpace()

    async def room(self) -> Room | None:
        return None

    async def create_run(self, run: Run) -> Run:
        if run.run_id in self._runs:
            raise run_exists(run.run_id)
        self._runs[run.run_id] = run
        return run

    async def transition(self, run_id: str, state: RunState) -> Run:
        run = self._runs.get(run_id)
        check_transition(run_id, run, state)
        assert run is not None
        changed = self._runs[run_id] = moved(run, state)
        if run_id in self._frontiers:
            self._frontiers[run_id].enter(state)
        return changed

    async def get_run(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    async def run_state(self, run_id: str) -> RunState | None:
        return self._runs[run_id].state if run_id in self._runs else None

    async def run_states(self, spider: str, project: str | None = None) -> dict[str, RunState]:
        return {run.run_id: run.state for run in reversed(await self.list_runs(spider, project))}

    async def list_runs(
        self,
        spider: str | None = None,
        project: str | None = None,
        *,
        states: Sequence[RunState] | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        runs = (run for run in reversed(self._runs.values()) if belongs(run, spider, project, states))
        return list(islice(runs, limit))

    async def delete_run(self, run_id: str) -> None:
        if self._runs.pop(run_id, None) is None:
            raise no_run(run_id)
        self.discard(run_id)
        self._sessions.forget_run(run_id)
        frontier = self._frontiers.pop(run_id, None)
        if frontier is not None:
            frontier.discard()

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        if run_id not in self._runs:
            raise no_run(run_id)
        if run_id not in self._frontiers:
            frontier = MemoryFrontier(
                run_id, self._hosts, self._clock, self._frontiers, self._facts, self._sessions, self, self.item_space
            )
            frontier.enter(self._runs[run_id].state)
            self._frontiers[run_id] = frontier
        found = self._frontiers[run_id]
        if options is not None:
            found.set_options(options)
        return found if holder is None else FencedFrontier(found, holder)

    async def close(self) -> None:
        for frontier in self._frontiers.values():
            frontier.discard()
