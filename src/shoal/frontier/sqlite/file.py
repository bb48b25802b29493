"""A frontier file: opened by one process at a time, used in one thread, changed in whole transactions.

Each commit hands a write-ahead log to the operating system, so nothing is lost when the process is killed. It is forced
to the disk at checkpoints only: when the machine loses power, the file is as it was after some earlier commit, whole,
up to half a minute back (what the system had not written by itself). Those pages are fetched again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import TypeVar
from urllib.parse import quote

from shoal.errors import FrontierError, ShoalError, StoreBusyError, StoreError

T = TypeVar("T")

APPLICATION_ID = 0x53686F6C
VERSION = 5
_MAGIC = b"SQLite format 3\0"
_TABLES = frozenset({"run", "host", "lane", "request", "seen", "seen_slice", "item", "event", "role", "fence", "note"})
_PRAGMAS = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA wal_autocheckpoint = 4000;
PRAGMA journal_size_limit = 67108864;
PRAGMA secure_delete = OFF;
"""
_BUSY_SECONDS = 10.0


class SQLiteFile:
    """A connection in a thread of its own. Whatever is passed to ``read`` and ``write`` runs there, one at a time.

    ``db`` is for that code alone. ``restore`` is called there after a change was rolled back, before anything else:
    it makes what the process keeps of the file's content anew from it.
    """

    def __init__(self, path: str | os.PathLike[str], *, readonly: bool) -> None:
        self.path = os.path.realpath(path)
        self.readonly = readonly
        self.restore: Callable[[], None] = lambda: None
        self.db: sqlite3.Connection
        self._lock: int | None = None
        self._stale = False
        self._closed = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-sqlite")

    async def open(self) -> None:
        """StoreBusyError while another process works on the file, StoreError if it is not for us."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except BaseException:
            self._thread.submit(self._close)  # if nobody waits for it any more, it is opened all the same
            self._thread.shutdown(wait=False)
            raise

    def _open(self) -> None:
        if not os.path.isdir(os.path.dirname(self.path)):
            raise StoreError(f"can't open {self.path}: there is no folder {os.path.dirname(self.path)}; make it first")
        try:
            self._check_header()
            self._lock = None if self.readonly else self._take_lock()
        except OSError as exc:
            raise StoreError(f"can't open {self.path}: {exc.strerror}") from exc
        try:
            self._connect()
        except BaseException as exc:
            self._drop_lock()
            if isinstance(exc, sqlite3.Error):
                raise self._explained(exc) from exc
            raise
        self._closed = False

    def _check_header(self) -> None:
        """Look at the first bytes, so that a file of another program is not even opened by SQLite."""
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
            self._check_kind(int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))
        elif self.readonly:
            raise StoreError(f"{self.path} is empty: nothing has run with it yet")

    def _check_kind(self, application: int, version: int) -> None:
        if application != APPLICATION_ID:
            raise StoreError(f"{self.path} is a database of another program; name another file")
        if version < VERSION:
            raise StoreError(f"{self.path} was written by an older Shoal (format {version}); name another file")
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
            tables = {name for (name,) in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables and not self.readonly:
                # Before the write-ahead log is on, so that the marks are in the file itself from its first page on.
                schema = files("shoal.frontier.sqlite").joinpath("schema.sql").read_text("utf-8")
                self.db.executescript(f"BEGIN IMMEDIATE;\n{schema}\nCOMMIT;")
                tables = set(_TABLES)
            (application,), (version,) = (
                self.db.execute(f"PRAGMA {mark}").fetchone() for mark in ("application_id", "user_version")
            )
            self._check_kind(application, version)
            if missing := _TABLES - tables:
                raise StoreError(f"{self.path} is damaged: it has no table {min(missing)}; name another file")
            if not self.readonly:
                self.db.executescript(_PRAGMAS)
        except BaseException:
            self.db.close()
            raise

    # -- one working process

    def _take_lock(self) -> int:
        """Held by an open file, so that it ends with the process, however that ends."""
        name = self.path + ".lock"
        while True:
            lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(lock, 20, 0).decode(errors="replace")
                os.close(lock)
                raise StoreBusyError(
                    f"another process{f' (pid {pid})' if pid else ''} works on {self.path}; "
                    "stop it first, or name another file"
                ) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(name)):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, b"%d" % os.getpid(), 0)
                    return lock
            os.close(lock)  # its last holder removed it just now

    def _drop_lock(self) -> None:
        if self._lock is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path + ".lock")
            os.close(self._lock)
            self._lock = None

    # -- transactions

    async def read(self, step: Callable[[], T]) -> T:
        """What ``step`` returns, of one state of the file."""
        return await self._run(partial(self._transact, "BEGIN", step))

    async def write(self, step: Callable[[], T]) -> T:
        """Run ``step`` as one transaction: all of it is kept, or nothing if it or the disk fails.

        A ``step`` that refuses (raises a ShoalError) has changed nothing yet, neither in the file nor in memory.
        """
        if self.readonly:
            raise StoreError(f"{self.path} was opened to be looked at only")
        return await self._run(partial(self._transact, "BEGIN IMMEDIATE", step))

    async def _run(self, job: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.path} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def _transact(self, begin: str, step: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.path} is closed")
        try:
            self._begin(begin)
            try:
                result = step()
                self.db.execute("COMMIT")
            except BaseException as exc:
                self._stale = not isinstance(exc, ShoalError) or isinstance(exc, StoreError)
                with suppress(sqlite3.Error):
                    self._roll_back()
                raise
        except sqlite3.Error as exc:
            raise self._explained(exc) from exc
        return result

    def _begin(self, begin: str) -> None:
        self._roll_back()
        if self._stale:
            self.restore()
            self._stale = False
        self.db.execute(begin)

    def _roll_back(self) -> None:
        if self.db.in_transaction:  # after some errors SQLite has done it itself
            self.db.execute("ROLLBACK")

    def _explained(self, exc: sqlite3.Error) -> FrontierError:
        """What happened, and what to do."""
        code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return FrontierError(f"no room on the disk for {self.path}; nothing was changed. Make room and go on")
        if code == sqlite3.SQLITE_IOERR:
            return FrontierError(f"can't read or write {self.path} ({exc}); nothing was changed. Look at the disk")
        if code == sqlite3.SQLITE_BUSY:
            return FrontierError(f"another program holds a lock on {self.path}; nothing was changed. Close it")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self.damaged(str(exc))
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return StoreError(f"can't open {self.path} ({exc}); look at who may write the file and its folder")
        return FrontierError(f"{self.path}: {exc}; nothing was changed")

    def damaged(self, what: str) -> StoreError:
        """The file is not as it was written."""
        return StoreError(f"{self.path} is damaged ({what}); save it with `sqlite3 FILE .recover`, or name another")

    async def close(self) -> None:
        """Bring the log into the file and let others have it. What was handed in before is done first."""
        if not self._closed:
            await self._run(self._close)
            self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self.readonly:
                with suppress(sqlite3.Error):  # it is all in the log then, and the next one to open the file takes it
                    self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.db.close()
        finally:
            self._drop_lock()
