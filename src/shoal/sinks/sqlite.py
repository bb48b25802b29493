"""Items as rows of a SQLite database: see `shoal.sinks.tables`."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from shoal.errors import SinkError
from shoal.item import as_text
from shoal.ports import LoggedItem
from shoal.sinks.keys import KEY, OWN, REGISTRY, RUN, SEQ, Progress, TableOptions
from shoal.sinks.rejects import Reject, Rejects
from shoal.sinks.storage import in_thread, storage_errors
from shoal.sinks.tables import Columns, Naming, Row, not_ours, rows_by_table

log = logging.getLogger("shoal.sinks")

_BUSY = 5.0  # seconds to wait for another process's transaction
_NAMING = Naming(fold=str.lower, forbidden=re.compile("\0"))
_AS_IT_IS = frozenset({str, float, bytes, bool, type(None)})


class SQLiteSink:
    """See the module. Columns have no type and are added as they appear; nested values are JSON text."""

    def __init__(self, path: str, options: TableOptions | None = None) -> None:
        self._path = os.path.realpath(path)
        self._options = options or TableOptions()
        self._progress = Progress(self._path, self._options.key)
        self._rejects = Rejects(self._path, self._options.on_reject)
        self._database: sqlite3.Connection | None = None
        self._tables: dict[str, _Table] = {}

    async def open(self, state: bytes) -> None:
        self._rejects.open()
        await in_thread(self._open, state)

    def _open(self, state: bytes) -> None:
        self._close()
        self._progress.open(state)
        with storage_errors(self._path):  # SQLite would only say "unable to open database file"
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666))
        with self._errors():
            # One transaction for each write is begun and ended by hand, so that new columns are part of it.
            self._database = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None, check_same_thread=False)
            self._database.execute("SELECT 1 FROM sqlite_master").fetchone()  # is it a database at all?
            if self._options.table is not None:
                with self._transaction() as database:
                    _Table(database, self._options.table, self._path, self._options)

    def _void(self, database: sqlite3.Connection, behind: int | None) -> None:
        """Rows of this run that come from pages which are crawled again."""
        if behind is None:
            return
        for name in [self._options.table] if self._options.table else _registered(database):
            _Table(database, name, self._path, self._options).void(behind)

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if items:
            self._rejects.add(await in_thread(self._write, items))

    def _write(self, items: Sequence[LoggedItem]) -> list[Reject]:
        tables, rejects = rows_by_table(items, self._options)
        with self._errors(), self._transaction() as database:
            self._void(database, self._progress.void_behind(items))
            for name, rows in tables.items():
                if name not in self._tables:
                    self._tables[name] = _Table(database, name, self._path, self._options)
                rejects += self._tables[name].write(rows)
        self._progress.wrote(items)
        return rejects

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = self._database
        assert database is not None, "not open"
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
            database.execute("COMMIT")
        except BaseException:
            self._tables.clear()  # their new columns are gone again
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    async def flush(self) -> bytes:
        """Every write was a durable transaction."""
        self._rejects.flush()
        return self._progress.flush()

    async def close(self, *, finished: bool) -> None:
        if finished:
            self._rejects.finish()
        await in_thread(self._finish if finished else self._close)

    def _finish(self) -> None:
        try:
            behind = self._progress.void_behind()
            if behind is not None and self._database is not None:
                with self._errors(), self._transaction() as database:
                    self._void(database, behind)
        finally:
            self._close()

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

    def __init__(self, database: sqlite3.Connection, name: str, path: str, options: TableOptions) -> None:
        """Makes the table if there is none. One that a sink did not make is left alone."""
        self._database = database
        self._name, self._options = _quote(name), options
        found = database.execute(f"PRAGMA table_info({self._name})").fetchall()
        names = {column for _, column, *_ in found}
        if found and not (names.issuperset(OWN) and any(column == KEY and main for _, column, *_, main in found)):
            raise not_ours(path, name, "sqlite:///file.db?table=name")
        if not found:
            self._create(name)
        if options.table is None:
            database.execute(f"CREATE TABLE IF NOT EXISTS {REGISTRY} (name TEXT PRIMARY KEY NOT NULL)")
            database.execute(f"INSERT OR IGNORE INTO {REGISTRY} VALUES (?)", (name,))
        self._columns = Columns(_NAMING, dict.fromkeys(names | set(OWN)))

    def _create(self, name: str) -> None:
        self._database.execute(
            f"CREATE TABLE {self._name} ({KEY} TEXT PRIMARY KEY NOT NULL, {RUN} TEXT NOT NULL, {SEQ} INTEGER NOT NULL)"
        )
        self._database.execute(f"CREATE INDEX {_quote(f'{name}_run_seq')} ON {self._name} ({RUN}, {SEQ})")

    def void(self, behind: int) -> None:
        """With a key of the user's, a row stays until a newer item replaces it: what it replaced is gone."""
        run = self._options.run
        if self._options.key:
            statement, values = f"UPDATE {self._name} SET {SEQ} = ?", (behind, run, behind)
            self._database.execute(f"{statement} WHERE {RUN} = ? AND {SEQ} > ?", values)
            return
        count = self._database.execute(f"DELETE FROM {self._name} WHERE {RUN} = ? AND {SEQ} > ?", (run, behind))
        if count.rowcount:
            log.info("%d rows of run %s deleted in %s: they are written again", count.rowcount, run, self._name)

    def write(self, rows: Sequence[Row]) -> Sequence[Reject]:
        """In order, rows with the same fields together. Returns the items that need too many columns."""
        rejects: Sequence[Reject] = ()
        rows = list({row.key: row for row in rows}.values())  # of those with one key, the last one counts
        if any(self._columns.home(field) not in self._columns for row in rows for field in row.data):
            rows, rejects = self._columns.fitting(rows, self._options.max_columns)
        for fields, alike in groupby(rows, lambda row: tuple(row.data)):
            self._write_alike(fields, list(alike))
        return rejects

    def _write_alike(self, fields: Sequence[str], rows: Sequence[Row]) -> None:
        run = self._options.run
        columns = [RUN, SEQ, *(_quote(self._home(field)) for field in fields)]
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

    def _home(self, field: str) -> str:
        """The column of a field. SQLite does not tell ``Title`` from ``title``."""
        home = self._columns.home(field)
        if home not in self._columns:
            self._database.execute(f"ALTER TABLE {self._name} ADD COLUMN {_quote(home)}")
            self._columns.kinds[home] = None
        return home


def _registered(database: sqlite3.Connection) -> list[str]:
    """The tables that were made for types of items."""
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (REGISTRY,)).fetchone():
        return []
    found = database.execute(
        f"SELECT name FROM {REGISTRY} WHERE name IN (SELECT name FROM sqlite_master WHERE type = 'table')"
    )
    return [name for (name,) in found]


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cell(value: Any) -> Any:
    if type(value) in _AS_IT_IS or (type(value) is int and value < 1 << 63):
        return value
    return as_text(value)
