"""The backends that the contract suite runs on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from shoal.frontier.memory import MemoryStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.ports import Store
from shoal.testing import FakeClock, Harness
from tests.contracts.local_harness import LocalMemoryHarness, LocalSQLiteHarness
from tests.contracts.postgres_harness import PostgresHarness
from tests.contracts.postgres_steps import schema_for
from tests.contracts.redis_harness import RedisHarness
from tests.support.databases import PostgresServer, shared


class MemoryHarness(Harness):
    """The frontier in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = FakeClock()

    async def open_store(self) -> Store:
        return MemoryStore(clock=self._clock)

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)


class SQLiteHarness(Harness):
    """The SQLite frontier: a file that one process uses."""

    durable = True
    keeps_leases = False

    def __init__(self) -> None:
        super().__init__()
        self._clock = FakeClock()
        self._folder = TemporaryDirectory(prefix="shoal-contract-")
        self._path = Path(self._folder.name, "0.db")

    async def open_store(self) -> Store:
        self._path = self._next_path()
        return await SQLiteStore.open(self._path, clock=self._clock)

    async def revive_store(self) -> Store:
        """Open a copy of the files, made while the store is open: the state after a kill."""
        old, self._path = self._path, self._next_path()
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{old}{suffix}", f"{self._path}{suffix}")
        await self.store.close()
        return await SQLiteStore.open(self._path, clock=self._clock)

    def _next_path(self) -> Path:
        return self._path.with_stem(str(int(self._path.stem) + 1))

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def close(self) -> None:
        await super().close()
        self._folder.cleanup()


BACKENDS: dict[str, Callable[[], Harness]] = {
    "memory": MemoryHarness,
    "sqlite": SQLiteHarness,
    "local-memory": LocalMemoryHarness,
    "local-sqlite": LocalSQLiteHarness,
    "redis": RedisHarness,
    "postgresql": PostgresHarness,
}


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS))
def harness(request: pytest.FixtureRequest) -> Harness:
    """One backend after the other."""
    made: Harness = request.param()
    return made


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a new schema on the shared PostgreSQL server."""
    return f"{shared(PostgresServer).url}?schema={schema_for(request)}"
