"""Items as rows of a MySQL or MariaDB database: see `shoal.sinks.tables`.

Each write is one transaction. It first locks the tables against changes of their columns and looks at these; if one is
missing or too narrow, it lets go, makes the change (one process at a time), and begins anew. So any number of processes
can write to one table. PyMySQL blocks, so all of it runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import socket
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from shoal.errors import SinkError
from shoal.ports import LoggedItem
from shoal.sinks.keys import KEY, OWN, REGISTRY, RUN, SEQ, Progress, TableOptions
from shoal.sinks.rejects import Reject, Rejects
from shoal.sinks.tables import (
    ATTEMPTS,
    REWRITE,
    Batch,
    Change,
    Columns,
    Group,
    Kind,
    Naming,
    Server,
    beyond_exact,
    halves,
    json_of,
    not_ours,
    rows_by_table,
    text_of,
)

try:
    import pymysql
    from pymysql.constants import CR, ER
    from pymysql.converters import escape_string
except ImportError as exc:
    raise SinkError("MySQL output needs PyMySQL: pip install 'shoal[mysql]'") from exc


log = logging.getLogger("shoal.sinks")


def _fold(name: str) -> str:
    """Neither case nor accents tell two names apart for sure."""
    letters = unicodedata.normalize("NFKD", name.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


_SPARE = "_shoal_widened"
"""A column on its way: left behind only by a process that died at the wrong moment."""
_NAMING = Naming(
    fold=_fold,
    limit=64,
    forbidden=re.compile(r"[\0\U00010000-\U0010ffff]|\s+\Z"),
    reserved=frozenset({"db_row_id", "db_trx_id", "db_roll_ptr", "fts_doc_id", _SPARE}),
)
_KEY_LENGTH = 255
_TYPES = {
    Kind.BOOL: "tinyint(1)", Kind.INT: "bigint", Kind.LONG: "bigint", Kind.BIG: "decimal(20,0)", Kind.REAL: "double",
    Kind.TEXT: "longtext", Kind.BYTES: "longblob", Kind.JSON: "json", Kind.TIME: "datetime(6)",
}  # fmt: skip
_KINDS = {name: kind for kind, name in _TYPES.items()} | {"bigint(20)": Kind.LONG}
_AS_TEXT = {
    Kind.BOOL: "IF({}, 'true', 'false')",
    Kind.BYTES: "REPLACE(TO_BASE64({}), '\\n', '')",
    Kind.TIME: "CONCAT(REPLACE(TRIM(TRAILING '.000000' FROM CAST({} AS CHAR)), ' ', 'T'), 'Z')",
}
"""How a column's values become text, where a mere change of its type would not give what `text_of` does."""
_DEEPEST = 30  # MariaDB takes JSON with up to 32 levels, MySQL with 100
_SETUP = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES', time_zone = '+00:00', "
    "innodb_lock_wait_timeout = {0}, lock_wait_timeout = {0}"
)
_BUSY = (ER.LOCK_DEADLOCK, ER.CHECKREAD, ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR, ER.DUP_FIELDNAME, ER.TABLE_EXISTS_ERROR,
         ER.TABLE_DEF_CHANGED)  # fmt: skip
"""Another process was faster: a deadlock, or another table than the one that was looked at."""
_FULL = (3, ER.DISK_FULL, ER.RECORD_FILE_FULL)
_AWAY = (CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, ER.SERVER_SHUTDOWN, 0)
_DENIED = (ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR,
           ER.SPECIFIC_ACCESS_DENIED_ERROR, ER.HOST_NOT_PRIVILEGED)  # fmt: skip
_MAY_PASS = {
    *_FULL, *_AWAY, *_BUSY, CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR, ER.CON_COUNT_ERROR, ER.LOCK_WAIT_TIMEOUT,
    ER.OUT_OF_RESOURCES, ER.OUTOFMEMORY, ER.TOO_MANY_USER_CONNECTIONS, ER.OPTION_PREVENTS_STATEMENT,
    ER.QUERY_INTERRUPTED, ER.GET_ERRNO,
}  # fmt: skip


class MySQLSink:
    """See the module. NaN and infinities, which MySQL has in no number, become NULL."""

    def __init__(self, server: Server, options: TableOptions | None = None) -> None:
        self._server = server
        self._options = options or TableOptions()
        self._progress = Progress(server.name, self._options.key)
        self._rejects = Rejects(server.name, self._options.on_reject)
        self._database: pymysql.Connection[Any] | None = None
        self._tables: dict[str, tuple[str, Columns]] = {}
        """By name: how the server describes it, and its columns."""
        self._blank: dict[str, dict[str, None]] = {}
        self._packet = 1 << 20

    async def open(self, state: bytes) -> None:
        self._rejects.open()
        await self._in_thread(self._open, state)

    def _open(self, state: bytes) -> None:
        self._close()
        self._progress.open(state)
        with self._errors():
            try:
                self._database = self._connection()
                self._database.connect()
            except (RuntimeError, ValueError) as exc:  # PyMySQL lacks a library, or was given a bad option
                raise SinkError(f"can't write {self._server.name}: {exc}") from None
            self._packet = int(self._ask("SELECT @@max_allowed_packet")[0][0])
            if self._options.table is not None:
                self._prepare(self._options.table, Batch(()))

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if items:
            rejects: list[Reject] = []
            await self._in_thread(self._write, items, rejects)
            self._rejects.add(rejects)

    def _write(self, items: Sequence[LoggedItem], found: list[Reject]) -> None:
        tables, rejects = rows_by_table(items, self._options)
        chunk = min(self._packet // 3, 4 << 20)
        batches = {name: Batch(rows, deepest=_DEEPEST, chunk=chunk) for name, rows in tables.items()}
        with self._errors():
            self._void(self._progress.void_behind(items))
            left = ATTEMPTS
            while not self._try_to_write(batches, last=left == 1):
                left -= 1
                time.sleep(random.uniform(0, 0.05))
        self._progress.wrote(items)
        found += [*rejects, *(reject for batch in batches.values() for reject in batch.rejects)]

    async def flush(self) -> bytes:
        """Every write was a durable transaction."""
        self._rejects.flush()
        return self._progress.flush()

    async def close(self, *, finished: bool) -> None:
        """At the end, fields that never had a value get their column too."""
        if finished:
            self._rejects.finish()
        await self._in_thread(self._finish if finished else self._close)

    def _finish(self) -> None:
        try:
            with self._errors():
                if self._database is not None:
                    self._void(self._progress.void_behind())
                for name, fields in self._blank.items():
                    self._prepare(name, Batch(()), fields)
        finally:
            self._close()

    def _close(self) -> None:
        if self._database is not None:
            with suppress(pymysql.MySQLError, OSError):
                self._database.close()
            self._database = None
            self._tables.clear()

    # -- one write

    def _try_to_write(self, batches: Mapping[str, Batch], *, last: bool) -> bool:
        """False: another process was in the way; nothing was written. That is an error at the last try."""
        database = self._connected
        try:
            for name, batch in batches.items():
                if name not in self._tables:
                    self._prepare(name, batch)
            database.begin()
            for name, batch in batches.items():
                columns = self._locked(name)
                if columns is None or columns.changes(batch.kinds):
                    if last:
                        raise SinkError(f"can't write {self._server.name}: others keep changing the table {name!r}")
                    database.rollback()
                    self._prepare(name, batch)
                    return False
                for group in batch.groups:
                    self._write_group(name, columns, group, batch)
            database.commit()
        except pymysql.MySQLError as exc:
            if last or _code(exc) not in _BUSY:
                raise
            database.rollback()
            return False
        return True

    def _locked(self, name: str) -> Columns | None:
        """The columns of a table, which stay as they are until the transaction ends; None if there is no table."""
        table = _quote(_NAMING.fit(name))
        if self._ask_about(f"SELECT 1 FROM {table} LIMIT 0 FOR UPDATE") is None:
            return None
        description = str(self._ask(f"SHOW CREATE TABLE {table}")[0][1])
        known = self._tables.get(name)
        if known is None or known[0] != description:
            columns = self._columns(name)
            if columns is None:
                return None
            known = self._tables[name] = description, columns
        return known[1]

    def _write_group(self, name: str, columns: Columns, group: Group, batch: Batch) -> None:
        statement = self._insertion(name, columns, group)
        if len(statement) < self._packet:
            if self._options.key:
                self._drop_replaced(name, group, batch.last)
            self._connected.query(statement)
        elif len(group.keys) > 1:
            for half in halves(group):
                self._write_group(name, columns, half, batch)
        else:
            batch.reject(
                group.keys[0],
                f"it needs a statement of {len(statement)} bytes, and the server takes {self._packet}; "
                "set its max_allowed_packet higher",
            )

    def _drop_replaced(self, name: str, group: Group, last: int) -> None:
        """The rows that newer items replace as a whole. A row of a later item of this run stays."""
        keys = ", ".join(f"'{key}'" for key in group.keys)
        self._ask(
            f"DELETE FROM {_quote(_NAMING.fit(name))} WHERE {KEY} IN ({keys}) "
            f"AND ({RUN} <> {self._run} OR {SEQ} <= {last})"
        )

    def _insertion(self, name: str, columns: Columns, group: Group) -> bytes:
        names = [KEY, RUN, SEQ]
        cells = [[f"'{key}'" for key in group.keys], [self._run] * len(group.keys), list(map(str, group.seqs))]
        for field, values in zip(group.fields, group.columns, strict=True):
            home = columns.home(field)
            if home not in columns:  # it has no value in any row so far
                self._note_blank(name, field)
                continue
            literal = _LITERALS[columns.kinds[home]]
            names.append(_quote(home))
            cells.append(["NULL" if value is None else literal(value) for value in values])
        changed = [KEY] if self._options.key else names[1:]  # a row that may stay keeps its key
        updates = ", ".join(f"{column} = VALUES({column})" for column in changed)
        rows = ",".join([f"({','.join(row)})" for row in zip(*cells, strict=True)])
        return (
            f"INSERT INTO {_quote(_NAMING.fit(name))} ({', '.join(names)}) VALUES {rows} "
            f"ON DUPLICATE KEY UPDATE {updates}"
        ).encode()

    def _note_blank(self, name: str, field: str) -> None:
        blank = self._blank.setdefault(name, {})
        if len(blank) < self._options.max_columns:
            blank[field] = None

    @property
    def _run(self) -> str:
        """The run as it stands in a statement."""
        return f"'{escape_string(self._options.run)}'"

    # -- rows that are void

    def _void(self, behind: int | None) -> None:
        """Rows of this run behind this number come from pages that are crawled again.

        With a key of the user's, a row stays until a newer item replaces it: what it replaced is gone.
        """
        if behind is None:
            return
        for name in [self._options.table] if self._options.table else self._registered():
            if self._columns(name) is None:
                continue
            table = _quote(_NAMING.fit(name))
            verb = f"UPDATE {table} SET {SEQ} = {behind}" if self._options.key else f"DELETE FROM {table}"
            self._ask(f"{verb} WHERE {RUN} = {self._run} AND {SEQ} > {behind}", REWRITE)
            if count := self._connected.affected_rows():  # type: ignore[no-untyped-call]
                log.info("%d rows of run %s in %s, behind item %d, come again", count, self._options.run, name, behind)
            self._connected.commit()

    def _registered(self) -> list[str]:
        """The tables that were made for types of items."""
        found = self._ask_about(f"SELECT name FROM {REGISTRY}") or []
        return [str(name) for (name,) in found]

    def _register(self, name: str) -> None:
        self._ask(
            f"CREATE TABLE IF NOT EXISTS {REGISTRY} (name varchar(190) COLLATE utf8mb4_bin PRIMARY KEY) "
            "ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4"
        )
        self._ask(f"INSERT IGNORE INTO {REGISTRY} VALUES ('{escape_string(_NAMING.fit(name))}')")
        self._connected.commit()

    # -- tables

    def _columns(self, name: str) -> Columns | None:
        """None: there is no such table. One that a sink did not make is a SinkError."""
        table = _quote(_NAMING.fit(name))
        found = self._ask_about(f"SHOW FULL COLUMNS FROM {table}")
        if found is None:
            return None
        names = {column for column, *_ in found}
        if not names.issuperset(OWN) or [column for column, _, _, _, key, *_ in found if key == "PRI"] != [KEY]:
            raise not_ours(self._server.name, name, "?table=name")
        kinds = {column: _KINDS.get(kind.lower()) for column, kind, *_ in found if column != _SPARE}
        if Kind.TEXT in kinds.values():  # MariaDB's JSON is text with a condition
            description = self._ask(f"SHOW CREATE TABLE {table}")[0][1]
            for column in kinds:
                if f"json_valid({_quote(column)})" in description:
                    kinds[column] = Kind.JSON
        return Columns(_NAMING, kinds)

    def _prepare(self, name: str, batch: Batch, blank: Iterable[str] = ()) -> None:
        """Make the table, or its columns, such that the fields of the batch fit. One process at a time does that."""
        table = _quote(_NAMING.fit(name))
        with self._lock(table):
            columns = self._columns(name)
            if columns is None:
                columns = self._create(table)
            if self._options.table is None:
                self._register(name)
            batch.fit(columns, self._options.max_columns)
            kinds, blank = batch.kinds, list(blank)[: columns.room(self._options.max_columns)]
            for column in columns.doubtful(kinds):
                large = f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {beyond_exact(_quote(column))})"
                if not self._ask(large, REWRITE)[0][0]:
                    columns.kinds[column] = Kind.INT
            changes = columns.changes(kinds, blank)
            by_hand = [change for change in changes if change.new is Kind.TEXT and change.old in _AS_TEXT]
            if plain := [change for change in changes if change not in by_hand]:
                longer = REWRITE if any(change.old for change in plain) else 1
                self._ask(f"ALTER TABLE {table} {', '.join(map(_alteration, plain))}", longer)
            for change in by_hand:
                self._rewrite(table, change)

    def _create(self, table: str) -> Columns:
        self._ask(
            f"CREATE TABLE {table} ({KEY} varchar({_KEY_LENGTH}) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY, "
            f"{RUN} varchar({_KEY_LENGTH}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, {SEQ} bigint NOT NULL, "
            f"KEY {RUN}{SEQ} ({RUN}, {SEQ})) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4"
        )
        return Columns(_NAMING, {KEY: Kind.TEXT, RUN: Kind.TEXT, SEQ: Kind.INT})

    def _rewrite(self, table: str, change: Change) -> None:
        """Turn a column into text by way of another one. The lock keeps writers away in between."""
        assert change.old is not None
        old, new, kind = _quote(change.column), _quote(_SPARE), _type(change.new)
        self._ask(f"LOCK TABLES {table} WRITE")
        try:
            if self._ask(f"SHOW COLUMNS FROM {table} WHERE Field = '{_SPARE}'"):
                self._ask(f"ALTER TABLE {table} DROP COLUMN {new}", REWRITE)
            self._ask(f"ALTER TABLE {table} ADD COLUMN {new} {kind} AFTER {old}", REWRITE)
            self._ask(f"UPDATE {table} SET {new} = {_AS_TEXT[change.old].format(old)} WHERE {old} IS NOT NULL", REWRITE)
            self._connected.commit()
            self._ask(f"ALTER TABLE {table} DROP COLUMN {old}, CHANGE COLUMN {new} {old} {kind}", REWRITE)
        finally:
            self._let_go("UNLOCK TABLES")

    @contextmanager
    def _lock(self, table: str) -> Iterator[None]:
        """It asks again and again, so that it never waits for a frozen server."""
        lock = "shoal-" + blake2b(f"{self._server.database}/{table}".encode(), digest_size=16).hexdigest()
        until = time.monotonic() + self._server.timeout * REWRITE
        while self._ask(f"SELECT GET_LOCK('{lock}', 0)")[0][0] != 1:
            if time.monotonic() > until:
                raise TimeoutError(f"another process has not been done with changing the table {table}")
            time.sleep(random.uniform(0.01, 0.05))
        try:
            yield
        finally:
            self._let_go(f"SELECT RELEASE_LOCK('{lock}')")

    def _let_go(self, statement: str) -> None:
        """Without a connection there is nothing to let go."""
        with suppress(pymysql.MySQLError, OSError):
            if self._database is not None:
                self._ask(statement)

    # -- calls

    async def _in_thread(self, work: Callable[..., None], *args: Any) -> None:
        """If the caller is cancelled, the thread is soon done too: it may have waited for a server that is frozen."""
        task = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                self._cut()
                await asyncio.wait({task}, timeout=0.1)
            task.exception()
            raise

    def _cut(self) -> None:
        wire = getattr(self._database, "_sock", None)
        with suppress(OSError):  # closed meanwhile
            if wire is not None:
                with socket.socket(fileno=os.dup(wire.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)

    def _connection(self) -> pymysql.Connection[Any]:
        server, options = self._server, self._server.options
        connection: pymysql.Connection[Any] = pymysql.connect(
            defer_connect=True, host=server.host or "localhost", port=server.port, user=server.user,
            password=(server.password or "").encode(),  # of text, PyMySQL takes Latin-1 only
            database=server.database, charset="utf8mb4", autocommit=False,
            connect_timeout=server.timeout, read_timeout=server.timeout, write_timeout=server.timeout,
            init_command=_SETUP.format(max(1, int(server.timeout * 0.9))),
            ssl_ca=options.get("ssl_ca"), ssl_cert=options.get("ssl_cert"), ssl_key=options.get("ssl_key"),
            ssl_verify_cert="ssl_ca" in options or None,
        )  # fmt: skip
        return connection

    @property
    def _connected(self) -> pymysql.Connection[Any]:
        assert self._database is not None, "not open"
        return self._database

    def _ask(self, statement: str, longer: int = 1) -> Sequence[Any]:
        database = self._connected
        database._read_timeout = self._server.timeout * longer  # type: ignore[attr-defined]
        try:
            with database.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            database._read_timeout = self._server.timeout  # type: ignore[attr-defined]

    def _ask_about(self, statement: str) -> Sequence[Any] | None:
        """None: there is no such table."""
        try:
            return self._ask(statement)
        except pymysql.MySQLError as exc:
            if _code(exc) == ER.NO_SUCH_TABLE:
                return None
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Whatever ended in an error left the connection in no state to go on with."""
        try:
            yield
        except BaseException as exc:
            self._close()
            if not isinstance(exc, pymysql.MySQLError | OSError):
                raise
            error = SinkError(f"can't write {self._server.name}: {self._advice(exc)}")
            raise error from (exc if isinstance(exc, OSError) or _code(exc) in _MAY_PASS else None)

    def _advice(self, exc: Exception) -> str:
        code, text = _code(exc), str(exc.args[-1]) if exc.args else type(exc).__name__
        if code in _DENIED:
            return f"the server refuses the user, its password, or what it asks for ({text}); correct or grant it"
        if code == ER.BAD_DB_ERROR:
            return f"there is no database {self._server.database!r} on that server; create it first"
        if code in _FULL or (code == ER.GET_ERRNO and "28" in text):
            return f"the disk of the server is full ({text}); free some space, then go on"
        if code in (ER.TOO_MANY_FIELDS, ER.TOO_BIG_ROWSIZE) or "Too many columns" in text:
            return f"the items have more fields than a table can have columns ({text}); put some into a nested one"
        if code == ER.LOCK_WAIT_TIMEOUT:
            return f"the table stayed locked for {self._server.timeout:g} s; is something else changing it?"
        if code in (CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR):
            return f"{text}; is it running, and is this its port?"
        if "timed out" in text:
            return f"no answer for {self._server.timeout:g} s"
        if code in _AWAY:
            return f"the connection was lost ({text})"
        return text


def _code(exc: Exception) -> int | None:
    return exc.args[0] if isinstance(exc, pymysql.MySQLError) and exc.args else None


def _type(kind: Kind) -> str:
    return _TYPES[kind] + (" CHARACTER SET utf8mb4" if kind is Kind.TEXT else "")


def _alteration(change: Change) -> str:
    verb = "ADD COLUMN" if change.old is None else "MODIFY COLUMN"
    return f"{verb} {_quote(change.column)} {_type(change.new)} NULL"


def _text(value: Any) -> str:
    return f"'{escape_string(value if type(value) is str else text_of(value))}'"


def _time(value: datetime) -> str:
    return f"'{value.replace(tzinfo=None).isoformat(' ', 'microseconds')}'"


_LITERALS: dict[Kind | None, Callable[[Any], str]] = {
    Kind.BOOL: lambda value: "1" if value else "0",
    Kind.INT: str,
    Kind.LONG: str,
    Kind.BIG: str,
    Kind.REAL: lambda value: repr(value) if math.isfinite(value) else "NULL",
    Kind.TEXT: _text,
    Kind.BYTES: lambda value: f"x'{value.hex()}'",
    Kind.JSON: lambda value: f"'{escape_string(json_of(value))}'",
    Kind.TIME: _time,
    None: _text,
}
"""How a value stands in a statement."""


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
