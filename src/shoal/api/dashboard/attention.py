"""What all readers of the dashboard share: a snapshot of the store, and its current problems. They are found even if no
notifications are configured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from shoal.config import Config
from shoal.errors import ShoalError
from shoal.operations.active_runs import Mark
from shoal.operations.facts import FactReader
from shoal.operations.notifications.watcher import Notifications, read_missed
from shoal.operations.problem import Problem
from shoal.operations.problems import advance_marks, channel_failing, find_problems
from shoal.operations.schedules.service import Schedules
from shoal.operations.snapshot import SnapshotTaker, StoreSnapshot
from shoal.ports import Store
from shoal.system import clock

_FRESH = 1.0  # seconds
_TIMEOUT = 5.0
_ORDER = ("critical", "warning")


class SharedSnapshot:
    """Takes a snapshot on request, if the last one is old. It never fails: if the store is unavailable, the snapshot
    says why."""

    def __init__(self, taker: SnapshotTaker) -> None:
        self._taker = taker
        self._last = StoreSnapshot(at=0.0)
        self._taken_at = -_FRESH
        self._lock = asyncio.Lock()

    async def get(self) -> StoreSnapshot:
        async with self._lock:
            if clock.monotonic() - self._taken_at >= _FRESH:
                try:
                    async with asyncio.timeout(_TIMEOUT):
                        self._last = await self._taker.take()
                except TimeoutError:
                    self._last = self._outdated(f"the store did not answer within {_TIMEOUT:g} s")
                except ShoalError as exc:
                    self._last = self._outdated(str(exc))
                self._taken_at = clock.monotonic()
            return self._last

    def _outdated(self, reason: str) -> StoreSnapshot:
        at = self._last.at
        return replace(self._last, away=reason, age=max(0.0, clock.time() - at) if at else 0.0)


class Attention:
    """Finds the problems of a store. One caller at a time may use it."""

    def __init__(
        self,
        store: Store,
        config: Config,
        notifications: Notifications,
        schedules: Schedules,
        *,
        without: Sequence[str] = (),
    ) -> None:
        """``without``: names of spiders whose runs are left out."""
        self._store = store
        self._notifications = notifications
        self._schedules = schedules
        self._facts = FactReader(store, config, notifications.limits, without=without)
        self._before: StoreSnapshot | None = None
        self._marks: dict[str, Mark] = {}
        self._answering_since = 0.0
        """The first snapshot after the store was away."""
        self._is_away = False
        self._since: dict[str, float] = {}
        """When each problem was first seen."""

    async def find(self, snapshot: StoreSnapshot) -> list[Problem]:
        """The problems at the time of a snapshot, critical ones first, then the newest."""
        if snapshot.away:
            self._is_away = True
            return find_problems(snapshot)
        if self._is_away:
            self._is_away, self._answering_since = False, snapshot.at
        self._marks = advance_marks(self._marks, snapshot)
        facts = await self._facts.read(snapshot, marks=self._marks, answering_since=self._answering_since)
        missed = await read_missed(self._schedules, facts.since)
        facts = replace(facts, others=(*facts.others, *missed, *await self._failing_channels()))
        problems = find_problems(snapshot, self._before, facts, self._notifications.limits)
        self._before = snapshot
        shown = [problem for problem in problems if problem.severity in _ORDER]
        shown = [replace(problem, since=self._since.get(problem.key, problem.since)) for problem in shown]
        self._since = {problem.key: problem.since for problem in shown}
        return sorted(shown, key=lambda problem: (_ORDER.index(problem.severity), -problem.since))

    async def _failing_channels(self) -> list[Problem]:
        try:
            channels = await self._notifications.channels(self._store)
        except ShoalError:  # a document of another version
            return []
        return [
            channel_failing(channel.name, channel.state.failures, channel.state.failing_since, channel.state.error)
            for channel in channels
            if channel.is_failing
        ]
