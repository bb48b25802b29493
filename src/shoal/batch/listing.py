"""Lists sessions with their progress."""

from __future__ import annotations

from msgspec import Struct

from shoal.batch.session import progress_of
from shoal.batch.settings import SessionSettings
from shoal.batch.spider import BatchSpider
from shoal.errors import RunError
from shoal.ports import Run, Store

MAX_LISTED = 200
"""How many of the newest sessions of a store are searched."""


class SessionSummary(Struct, frozen=True, kw_only=True):
    """A session and its progress."""

    session_id: str
    state: str
    distributed: bool
    caller: str
    """The name of the caller's token; empty for the main token, or without tokens."""
    created_at: float
    ended_at: float | None
    urls: int
    first_url: str
    progress: dict[str, int]


async def list_sessions(store: Store, project: str, caller: str | None, limit: int) -> list[SessionSummary]:
    """The newest sessions of a caller, or of all callers with None."""
    found: list[SessionSummary] = []
    for run in await store.list_runs(BatchSpider.name, project, limit=MAX_LISTED):
        if len(found) == limit:
            break
        if caller is None or run.settings.get("caller") == caller:
            try:
                found.append(await _summary(store, run))
            except RunError:  # deleted in the meantime, or of another version
                continue
    return found


async def _summary(store: Store, run: Run) -> SessionSummary:
    settings = SessionSettings.of(run)
    stats = await (await store.frontier(run.run_id)).stats()
    return SessionSummary(
        session_id=run.run_id, state=run.state, distributed=settings.distributed, caller=settings.caller,
        created_at=run.created_at, ended_at=run.ended_at, urls=len(settings.urls),
        first_url=settings.urls[0] if settings.urls else "", progress=progress_of(stats, len(settings.invalid)),
    )  # fmt: skip
