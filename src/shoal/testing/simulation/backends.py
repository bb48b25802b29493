"""The stores that a simulated server can have.

To simulate a backend of your own, write a `Backend` whose store runs in the event loop, without sockets: its clock is
the one that it is given, and its threads are those of `shoal.system.threads`.
"""

from __future__ import annotations

import copy
import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from shoal.frontier.memory.store import MemoryStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.frontier.sqlite.file import SQLiteFile
from shoal.ports import Store


class Backend(ABC):
    """One store on a simulated server."""

    survives = True
    """Whether the store survives the process of the server."""

    @abstractmethod
    async def open(self) -> Store:
        """Open the store: for the first time, after `crash`, or after `restore`."""

    @abstractmethod
    def crash(self) -> None:
        """The process of the server is gone, at once."""

    @abstractmethod
    def back_up(self) -> None:
        """Copy the committed state of the store."""

    @abstractmethod
    def restore(self) -> None:
        """After `crash`: replace the state of the store by the copy."""


class MemoryBackend(Backend):
    """The store of one process."""

    survives = False

    def __init__(self, clock: Callable[[], float], folder: Path) -> None:
        self._store = MemoryStore(clock=clock)
        self._copy = self._store

    async def open(self) -> Store:
        return self._store

    def crash(self) -> None:
        """Only called before `restore`."""

    def back_up(self) -> None:
        self._copy = copy.deepcopy(self._store)

    def restore(self) -> None:
        self._store = self._copy


class SQLiteBackend(Backend):
    """A file. Clients on other machines keep their leases when the process of the server is restarted."""

    def __init__(self, clock: Callable[[], float], folder: Path) -> None:
        self._clock = clock
        self._path = folder / "store.db"
        self._file: SQLiteFile | None = None

    async def open(self) -> Store:
        self._file = SQLiteFile(self._path, readonly=False)
        return await SQLiteStore.on(self._file, self._clock, keeps=lambda store, run_id, holder: True)

    def crash(self) -> None:
        file, self._file = self._file, None
        if file is not None and file._lock is not None:
            file._closed = True  # the steps that were passed to its thread do not run
            file.db.close()
            file._drop_lock()

    def back_up(self) -> None:
        with closing(sqlite3.connect(self._path)) as source, closing(sqlite3.connect(self._copy)) as target:
            source.backup(target)

    def restore(self) -> None:
        for ending in ("-wal", "-shm"):
            self._path.with_name(self._path.name + ending).unlink(missing_ok=True)
        shutil.move(self._copy, self._path)

    @property
    def _copy(self) -> Path:
        return self._path.with_suffix(".copy")


BACKENDS: dict[str, Callable[[Callable[[], float], Path], Backend]] = {
    "memory": MemoryBackend,
    "sqlite": SQLiteBackend,
}
"""By name: a function of the server's clock and of an empty folder."""
