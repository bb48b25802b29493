"""Notifications for servers and commands: the loop, the reported problems, the channels, a test message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.monitoring.problems import Limits
from shoal.notifications.channels import Channel, open_channels
from shoal.notifications.delivery import ChannelState, read_channel_states, read_reports
from shoal.notifications.messages import make_test_message
from shoal.notifications.reports import Report
from shoal.notifications.rules import limits_for
from shoal.notifications.settings import LoadedSettings, Rule, load_notifications
from shoal.notifications.watcher import Watcher
from shoal.ports import Documents, Store
from shoal.suggestions import did_you_mean


class ChannelInfo(Struct, frozen=True):
    """A channel of the settings, and how it does."""

    name: str
    type: str
    is_failing: bool
    state: ChannelState


class Notifications:
    """The notifications of one process. Without channels it does nothing."""

    def __init__(
        self, config: Config, loaded: LoadedSettings | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        """ConfigError if the settings are invalid, or a channel lacks a secret or a library."""
        loaded = load_notifications() if loaded is None else loaded
        self._config = config
        self._settings = loaded.settings
        self._channels: dict[str, Channel] = open_channels(loaded, config, environ)
        self._watcher: Watcher | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def channel_names(self) -> list[str]:
        return list(self._channels)

    def limits(self, run_id: str, spider: str) -> Limits:
        """From when on something is a problem of this run."""
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
        """What was reported: lasting problems first, then the newest."""
        found = await read_reports(documents, self._config.project_name)
        return sorted(found.values(), key=lambda report: (not report.is_open, -report.reported_at))

    async def channels(self, documents: Documents) -> list[ChannelInfo]:
        """All channels, with their state. It has no secrets."""
        states = await read_channel_states(documents, self._config.project_name, self._channels)
        limit = self._settings.failing_after
        return [
            ChannelInfo(name, str(table.__struct_config__.tag), states[name].failures >= limit, states[name])
            for name, table in self._settings.channels.items()
        ]

    async def test(self, name: str | None = None) -> dict[str, str]:
        """Send a test message through one channel or all of them. For each, why it was not delivered, or an empty
        string. ConfigError if there is no such channel."""
        if not self._channels:
            raise ConfigError("no channel is configured: add [notifications.channels.NAME] to shoal.toml")
        if name is not None and name not in self._channels:
            known = did_you_mean(name, self._channels) or f"; the channels are: {', '.join(self._channels)}"
            raise ConfigError(f"there is no channel {name!r:.120}{known}")
        message = make_test_message(os.urandom(12).hex(), self._config.project_name)
        chosen = {each: channel for each, channel in self._channels.items() if name in (None, each)}
        errors = await asyncio.gather(*(channel.send(message) for channel in chosen.values()))
        return dict(zip(chosen, errors, strict=True))
