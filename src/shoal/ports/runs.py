"""Runs: one execution of a spider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

RunState: TypeAlias = Literal["queued", "running", "paused", "finished", "cancelled"]

_Moment: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970, as far as a calendar goes."""


class Run(Struct, frozen=True, kw_only=True):
    """One execution of a spider."""

    run_id: str
    spider: str
    state: RunState
    created_at: _Moment
    settings: Mapping[str, object] = {}
    project: str = "shoal"
    """``project_name`` of the configuration. Projects on one store share only the politeness to hosts."""
    ended_at: _Moment | None = None
    """When it was finished or cancelled."""
