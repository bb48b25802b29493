"""Items as rows of a SQLite database: see `shoal.sinks.tables`."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from shoal.errors import SinkError
from shoal.item import as_text
from shoal.ports import LoggedItem
from shoal.sinks.storage import in_thread, storage_errors
from shoal.sinks.tables import KEY, Columns, Naming, Row, not_ours, rows_by_table

_BUSY = 5.0  # seconds to wait for another process's transaction
_NAMING = Naming(fold=str.lower)
_AS_IT_IS = frozenset({str, float, bytes, bool, type(None)})


class SQLiteSink:
    """See the module. Columns have no type and are added as they appear; nested values are JSON text."""

    def __init__(self, path: str, table: str | None = None, *, run_id: str = "") -> None:
        self._path = os.path.realpath(path)
        self._table = table
        self._prefix = f"{run_id}-" if run_id else ""
        self._database: sqlite3.Connection | None = None
        self._tables: dict[str, _Table] = {}

    async def open(self, state: bytes) -> None:
        await in_thread(self._open)

    def _open(self) -> None:
        self._close()
        with storage_errors(self._path):  # SQLite would only say "unable to open database file"
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666))
        with self._errors():
            # One transaction for each write is begun and ended by hand, so that new columns are part of it.
            self._database = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
            self._database.execute("SELECT 1 FROM sqlite_master").fetchone()  # is it a database at all?
        if self._table is not None:
            with self._errors():
                _Table(self._database, self._table, self._path)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if items:
            await in_thread(self._write, items)

    def _write(self, items: Sequence[LoggedItem]) -> None:
        database = self._database
        assert database is not None, "write before open"
        with self._errors():
            database.execute("BEGIN IMMEDIATE")
            try:
                for name, rows in rows_by_table(items, self._table, self._prefix).items():
                    if name not in self._tables:
                        self._tables[name] = _Table(database, name, self._path)
                    self._tables[name].upsert(rows)
                database.execute("COMMIT")
            except BaseException:
                self._tables.clear()  # their new columns are gone again
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise

    async def flush(self) -> bytes:
        """Every write was a durable transaction."""
        return b""

    async def close(self, *, finished: bool) -> None:
        await in_thread(self._close)

    def _close(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            self._tables.clear()
            with self._errors():
                database.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise SinkError(f"can't write {self._path}: {_advice(exc)}") from exc


def _advice(exc: sqlite3.Error) -> str:
    text = str(exc)
    if "not a database" in text:
        return "it is not a SQLite database; choose another output"
    if "locked" in text:
        return "another process keeps it locked; close that one, or choose another output"
    if "disk is full" in text:
        return "the disk is full; free some space, then go on"
    if "readonly" in text:
        return "no permission; change its permissions and those of its folder, or choose another place"
    return text


class _Table:
    """One table of the database."""

    def __init__(self, database: sqlite3.Connection, name: str, path: str) -> None:
        """Makes the table if there is none. One that a sink did not make is left alone."""
        self._database = database
        self._name = _quote(name)
        found = database.execute(f"PRAGMA table_info({self._name})").fetchall()
        if found and not any(column == KEY and primary for _, column, *_, primary in found):
            raise not_ours(path, name, "sqlite:///file.db?table=name")
        if not found:
            database.execute(f"CREATE TABLE {self._name} ({_quote(KEY)} TEXT PRIMARY KEY NOT NULL)")
        self._columns = Columns(_NAMING, {column: None for _, column, *_ in found})

    def upsert(self, rows: Sequence[Row]) -> None:
        """In order, rows with the same fields together."""
        for fields, alike in groupby(rows, lambda row: tuple(row.data)):
            cells = [[row.key, *map(_cell, row.data.values())] for row in alike]
            columns = [_quote(self._home(field)) for field in fields]
            updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
            self._database.executemany(
                f"INSERT INTO {self._name} ({', '.join([_quote(KEY), *columns])}) "
                f"VALUES ({', '.join('?' * (len(columns) + 1))}) "
                f"ON CONFLICT ({_quote(KEY)}) DO {f'UPDATE SET {updates}' if updates else 'NOTHING'}",
                cells,
            )

    def _home(self, field: str) -> str:
        """The column of a field. SQLite does not tell ``Title`` from ``title``."""
        home = self._columns.home(field)
        if home not in self._columns:
            self._database.execute(f"ALTER TABLE {self._name} ADD COLUMN {_quote(home)}")
            self._columns.kinds[home] = None
        return home


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cell(value: Any) -> Any:
    if type(value) in _AS_IT_IS or (type(value) is int and value < 1 << 63):
        return value
    return as_text(value)
