"""How a process takes part in a run: the input of a `RunLifecycle`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from shoal.config import Config
from shoal.crawling.engine_options import Drain
from shoal.crawling.scheduler import Scheduler
from shoal.crawling.seeder import Source
from shoal.ports import Fetcher, Frontier, FrontierOptions, Holder
from shoal.runs.recorder import RecordedProcess
from shoal.runs.worker_session import WorkerSession
from shoal.spider import Spider

if TYPE_CHECKING:
    from shoal.fetch.sessions.stored import SessionImport


class Output(Drain, Protocol):
    """An output of a run."""

    async def finish(self, *, finished: bool) -> None:
        """Write what the item log has, and close the output. ``finished``: the run is over."""
        ...

    def hurry(self) -> None:
        """Do not wait long for an output that is down: the process stops."""
        ...


class Plan(Struct, kw_only=True):
    """How one process takes part in a run."""

    spider: Spider
    config: Config
    options: FrontierOptions
    frontier: Frontier | None = None
    """Used instead of a new one."""
    open_outputs: Callable[[Frontier], Awaitable[Sequence[Output]]]
    make_scheduler: Callable[[Frontier], Scheduler]
    source: Source | None = None
    """Start requests. None: another process pushes them."""
    fetcher: Fetcher | None = None
    """Used instead of a new one. The caller closes it."""
    networks: Sequence[str] | None = None
    """See `make_fetcher`."""
    shared: bool = False
    """Other processes, or other crawls of this process, use the frontier too."""
    near: bool = False
    """Another process of this machine owns the frontier."""
    output_names: tuple[str, ...] = ()
    """For the summary."""
    resumes: bool = False
    """A paused run continues when this process begins. Otherwise the process waits until somebody resumes the run."""
    watches: bool = False
    """Poll the state of the run: another process may pause, resume or cancel it."""
    stays: bool = False
    """Stay when the run is finished: it may get more requests."""
    is_private: bool = False
    """The run ends with this process, so its outputs are complete when it ends, for whatever reason."""
    keep_items: bool = True
    grace: float | None = None
    """Seconds that pages in flight have after a stop. None: ``shutdown_grace``."""
    output_timeout: float | None = None
    """Seconds that outputs have after a stop. None: as long as they need."""
    output_silence: float | None = None
    """Without such a time: seconds after a stop in which one of the outputs must move on. None: it need not. Items that
    are not written stay in the log, which must survive the process."""
    holder: Holder | None = None
    """The slot in a cluster under which this process works."""
    may_work: Callable[[], bool] | None = None
    """See `EngineOptions`."""
    process: RecordedProcess | None = None
    """How its reports name this process. None: nothing is recorded."""
    session: WorkerSession | None = None
    """The session of this process as a worker. It has a holder of its own."""
    imported: SessionImport | None = None
    """Cookies to begin with, if those of the run are not stored."""
    on_begin: Callable[[], None] = lambda: None
    """Called when the outputs are open and the engine exists."""
    on_state: Callable[[str], None] = lambda state: None
    """Called when this process moved the run to another state."""
    on_unseeded: Callable[[], Awaitable[object]] | None = None
    """Called when seeding is incomplete and no process is seeding."""
