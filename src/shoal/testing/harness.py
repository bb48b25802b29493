"""What the contract suite needs to know of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from shoal.ports import Frontier, FrontierOptions, Holder, Run, Store


class FakeClock:
    """A clock that goes on only when told to."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Harness(ABC):
    """One backend under test: opens stores, makes their time pass, lets their processes die."""

    durable: ClassVar[bool] = False
    """Whether a store outlives its process; then ``revive_store`` is needed."""

    keeps_leases: ClassVar[bool] = True
    """Whether leases and roles outlive the process that took them, until they run out. False where a store that is
    opened again knows that its only process is dead, and takes them back at once."""

    drift: ClassVar[float] = 0.0
    """How far the store's clock may go on by itself during one test, in seconds: 0 for a fake clock. Under 1."""

    store: Store
    """The store that ``open`` opened."""

    def __init__(self) -> None:
        self.frontiers: dict[str, Frontier] = {}
        """By run, those that are open."""
        self._options: dict[str, FrontierOptions] = {}
        self._is_open = False

    @abstractmethod
    async def open_store(self) -> Store:
        """A store with nothing in it."""

    @abstractmethod
    async def advance(self, seconds: float) -> None:
        """Make the store's clock go on: time in the suite is only ever made by this."""

    async def revive_store(self) -> Store:
        """The same store in a new process, after the old one was killed in the middle of its work."""
        raise NotImplementedError

    async def open(self, options: FrontierOptions | None = None) -> Frontier:
        """The frontier of a new run in a store of its own."""
        await self._close_store()
        self.store = await self.open_store()
        self._is_open = True
        return await self.open_run("run", options)

    async def open_run(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        """A frontier of a run on the store that is open: of a new run, or one more worker of an old one."""
        options = options or self._options.get(run_id) or FrontierOptions()
        if await self.store.get_run(run_id) is None:
            run = Run(run_id=run_id, spider="spider", state="running", created_at=len(self._options))
            await self.store.create_run(run)
        frontier = await self.store.frontier(run_id, options, holder)
        self._options[run_id] = options
        self.frontiers[run_id] = frontier
        return frontier

    async def reopen(self) -> Frontier:
        """The first run's frontier in a new process; the old one was killed. `open_run` opens the others."""
        self.frontiers.clear()
        self.store = await self.revive_store()
        return await self.open_run("run")

    async def close(self) -> None:
        """The test is over: leave nothing behind."""
        await self._close_store()

    async def _close_store(self) -> None:
        self.frontiers.clear()
        self._options.clear()
        if self._is_open:
            self._is_open = False
            await self.store.close()
