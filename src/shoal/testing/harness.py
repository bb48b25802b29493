"""The adapter between the frontier contract and a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from shoal.ports import Frontier, FrontierOptions, Holder, Run, Store


class FakeClock:
    """A clock that stands still until a test advances it."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Harness(ABC):
    """One backend under test. It opens stores, advances their clocks, and simulates crashes."""

    durable: ClassVar[bool] = False
    """Whether a store survives its process. Then implement ``revive_store``."""

    keeps_leases: ClassVar[bool] = True
    """Whether leases and roles survive the process that took them, until they expire. False for a store that only one
    process uses: when it is opened again, that process is dead, and the store ends them at once."""

    drift: ClassVar[float] = 0.0
    """How many seconds the clock of the store may advance by itself during a test: 0 for a fake clock. Below 1."""

    store: Store
    """The store that ``open`` opened."""

    def __init__(self) -> None:
        self.frontiers: dict[str, Frontier] = {}
        """The frontiers that are open, by run."""
        self._options: dict[str, FrontierOptions] = {}
        self._is_open = False

    @abstractmethod
    async def open_store(self) -> Store:
        """Open an empty store."""

    @abstractmethod
    async def advance(self, seconds: float) -> None:
        """Advance the clock of the store. The suite never waits for real time."""

    async def revive_store(self) -> Store:
        """Open the same store as a new process does, after the old one was killed in the middle of its work."""
        raise NotImplementedError

    async def open(self, options: FrontierOptions | None = None) -> Frontier:
        """Open a new store, create a run in it, and return its frontier."""
        await self._close_store()
        self.store = await self.open_store()
        self._is_open = True
        return await self.open_run("run", options)

    async def open_run(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        """The frontier of a run on the open store, for one more worker. A new run is created."""
        options = options or self._options.get(run_id) or FrontierOptions()
        if await self.store.get_run(run_id) is None:
            run = Run(run_id=run_id, spider="spider", state="running", created_at=len(self._options))
            await self.store.create_run(run)
        frontier = await self.store.frontier(run_id, options, holder)
        self._options[run_id] = options
        self.frontiers[run_id] = frontier
        return frontier

    async def reopen(self) -> Frontier:
        """Kill the process, and return the frontier of the first run in a new one. `open_run` opens other runs."""
        self.frontiers.clear()
        self.store = await self.revive_store()
        return await self.open_run("run")

    async def close(self) -> None:
        """Clean up after the test."""
        await self._close_store()

    async def _close_store(self) -> None:
        self.frontiers.clear()
        self._options.clear()
        if self._is_open:
            self._is_open = False
            await self.store.close()
