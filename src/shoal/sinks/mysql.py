"""Items as rows of a MySQL or MariaDB database. See `shoal.sinks.serversink` for how it writes.

PyMySQL blocks, so each statement runs in a thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar

from shoal.errors import SinkError
from shoal.sinks.keys import KEY, REGISTRY, RUN, SEQ, SYSTEM_COLUMNS, TableOptions
from shoal.sinks.serversink import REWRITE_FACTOR, ServerSink
from shoal.sinks.tables import (
    Batch,
    Change,
    Columns,
    DatabaseServer,
    Group,
    Kind,
    Row,
    foreign_table,
    halves,
    large_integers,
)

try:
    import pymysql
    import pymysql.cursors
    from pymysql.constants import CR, ER
except ImportError as exc:
    raise SinkError("MySQL output needs PyMySQL: pip install 'shoal[mysql]'") from exc

from shoal.sinks.mysql_sql import (
    AS_TEXT,
    CREATE,
    CREATE_REGISTRY,
    KINDS,
    LITERALS,
    MAX_JSON_DEPTH,
    NAMING,
    SETUP,
    SPARE,
    alteration,
    quote,
    string,
    type_of,
)

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]
Connection: TypeAlias = "pymysql.Connection[pymysql.cursors.Cursor]"

_READ_TIMEOUT = "_read_timeout"
"""A private attribute: PyMySQL has no other way to change the timeout of a connection."""

_MAX_CHUNK = 4 << 20
_CONFLICTS = (ER.LOCK_DEADLOCK, ER.CHECKREAD, ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR, ER.DUP_FIELDNAME,
              ER.TABLE_EXISTS_ERROR, ER.TABLE_DEF_CHANGED)  # fmt: skip
_DISK_FULL = (3, ER.DISK_FULL, ER.RECORD_FILE_FULL)
_CONNECTION_LOST = (CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, ER.SERVER_SHUTDOWN, 0)
_DENIED = (ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR,
           ER.SPECIFIC_ACCESS_DENIED_ERROR, ER.HOST_NOT_PRIVILEGED)  # fmt: skip
_RETRYABLE = {
    *_DISK_FULL, *_CONNECTION_LOST, *_CONFLICTS, CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR, ER.CON_COUNT_ERROR,
    ER.LOCK_WAIT_TIMEOUT, ER.OUT_OF_RESOURCES, ER.OUTOFMEMORY, ER.TOO_MANY_USER_CONNECTIONS,
    ER.OPTION_PREVENTS_STATEMENT, ER.QUERY_INTERRUPTED, ER.GET_ERRNO,
}  # fmt: skip


class MySQLSink(ServerSink[Columns]):
    """See the module. NaN and infinities, which MySQL does not allow in numbers, become NULL."""

    _DRIVER_ERRORS = (pymysql.MySQLError, OSError)

    def __init__(self, server: DatabaseServer, options: TableOptions | None = None) -> None:
        super().__init__(server, options)
        self._database: Connection | None = None
        self._described: dict[str, tuple[str, Columns]] = {}
        """By table: how the server describes it, and its columns."""
        self._max_packet = 1 << 20

    # -- connection

    @property
    def _is_connected(self) -> bool:
        return self._database is not None

    @property
    def _connected(self) -> Connection:
        assert self._database is not None, "not open"
        return self._database

    async def _connect(self) -> None:
        server, options = self._server, self._server.options
        try:
            self._database = pymysql.connect(
                defer_connect=True, host=server.host or "localhost", port=server.port, user=server.user,
                password=(server.password or "").encode(),  # PyMySQL encodes text as Latin-1
                database=server.database, charset="utf8mb4", autocommit=False,
                connect_timeout=server.timeout, read_timeout=server.timeout, write_timeout=server.timeout,
                init_command=SETUP.format(max(1, int(server.timeout * 0.9))),
                ssl_ca=options.get("ssl_ca"), ssl_cert=options.get("ssl_cert"), ssl_key=options.get("ssl_key"),
                ssl_verify_cert="ssl_ca" in options or None,
            )  # fmt: skip
            await self._in_thread(self._connected.connect)
        except (RuntimeError, ValueError) as exc:  # PyMySQL lacks a library, or got a bad option
            raise SinkError(f"can't write {self._name}: {exc}") from None
        self._max_packet = int((await self._ask("SELECT @@max_allowed_packet"))[0][0])

    async def _disconnect(self) -> None:
        if self._database is not None:
            await self._in_thread(self._disconnect_now)

    def _disconnect_now(self) -> None:
        if self._database is not None:
            with suppress(pymysql.MySQLError, OSError):
                self._database.close()
            self._database = None
            self._ready.clear()
            self._described.clear()

    def _drop_connection(self) -> None:
        self._shut_socket()  # so that closing cannot block
        self._disconnect_now()

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a call in a thread. A cancellation closes the socket, so the thread ends even if the server is frozen."""
        task = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                self._shut_socket()
                await asyncio.wait({task}, timeout=0.1)
            task.exception()
            raise

    def _shut_socket(self) -> None:
        wire = getattr(self._database, "_sock", None)
        with suppress(OSError):  # already closed
            if wire is not None:
                with socket.socket(fileno=os.dup(wire.fileno())) as same:
                    same.shutdown(socket.SHUT_RDWR)

    async def _ask(self, statement: str, longer: int = 1) -> Rows:
        return await self._in_thread(self._ask_now, statement, longer)

    def _ask_now(self, statement: str, longer: int = 1) -> Rows:
        database = self._connected
        setattr(database, _READ_TIMEOUT, self._server.timeout * longer)
        try:
            with database.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            setattr(database, _READ_TIMEOUT, self._server.timeout)

    async def _ask_if_exists(self, statement: str) -> Rows | None:
        """Run a query. None if its table does not exist."""
        try:
            return await self._ask(statement)
        except pymysql.MySQLError as exc:
            if _code(exc) == ER.NO_SUCH_TABLE:
                return None
            raise

    # -- write

    def _batch(self, rows: Sequence[Row]) -> Batch:
        return Batch(rows, max_depth=MAX_JSON_DEPTH, chunk=min(self._max_packet // 3, _MAX_CHUNK))

    async def _begin_write(self, names: Sequence[str]) -> None:
        await self._in_thread(self._connected.begin)

    async def _commit(self) -> None:
        await self._in_thread(self._connected.commit)

    async def _rollback(self) -> None:
        await self._in_thread(self._connected.rollback)

    async def _locked_columns(self, name: str) -> Columns | None:
        table = _quoted(name)
        if await self._ask_if_exists(f"SELECT 1 FROM {table} LIMIT 0 FOR UPDATE") is None:
            return None
        description = str((await self._ask(f"SHOW CREATE TABLE {table}"))[0][1])
        known = self._described.get(name)
        if known is None or known[0] != description:
            columns = await self._columns(name)
            if columns is None:
                return None
            known = self._described[name] = description, columns
        return known[1]

    async def _write_batch(self, name: str, columns: Columns, batch: Batch) -> None:
        await self._in_thread(self._write_groups, name, columns, batch)

    def _write_groups(self, name: str, columns: Columns, batch: Batch) -> None:
        for group in batch.groups:
            self._write_group(name, columns, group, batch)

    def _write_group(self, name: str, columns: Columns, group: Group, batch: Batch) -> None:
        statement = self._insertion(name, columns, group)
        if len(statement) < self._max_packet:
            if self._options.key:
                self._delete_replaced(name, group, batch.last)
            self._connected.query(statement)
        elif len(group.keys) > 1:
            for half in halves(group):
                self._write_group(name, columns, half, batch)
        else:
            batch.reject(
                group.keys[0],
                f"it needs a statement of {len(statement)} bytes, but the server allows {self._max_packet}; "
                "increase max_allowed_packet of the server",
            )

    def _delete_replaced(self, name: str, group: Group, last: int) -> None:
        """Delete the rows that these items replace. A row of a later item of this run stays."""
        keys = ", ".join(f"'{key}'" for key in group.keys)
        table = _quoted(name)
        self._ask_now(f"DELETE FROM {table} WHERE {KEY} IN ({keys}) AND ({RUN} <> {self._run} OR {SEQ} <= {last})")

    def _insertion(self, name: str, columns: Columns, group: Group) -> bytes:
        names = [KEY, RUN, SEQ]
        cells = [[f"'{key}'" for key in group.keys], [self._run] * len(group.keys), list(map(str, group.seqs))]
        for field, values in zip(group.fields, group.columns, strict=True):
            column = columns.column_for(field)
            if column not in columns:  # no row has a value for it so far
                self._note_blank(name, field)
                continue
            literal = LITERALS[columns.kinds[column]]
            names.append(quote(column))
            cells.append(["NULL" if value is None else literal(value) for value in values])
        changed = [KEY] if self._options.key else names[1:]  # with a key, a row that was not deleted stays as it is
        updates = ", ".join(f"{column} = VALUES({column})" for column in changed)
        rows = ",".join([f"({','.join(row)})" for row in zip(*cells, strict=True)])
        return (
            f"INSERT INTO {_quoted(name)} ({', '.join(names)}) VALUES {rows} ON DUPLICATE KEY UPDATE {updates}"
        ).encode()

    @property
    def _run(self) -> str:
        """The run as a literal."""
        return string(self._options.run)

    async def _remove_rows_after(self, name: str, seq: int) -> int:
        if await self._columns(name) is None:
            return 0
        table = _quoted(name)
        verb = f"UPDATE {table} SET {SEQ} = {seq}" if self._options.key else f"DELETE FROM {table}"
        await self._ask(f"{verb} WHERE {RUN} = {self._run} AND {SEQ} > {seq}", REWRITE_FACTOR)
        count = (await self._ask("SELECT ROW_COUNT()"))[0][0]
        await self._commit()
        return int(count)

    # -- tables

    async def _columns(self, name: str) -> Columns | None:
        table = _quoted(name)
        found = await self._ask_if_exists(f"SHOW FULL COLUMNS FROM {table}")
        if found is None:
            return None
        names, keys = {column for column, *_ in found}, [column for column, _, _, _, key, *_ in found if key == "PRI"]
        if keys != [KEY] or not names.issuperset(SYSTEM_COLUMNS):
            raise foreign_table(self._name, name, "?table=name")
        kinds = {column: KINDS.get(kind.lower()) for column, kind, *_ in found if column != SPARE}
        if Kind.TEXT in kinds.values():  # MariaDB's JSON is text with a condition
            description = (await self._ask(f"SHOW CREATE TABLE {table}"))[0][1]
            for column in kinds:
                if f"json_valid({quote(column)})" in description:
                    kinds[column] = Kind.JSON
        return Columns(NAMING, kinds)

    @asynccontextmanager
    async def _exclusive(self, name: str) -> AsyncIterator[None]:
        place = f"{self._server.database}/{_quoted(name)}"
        lock = "shoal-" + blake2b(place.encode(), digest_size=16).hexdigest()
        await self._poll_lock(name, f"SELECT GET_LOCK('{lock}', 0) = 1")
        try:
            yield
        finally:
            await self._unlock(f"SELECT RELEASE_LOCK('{lock}')")

    async def _is_true(self, condition: str, longer: int = 1) -> bool:
        return bool((await self._ask(condition, longer))[0][0])

    async def _unlock(self, statement: str) -> None:
        """Release a lock. The server does that itself when the connection is gone."""
        with suppress(pymysql.MySQLError, OSError):
            if self._database is not None:
                await self._ask(statement)

    async def _create(self, name: str) -> Columns:
        await self._ask(CREATE.format(table=_quoted(name), key=KEY, run=RUN, seq=SEQ))
        return Columns(NAMING, {KEY: Kind.TEXT, RUN: Kind.TEXT, SEQ: Kind.INT})

    async def _register(self, name: str) -> None:
        await self._ask(CREATE_REGISTRY.format(registry=REGISTRY))
        await self._ask(f"INSERT IGNORE INTO {REGISTRY} VALUES ({string(NAMING.fit(name))})")
        await self._commit()

    async def _registered(self) -> list[str]:
        found = await self._ask_if_exists(f"SELECT name FROM {REGISTRY}")
        return [str(name) for (name,) in found or ()]

    async def _has_large_integers(self, name: str, column: str) -> bool:
        return await self._is_true(large_integers(_quoted(name), quote(column)), REWRITE_FACTOR)

    async def _alter(self, name: str, changes: Sequence[Change]) -> None:
        table = _quoted(name)
        rewrites = [change for change in changes if change.new is Kind.TEXT and change.old in AS_TEXT]
        if others := [change for change in changes if change not in rewrites]:
            longer = REWRITE_FACTOR if any(change.old for change in others) else 1
            await self._ask(f"ALTER TABLE {table} {', '.join(map(alteration, others))}", longer)
        for change in rewrites:
            await self._rewrite_as_text(table, change)

    async def _rewrite_as_text(self, table: str, change: Change) -> None:
        """Turn a column into text through a second column. The lock keeps writers away meanwhile."""
        assert change.old is not None
        old, new, kind = quote(change.column), quote(SPARE), type_of(change.new)
        value = AS_TEXT[change.old].format(old)
        await self._ask(f"LOCK TABLES {table} WRITE")
        try:
            if await self._ask(f"SHOW COLUMNS FROM {table} WHERE Field = '{SPARE}'"):
                await self._ask(f"ALTER TABLE {table} DROP COLUMN {new}", REWRITE_FACTOR)
            await self._ask(f"ALTER TABLE {table} ADD COLUMN {new} {kind} AFTER {old}", REWRITE_FACTOR)
            await self._ask(f"UPDATE {table} SET {new} = {value} WHERE {old} IS NOT NULL", REWRITE_FACTOR)
            await self._commit()
            await self._ask(f"ALTER TABLE {table} DROP COLUMN {old}, CHANGE COLUMN {new} {old} {kind}", REWRITE_FACTOR)
        finally:
            await self._unlock("UNLOCK TABLES")

    # -- errors

    def _is_conflict(self, exc: Exception) -> bool:
        return _code(exc) in _CONFLICTS

    def _is_retryable(self, exc: Exception) -> bool:
        return isinstance(exc, OSError) or _code(exc) in _RETRYABLE

    def _explain(self, exc: Exception) -> str:
        code, text, server = _code(exc), str(exc.args[-1]) if exc.args else type(exc).__name__, self._server
        if code in _DENIED:
            return f"the server refuses the user or the password, or denies permission ({text}); check or grant it"
        if code == ER.BAD_DB_ERROR:
            return f"the server has no database {server.database!r}; create it first"
        if code in _DISK_FULL or (code == ER.GET_ERRNO and "28" in text):
            return f"the disk of the server is full ({text}); free some space, then resume the run"
        if code in (ER.TOO_MANY_FIELDS, ER.TOO_BIG_ROWSIZE) or "Too many columns" in text:
            return f"the items have more fields than a table can have columns ({text}); nest some of them"
        if code == ER.LOCK_WAIT_TIMEOUT:
            return f"the table stayed locked for {server.timeout:g} s; is another program changing it?"
        if code in (CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR):
            return f"{text}; is the server running, and is the port correct?"
        if "timed out" in text:
            return f"no answer for {server.timeout:g} s"
        if code in _CONNECTION_LOST:
            return f"the connection was lost ({text})"
        return text


def _code(exc: Exception) -> int | None:
    return exc.args[0] if isinstance(exc, pymysql.MySQLError) and exc.args else None


def _quoted(name: str) -> str:
    return quote(NAMING.fit(name))
