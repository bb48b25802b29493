"""Finds current problems for the dashboard, even if no notifications are configured."""

from __future__ import annotations

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
from shoal.operations.snapshot import StoreSnapshot
from shoal.ports import Store

_ORDER = ("critical", "warning")


class Attention:
    """Finds the problems of a store. One caller at a time may use it."""

    def __init__(
        self, store: Store, config: Config, notifications: Notifications, schedules: Schedules, *,
        without: Sequence[str] = (),
    ) -> None:  # fmt: skip
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
        found = find_problems(snapshot, self._before, facts, self._notifications.limits)
        self._before = snapshot
        shown = [each for each in found if each.severity in _ORDER]
        shown = [replace(each, since=self._since.get(each.key, each.since)) for each in shown]
        self._since = {each.key: each.since for each in shown}
        return sorted(shown, key=lambda each: (_ORDER.index(each.severity), -each.since))

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


# The screens of the dashboard that the navigation lists.


NAVIGATION = (
    ("/", "Overview"),
    ("/ui/runs", "Runs"),
    ("/ui/hosts", "Hosts"),
    ("/ui/workers", "Workers"),
    ("/ui/batches", "Batches"),
    ("/ui/schedules", "Schedules"),
    ("/ui/notifications", "Notifications"),
    ("/ui/actions", "Actions"),
    ("/ui/settings", "Settings"),
)
SERVED_ONLY = ("/ui/batches",)
"""Screens of a server that crawls itself."""
ADMIN_ONLY = ("/ui/settings",)
