"""The settings of a session, stored with its run. They are validated again when they are read."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from shoal.batch.options import BatchOptions
from shoal.batch.urls import UrlList
from shoal.errors import RunError
from shoal.ports import FrontierOptions, Run

_Short: TypeAlias = Annotated[str, Meta(max_length=300)]
_MAX_ATTEMPTS = 11  # the first, and the largest number of retries that a caller may request


class Webhook(Struct, frozen=True, forbid_unknown_fields=True):
    """Where to send a message when a batch ends, and the key that signs it."""

    url: Annotated[str, Meta(max_length=65536)]
    secret: _Short


class SessionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a process needs to work on a session."""

    urls: list[str]
    normalized: list[str] = msgspec.field(name="normal")
    """The normalized form of each URL; empty where it equals the URL. Stored because normalizing may take seconds."""
    invalid: dict[str, str] = msgspec.field(name="wrong", default_factory=dict)
    """Why a URL is invalid, by its position."""
    options: dict[str, object]
    caller: _Short
    """The name of the caller's token; empty for the main token, or without tokens."""
    address: _Short = ""
    """The caller's IP address."""
    distributed: bool
    networks: Annotated[tuple[_Short, ...], Meta(max_length=1000)] = ()
    """Private networks that the server allows (``serve.allow``). They hold for all processes that work on it."""
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    webhook: Webhook | None = None
    delay: Annotated[float, Meta(ge=0, le=1e9)]
    concurrency_per_host: Annotated[int, Meta(ge=1)]
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    max_attempts: Annotated[int, Meta(ge=1, le=_MAX_ATTEMPTS)]

    @property
    def owner(self) -> str:
        """Whose limits and shares the session counts against: the caller's name, or its address if it has none."""
        return self.caller or self.address

    @property
    def frontier_options(self) -> FrontierOptions:
        return FrontierOptions(
            max_attempts=self.max_attempts, delay=self.delay, concurrency_per_host=self.concurrency_per_host,
            weight=self.weight,
        )  # fmt: skip

    @classmethod
    def of(cls, run: Run) -> SessionSettings:
        """Read the settings of a run. RunError if another version of `shoal serve` wrote them and they are invalid."""
        try:
            settings = msgspec.convert(dict(run.settings), cls)
            _check(settings)
        except (msgspec.ValidationError, ValueError) as exc:
            raise RunError(f"session {run.run_id} has invalid settings: {exc}") from exc
        return settings

    def url_list(self) -> UrlList:
        normalized = [normal or url for url, normal in zip(self.urls, self.normalized, strict=True)]
        return UrlList(self.urls, normalized, {int(position): reason for position, reason in self.invalid.items()})


def read_settings(run: Run) -> tuple[SessionSettings, BatchOptions]:
    """Read the settings and options of a run. RunError as in `SessionSettings.of`."""
    settings = SessionSettings.of(run)
    try:
        return settings, BatchOptions.model_validate(settings.options)
    except ValidationError as exc:
        which = ", ".join(".".join(map(str, error["loc"])) for error in exc.errors()[:5])  # values may be secret
        raise RunError(f"session {run.run_id} has invalid options: {which}") from exc


def _check(settings: SessionSettings) -> None:
    """ValueError for errors that the types do not catch."""
    if len(settings.normalized) != len(settings.urls):
        raise ValueError(f"{len(settings.normalized)} normalized URLs for {len(settings.urls)} URLs")
    if not all(position.isdecimal() and int(position) < len(settings.urls) for position in settings.invalid):
        raise ValueError("invalid URLs at positions beyond the list")
    for network in settings.networks:
        ip_network(network)
