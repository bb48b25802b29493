"""Notifications for servers and commands: the loop, the reported problems, the channels, a test message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.monitoring.problem import ProblemLimits
from shoal.notifications.channels import Channel, open_channels
from shoal.notifications.delivery import ChannelState, read_channel_states, read_reports
from shoal.notifications.messages import make_test_message
from shoal.notifications.reports import Report
from shoal.notifications.rules import limits_for
from shoal.notifications.settings import LoadedSettings, NotificationSettings, Rule, load_notifications
from shoal.notifications.watcher import Watcher, watch_of
from shoal.ports import Documents, Store
from shoal.suggestions import did_you_mean


class ChannelInfo(Struct, frozen=True):
    """A channel of the settings, and its state."""

    name: str
    type: str
    is_failing: bool
    state: ChannelState


async def list_problems(documents: Documents, project: str) -> list[Report]:
    """What was reported in the last days: lasting problems first, then the newest."""
    found = await read_reports(documents, project)
    return sorted(found.values(), key=lambda report: (not report.is_open, -report.reported_at))


async def list_channels(documents: Documents, project: str, settings: NotificationSettings) -> list[ChannelInfo]:
    """All channels of the settings, with their state and without secrets."""
    states = await read_channel_states(documents, project, settings.channels)
    limit = settings.failing_after
    return [
        ChannelInfo(name, str(table.__struct_config__.tag), states[name].failures >= limit, states[name])
        for name, table in settings.channels.items()
    ]


class Notifications:
    """The notifications of one process. Without channels it does nothing."""

    def __init__(
        self,
        config: Config,
        loaded: LoadedSettings | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        active: bool = True,
    ) -> None:
        """ConfigError if the settings are invalid, or a channel lacks a secret or a library. Without ``active``, it
        opens no channel and needs no secret: it only shows what others report."""
        loaded = load_notifications() if loaded is None else loaded
        self._config = config
        self._settings = loaded.settings
        self._channels: dict[str, Channel] = open_channels(loaded, config, environ) if active else {}
        self._watcher: Watcher | None = None
        self._task: asyncio.Task[None] | None = None

    def limits(self, run_id: str, spider: str) -> ProblemLimits:
        """The limits for this run, beyond which something is a problem."""
        return limits_for(self._settings.rules.values(), run_id, spider)

    @property
    def rules(self) -> dict[str, Rule]:
        return self._settings.rules

    def start(self, store: Store, name: str, *, without: Sequence[str] = ()) -> None:
        """Watch a store, if there is a channel. ``name``: of this process, unique. ``without``: names of spiders whose
        runs are left out."""
        if self._channels:
            self._watcher = Watcher(store, self._config, self._settings, self._channels, name, without=without)
            self._task = asyncio.create_task(self._watcher.run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._watcher is not None:
            await self._watcher.release()
        for channel in self._channels.values():
            await channel.close()

    async def problems(self, documents: Documents) -> list[Report]:
        return await list_problems(documents, self._config.project_name)

    async def channels(self, documents: Documents) -> list[ChannelInfo]:
        return await list_channels(documents, self._config.project_name, self._settings)

    async def watched_since(self, documents: Documents) -> float | None:
        """When a server began to watch this project. None if none has."""
        watch = await watch_of(documents, self._config.project_name).read()
        return None if watch is None else watch.since

    async def test(self, name: str | None = None) -> dict[str, str]:
        """Send a test message through one channel or all of them. Return for each why it was not delivered, or an empty
        string. ConfigError if there is no such channel."""
        if not self._channels and self._settings.channels:
            raise ConfigError("this server sends no notifications; ask one that was started with `shoal serve`")
        if not self._channels:
            raise ConfigError("no channel is configured: add [notifications.channels.NAME] to shoal.toml")
        if name is not None and name not in self._channels:
            known = did_you_mean(name, list(self._channels)) or f"; the channels are: {', '.join(self._channels)}"
            raise ConfigError(f"there is no channel {name!r:.120}{known}")
        message = make_test_message(os.urandom(12).hex(), self._config.project_name)
        chosen = {each: channel for each, channel in self._channels.items() if name in (None, each)}
        errors = await asyncio.gather(*(channel.send(message) for channel in chosen.values()))
        return dict(zip(chosen, errors, strict=True))
