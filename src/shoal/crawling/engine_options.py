"""How an engine takes part in a run, and what it needs of outputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct


class Drain(Protocol):
    """What the engine needs of a drainer. Its owner starts and finishes it."""

    def nudge(self) -> None:
        """There are new items."""

    async def run(self) -> None: ...

    async def start_over(self) -> None:
        """The store went back in time: continue from the cursor that it has now. ``run`` is not running."""
        ...


class EngineOptions(Struct, frozen=True, kw_only=True):
    """How an engine takes part in a run."""

    shared: bool = False
    """The frontier is on a server, and other processes use it too."""
    near: bool = False
    """That server is another process of this machine."""
    keep_items: bool = True
    """Keep the item log after all drainers have passed it."""
    stay: bool = False
    """Stay when the run is finished: it may get more requests."""
    may_work: Callable[[], bool] | None = None
    """Whether this process still holds its slot in a cluster, or its session as a worker. Checked before each page.
    None: it needs neither."""
    rejoin: Callable[[], Awaitable[None]] | None = None
    """Called when this process was fenced; then it starts over. None: a fence ends the work."""
