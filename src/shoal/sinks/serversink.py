"""The table sink for a database server that several processes write to at once: PostgreSQL and MySQL.

Each write is one transaction. It first locks the tables against changes of their columns and reads these. If a column
is missing or too narrow, it rolls back, changes the table (one process at a time), and tries again. So any number of
processes can write to one table.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar, Generic, TypeVar

from shoal.errors import SinkError
from shoal.sinks.keys import TableOptions
from shoal.sinks.rejects import Reject
from shoal.sinks.tables import Batch, Change, Columns, DatabaseServer, Kind, Row
from shoal.sinks.tablesink import TableSink

C = TypeVar("C", bound=Columns)

REWRITE_FACTOR = 20
"""The factor for the timeout of a change of a column's type: the server rewrites the table."""
_MAX_ATTEMPTS = 20
"""How often a write is tried while other processes change or lock its tables."""
_MAX_PAUSE = 0.05


class ServerSink(TableSink, Generic[C]):
    """See the module. ``C`` describes the columns of a table."""

    _DRIVER_ERRORS: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, server: DatabaseServer, options: TableOptions | None = None) -> None:
        super().__init__(server.name, options)
        self._server = server
        self._ready: set[str] = set()
        """The tables that had all columns when they were last checked."""
        self._blank: dict[str, dict[str, None]] = {}
        """By table, the fields that never had a value. They get a column when the run is finished."""

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turn errors of the driver into a SinkError. Drop the connection after any error or cancellation, because its
        state is unknown."""
        try:
            yield
        except BaseException as exc:
            self._ready.clear()
            self._drop_connection()
            if not isinstance(exc, self._DRIVER_ERRORS):
                raise
            error = SinkError(f"can't write {self._name}: {self._explain(exc)}")
            raise error from (exc if self._is_retryable(exc) else None)

    # -- write

    async def _write_tables(self, tables: Mapping[str, Sequence[Row]]) -> list[Reject]:
        batches = {name: self._batch(rows) for name, rows in tables.items()}
        left = _MAX_ATTEMPTS
        while not await self._try_to_write(batches, is_last=left == 1):
            left -= 1
            await asyncio.sleep(random.uniform(0, _MAX_PAUSE))
        return [reject for batch in batches.values() for reject in batch.rejects]

    async def _try_to_write(self, batches: Mapping[str, Batch], *, is_last: bool) -> bool:
        """Return False if another process interfered and nothing was written. The last attempt raises instead."""
        try:
            for name, batch in batches.items():
                if name not in self._ready:
                    await self._prepare(name, batch)
            await self._begin_write(list(batches))
            for name, batch in batches.items():
                columns = await self._locked_columns(name)
                if columns is None or columns.changes(batch.kinds):
                    if is_last:
                        raise SinkError(
                            f"can't write {self._name}: other processes changed the table {name!r} during each of "
                            f"{_MAX_ATTEMPTS} attempts"
                        )
                    self._ready.discard(name)
                    await self._rollback()
                    return False
                await self._write_batch(name, columns, batch)
            await self._commit()
        except self._DRIVER_ERRORS as exc:
            if is_last or not self._is_conflict(exc):
                raise
            self._ready.clear()
            await self._rollback()
            return False
        return True

    def _note_blank(self, name: str, field: str) -> None:
        """Remember a field without a value in any row so far."""
        blank = self._blank.setdefault(name, {})
        if len(blank) < self._options.max_columns:
            blank[field] = None

    # -- tables

    async def _prepare_table(self, name: str) -> None:
        await self._prepare(name, Batch(()))

    async def _complete_tables(self) -> None:
        for name, fields in self._blank.items():
            await self._prepare(name, Batch(()), fields)

    async def _prepare(self, name: str, batch: Batch, blank: Iterable[str] = ()) -> None:
        """Create the table, and add or widen columns so that the fields of the batch fit."""
        limit = self._options.max_columns
        async with self._exclusive(name):
            columns = await self._columns(name)
            if columns is None:
                columns = await self._create(name)
            if self._options.table is None:
                await self._register(name)
            batch.fit(columns, limit)
            blank = list(blank)[: columns.room(limit)]
            for column in columns.maybe_exact(batch.kinds):
                if not await self._has_large_integers(name, column):
                    columns.kinds[column] = Kind.INT
            if changes := columns.changes(batch.kinds, blank):
                await self._alter(name, changes)
        self._ready.add(name)

    async def _poll_lock(self, name: str, take: str) -> None:
        """Poll for the lock of a table. A blocking wait could hang on a frozen server."""
        deadline = time.monotonic() + self._server.timeout * REWRITE_FACTOR
        while not await self._is_true(take):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process is still changing the table {name!r}")
            await asyncio.sleep(random.uniform(0.01, _MAX_PAUSE))

    # -- implemented for each database

    @abstractmethod
    async def _is_true(self, condition: str, longer: int = 1) -> bool:
        """Return whether a query's only value is true. It may take ``longer`` times the timeout."""

    @abstractmethod
    def _drop_connection(self) -> None:
        """Close the connection at once, without asking the server."""

    @abstractmethod
    def _explain(self, exc: Exception) -> str:
        """Why it failed, and what to do."""

    @abstractmethod
    def _is_retryable(self, exc: Exception) -> bool: ...

    @abstractmethod
    def _is_conflict(self, exc: Exception) -> bool:
        """Whether another process interfered: a deadlock, or a table that changed since it was checked."""

    @abstractmethod
    def _batch(self, rows: Sequence[Row]) -> Batch: ...

    @abstractmethod
    async def _begin_write(self, names: Sequence[str]) -> None:
        """Begin a transaction."""

    @abstractmethod
    async def _locked_columns(self, name: str) -> C | None:
        """The columns of a table. They do not change until the transaction ends. None if there is no such table."""

    @abstractmethod
    async def _write_batch(self, name: str, columns: C, batch: Batch) -> None: ...

    @abstractmethod
    async def _commit(self) -> None: ...

    @abstractmethod
    async def _rollback(self) -> None: ...

    @abstractmethod
    def _exclusive(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold the lock of a table: only one process at a time has it."""

    @abstractmethod
    async def _columns(self, name: str) -> C | None:
        """The columns of a table; None if there is no such table. SinkError for one that no sink created."""

    @abstractmethod
    async def _create(self, name: str) -> C: ...

    @abstractmethod
    async def _register(self, name: str) -> None:
        """Add the table to those that ``_registered`` returns."""

    @abstractmethod
    async def _has_large_integers(self, name: str, column: str) -> bool:
        """Whether the column has integers that a float does not hold exactly."""

    @abstractmethod
    async def _alter(self, name: str, changes: Sequence[Change]) -> None: ...
