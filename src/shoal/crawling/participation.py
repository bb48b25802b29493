"""How a process takes part in a run, as far as the engine needs to know, and what the engine needs of outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec import Struct

from shoal.config import Config
from shoal.errors import RequestError
from shoal.http import Request
from shoal.spider import Spider

if TYPE_CHECKING:
    from shoal.sinks.warc import WarcArchive

Source: TypeAlias = Callable[[], AsyncIterator[Request | RequestError]]
"""Yields the start requests, always the same ones in the same order. For an invalid URL it yields the error."""


class Drain(Protocol):
    """The parts of a drainer that the engine uses. Its owner starts and finishes it."""

    @property
    def role(self) -> str:
        """The role that it takes in the run. Empty: none."""
        ...

    def nudge(self) -> None:
        """Report new items."""

    async def run(self) -> None: ...

    async def start_over(self) -> None:
        """After the store went back in time, continue from the cursor that it has now. ``run`` is not running."""
        ...


class Participation(Struct, frozen=True, kw_only=True):
    """How an engine takes part in a run. A `Plan` is one: it also says how the process begins and ends its part."""

    spider: Spider
    config: Config
    source: Source | None = None
    """Start requests. None: another process pushes them."""
    run_id: str = ""
    """For reports why the engine has nothing to do. Empty: it makes none."""
    shared: bool = False
    """Other processes, or other crawls of this process, use the frontier too."""
    near: bool = False
    """Another process of this machine owns the frontier."""
    keep_items: bool = True
    """Keep the item log after all drainers have passed it."""
    stays: bool = False
    """Stay when the run is finished: it may get more requests."""
    may_work: Callable[[], bool] | None = None
    """Whether this process still holds its slot in a cluster, or its session as a worker. Checked before each page.
    None: it needs neither."""
    on_settled: Callable[[], Awaitable[None]] | None = None
    """Called after pages were stored: the run may have reached a limit."""
    archive: WarcArchive | None = None
    """Where the exchanges of pages are kept. None: nowhere."""
    rejoin: Callable[[], Awaitable[None]] | None = None
    """Called when this process was fenced; then it starts over. None: a fence ends the work."""
