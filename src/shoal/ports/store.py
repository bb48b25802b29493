"""The frontier of a run, and the store that keeps runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from msgspec import Struct

from shoal.ports.documents import Documents, Run, RunState
from shoal.ports.hosts import Hosts, Workers
from shoal.ports.queue import FrontierOptions, Holder, Inspection, ItemLog, Queue, Rewind, Roles

_RESERVE = 256 << 20  # bytes


class Room(Struct, frozen=True):
    """How full a store is, in bytes. What other programs keep on the same server or disk counts too."""

    used: int
    total: int

    @property
    def usable(self) -> int:
        """Without a reserve for what must be stored even if the store is full: failures, and the ends of runs."""
        return self.total - min(self.total // 10, _RESERVE)

    @property
    def free(self) -> int:
        """Bytes that may still be used. Not above 0 if the store is full."""
        return self.usable - self.used


class ItemSource(Roles, ItemLog, Inspection, Protocol):
    """The parts of a frontier that outputs need."""


class RunView(Hosts, Workers, Inspection, Protocol):
    """The parts of a frontier that show a run."""


class Frontier(Queue, Roles, Workers, ItemLog, Hosts, Inspection, Protocol):
    """All URLs of one run. Many tasks and processes may call every method at the same time.

    Each call that changes something is one atomic step: after a crash it happened completely or not at all. Every call
    may raise FrontierError; then nothing was changed.

    A frontier on a server remembers the last completion that the server acknowledged. It presents this receipt with
    each ``lease``, ``complete``, ``fail``, ``release`` and ``push``. A server that does not know the completion was
    rewound: the call changes nothing and raises StoreRewoundError. So does every later call until ``recover``.
    """

    def hold(self, holder: Holder) -> None:
        """From now on, leases and roles belong to this holder: a worker that was fenced joins again. Only for a
        frontier that was opened with a holder."""
        ...

    async def recover(self) -> Rewind | None:
        """Continue after a StoreRewoundError. None if the store was not rewound.

        It records the rewind in the run, makes every host of the store wait one delay from now, and clears what this
        object remembers. The caller must first drop all it knows of the store: known links, cursors, leases. Clients
        that notice the same rewind record it once."""
        ...

    async def close(self) -> None: ...


class Store(Documents, Protocol):
    """Keeps runs, their frontiers and documents. Opened by a URL."""

    shared: ClassVar[bool]
    """Whether other processes may work on it at the same time."""

    async def create_run(self, run: Run) -> Run: ...

    async def transition(self, run_id: str, state: RunState, *, among: Sequence[RunState] | None = None) -> Run:
        """Move a run to another state. RunError if there is no such run, or the step is not allowed, or the run is in
        none of the states ``among``: a process that begins to work on a run must not undo what somebody did to it
        meanwhile. None: any state."""
        ...

    async def get_run(self, run_id: str) -> Run | None: ...

    async def run_state(self, run_id: str) -> RunState | None:
        """The state alone, for callers that poll: the settings of a run may be large."""
        ...

    async def run_states(self, spider: str, project: str | None = None) -> dict[str, RunState]:
        """The states of all runs of a spider, in one project or in all; oldest first."""
        ...

    async def list_runs(
        self,
        spider: str | None = None,
        project: str | None = None,
        *,
        states: Sequence[RunState] | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        """Runs of one spider or of all, in one project or in all, in some states or in all; newest first, and at most
        ``limit`` of them. When ``create_run`` has returned, all runs that are older than the new one are in the list,
        also those that were created at the same time."""
        ...

    async def delete_run(self, run_id: str) -> None:
        """Delete a run and everything that belongs to it. Hosts stay. RunError if there is no such run."""
        ...

    async def room(self) -> Room | None:
        """How full the store is. None if it does not know, and refused nothing for lack of room in the last seconds."""
        ...

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        """The frontier of a run. With ``holder``, its leases and roles belong to that slot: see ``Queue.fence``.

        ``options``: the caller takes part in the run, and these are the options of the run from now on, for everybody
        who has it open. The store keeps them; the last call decides. Without options, the caller looks at the run as it
        is, and changes none of them. A run in which nobody has taken part yet has the defaults."""
        ...

    async def close(self) -> None: ...
