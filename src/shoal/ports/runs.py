"""Runs: one execution of a spider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct

RunState: TypeAlias = Literal["queued", "running", "paused", "finished", "cancelled"]


class Run(Struct, frozen=True, kw_only=True):
    """One execution of a spider."""

    run_id: str
    spider: str
    state: RunState
    created_at: float
    settings: Mapping[str, object] = {}
    project: str = "shoal"
    """``project_name`` of the configuration. Projects on one store share only the politeness to hosts."""
    ended_at: float | None = None
    """When it was finished or cancelled."""
