"""Channels: each sends one message, and says why it could not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.notifications.channels.apprise_service import AppriseService
from shoal.notifications.channels.mail import Mail
from shoal.notifications.channels.signed_webhook import SignedWebhook
from shoal.notifications.messages import Message
from shoal.notifications.secret import Secret, read_secret
from shoal.notifications.settings import (
    AppriseChannel,
    ChannelTable,
    LoadedSettings,
    SlackChannel,
    SmtpChannel,
    TelegramChannel,
    WebhookChannel,
)


class Channel(Protocol):
    """A way to reach people."""

    async def send(self, message: Message) -> str:
        """Send a message once. Returns why it was not delivered, without secrets; an empty string if it was. It takes
        bounded time."""
        ...

    async def close(self) -> None: ...


def open_channels(
    loaded: LoadedSettings, config: Config, environ: Mapping[str, str] | None = None
) -> dict[str, Channel]:
    """All channels of the settings. ConfigError if one of them lacks a secret or a library. Nothing is contacted."""
    opener = _Opener(loaded, config, os.environ if environ is None else environ)
    return {name: opener.open(name, table) for name, table in loaded.settings.channels.items()}


class _Opener:
    def __init__(self, loaded: LoadedSettings, config: Config, environ: Mapping[str, str]) -> None:
        self._source = loaded.source
        self._folder: Path = loaded.folder
        self._config = config
        self._environ = environ

    def open(self, name: str, table: ChannelTable) -> Channel:
        where = f"{self._source}: [notifications.channels.{name}]"
        match table:
            case WebhookChannel():
                networks: Sequence[str] = (*self._config.serve.allow, *table.allow)
                url = Secret(table.url) if table.url is not None else self._secret(where, "url", table)
                return SignedWebhook(self._config, url, self._secret(where, "key", table), networks, table.timeout)
            case SmtpChannel():
                password = None if table.username is None else self._secret(where, "password", table)
                if table.username is None and (table.password_env or table.password_file):
                    raise ConfigError(f"{where}: the password has no username")
                return Mail(where, table, password, self._folder)
            case SlackChannel() | AppriseChannel():
                return AppriseService(where, self._secret(where, "url", table), table.timeout)
            case TelegramChannel():
                token = self._secret(where, "token", table)
                url = Secret(f"tgram://{token.reveal()}/{table.chat}/")
                return AppriseService(where, url, table.timeout, hidden=[token])

    def _secret(self, where: str, name: str, table: ChannelTable) -> Secret:
        variable, file = getattr(table, f"{name}_env"), getattr(table, f"{name}_file")
        found = read_secret(where, name, variable, file, self._environ, self._folder)
        if found is None:
            raise ConfigError(f'{where}: set {name}_env = "VARIABLE" or {name}_file = "PATH"')
        return found
