"""A simulated server with a real store in memory, and its clients. Calls cross a network that loses and delays them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from shoal.errors import StoreAwayError, StoreRewoundError
from shoal.frontier.local import wire
from shoal.frontier.local.store import OwnerConnection, SocketStore
from shoal.frontier.memory.store import MemoryStore
from shoal.ports import Frontier, HostUpdate, Rewind, Store
from shoal.system import clock

if TYPE_CHECKING:
    from shoal.testing.simulation.world import World

TIMEOUT = 5.0
"""Seconds after which a client gives up a call."""
_READS = {
    *("stats", "roles", "audit", "rewinds", "find", "dead_kinds", "host_states", "host_state", "waits", "recall"),
    *("read_items", "workers", "lease_outcomes", "get_document", "list_documents", "get_run", "run_state"),
    *("run_states", "list_runs", "room"),
}
"""Calls that change nothing."""


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
        return 1_700_000_000.0 + self._world.loop.time()

    def __deepcopy__(self, memo: object) -> ServerClock:
        return self


class SimulatedServer:
    """Serves one store, a call at a time. It may be away, and it may go back in time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clock = ServerClock(world)
        self._store = MemoryStore(clock=self._clock)
        self._frontiers: dict[bytes, Frontier] = {}
        self._restored: list[int] = []
        """For each time that the store went back: the changes that it kept."""
        self.restored_at: list[float] = []
        self._changes = 0
        self._backup: tuple[MemoryStore, int, float] | None = None
        self.is_away = False
        self.ignores_late_calls = True
        self.lost_since = 0.0
        """Until when the store knew everything, if it went back."""

    @property
    def store(self) -> MemoryStore:
        """The store as it is now, for judges."""
        return self._store

    # -- calls

    @property
    def receipt(self) -> Receipt:
        """What a client gets that has an answer now."""
        return Receipt(len(self._restored), self._changes)

    def knows(self, receipt: Receipt) -> bool:
        """Whether the store still has everything that a client with this receipt has seen."""
        return all(receipt.change <= kept for kept in self._restored[receipt.generation :])

    async def answer(self, method: str, run: bytes, arguments: msgspec.Raw, receipt: Receipt | None) -> bytes:
        """Execute a call. Returns its encoded result."""
        if method == "recover":
            return wire.encode(await self._recover())
        if receipt is not None and not self.knows(receipt):
            raise StoreRewoundError("the store went back in time; nothing was changed. Call recover() first")
        if method not in _READS:
            self._changes += 1
        if not run:
            return wire.encode(await wire.STORE[method].call(self._store, arguments))
        if method == wire.DEAD:
            frontier = await self._frontier(run)
            return wire.encode(wire.DeadPage(0, [history async for history in frontier.dead()]))
        return wire.encode(await wire.FRONTIER[method].call(await self._frontier(run), arguments))

    async def _frontier(self, run: bytes) -> Frontier:
        if run not in self._frontiers:
            key = wire.decode_run_key(run)
            self._frontiers[run] = await self._store.frontier(key.run_id, key.options, key.holder)
        return self._frontiers[run]

    async def _recover(self) -> Rewind:
        """A client has noticed that the store went back. Nobody knows when the hosts were contacted last."""
        for run_id in self._store.frontiers:
            frontier = await self._store.frontier(run_id)
            for state in await frontier.host_states(1000):
                await frontier.update_host(state.host, HostUpdate(block_for=state.delay))
        return Rewind(at=self._clock(), lost_seconds=max(0.0, self._clock() - self.lost_since))

    # -- time travel

    def back_up(self) -> None:
        """Copy the store."""
        self._backup = copy.deepcopy(self._store), self._changes, self._clock()

    def restore(self) -> bool:
        """Replace the store by its copy, as if it had been restored from a backup. False if there is none."""
        if self._backup is None:
            return False
        self._store, self._changes, self.lost_since = self._backup
        self._backup, self._frontiers = None, {}
        self._restored.append(self._changes)
        self.restored_at.append(self._world.loop.time())
        return True


class SimulatedConnection(OwnerConnection):
    """The connection of one process to the server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._receipt: Receipt | None = None
        self._is_rewound = False

    async def open(self) -> None:
        """Do nothing: each call is a message of its own."""

    async def close(self) -> None:
        """Do nothing."""

    async def call(self, method: str, run: bytes, arguments: msgspec.Raw) -> msgspec.Raw:
        if self._is_rewound and method != "recover":
            raise StoreRewoundError("the store went back in time; nothing was changed. Call recover() first")
        loop, network = self._world.loop, self._world.network
        answered: asyncio.Future[bytes] = loop.create_future()
        timer = loop.call_later(TIMEOUT, _give_up, answered)
        server, receipt, not_after = self._world.server, self._receipt, clock.now() + TIMEOUT

        def reply(finish: Callable[[], None]) -> None:
            if not network.loses():
                loop.call_later(network.delay(), finish, context=self._world.context_of(caller))

        async def execute() -> None:
            if server.is_away or (clock.now() > not_after and server.ignores_late_calls):
                return
            try:
                result = await server.answer(method, run, arguments, receipt)
            except Exception as exc:  # every error of a call is sent to its client
                error = wire.error_of(exc)
                reply(lambda: _fail(answered, error))
            else:
                after = server.receipt
                reply(lambda: self._finish(answered, result, after))

        caller = self._world.current
        if not network.loses() and not server.is_away:
            loop.call_later(network.delay(), lambda: self._world.machine.start(execute()), context=self._world.context)
        try:
            result = msgspec.Raw(await answered)
            self._is_rewound &= method != "recover"
            return result
        except StoreRewoundError:
            self._is_rewound = True
            raise
        finally:
            timer.cancel()

    def _finish(self, answered: asyncio.Future[bytes], result: bytes, receipt: Receipt) -> None:
        if not answered.done():
            answered.set_result(result)
            if self._receipt is None or receipt > self._receipt:
                self._receipt = receipt


def _give_up(answered: asyncio.Future[bytes]) -> None:
    if not answered.done():
        answered.set_exception(StoreAwayError(f"the simulated server did not answer in {TIMEOUT:g} s"))


def _fail(answered: asyncio.Future[bytes], error: tuple[str, str]) -> None:
    if not answered.done():
        try:
            wire.raise_error(error)
        except Exception as exc:  # it becomes the result of the call
            answered.set_exception(exc)


def open_store(world: World) -> Store:
    """A client of the simulated server, for the process that runs now."""
    return cast(Store, SocketStore(SimulatedConnection(world)))
