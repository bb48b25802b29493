"""A frontier file: used by one process at a time, in one thread, in transactions.

Each commit hands a write-ahead log to the operating system, so a killed process loses nothing. The log is forced to the
disk only at checkpoints. After a power cut the file is in the state of an earlier commit, at most about half a minute
old. The pages after it are fetched again.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

from shoal.clients import errors
from shoal.errors import FrontierError, ShoalError, StoreAwayError, StoreError
from shoal.frontier.sqlite import file_lock
from shoal.frontier.sqlite.file_lock import FileLock
from shoal.system import clock, threads

# Changes a frontier file of an older format into one of the format of ``schema.sql``.
#
# A table that lacks columns, or has other defaults, is made again from its rows. What a row of an older format does
# not have gets the default of the schema, or the value in `_FILLED`.


OLDEST = 5
"""The oldest format that can be upgraded. In earlier ones tokens were numbers that could repeat."""
_LATER_TABLES = frozenset({"stage", "document", "inventory"})
"""Tables that were added since then. All others must be there."""
_FILLED = {
    ("run", "project"): "'shoal'",
    ("event", "worker"): "''",
    ("item", "id"): "(run << 40) + seq",
    ("run", "cookies"): "1",
}
"""SQL for columns without a default, by table and column. Ids of items: see ``items.py``."""
STORED = (
    "SELECT run, 'role' AS kind, role AS name FROM role UNION ALL SELECT 0, 'document', key FROM document"
    " UNION ALL SELECT 0, 'host', name FROM host"
)
"""What the inventory lists."""
UNLISTED = f"SELECT * FROM ({STORED}) EXCEPT SELECT run, kind, name FROM inventory"
"""What the inventory lacks: in a file of an older format, everything."""


def missing_table(db: sqlite3.Connection, schema: str) -> str | None:
    """A table that a file of any format since the oldest one has, and this one does not."""
    with closing(_fresh(schema)) as fresh:
        return min(_tables(fresh).keys() - _tables(db).keys() - _LATER_TABLES, default=None)


def upgrade(db: sqlite3.Connection, schema: str) -> None:
    """Upgrade the tables in one transaction: all of it is done, or nothing."""
    with closing(_fresh(schema)) as fresh:
        db.execute("BEGIN IMMEDIATE")
        try:
            before = _tables(db)
            for table, statement in _tables(fresh).items():
                if table not in before:
                    db.execute(statement)
                elif _columns(db, table) != _columns(fresh, table):
                    _remake(db, table, statement, list(_columns(fresh, table)))
            existing = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            others = fresh.execute("SELECT name, sql FROM sqlite_master WHERE type <> 'table' AND sql IS NOT NULL")
            for name, statement in others.fetchall():
                if name not in existing:
                    db.execute(statement)
            db.execute(f"INSERT OR IGNORE INTO inventory {UNLISTED}")
            (version,) = fresh.execute("PRAGMA user_version").fetchone()
            db.execute(f"PRAGMA user_version = {version}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _fresh(schema: str) -> sqlite3.Connection:
    """An empty database in memory with the current tables."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(schema)
    return db


def _tables(db: sqlite3.Connection) -> dict[str, str]:
    """The statements that create the tables, by name."""
    return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())


def _columns(db: sqlite3.Connection, table: str) -> dict[str, tuple[str, int, str | None, int]]:
    """Type, NOT NULL, default, and place in the key of each column."""
    described = db.execute(f"PRAGMA table_info({table})").fetchall()
    return {name: (kind, not_null, default, key) for _, name, kind, not_null, default, key in described}


def _remake(db: sqlite3.Connection, table: str, statement: str, columns: list[str]) -> None:
    """Make a table again, with the values of the columns that it had before."""
    before = _columns(db, table)
    values = {name: name for name in columns if name in before}
    values |= {name: _FILLED[table, name] for name in columns if name not in before and (table, name) in _FILLED}
    db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    db.execute(statement)
    db.execute(f"INSERT INTO {table} ({', '.join(values)}) SELECT {', '.join(values.values())} FROM old_{table}")
    db.execute(f"DROP TABLE old_{table}")


T = TypeVar("T")
StoredRow: TypeAlias = tuple[Any, ...]
"""A row of a table, as SQLite returns it."""

APPLICATION_ID = 0x53686F6C
VERSION = 14
_MAGIC = b"SQLite format 3\0"
_PRAGMAS = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA wal_autocheckpoint = 4000;
PRAGMA journal_size_limit = 67108864;
PRAGMA secure_delete = OFF;
"""
_BUSY_SECONDS = 10.0
_SECONDS_BETWEEN_CHECKS = 1.0
"""How often it is checked that the file still has its name."""


class SQLiteFile:
    """A connection in its own thread. Steps that are passed to ``read`` and ``write`` run there, one at a time.

    Only such steps may use ``db``. After a change was rolled back, ``restore`` is called there before the next step: it
    reloads from the file what the process keeps in memory.
    """

    def __init__(self, path: str | os.PathLike[str], *, readonly: bool) -> None:
        self.path = file_lock.name_in_use(path)
        self.readonly = readonly
        self.restore: Callable[[], None] = lambda: None
        self.db: sqlite3.Connection
        self._lock: FileLock | None = None
        self._check_at = 0.0
        self._stale = False
        self._closed = True
        self._on_commit: list[Callable[[], None]] = []
        self._thread = threads.StepThread("shoal-sqlite")

    async def open(self) -> None:
        """Open the file, or create it. StoreBusyError while another process works on it, StoreError if it cannot be
        used."""
        try:
            await self._thread.run(self._open)
        except BaseException:
            # If the caller was cancelled, the file is opened anyway.
            self._thread.stop(self._close)
            raise

    def _open(self) -> None:
        if not os.path.isdir(os.path.dirname(self.path)):
            raise StoreError(
                f"cannot open {self.path}: there is no folder {os.path.dirname(self.path)}; create it first"
            )
        try:
            self._check_header()
            recorded = file_lock.recorded_name(self.path)
            self._lock = None if self.readonly else FileLock(self.path)
        except OSError as exc:
            raise StoreError(f"cannot open {self.path}: {exc.strerror}") from exc
        try:
            file_lock.check_log(self.path, recorded)
            self._connect()
        except BaseException as exc:
            self._drop_lock()
            if isinstance(exc, sqlite3.Error):
                error = self._explain(exc)
                raise (error if isinstance(error, StoreAwayError) else StoreError(str(error))) from exc
            raise
        self._closed = False

    def _check_header(self) -> None:
        """Check the first bytes, so that SQLite does not even open a file of another program."""
        if file_lock.is_open_here(self.path):
            return
        try:
            with open(self.path, "rb") as file:
                header = file.read(100)
        except FileNotFoundError:
            if self.readonly:
                raise StoreError(f"there is no file {self.path}") from None
            return
        if header and not header.startswith(_MAGIC):
            raise StoreError(f"{self.path} is not a database; name another file")
        if header:
            self._check_format(int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))
        elif self.readonly:
            raise StoreError(f"{self.path} is empty: nothing has run with it yet")

    def _check_format(self, application: int, version: int) -> None:
        if application != APPLICATION_ID:
            raise StoreError(f"{self.path} is a database of another program; name another file")
        if version < OLDEST:
            raise StoreError(
                f"{self.path} was written by an older Shoal (format {version}), and this one reads formats from "
                f"{OLDEST} on. Finish its runs with that version, and export their items; meanwhile name another file "
                "for new runs"
            )
        if version > VERSION:
            raise StoreError(
                f"{self.path} was written by a newer Shoal (format {version}, this one knows {VERSION}); upgrade"
            )

    def _connect(self) -> None:
        mode = "ro" if self.readonly else "rwc"
        uri = f"file:{quote(self.path)}?mode={mode}"
        self.db = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, cached_statements=256)
        try:
            self.db.executescript("PRAGMA cache_size = -16000; PRAGMA temp_store = MEMORY;")
            schema = files("shoal.frontier.sqlite").joinpath("schema.sql").read_text("utf-8")
            if not self.readonly and self.db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                # Before the write-ahead log is on, so that the first page of the file itself has its format.
                self.db.executescript(f"BEGIN IMMEDIATE;\n{schema}\nCOMMIT;")
            (application,), (version,) = (
                self.db.execute(f"PRAGMA {mark}").fetchone() for mark in ("application_id", "user_version")
            )
            self._check_format(application, version)
            if missing := missing_table(self.db, schema):
                raise StoreError(f"{self.path} is damaged: it has no table {missing}; name another file")
            if self.readonly and version < VERSION:
                self._copy()
            if version < VERSION:
                upgrade(self.db, schema)
            if not self.readonly:
                self.db.executescript(_PRAGMAS)
                # Its name is written into the file itself, not only into its log.
                record = file_lock.NAME_KEY, file_lock.name_record(self.path)
                self.db.execute("INSERT OR REPLACE INTO note VALUES (?, ?, 1e18)", record)
                self.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except BaseException:
            self.db.close()
            raise

    def _copy(self) -> None:
        """Read a temporary copy: a reader does not change the format of a file that an older version may still use."""
        with closing(self.db) as file:
            self.db = sqlite3.connect("", isolation_level=None)
            file.backup(self.db)

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- transactions

    async def read(self, step: Callable[[], T]) -> T:
        """Run ``step`` on one state of the file."""
        return await self._run(partial(self._transact, "BEGIN", step))

    async def write(self, step: Callable[[], T]) -> T:
        """Run ``step`` as one transaction: all of it is kept, or nothing if it or the disk fails.

        A ``step`` that raises a ShoalError must not have changed anything yet, neither in the file nor in memory.
        """
        if self.readonly:
            raise StoreError(f"{self.path} was opened readonly; it cannot be changed")
        return await self._run(partial(self._transact, "BEGIN IMMEDIATE", step))

    async def _run(self, job: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.path} is closed")
        return await self._thread.run(job)

    def _transact(self, begin: str, step: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.path} is closed")
        try:
            self._begin(begin)
            try:
                result = step()
                self.db.execute("COMMIT")
                for callback in self._on_commit:
                    callback()
            except BaseException as exc:
                self._stale = not isinstance(exc, ShoalError) or isinstance(exc, StoreError)
                with suppress(sqlite3.Error):
                    self._roll_back()
                raise
        except sqlite3.Error as exc:
            raise self._explain(exc) from exc
        finally:
            self._on_commit.clear()
        return result

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after this step is committed. It is not called if the step is rolled back."""
        self._on_commit.append(callback)

    def _begin(self, begin: str) -> None:
        if self._lock is not None and clock.monotonic() > self._check_at:
            self._lock.check()
            self._check_at = clock.monotonic() + _SECONDS_BETWEEN_CHECKS
        self._roll_back()
        if self._stale:
            self.restore()
            self._stale = False
        self.db.execute(begin)

    def _roll_back(self) -> None:
        if self.db.in_transaction:  # after some errors SQLite has done it itself
            self.db.execute("ROLLBACK")

    def _explain(self, exc: sqlite3.Error) -> FrontierError:
        """The ShoalError for an error of SQLite. Its text says what failed, and what to do."""
        meaning = errors.meaning(exc)
        if getattr(exc, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self.damaged(str(exc))
        reason = f"{meaning.advice} ({exc})" if meaning.advice else f"{exc}; nothing was changed"
        return meaning.error(f"{self.path}: {reason}")

    def damaged(self, what: str) -> StoreError:
        """The error for a file that has unexpected content."""
        return StoreError(
            f"{self.path} is damaged ({what}); rescue it with `sqlite3 FILE .recover`, or name another file"
        )

    async def close(self) -> None:
        """Finish the steps that were passed before, write the log into the file, and release the lock."""
        if not self._closed:
            await self._run(self._close)
            self._thread.stop()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self.readonly:
                with suppress(sqlite3.Error):  # nothing is lost: the next process reads the log
                    self.db.execute("DELETE FROM note WHERE key = ?", (file_lock.NAME_KEY,))
                    self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.db.close()
        finally:
            self._drop_lock()
