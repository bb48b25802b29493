"""Runs, their frontiers and documents in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import ClassVar

from shoal.frontier.composed import ComposedFrontier, FencedFrontier, LocalSessions, LocalWorkers
from shoal.frontier.host_policy import DEFAULT_HOST
from shoal.frontier.memory.inspection import MemoryInspection
from shoal.frontier.memory.items import ItemSpace, MemoryItemLog, MemoryRoles
from shoal.frontier.memory.queue import MemoryQueue, MemoryStages
from shoal.frontier.memory.requests import Requests
from shoal.frontier.politeness import Host, OpenRuns, apply_update
from shoal.frontier.rules import HALTED, RESTING, belongs, moved, no_run, run_exists
from shoal.ports import (
    Document,
    Frontier,
    FrontierOptions,
    Holder,
    HostState,
    HostUpdate,
    Room,
    Run,
    RunState,
)
from shoal.ports.documents import check_document
from shoal.system.clock import steady_time


class MemoryDocuments:
    """Documents in this process. See `shoal.ports.Documents`. ``runs``: those of the store, by name."""

    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs
        self._documents: dict[str, Document] = {}

    async def get_document(self, key: str) -> Document | None:
        return self._documents.get(key)

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        keys = sorted(key for key in self._documents if key.startswith(prefix) and key > after)
        return [self._documents[key] for key in keys[:limit]]

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        check_document(key, value, version)
        document = self._documents.get(key)
        stored = document.version if document else b""
        if stored == version or (value is None and not stored):
            return True
        if stored != replaces:
            return False
        if value is None:
            del self._documents[key]
        else:
            self._documents[key] = Document(key, value, version)
        if run is not None:
            self._runs.setdefault(run.run_id, run)
        return True

    def discard(self, run_id: str) -> None:
        """Delete the documents of a run."""
        for key in [key for key in self._documents if key.startswith(f"run/{run_id}/")]:
            del self._documents[key]


Facts = dict[str, tuple[bytes, float]]
"""Small facts and when each of them expires."""


class MemoryHosts:
    """The hosts as one run sees them, and the facts that all runs share. See `shoal.ports.Hosts`."""

    def __init__(self, requests: Requests, hosts: dict[str, Host], facts: Facts, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._hosts = hosts
        self._facts = facts
        self._clock = clock

    async def update_host(self, host: str, update: HostUpdate) -> None:
        is_default = host == DEFAULT_HOST
        changed = self._hosts.setdefault(host, Host(host)) if is_default else self._requests.lane(host).host
        apply_update(self._hosts, changed, update, self._clock())

    async def host_states(self, limit: int = 100) -> list[HostState]:
        return self._requests.lanes.states(self._clock(), limit)

    async def host_state(self, host: str) -> HostState:
        return self._requests.lanes.state(self._hosts.get(host, Host(host)), self._clock())

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        now = self._clock()
        for old in [old for old, (_, until) in self._facts.items() if until <= now]:
            del self._facts[old]
        self._facts[key] = (value, now + ttl)

    async def recall(self, key: str) -> bytes | None:
        value, until = self._facts.get(key, (None, 0.0))
        return value if until > self._clock() else None


class MemoryFrontier(ComposedFrontier):
    """See `shoal.ports.Frontier`."""

    def __init__(self, store: MemoryStore, run_id: str) -> None:
        clock, hosts, runs, sessions = store.clock, store.hosts, store.frontiers, store.sessions
        self._requests = requests = Requests(FrontierOptions(), hosts, run_id)
        roles = MemoryRoles(clock)
        self._items = items = MemoryItemLog(roles, store.item_space)
        self._stages = stages = MemoryStages(requests, clock)
        self._queue = queue = MemoryQueue(
            requests, stages, items, roles, clock, partial(runs.expire_others, self), store
        )
        self.expire_leases = queue.expire_leases
        self._clock = clock
        self.held_at = queue.held_at
        holders = partial(sessions.holders, runs)
        inspection = MemoryInspection(requests, stages, queue, roles, items, clock, holders)
        workers = LocalWorkers(run_id, sessions, queue.fence, queue.holders)
        super().__init__(queue, roles, workers, items, MemoryHosts(requests, hosts, store.facts, clock), inspection)

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


class MemoryStore(MemoryDocuments):
    """Runs and their frontiers in this process. They are lost when it ends. See `shoal.ports.Store`."""

    shared: ClassVar[bool] = False

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._runs: dict[str, Run] = {}
        super().__init__(self._runs)
        self.clock = clock or steady_time()
        self.frontiers: OpenRuns[MemoryFrontier] = OpenRuns()
        self.hosts: dict[str, Host] = {}
        self.facts: Facts = {}
        self.sessions: LocalSessions = LocalSessions(self.clock)
        self.item_space: ItemSpace = ItemSpace()

    async def room(self) -> Room | None:
        return None

    async def create_run(self, run: Run) -> Run:
        if run.run_id in self._runs:
            raise run_exists(run.run_id)
        self._runs[run.run_id] = run
        return run

    async def transition(self, run_id: str, state: RunState, *, among: Sequence[RunState] | None = None) -> Run:
        if run_id not in self._runs:
            raise no_run(run_id)
        changed = self._runs[run_id] = moved(self._runs[run_id], state, among)
        if run_id in self.frontiers:
            self.frontiers[run_id].enter(state)
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
        self.sessions.forget_run(run_id)
        frontier = self.frontiers.pop(run_id, None)
        if frontier is not None:
            frontier.discard()

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        if run_id not in self._runs:
            raise no_run(run_id)
        if run_id not in self.frontiers:
            frontier = MemoryFrontier(self, run_id)
            frontier.enter(self._runs[run_id].state)
            self.frontiers[run_id] = frontier
        opened = self.frontiers[run_id]
        if options is not None:
            opened.set_options(options)
        return opened if holder is None else FencedFrontier(opened, holder)

    async def close(self) -> None:
        for frontier in self.frontiers.values():
            frontier.discard()
