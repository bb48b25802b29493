"""What a session is about, as it is kept with its run. Whoever reads it from a store checks it again."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct
from pydantic import ValidationError

from shoal.batch.options import BatchOptions
from shoal.batch.urls import GivenUrls
from shoal.errors import RunError
from shoal.ports import Run

_Short: TypeAlias = Annotated[str, Meta(max_length=300)]
_MOST_ATTEMPTS = 11  # the first, and as many retries as a caller may ask for


class Webhook(Struct, frozen=True, forbid_unknown_fields=True):
    """Who is told when a batch is done."""

    url: Annotated[str, Meta(max_length=65536)]
    secret: _Short


class SessionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is about; kept with its run."""

    urls: list[str]
    normal: list[str]
    """The normal form of each URL, or nothing where it was given in it: making them may take seconds."""
    wrong: dict[str, str] = {}
    """Why a URL is none, by its place."""
    options: dict[str, Any]
    caller: _Short
    """The name of its owner's token; nothing where there is one for all, or none."""
    address: _Short = ""
    """Where it came from."""
    distributed: bool
    networks: Annotated[tuple[_Short, ...], Meta(max_length=1000)] = ()
    """Private networks that the server which took it allows, whoever works on it."""
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    webhook: Webhook | None = None
    delay: Annotated[float, Meta(ge=0, le=1e9)]
    concurrency_per_host: Annotated[int, Meta(ge=1)]
    max_attempts: Annotated[int, Meta(ge=1, le=_MOST_ATTEMPTS)]

    @property
    def sharer(self) -> str:
        """With whom it shares what a caller may have: callers without a name are told apart by their addresses."""
        return self.caller or self.address

    def given(self) -> GivenUrls:
        """The URLs as they were read when the session began."""
        normal = [normal or url for url, normal in zip(self.urls, self.normal, strict=True)]
        return GivenUrls(self.urls, normal, {int(place): why for place, why in self.wrong.items()})


def read_settings(run: Run) -> tuple[SessionSettings, BatchOptions]:
    """RunError for settings that `shoal serve` could not have written: another version made them, or somebody else."""
    try:
        settings = msgspec.convert(dict(run.settings), SessionSettings)
        _check(settings)
        return settings, BatchOptions.model_validate(settings.options)
    except ValidationError as exc:
        which = ", ".join(".".join(map(str, error["loc"])) for error in exc.errors()[:5])  # not what: it may be secret
        raise RunError(f"session {run.run_id} has options that can't be read: {which}") from exc
    except (msgspec.ValidationError, ValueError) as exc:
        raise RunError(f"session {run.run_id} has settings that can't be read: {exc}") from exc


def _check(settings: SessionSettings) -> None:
    """ValueError for what a type can't say."""
    if len(settings.normal) != len(settings.urls):
        raise ValueError(f"{len(settings.normal)} normal forms for {len(settings.urls)} URLs")
    if not all(place.isdecimal() and int(place) < len(settings.urls) for place in settings.wrong):
        raise ValueError("reasons for URLs that are not there")
    for network in settings.networks:
        ip_network(network)
