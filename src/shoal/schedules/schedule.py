"""A schedule: what runs, when, and what happened so far."""

from __future__ import annotations

import re
import time
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.config import Config
from shoal.schedules.times import Times, make_times

OverlapPolicy: TypeAlias = Literal["skip", "wait", "cancel"]
"""What happens at a due time while an earlier run is active: skip this time, wait until that run has ended, or cancel
that run."""
MissedPolicy: TypeAlias = Literal["one", "all", "none"]
"""Which missed times are run later, after all servers were down: the latest one, all, or none."""
Origin: TypeAlias = Literal["file", "store"]

_DEFAULT_PROJECT = Config().project_name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class Definition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a user writes. `shoal.schedules.definitions` checks it."""

    spider: str
    """Its name in the registry."""
    arguments: dict[str, object] = {}
    settings: dict[str, object] = {}
    """By dotted key."""
    cron: str = ""
    every: str = ""
    """An interval. Either ``cron`` or ``every`` is set."""
    time_zone: str = "UTC"
    jitter: float = 0.0
    overlap: OverlapPolicy = "skip"
    missed: MissedPolicy = "one"
    keep: int | None = None
    """How many ended runs to keep. None: all."""

    @property
    def times(self) -> Times:
        """ConfigError if another program stored an invalid definition."""
        return make_times(*self.timing)

    @property
    def timing(self) -> tuple[str, str, str]:
        return self.cron, self.every, self.time_zone


class Schedule(Struct, frozen=True, kw_only=True):
    """A schedule as it is stored."""

    name: str
    project: str
    definition: Definition
    origin: Origin = "store"
    paused: bool = False
    last: float
    """All times up to this one have been decided: fired, skipped or missed."""
    waiting: float | None = None
    """A time whose run starts when the earlier one has ended."""
    run_id: str = ""
    """The newest run."""
    fired_at: float | None = None
    """The time of the newest run."""
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    missed_at: float | None = None
    """The last time that was missed."""
    error: str = ""
    """Why the last run could not start, or failed in a server."""
    source: str = ""
    """The machine and the shoal.toml that define it. Empty if no file does, or it is unknown."""
    orphaned_at: float | None = None
    """Since when no server that runs has it in its shoal.toml. It is kept, but starts no runs."""

    @property
    def run_prefix(self) -> str:
        """The prefix of the names of its runs. Names of runs are unique in a store, which several projects may
        share."""
        own = "" if self.project == _DEFAULT_PROJECT else f"{self.project}."
        return f"{own}{self.name}_"

    def run_id_at(self, due: float) -> str:
        """The name of the run for a due time. It is the same on every server."""
        fraction = round(due % 1 * 1000)
        text = time.strftime("%Y%m%dT%H%M%S", time.gmtime(due // 1))
        return f"{self.run_prefix}{text}{f'-{fraction:03d}' if fraction else ''}"

    @property
    def next_due(self) -> float | None:
        """The next time, without jitter. None while it is paused or orphaned."""
        return None if self.paused or self.orphaned_at is not None else self.definition.times.after(self.last)


def document_prefix(project: str) -> str:
    """The prefix of the keys of a project's schedules."""
    return f"schedule/{project}/"


def schedule_of_run(settings: object) -> str:
    """The schedule that created a run with these settings; empty if none did."""
    found = settings.get("schedule", "") if isinstance(settings, dict) else ""
    return found if isinstance(found, str) else ""


def describe_timing(definition: Definition) -> str:
    """``every 15m``, or ``30 2 * * * Europe/Berlin``, for people."""
    if definition.every:
        return f"every {definition.every}"
    return f"{definition.cron} {definition.time_zone}"
