"""How a process takes part in a run: the input of a `RunLifecycle`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from shoal.crawling.engine import Drain, Participation
from shoal.crawling.run_queue import RunQueue
from shoal.ports import Fetcher, Frontier, FrontierOptions, Holder
from shoal.runs.recorder import RecordedProcess
from shoal.runs.worker_session import WorkerSession

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

    async def abandon(self) -> None:
        """Leave the output as it is to other processes, unless it is finished."""
        ...


class Plan(Participation, frozen=True, kw_only=True):
    """How one process takes part in a run."""

    options: FrontierOptions
    frontier: Frontier | None = None
    """Used instead of a new one."""
    open_outputs: Callable[[Frontier], Awaitable[Sequence[Output]]]
    make_queue: Callable[[Frontier], RunQueue] | None = None
    """None: `shoal.crawling.run_queue.make_run_queue` does it."""
    fetcher: Fetcher | None = None
    """Used instead of a new one. The caller closes it."""
    networks: Sequence[str] | None = None
    """See `make_fetcher`."""
    output_names: tuple[str, ...] = ()
    """For the summary."""
    resumes: bool = False
    """A paused run continues when this process begins. Otherwise the process waits until somebody resumes the run."""
    watches: bool = False
    """Poll the state of the run: another process may pause, resume or cancel it."""
    is_private: bool = False
    """The run ends with this process, so its outputs are complete when it ends, for whatever reason."""
    grace: float | None = None
    """Seconds that pages in flight have after a stop. None: ``shutdown_grace``."""
    output_timeout: float | None = None
    """Seconds that outputs have after a stop. None: as long as they need."""
    output_silence: float | None = None
    """Without such a time: seconds after a stop in which one of the outputs must move on. None: it need not. Items that
    are not written stay in the log, which must survive the process."""
    holder: Holder | None = None
    """The slot in a cluster under which this process works."""
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
