"""A simulated server with a real store, and its clients. Calls cross a network that loses, delays and repeats them."""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import msgspec

from shoal.errors import StoreRewoundError
from shoal.frontier.local import wire
from shoal.frontier.local.store import OwnerConnection, SocketStore
from shoal.ports import Frontier, FrontierOptions, Holder, HostUpdate, Rewind, Run, Store
from shoal.testing.simulation.calls import NetworkCall
from shoal.testing.simulation.leases import JUDGED, LeaseJudge
from shoal.testing.simulation.loop import Process

if TYPE_CHECKING:
    from shoal.testing.simulation.backends import Backend
    from shoal.testing.simulation.world import World

TIMEOUT = 5.0
"""Seconds after which a client gives up a call."""
_READS = {
    *("stats", "roles", "audit", "rewinds", "find", "dead_kinds", "host_states", "host_state", "waits", "recall"),
    *("read_items", "workers", "lease_outcomes", "get_document", "list_documents", "get_run", "run_state"),
    *("run_states", "list_runs", "room"),
}
"""Calls that change nothing."""
_UNPROVEN = (_READS - {"read_items"}) | {"fence"}
"""Calls whose answers are no receipts for a client."""


class Receipt(NamedTuple):
    """How far the store had come when it answered a client."""

    generation: int
    """How often the store had gone back in time."""
    change: int


class ServerClock:
    """The clock of the server. It never jumps."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self) -> float:
        return self._world.epoch + self._world.loop.time()

    def __deepcopy__(self, memo: object) -> ServerClock:
        return self


class StoreJudge(ABC):
    """Judges calls to the store itself, in the order in which they took effect. A copy of it is backed up with the
    store."""

    methods: frozenset[str] = frozenset()
    """The calls that it judges."""

    @abstractmethod
    def note(self, call: Call, arguments: tuple[Any, ...], result: Any) -> None:
        """The server has executed a call."""

    @abstractmethod
    def after_rewind(self, before: Self) -> Self:
        """This judge, for a store that went back to it. ``before``: the judge until then."""


class SimulatedServer:
    """Serves one store. It may be away, it may be restarted, and it may go back in time."""

    def __init__(self, world: World, backend: Callable[[Callable[[], float]], Backend]) -> None:
        """``backend``: makes it, with the clock of the server."""
        self._world = world
        self.clock = ServerClock(world)
        self._backend = backend(self.clock)
        self._store: Store | None = None
        self._opening, self._turn = asyncio.Lock(), asyncio.Lock()
        self._frontiers: dict[bytes, Frontier] = {}
        self._processes = [Process(world.loop, "server")]
        """The last one is alive. What is left of the others is kept, so that no code of theirs runs."""
        self._restored: list[int] = []
        """For each time that the store went back: the changes that it kept."""
        self.restored_at: list[float] = []
        self._changes = 0
        self._backup: tuple[int, float, LeaseJudge, StoreJudge | None] | None = None
        self.is_away = False
        self.cut_off: set[Process] = set()
        """Processes whose calls do not arrive."""
        self.lost_since = 0.0
        """Until when the store knew everything, if it went back."""
        self.leases = LeaseJudge(world)
        self.judge: StoreJudge | None = None

    @property
    def survives(self) -> bool:
        """Whether the store survives `restart`."""
        return self._backend.survives

    async def store(self) -> Store:
        """The store as it is now."""
        async with self._opening:
            if self._store is None:
                self._store = await self._backend.open()
            return self._store

    async def run_of(self, run_id: str) -> Run | None:
        """A run as the store has it now."""
        return await (await self.store()).get_run(run_id)

    async def list_runs(self) -> list[Run]:
        """The runs as the store has them now."""
        return await (await self.store()).list_runs()

    # -- calls

    def receive(self, call: Call) -> None:
        """A call has arrived."""
        if not self.is_away and call.caller not in self.cut_off:
            self._processes[-1].start(self._execute(call))

    async def _execute(self, call: Call) -> None:
        if call.is_late and call.method in _REFUSED_LATE:
            return
        try:
            result = await self._answer(call)
        except Exception as exc:  # every error of a call is sent to its client
            call.fail(_decoded(wire.error_of(exc)))
        else:
            call.finish((result, Receipt(len(self._restored), self._changes)))

    def _knows(self, receipt: Receipt) -> bool:
        """Whether the store still has everything that a client with this receipt has seen."""
        return all(receipt.change <= kept for kept in self._restored[receipt.generation :])

    async def _answer(self, call: Call) -> bytes:
        """Execute a call. Returns its encoded result."""
        store, method, run = await self.store(), call.method, call.run
        if method == "recover":
            return wire.encode(await self._recover(store))
        if call.receipt is not None and not self._knows(call.receipt):
            raise StoreRewoundError("the store went back in time; nothing was changed. Call recover() first")
        if method not in _READS:
            self._changes += 1
        if not run:
            return wire.encode(await self._call_store(store, call))
        frontier = await self._frontier(store, run)
        if method == wire.DEAD:
            return wire.encode(wire.DeadPage(0, [history async for history in frontier.dead()]))
        if method not in JUDGED:
            return wire.encode(await wire.FRONTIER[method].call(frontier, call.arguments))
        async with self._turn:  # so that calls are judged in the order in which they took effect
            result = await wire.FRONTIER[method].call(frontier, call.arguments)
            self.leases.note(call, wire.FRONTIER[method].decode_arguments(call.arguments), result)
        return wire.encode(result)

    async def _call_store(self, store: Store, call: Call) -> Any:
        method, judge = wire.STORE[call.method], self.judge
        async with self._turn if call.method not in _READS else nullcontext():
            result = await method.call(store, call.arguments)
            arguments = method.decode_arguments(call.arguments)
            if judge is not None and call.method in judge.methods:
                judge.note(call, arguments, result)
            if call.method == "delete_run":
                for run in [run for run in self._frontiers if wire.decode_run_key(run).run_id == arguments[0]]:
                    del self._frontiers[run]
                self.leases.forget(arguments[0])
        return result

    async def _frontier(self, store: Store, run: bytes) -> Frontier:
        if run not in self._frontiers:
            key = wire.decode_run_key(run)
            self._frontiers[run] = await store.frontier(key.run_id, key.options, key.holder)
        return self._frontiers[run]

    async def _recover(self, store: Store) -> Rewind:
        """A client has noticed that the store went back. Nobody knows when the hosts were contacted last."""
        for run in await store.list_runs():
            frontier = await store.frontier(run.run_id)
            for state in await frontier.host_states(1000):
                await frontier.update_host(state.host, HostUpdate(block_for=state.delay))
        return Rewind(at=self.clock(), lost_seconds=max(0.0, self.clock() - self.lost_since))

    # -- faults

    def restart(self) -> None:
        """The process of the server is killed, and starts again. What it had not answered gets no answer."""
        self._processes[-1].kill()
        self._backend.crash()
        self._store, self._frontiers = None, {}
        self._opening, self._turn = asyncio.Lock(), asyncio.Lock()
        self._processes.append(Process(self._world.loop, "server"))

    def back_up(self) -> None:
        """Copy the store."""
        self._backend.back_up()
        self._backup = self._changes, self.clock(), copy.deepcopy(self.leases), copy.deepcopy(self.judge)

    def restore(self) -> bool:
        """Replace the store by its copy, as if it had been restored from a backup. False if there is none."""
        if self._backup is None:
            return False
        self.restart()
        self._backend.restore()
        kept, self.lost_since, leases, judge = self._backup
        self._backup, self.leases = None, leases.after_rewind(self.leases)
        if judge is not None and self.judge is not None:
            self.judge = judge.after_rewind(self.judge)
        self._changes += 1  # so that no later change has the number of one that is lost
        self._restored.append(kept)
        self.restored_at.append(self._world.loop.time())
        return True


_REFUSED_LATE = {"lease", "transition"}
"""Calls that a server ignores when their client has given them up. It executes other calls whenever they arrive."""


class Call(NetworkCall[tuple[bytes, Receipt]]):
    """A call to the store."""

    def __init__(self, world: World, method: str, run: bytes, arguments: msgspec.Raw, receipt: Receipt | None) -> None:
        super().__init__(world, TIMEOUT)
        self.method = method
        self.run = run
        self.arguments = arguments
        self.receipt = receipt


class SimulatedConnection(OwnerConnection):
    """A connection to the server: of a store, or of one frontier. As with real servers, a frontier notices that the
    store went back if the store lacks what it acknowledged to the frontier."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._receipt: Receipt | None = None
        self._is_rewound = False

    async def open(self) -> None:
        """Do nothing: each call is a message of its own."""

    async def close(self) -> None:
        """Do nothing."""

    async def call(self, method: str, run: bytes, arguments: msgspec.Raw) -> msgspec.Raw:
        if run and self._is_rewound and method != "recover":
            raise StoreRewoundError("the store went back in time; nothing was changed. Call recover() first")
        world = self._world
        call = Call(world, method, run, arguments, self._receipt if run else None)
        try:
            result, receipt = await call.send(lambda: world.server.receive(call))
        except StoreRewoundError:
            self._is_rewound = True
            raise
        self._is_rewound &= method != "recover"
        if run and method not in _UNPROVEN and (self._receipt is None or receipt > self._receipt):
            self._receipt = receipt
        return msgspec.Raw(result)


def _decoded(error: tuple[str, str]) -> Exception:
    try:
        wire.raise_error(error)
    except Exception as exc:  # it becomes the result of the call
        return exc
    raise AssertionError(error)


class SimulatedStore(SocketStore):
    """A client of the simulated server. As on a real server, each frontier remembers for itself what the store has
    acknowledged. Runs and documents need no such proof."""

    def __init__(self, world: World) -> None:
        super().__init__(SimulatedConnection(world))
        self._world = world

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        return await SocketStore.frontier(SocketStore(SimulatedConnection(self._world)), run_id, options, holder)


def open_store(world: World) -> Store:
    """A client of the simulated server, for the process that runs now."""
    return cast("Store", cast(Any, SimulatedStore(world)))
