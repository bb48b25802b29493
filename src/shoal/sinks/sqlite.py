"""Items as rows of a SQLite database. See `shoal.sinks.tablesink`."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import TypeVar

from shoal.errors import SinkError
from shoal.item import as_text
from shoal.sinks.keys import KEY, REGISTRY, RUN, SEQ, SYSTEM_COLUMNS, TableOptions
from shoal.sinks.rejects import Reject
from shoal.sinks.storage import in_thread, storage_errors
from shoal.sinks.tables import Columns, Naming, Row, foreign_table
from shoal.sinks.tablesink import TableSink

T = TypeVar("T")

_BUSY_TIMEOUT = 5.0  # seconds to wait for another process's transaction
_NAMING = Naming(fold=str.lower, forbidden=re.compile("\0"))
_NATIVE_TYPES = frozenset({str, float, bytes, bool, type(None)})


class SQLiteSink(TableSink):
    """See the module. Columns have no type and are added as fields appear. Nested values are JSON text."""

    def __init__(self, path: str, options: TableOptions | None = None) -> None:
        self._path = os.path.realpath(path)
        super().__init__(self._path, options)
        self._database: sqlite3.Connection | None = None
        self._tables: dict[str, _Table] = {}

    # -- connection

    @property
    def _is_connected(self) -> bool:
        return self._database is not None

    async def _connect(self) -> None:
        await in_thread(self._connect_now)

    def _connect_now(self) -> None:
        with storage_errors(self._path):  # SQLite would only say "unable to open database file"
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666))
        # Transactions begin and end by explicit statements, so that new columns are part of them.
        self._database = sqlite3.connect(
            self._path, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        self._database.execute("SELECT 1 FROM sqlite_master").fetchone()  # fails if it is not a database

    async def _disconnect(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            self._tables.clear()
            async with self._errors():
                await in_thread(database.close)

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise SinkError(f"can't write {self._path}: {_explain(exc)}") from exc

    async def _transact(self, step: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``step`` in a thread, as one transaction."""
        return await in_thread(self._transact_now, step)

    def _transact_now(self, step: Callable[[sqlite3.Connection], T]) -> T:
        database = self._database
        assert database is not None, "not open"
        database.execute("BEGIN IMMEDIATE")
        try:
            result = step(database)
            database.execute("COMMIT")
        except BaseException:
            self._tables.clear()  # the rollback removes their new columns
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return result

    # -- tables

    async def _prepare_table(self, name: str) -> None:
        await self._transact(lambda database: self._table(database, name))

    def _table(self, database: sqlite3.Connection, name: str) -> _Table:
        if name not in self._tables:
            self._tables[name] = _Table(database, name, self._path, self._options)
        return self._tables[name]

    async def _write_tables(self, tables: Mapping[str, Sequence[Row]]) -> list[Reject]:
        return await self._transact(
            lambda database: [
                reject for name, rows in tables.items() for reject in self._table(database, name).write(rows)
            ]
        )

    async def _complete_tables(self) -> None:
        """Nothing to do: each field got its column when it was first written."""

    async def _registered(self) -> list[str]:
        return await self._transact(_registered)

    async def _remove_rows_after(self, name: str, seq: int) -> int:
        return await self._transact(lambda database: self._table(database, name).remove_rows_after(seq))


def _registered(database: sqlite3.Connection) -> list[str]:
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (REGISTRY,)).fetchone():
        return []
    found = database.execute(
        f"SELECT name FROM {REGISTRY} WHERE name IN (SELECT name FROM sqlite_master WHERE type = 'table')"
    )
    return [name for (name,) in found]


def _explain(exc: sqlite3.Error) -> str:
    text = str(exc)
    if "not a database" in text:
        return "it is not a SQLite database; choose another output"
    if "locked" in text:
        return f"another process locked it for more than {_BUSY_TIMEOUT:g} s; stop that one, or choose another output"
    if "disk is full" in text:
        return "the disk is full; free some space, then resume the run"
    if "readonly" in text:
        return "permission denied; change the permissions of the file and its folder, or choose another output"
    return text


class _Table:
    """One table of the database."""

    def __init__(self, database: sqlite3.Connection, name: str, path: str, options: TableOptions) -> None:
        """Create the table unless it exists. SinkError for one that no sink created."""
        self._database = database
        self._name, self._options = _quote(name), options
        found = database.execute(f"PRAGMA table_info({self._name})").fetchall()
        names = {column for _, column, *_ in found}
        has_key = any(column == KEY and is_key for _, column, *_, is_key in found)
        if found and not (has_key and names.issuperset(SYSTEM_COLUMNS)):
            raise foreign_table(path, name, "sqlite:///file.db?table=name")
        if not found:
            self._create(name)
        if options.table is None:
            database.execute(f"CREATE TABLE IF NOT EXISTS {REGISTRY} (name TEXT PRIMARY KEY NOT NULL)")
            database.execute(f"INSERT OR IGNORE INTO {REGISTRY} VALUES (?)", (name,))
        self._columns = Columns(_NAMING, dict.fromkeys(names | set(SYSTEM_COLUMNS)))

    def _create(self, name: str) -> None:
        self._database.execute(
            f"CREATE TABLE {self._name} ({KEY} TEXT PRIMARY KEY NOT NULL, {RUN} TEXT NOT NULL, {SEQ} INTEGER NOT NULL)"
        )
        self._database.execute(f"CREATE INDEX {_quote(f'{name}_run_seq')} ON {self._name} ({RUN}, {SEQ})")

    def remove_rows_after(self, seq: int) -> int:
        verb = f"UPDATE {self._name} SET {SEQ} = :seq" if self._options.key else f"DELETE FROM {self._name}"
        values = {"run": self._options.run, "seq": seq}
        return self._database.execute(f"{verb} WHERE {RUN} = :run AND {SEQ} > :seq", values).rowcount

    def write(self, rows: Sequence[Row]) -> Sequence[Reject]:
        """Write the rows in order, those with the same fields together. Return the items that need too many columns."""
        rejects: Sequence[Reject] = ()
        rows = list({row.key: row for row in rows}.values())  # the last row with a key wins
        if any(self._columns.column_for(field) not in self._columns for row in rows for field in row.data):
            rows, rejects = self._columns.fitting(rows, self._options.max_columns)
        for fields, alike in groupby(rows, lambda row: tuple(row.data)):
            self._write_alike(fields, list(alike))
        return rejects

    def _write_alike(self, fields: Sequence[str], rows: Sequence[Row]) -> None:
        run = self._options.run
        columns = [RUN, SEQ, *(_quote(self._ensure_column(field)) for field in fields)]
        if self._options.key:
            self._database.executemany(
                f"DELETE FROM {self._name} WHERE {KEY} = ? AND ({RUN} <> ? OR {SEQ} <= ?)",
                [(row.key, run, row.item.seq) for row in rows],
            )
            conflict = "NOTHING"
        else:
            conflict = "UPDATE SET " + ", ".join(f"{column} = excluded.{column}" for column in columns)
        self._database.executemany(
            f"INSERT INTO {self._name} ({', '.join([KEY, *columns])}) "
            f"VALUES ({', '.join('?' * (len(columns) + 1))}) ON CONFLICT ({KEY}) DO {conflict}",
            [[row.key, run, row.item.seq, *map(_cell, row.data.values())] for row in rows],
        )

    def _ensure_column(self, field: str) -> str:
        """The column of a field, added if it is missing. For SQLite ``Title`` and ``title`` are the same."""
        column = self._columns.column_for(field)
        if column not in self._columns:
            self._database.execute(f"ALTER TABLE {self._name} ADD COLUMN {_quote(column)}")
            self._columns.kinds[column] = None
        return column


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cell(value: object) -> object:
    if type(value) in _NATIVE_TYPES or (type(value) is int and value < 1 << 63):
        return value
    return as_text(value)
