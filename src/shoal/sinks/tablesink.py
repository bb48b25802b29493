"""The sink that writes items as rows of tables: what SQLite, PostgreSQL and MySQL have in common.

`TableSink` has the steps that do not depend on the database: open at a saved state, delete stale rows, write, flush,
close. Each database is a subclass. `shoal.sinks.tables` decides which table and column a value goes to,
`shoal.sinks.keys` which row.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from shoal.ports import LoggedItem
from shoal.sinks.keys import TableOptions, WriteProgress
from shoal.sinks.rejects import Reject, Rejects
from shoal.sinks.tables import Row, rows_by_table

log = logging.getLogger("shoal.sinks")


class TableSink(ABC):
    """Writes items as rows. Each write is one durable transaction, so a flush only has to return the position.

    A write that is repeated changes nothing: it replaces the rows with the same keys.
    """

    def __init__(self, name: str, options: TableOptions | None = None) -> None:
        """``name`` is the database as messages show it."""
        self._name = name
        self._options = options or TableOptions()
        self._progress = WriteProgress(name, self._options.key)
        self._rejects = Rejects(name, self._options.on_reject)

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        await self._disconnect()
        self._rejects.open()
        self._progress.open(state)
        async with self._errors():
            await self._connect()
            if self._options.table is not None:
                await self._prepare_table(self._options.table)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if not items:
            return
        tables, rejects = rows_by_table(items, self._options)
        async with self._errors():
            await self._remove_stale(self._progress.stale_after(items))
            rejects += await self._write_tables(tables)
        self._progress.wrote(items)
        self._rejects.add(rejects)

    async def flush(self) -> bytes:
        """Return the position. Every write was already durable."""
        self._rejects.flush()
        return self._progress.flush()

    async def close(self, *, finished: bool) -> None:
        if finished:
            self._rejects.finish()
        try:
            if finished and self._is_connected:
                async with self._errors():
                    await self._remove_stale(self._progress.stale_after())
                    await self._complete_tables()
        finally:
            await self._disconnect()

    async def _remove_stale(self, seq: int | None) -> None:
        """Remove the rows of this run after item ``seq``. The item log has their items, or, after a
        rewind, their pages are crawled again."""
        if seq is None:
            return
        for name in [self._options.table] if self._options.table else await self._registered():
            if count := await self._remove_rows_after(name, seq):
                log.debug("%s: removed %d rows after item %d, the last saved position", name, count, seq)

    # -- implemented for each database

    @property
    @abstractmethod
    def _is_connected(self) -> bool: ...

    @abstractmethod
    async def _connect(self) -> None: ...

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the connection, if there is one."""

    @abstractmethod
    def _errors(self) -> AbstractAsyncContextManager[None]:
        """Turn errors of the driver into a SinkError. Its ``__cause__`` is set if a retry can help."""

    @abstractmethod
    async def _prepare_table(self, name: str) -> None:
        """Create the table unless it exists. SinkError for one that no sink created."""

    @abstractmethod
    async def _write_tables(self, tables: Mapping[str, Sequence[Row]]) -> list[Reject]:
        """Write the rows of each table in one transaction. Return the items that do not fit."""

    @abstractmethod
    async def _registered(self) -> list[str]:
        """The tables that were created for types of items."""

    @abstractmethod
    async def _remove_rows_after(self, name: str, seq: int) -> int:
        """Delete the rows of this run after item ``seq``, and return how many there were.

        With a key chosen by the user, mark them as written at ``seq`` instead, so that a newer item replaces them. The
        rows that they once replaced are gone.
        """

    @abstractmethod
    async def _complete_tables(self) -> None:
        """Make the last changes when the run is finished."""
