"""Frontiers that another process would own, for the contract suite: client and server share the test's event loop."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.frontier.local.server import FrontierServer
from shoal.frontier.local.store import SocketStore
from shoal.frontier.memory import MemoryStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.ports import Store
from shoal.testing import FakeClock, Harness


class _LocalHarness(Harness):
    """A server on a socket of its own for each store."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = FakeClock()
        self._folder = TemporaryDirectory(prefix="shoal-contract-")
        self._numbers = count(1)
        self._owned: Store
        self._server: FrontierServer | None = None

    @abstractmethod
    async def open_owned(self) -> Store:
        """Open an empty store in this process."""

    async def open_store(self) -> Store:
        await self._stop_server()
        self._owned = await self.open_owned()
        return await self._serve()

    async def _serve(self) -> Store:
        path = Path(self._folder.name, f"{next(self._numbers)}.sock")
        self._server = FrontierServer(self._owned, durable=self.durable)
        await self._server.start(path)
        return await SocketStore.open(f"local:{path}")

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
            await self._owned.close()

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def close(self) -> None:
        await super().close()
        await self._stop_server()
        self._folder.cleanup()


class LocalMemoryHarness(_LocalHarness):
    """The owner has the frontier in memory."""

    async def open_owned(self) -> Store:
        store = MemoryStore(clock=self._clock)
        store.item_space.limit = 5  # the other items are on disk
        return store


class LocalSQLiteHarness(_LocalHarness):
    """The owner has the frontier in a file. Its clients keep their leases when another process becomes the owner."""

    durable = True
    keeps_leases = True

    async def open_owned(self) -> Store:
        return await self._open_file()

    async def _open_file(self) -> SQLiteStore:
        self._path = Path(self._folder.name, f"{next(self._numbers)}.db")
        return await SQLiteStore.open(self._path, clock=self._clock, keeps=lambda *_: True)

    async def revive_store(self) -> Store:
        """Copy the files while the owner works: that is what the next owner sees after a kill."""
        copy = Path(self._folder.name, f"{next(self._numbers)}.db")
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{self._path}{suffix}", f"{copy}{suffix}")
        await self.store.close()
        await self._stop_server()
        self._path = copy
        self._owned = await SQLiteStore.open(copy, clock=self._clock, keeps=lambda *_: True)
        return await self._serve()
