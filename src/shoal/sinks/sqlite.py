"""Items as rows of a SQLite database. See `shoal.sinks.tablesink`.

Columns have no type and are added as fields appear. Nested values are JSON text.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from shoal.clients import errors
from shoal.clients.errors import Severity
from shoal.errors import SinkError
from shoal.item import as_text
from shoal.sinks.dialects import Connection, Dialect, Rows, TableColumn, Target, quoted, run_blocking
from shoal.sinks.keys import KEY, RUN, SEQ, TableOptions
from shoal.sinks.storage import in_thread, storage_errors
from shoal.sinks.tables import Batch, Change, Columns, Naming, Row
from shoal.sinks.tablesink import TableSink

T = TypeVar("T")

_BUSY_TIMEOUT = 5.0  # seconds to wait for another process's transaction
_NATIVE_TYPES = frozenset({str, float, bytes, bool, type(None)})
_CONFLICTS = ("no such table", "no such column", "has no column named", "duplicate column name", "already exists")


def sqlite_sink(path: str, options: TableOptions | None = None) -> TableSink:
    """The sink for a SQLite database."""
    path = os.path.realpath(path)
    return TableSink(path, SQLITE, lambda: SQLiteConnection(path), options)


def _string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


SQLITE = Dialect(
    naming=Naming(fold=str.lower, forbidden=re.compile("\0")),
    quote=quoted,
    string=_string,
    kinds={},
    create=(
        f"CREATE TABLE {{table}} ({KEY} TEXT PRIMARY KEY NOT NULL, {RUN} TEXT NOT NULL, {SEQ} INTEGER NOT NULL)",
        f"CREATE INDEX {{index}} ON {{table}} ({RUN}, {SEQ})",
    ),
    create_registry="CREATE TABLE {table} (name TEXT PRIMARY KEY NOT NULL)",
    create_outputs=(
        "CREATE TABLE {table} (run TEXT NOT NULL, output TEXT NOT NULL, log INTEGER NOT NULL, epoch INTEGER NOT NULL, "
        "seq INTEGER NOT NULL, rejected INTEGER NOT NULL, PRIMARY KEY (run, output, log))"
    ),
    for_update="",
    table_option="sqlite:///file.db?table=name",
    errors=(sqlite3.Error,),
    is_conflict=lambda exc: any(text in str(exc) for text in _CONFLICTS),
    is_retryable=lambda exc: errors.meaning(exc).severity is not Severity.FINAL,
)


class SQLiteConnection(Connection):
    """A connection to a file. It blocks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file."""

    @property
    def _connected(self) -> sqlite3.Connection:
        assert self._database is not None, "not open"
        return self._database

    async def open(self, *, creates: bool = True) -> None:
        await in_thread(self._open, creates)

    def _open(self, creates: bool) -> None:
        if not creates and not os.path.exists(self._path):
            self._database = sqlite3.connect(":memory:", check_same_thread=False)
            return
        with storage_errors(self._path):  # SQLite would only say "unable to open database file"
            if creates:
                self._create()
            before = _identity(self._path)
        # Transactions begin and end by explicit statements, so that new columns are part of them.
        self._database = sqlite3.connect(
            f"{Path(self._path).as_uri()}?mode=rw",  # a reader, too, has to undo the transaction of a dead process
            uri=True,
            timeout=_BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.execute("SELECT 1 FROM sqlite_master").fetchone()  # fails if it is not a database
        self._identity = before
        self._check_identity()

    def _create(self) -> None:
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:  # closing a second descriptor would end the locks that this process has on the file
            if os.path.isdir(self._path):
                raise IsADirectoryError(errno.EISDIR, "") from None
            if not os.access(self._path, os.R_OK | os.W_OK):
                raise PermissionError(errno.EACCES, "") from None

    def _check_identity(self) -> None:
        """SinkError if the path is no longer the file that is open. SQLite would go on writing to that one."""
        try:
            if self._identity is not None and _identity(self._path) != self._identity:
                raise FileNotFoundError(errno.ENOENT, "another file has its name")
        except OSError as exc:
            raise SinkError(f"{self._path} was removed or replaced: {exc.strerror}") from exc

    async def close(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            await in_thread(database.close)

    def discard(self) -> bool:
        return False

    def explain(self, exc: Exception) -> str:
        text = str(exc)
        if "not a database" in text:
            return "it is not a SQLite database; choose another output"
        if "locked" in text:
            return (
                f"another process locked it for more than {_BUSY_TIMEOUT:g} s; stop that one, or choose another output"
            )
        if "disk is full" in text:
            return "the disk is full; free some space, then resume the run"
        if "readonly" in text:
            return "permission denied; change the permissions of the file and its folder, or choose another output"
        return text

    async def run(self, steps: Coroutine[Any, Any, T]) -> T:
        return await in_thread(self._run, steps)

    def _run(self, steps: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_identity()
            return run_blocking(steps)
        except BaseException:
            steps.close()
            self._roll_back()
            raise

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this is a thread

    async def begin(self, tables: Sequence[str] = (), statement: str = "", longer: int = 1) -> int:
        """``IMMEDIATE`` locks the whole database."""
        self._connected.execute("BEGIN IMMEDIATE")
        return await self.execute(statement) if statement else 0

    async def rollback(self) -> None:
        self._roll_back()

    def _roll_back(self) -> None:
        if self._connected.in_transaction:
            self._connected.execute("ROLLBACK")

    async def execute(self, statement: str, longer: int = 1) -> int:
        return self._connected.execute(statement).rowcount

    async def fetch(self, statement: str, longer: int = 1) -> Rows:
        return self._connected.execute(statement).fetchall()

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        await self.begin()
        yield
        await self.commit()

    async def columns(self, table: str, *, locks: bool = False) -> Sequence[TableColumn] | None:
        described = await self.fetch(f"PRAGMA table_info({table})")
        return [TableColumn(name, type_, bool(is_key)) for _, name, type_, *_, is_key in described] or None

    def batch(self, rows: Iterable[Row]) -> Batch:
        return Batch(rows, is_typed=False)

    async def insert(self, target: Target, columns: Columns, batch: Batch) -> int:
        """Write the rows in order, those with the same fields together."""
        count = 0
        for fields, rows in groupby(batch.rows, lambda row: tuple(row.data)):
            count += await self._insert_alike(target, columns, fields, list(rows))
        return count

    async def _insert_alike(self, target: Target, columns: Columns, fields: Sequence[str], rows: list[Row]) -> int:
        names = [RUN, SEQ, *(quoted(columns.column_for(field)) for field in fields)]
        updates = "UPDATE SET " + ", ".join(f"{name} = excluded.{name}" for name in names)
        deleted = await self.execute(target.deletion(row.key for row in rows)) if target.replaced else 0
        inserted = self._connected.executemany(
            f"INSERT INTO {target.table} ({', '.join([KEY, *names])}) VALUES ({', '.join('?' * (len(names) + 1))}) "
            f"ON CONFLICT ({KEY}) DO {updates if target.replaces else 'NOTHING'}",
            [[row.key, target.run, row.item.seq, *map(_cell, row.data.values())] for row in rows],
        ).rowcount
        return inserted - deleted

    async def alter(self, table: str, changes: Sequence[Change]) -> None:
        for change in changes:
            await self.execute(f"ALTER TABLE {table} ADD COLUMN {quoted(change.column)}")


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _cell(value: object) -> object:
    if type(value) in _NATIVE_TYPES or (type(value) is int and value < 1 << 63):
        return value
    return as_text(value)
