"""The ``[notifications]`` table of ``shoal.toml``: channels, rules, and how often.

::

    [notifications.channels.ops]
    type = "webhook"
    url = "https://ops.example/shoal"
    key_env = "OPS_WEBHOOK_KEY"          # a secret is in the environment or in a file

    [notifications.rules.nightly]
    spider = "books"
    events = ["failed", "stalled", "few_items"]
    channels = ["ops"]
    stalled_after = 300
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from shoal.config import Seconds, Text, Timeout, find_config_file, read_toml
from shoal.errors import ConfigError
from shoal.messages import did_you_mean
from shoal.operations.problem import ProblemKind, ProblemLimits

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Pages: TypeAlias = Annotated[int, Meta(ge=1)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Address: TypeAlias = Annotated[str, Meta(min_length=3, max_length=320, pattern=r"^[^\s@<>,;]+@[^\s@<>,;]+\Z")]

_SECRETS = ("url", "key", "password", "token", "secret")
"""Keys of a channel that hold a secret. Each is read from KEY_env or KEY_file."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class WebhookChannel(_Table, tag_field="type", tag="webhook", frozen=True, kw_only=True):
    """A signed POST to a URL."""

    url: Text | None = None  # may be in the file if it has neither a password nor a query
    url_env: Text | None = None
    url_file: Text | None = None
    key_env: Text | None = None
    key_file: Text | None = None
    allow: tuple[str, ...] = ()  # private networks that the URL may lead to, in addition to serve.allow
    timeout: Timeout = 10.0


class SmtpChannel(_Table, tag_field="type", tag="smtp", frozen=True, kw_only=True):
    """Mail through an SMTP server."""

    host: Text
    port: Port | None = None  # none: 587 with STARTTLS, 465 with TLS, 25 without
    security: Literal["starttls", "tls", "none"] = "starttls"
    username: Text | None = None
    password_env: Text | None = None
    password_file: Text | None = None
    sender: Address = msgspec.field(name="from")
    to: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=50)]
    ca_file: Text | None = None  # certificates that are trusted, instead of the system's
    timeout: Timeout = 15.0


class SlackChannel(_Table, tag_field="type", tag="slack", frozen=True, kw_only=True):
    """An incoming webhook of Slack."""

    url_env: Text | None = None
    url_file: Text | None = None
    timeout: Timeout = 15.0


class TelegramChannel(_Table, tag_field="type", tag="telegram", frozen=True, kw_only=True):
    """A bot of Telegram."""

    token_env: Text | None = None
    token_file: Text | None = None
    chat: Annotated[str, Meta(pattern=r"^(-?[0-9]{1,20}|@[A-Za-z0-9_]{3,40})\Z")]
    timeout: Timeout = 15.0


class AppriseChannel(_Table, tag_field="type", tag="apprise", frozen=True, kw_only=True):
    """A service that apprise knows, by its URL."""

    url_env: Text | None = None
    url_file: Text | None = None
    timeout: Timeout = 15.0


ChannelTable: TypeAlias = WebhookChannel | SmtpChannel | SlackChannel | TelegramChannel | AppriseChannel


_TYPES: dict[str, type[msgspec.Struct]] = {
    "webhook": WebhookChannel, "smtp": SmtpChannel, "slack": SlackChannel, "telegram": TelegramChannel,
    "apprise": AppriseChannel,
}  # fmt: skip


class Rule(_Table, frozen=True, kw_only=True):
    """Which problems are sent through which channels, and the limits beyond which something is a problem."""

    events: tuple[ProblemKind, ...] | None = None  # none: all but finished
    spider: Text | None = None  # none: all
    run: Text | None = None  # none: all
    channels: tuple[Text, ...] = ()  # empty: all
    stalled_after: Timeout | None = None
    failure_rate: Share | None = None
    failure_pages: Pages | None = None
    callback_errors: Pages | None = None
    host_failing_after: Timeout | None = None
    host_failing_attempts: Pages | None = None
    login_after: Timeout | None = None
    no_worker_after: Timeout | None = None
    stuck_after: Timeout | None = None
    item_drop: Share | None = None
    coverage_drop: Share | None = None
    output_lag: Pages | None = None
    output_missing_after: Timeout | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits that this rule sets."""
        limits = {name: getattr(self, name) for name in ProblemLimits.__struct_fields__ if hasattr(self, name)}
        return {name: value for name, value in limits.items() if value is not None}


class NotificationSettings(_Table, frozen=True, kw_only=True):
    """All of ``[notifications]``."""

    check_every: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0  # seconds between two checks
    min_interval: Seconds = 900.0  # between two messages on a problem that changes or returns
    retry_after: Timeout = 30.0  # before a failed channel is tried again; doubles up to 15 minutes
    failing_after: Pages = 3  # failures in a row after which a channel is reported through the others
    channels: dict[str, ChannelTable] = {}
    rules: dict[str, Rule] = {}


class LoadedSettings(msgspec.Struct, frozen=True):
    """The settings, and the folder that file names in them are relative to."""

    settings: NotificationSettings
    source: str
    folder: Path


def load_notifications(file: Path | None = None) -> LoadedSettings:
    """Read the settings from this file, or from the ``shoal.toml`` in use. ConfigError says what is wrong in it, and
    never shows a value that may be a secret."""
    file = file or find_config_file(os.environ)
    if file is None:
        return LoadedSettings(NotificationSettings(), "", Path())
    table = read_toml(file).get("notifications", {})
    if not isinstance(table, dict):
        raise ConfigError(f'{file}: "notifications" must be a table, such as [notifications.channels.ops]')
    for kind in ("channels", "rules"):
        if not isinstance(table.get(kind, {}), dict):
            raise ConfigError(f'{file}: "notifications.{kind}" must be a table, such as [notifications.{kind}.NAME]')
    channels = {name: _channel(str(file), name, channel) for name, channel in table.get("channels", {}).items()}
    rules = {name: _rule(str(file), name, rule, channels) for name, rule in table.get("rules", {}).items()}
    plain = {name: value for name, value in table.items() if name not in ("channels", "rules")}
    try:
        settings = msgspec.convert(plain, NotificationSettings, strict=True)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{file}: [notifications]: {exc}{_near(exc, NotificationSettings)}") from None
    return LoadedSettings(msgspec.structs.replace(settings, channels=channels, rules=rules), str(file), file.parent)


def _channel(file: str, name: str, values: object) -> ChannelTable:
    where = f"{file}: [notifications.channels.{name}]"
    _check_name(where, name)
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a table")
    for key in _SECRETS:
        if key in values and not (key == "url" and values.get("type") == "webhook" and _is_plain(values[key])):
            raise ConfigError(
                f'{where}: "{key}" is a secret and must not be in this file. Put it into an environment variable and '
                f'write {key}_env = "VARIABLE", or into a file that only you can read and write {key}_file = "PATH"'
            )
    if "type" not in values:
        raise ConfigError(f'{where}: "type" is missing; it is one of {", ".join(_TYPES)}')
    try:
        table: ChannelTable = msgspec.convert(values, ChannelTable)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: {exc}{_near(exc, _TYPES.get(str(values['type']), AppriseChannel))}") from None
    return table


def _is_plain(url: object) -> bool:
    """Whether a URL has no place for a secret, except its path."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
    except ValueError:
        return False
    return parts is not None and not (parts.username or parts.password or parts.query)


def _rule(file: str, name: str, values: object, channels: Mapping[str, ChannelTable]) -> Rule:
    where = f"{file}: [notifications.rules.{name}]"
    _check_name(where, name)
    try:
        rule = msgspec.convert(values, Rule)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{where}: {exc}{_near(exc, Rule)}") from None
    for channel in rule.channels:
        if channel not in channels:
            hint = did_you_mean(channel, list(channels)) or f"; its channels are: {', '.join(channels) or 'none'}"
            raise ConfigError(f"{where}: there is no channel {channel!r}{hint}")
    return rule


def _check_name(where: str, name: str) -> None:
    if not 0 < len(name) <= 100 or not name.isprintable() or "/" in name:
        raise ConfigError(f"{where}: a name has 1 to 100 printable characters and no slash")


def _near(exc: msgspec.ValidationError, table: type[msgspec.Struct]) -> str:
    """The nearest key for an unknown one, or the events for an unknown event."""
    text = str(exc)
    if "unknown field `" in text:
        return did_you_mean(text.split("`")[1], table.__struct_encode_fields__)
    if "$.events" in text:
        return f"; events are: {', '.join(get_args(ProblemKind))}"
    return ""


# Secrets of channels: from the environment or a file, never from ``shoal.toml``.


_MIN_PART = 6
"""The shortest part of a secret that is hidden in messages, in characters. A shorter one may be a word of the
message."""
_MAX_BYTES = 16 * 1024


class Secret:
    """A text that no ``repr``, log line or message shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__


def read_secret(
    where: str, name: str, variable: str | None, file: str | None, environ: Mapping[str, str], folder: Path
) -> Secret | None:
    """The secret ``name`` of a channel. None if neither a variable nor a file is named. ConfigError if it is missing
    there. ``folder``: where a relative file name begins."""
    if variable is not None and file is not None:
        raise ConfigError(f"{where}: {name}_env and {name}_file contradict each other; set one of them")
    if variable is not None:
        if variable.startswith("SHOAL_"):
            raise ConfigError(
                f'{where}: {name}_env = "{variable}": variables that begin with SHOAL_ are settings; use another name'
            )
        text = environ.get(variable, "").strip()
        if not text:
            raise ConfigError(f"{where}: the environment variable {variable} ({name}_env) is not set")
    elif file is not None:
        text = _read_file(where, name, folder / file)
    else:
        return None
    if not text.isprintable():
        raise ConfigError(f"{where}: the secret {name} must be one line of printable characters")
    return Secret(text)


def _read_file(where: str, name: str, file: Path) -> str:
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES).decode().strip()
    except OSError as exc:
        raise ConfigError(f"{where}: cannot read {file} ({name}_file): {exc.strerror}") from exc
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {file} ({name}_file) is not UTF-8 text") from None
    if not text:
        raise ConfigError(f"{where}: {file} ({name}_file) is empty")
    return text


def without_secrets(text: str, secrets: Iterable[Secret]) -> str:
    """The text with ``***`` for each secret, and for each part of a secret that is a URL."""
    parts = {part for secret in secrets for part in _parts(secret.reveal())}
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, "***")
    return text


def _parts(secret: str) -> list[str]:
    parts = [secret] if secret else []
    if "://" in secret:
        # The host is no secret: an error without it helps nobody.
        rest = secret.partition("://")[2]
        user, mark, after = rest.rpartition("@")
        path = after.partition("/")[2]
        parts += [part for part in re.split(r"[/:@?&=#]", f"{user}/{path}" if mark else path) if len(part) >= _MIN_PART]
    return parts
