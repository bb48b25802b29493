"""Items as rows of a MySQL or MariaDB database. See `shoal.sinks.tablesink`.

NaN and infinities, which MySQL does not allow in numbers, become NULL.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar

from shoal.clients.errors import Severity
from shoal.errors import SinkError
from shoal.messages import pip_install
from shoal.sinks.dialects import REWRITE_FACTOR, Connection, Dialect, Rows, TableColumn, Target, poll_lock, run_blocking
from shoal.sinks.keys import KEY, RUN, SEQ, TableOptions
from shoal.sinks.tables import (
    Batch,
    Change,
    Columns,
    DatabaseServer,
    Group,
    Kind,
    Naming,
    Row,
    halves,
    json_of,
    text_of,
)
from shoal.sinks.tablesink import TableSink
from shoal.system import threads

try:
    import pymysql
    import pymysql.cursors
    from pymysql.constants import CR, ER
    from pymysql.converters import escape_string

    from shoal.clients.mysql import CONFLICTS, CONNECTION_LOST, DENIED, DISK_FULL, READ_ONLY, code_of, severity
except ImportError as exc:
    raise SinkError(f"MySQL output needs PyMySQL: {pip_install('mysql')}") from exc

T = TypeVar("T")
_Driver: TypeAlias = "pymysql.Connection[pymysql.cursors.Cursor]"

_SPARE = "_shoal_widened"
"""The temporary column of a column rewrite. It remains only if a process dies during the rewrite."""
_MAX_JSON_DEPTH = 30  # MariaDB takes JSON with up to 32 levels, MySQL with 100
_KEY_LENGTH = 255
_TYPES = {
    Kind.BOOL: "tinyint(1)", Kind.INT: "bigint", Kind.LONG: "bigint", Kind.BIG: "decimal(20,0)", Kind.REAL: "double",
    Kind.TEXT: "longtext", Kind.BYTES: "longblob", Kind.JSON: "json", Kind.TIME: "datetime(6)",
}  # fmt: skip
_AS_TEXT = {
    Kind.BOOL: "IF({}, 'true', 'false')",
    Kind.BYTES: "REPLACE(TO_BASE64({}), '\\n', '')",
    Kind.TIME: "CONCAT(REPLACE(TRIM(TRAILING '.000000' FROM CAST({} AS CHAR)), ' ', 'T'), 'Z')",
}
"""How the values of a column become text, where a change of the type differs from `text_of`."""

_SETUP = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES', time_zone = '+00:00', "
    "innodb_lock_wait_timeout = {0}, lock_wait_timeout = {0} /*M!100300 , idle_transaction_timeout = {0} */"
)
"""MariaDB ends an idle transaction, so a process that is frozen in one does not block its successor. MySQL can't."""
_READ_TIMEOUT = "_read_timeout"
"""A private attribute: PyMySQL has no other way to change the timeout of a connection."""

_MAX_CHUNK = 4 << 20


def mysql_sink(server: DatabaseServer, options: TableOptions | None = None) -> TableSink:
    """The sink for a MySQL or MariaDB database."""
    return TableSink(server.name, MYSQL, lambda: MySQLConnection(server), options)


def _fold(name: str) -> str:
    """Two names that differ only in case or accents may be the same column."""
    letters = unicodedata.normalize("NFKD", name.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _string(text: str) -> str:
    return f"'{escape_string(text)}'"


MYSQL = Dialect(
    naming=Naming(
        fold=_fold,
        limit=64,
        forbidden=re.compile(r"[\0\U00010000-\U0010ffff]|\s+\Z"),
        reserved=frozenset({"db_row_id", "db_trx_id", "db_roll_ptr", "fts_doc_id", _SPARE}),
    ),
    quote=_quote,
    string=_string,
    kinds={name: kind for kind, name in _TYPES.items()} | {"bigint(20)": Kind.LONG},
    create=(
        f"CREATE TABLE {{table}} ({KEY} varchar({_KEY_LENGTH}) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY, "
        f"{RUN} varchar({_KEY_LENGTH}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, {SEQ} bigint NOT NULL, "
        f"KEY {RUN}{SEQ} ({RUN}, {SEQ})) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4",
    ),
    create_registry=(
        "CREATE TABLE IF NOT EXISTS {table} (name varchar(190) COLLATE utf8mb4_bin PRIMARY KEY) "
        "ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4"
    ),
    create_outputs=(
        f"CREATE TABLE {{table}} (run varchar({_KEY_LENGTH}) COLLATE utf8mb4_bin, "
        "output varchar(64) COLLATE utf8mb4_bin, log int, epoch bigint NOT NULL, seq bigint NOT NULL, "
        "rejected bigint NOT NULL, PRIMARY KEY (run, output, log)) "
        "ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4"
    ),
    user=(
        "SELECT CONCAT(QUOTE(SUBSTRING_INDEX(CURRENT_USER(), '@', 1)), '@', "
        "QUOTE(SUBSTRING_INDEX(CURRENT_USER(), '@', -1)))"
    ),
    add="INSERT IGNORE INTO {table} VALUES ({values})",
    errors=(pymysql.MySQLError, OSError),
    is_conflict=lambda exc: code_of(exc) in CONFLICTS,
    is_retryable=lambda exc: severity(exc) is not Severity.FINAL,
    is_denied=lambda exc: code_of(exc) in DENIED,
)


class MySQLConnection(Connection):
    """A connection of PyMySQL. It blocks."""

    def __init__(self, server: DatabaseServer) -> None:
        self._server = server
        self._database: _Driver | None = None
        self._described: dict[str, tuple[str, Sequence[TableColumn]]] = {}
        """By table: the statement that creates it, and its columns."""
        self._max_packet = 1 << 20

    @property
    def _connected(self) -> _Driver:
        assert self._database is not None, "not open"
        return self._database

    async def open(self, *, creates: bool = True) -> None:
        server, options = self._server, self._server.options
        try:
            self._database = pymysql.connect(
                defer_connect=True,
                host=server.host or "localhost",
                port=server.port,
                user=server.user,
                password=(server.password or "").encode(),  # PyMySQL encodes text as Latin-1
                database=server.database,
                charset="utf8mb4",
                autocommit=False,
                connect_timeout=server.timeout,
                read_timeout=server.timeout,
                write_timeout=server.timeout,
                init_command=_SETUP.format(max(1, int(server.timeout * 0.9))),
                ssl_ca=options.get("ssl_ca"),
                ssl_cert=options.get("ssl_cert"),
                ssl_key=options.get("ssl_key"),
                ssl_verify_cert="ssl_ca" in options or None,
            )
            await self._in_thread(self._connected.connect)
        except (RuntimeError, ValueError) as exc:  # PyMySQL lacks a library, or got a bad option
            raise SinkError(f"can't write {server.name}: {exc}") from None
        self._max_packet = int((await self.run(self.fetch("SELECT @@max_allowed_packet")))[0][0])

    async def close(self) -> None:
        if self._database is not None:
            await self._in_thread(self._close)

    def _close(self) -> None:
        if self._database is not None:
            with suppress(pymysql.MySQLError, OSError):
                self._database.close()
            self._database = None

    def discard(self) -> bool:
        self._shut_socket()  # so that closing cannot block
        self._close()
        return True

    def explain(self, exc: Exception) -> str:
        code, text, server = code_of(exc), str(exc.args[-1]) if exc.args else type(exc).__name__, self._server
        if code in DENIED:
            return f"the server refuses the user or the password, or denies permission ({text}); check or grant it"
        if code == ER.BAD_DB_ERROR:
            return f"the server has no database {server.database!r}; create it first"
        if code in DISK_FULL or (code == ER.GET_ERRNO and "28" in text):
            return f"the disk of the server is full ({text}); free some space, then resume the run"
        if code in READ_ONLY:
            return f"the server is read-only ({text}): a failover is under way, or it is a replica"
        if code in (ER.TOO_MANY_FIELDS, ER.TOO_BIG_ROWSIZE) or "Too many columns" in text:
            return f"the items have more fields than a table can have columns ({text}); nest some of them"
        if code == ER.LOCK_WAIT_TIMEOUT:
            return f"the table stayed locked for {server.timeout:g} s; is another program changing it?"
        if code in (CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR):
            return f"{text}; is the server running, and is the port correct?"
        if "timed out" in text:
            return f"no answer for {server.timeout:g} s"
        if code in CONNECTION_LOST:
            return f"the connection was lost ({text})"
        return text

    async def run(self, steps: Coroutine[Any, Any, T]) -> T:
        return await self._in_thread(run_blocking, steps)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a call in a thread. A cancellation closes the socket, so the thread ends even if the server is frozen."""
        task = asyncio.ensure_future(threads.call(work, *args))
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

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - this is a thread

    async def begin(self, tables: Sequence[str] = (), statement: str = "", longer: int = 1) -> int:
        """Tables are locked one by one: see ``columns``."""
        self._connected.begin()
        return await self.execute(statement, longer) if statement else 0

    async def execute(self, statement: str, longer: int = 1) -> int:
        return self._query(statement, longer)[0]

    async def fetch(self, statement: str, longer: int = 1) -> Rows:
        return self._query(statement, longer)[1]

    def _query(self, statement: str, longer: int = 1) -> tuple[int, Rows]:
        database = self._connected
        setattr(database, _READ_TIMEOUT, self._server.timeout * longer)
        try:
            with database.cursor() as cursor:
                cursor.execute(statement)
                return cursor.rowcount, list(cursor.fetchall())
        finally:
            setattr(database, _READ_TIMEOUT, self._server.timeout)

    async def _fetch_if_exists(self, statement: str) -> Rows | None:
        """Run a query. None if its table does not exist."""
        try:
            return await self.fetch(statement)
        except pymysql.MySQLError as exc:
            if code_of(exc) == ER.NO_SUCH_TABLE:
                return None
            raise

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        place = f"{self._server.database}/{_quote(name)}"
        lock = "shoal-" + blake2b(place.encode(), digest_size=16).hexdigest()
        await poll_lock(self, name, f"SELECT GET_LOCK('{lock}', 0) = 1", self._server.timeout)
        try:
            yield
            await self.commit()
        finally:
            await self._unlock(f"SELECT RELEASE_LOCK('{lock}')")

    async def _unlock(self, statement: str) -> None:
        """Release a lock. The server does that itself when the connection is gone."""
        with suppress(pymysql.MySQLError, OSError):
            if self._database is not None:
                await self.fetch(statement)

    async def columns(self, table: str, *, locks: bool = False) -> Sequence[TableColumn] | None:
        if locks and await self._fetch_if_exists(f"SELECT 1 FROM {table} LIMIT 0 FOR UPDATE") is None:
            return None
        description = await self._fetch_if_exists(f"SHOW CREATE TABLE {table}")
        if description is None:
            return None
        described, statement = self._described.get(table), str(description[0][1])
        if described is None or described[0] != statement:
            described = self._described[table] = statement, await self._describe(table, statement)
        return described[1]

    async def _describe(self, table: str, statement: str) -> Sequence[TableColumn]:
        """SinkError for a table without transactions."""
        for engine in re.findall(r"^\) ENGINE=(\w+)", statement, re.MULTILINE)[-1:]:
            has_transactions = f"SELECT transactions FROM information_schema.engines WHERE engine = '{engine}'"
            if await self.fetch(has_transactions) != [("YES",)]:
                raise SinkError(
                    f"can't write {self._server.name}: the table {table} has the engine {engine}, which has no "
                    f"transactions; change it with ALTER TABLE {table} ENGINE=InnoDB"
                )
        return [
            # MariaDB's JSON is text with a condition
            TableColumn(name, "json" if f"json_valid({_quote(name)})" in statement else type_, key == "PRI")
            for name, type_, _, _, key, *_ in await self.fetch(f"SHOW FULL COLUMNS FROM {table}")
            if name != _SPARE
        ]

    def batch(self, rows: Iterable[Row]) -> Batch:
        return Batch(rows, max_depth=_MAX_JSON_DEPTH, chunk=min(self._max_packet // 3, _MAX_CHUNK))

    async def insert(self, target: Target, columns: Columns, batch: Batch) -> int:
        return sum([await self._insert_group(target, columns, group, batch) for group in batch.groups])

    async def _insert_group(self, target: Target, columns: Columns, group: Group, batch: Batch) -> int:
        statement = _insertion(target, columns, group)
        if len(statement) < self._max_packet:
            deleted = await self.execute(target.deletion(group.keys)) if target.replaced else 0
            return self._connected.query(statement) - deleted
        if len(group.keys) > 1:
            return sum([await self._insert_group(target, columns, half, batch) for half in halves(group)])
        batch.reject(
            group.keys[0],
            f"it needs a statement of {len(statement)} bytes, but the server allows {self._max_packet}; "
            "increase max_allowed_packet of the server",
        )
        return 0

    async def alter(self, table: str, changes: Sequence[Change]) -> None:
        rewrites = [change for change in changes if change.new is Kind.TEXT and change.old in _AS_TEXT]
        if others := [change for change in changes if change not in rewrites]:
            longer = REWRITE_FACTOR if any(change.old for change in others) else 1
            await self.execute(f"ALTER TABLE {table} {', '.join(map(_alteration, others))}", longer)
        for change in rewrites:
            await self._rewrite_as_text(table, change)

    async def _rewrite_as_text(self, table: str, change: Change) -> None:
        """Turn a column into text through a second column. The lock keeps writers away meanwhile."""
        assert change.old is not None
        old, new, kind = _quote(change.column), _quote(_SPARE), _type_of(change.new)
        value = _AS_TEXT[change.old].format(old)
        await self.fetch(f"LOCK TABLES {table} WRITE")
        try:
            if await self.fetch(f"SHOW COLUMNS FROM {table} WHERE Field = '{_SPARE}'"):
                await self.fetch(f"ALTER TABLE {table} DROP COLUMN {new}", REWRITE_FACTOR)
            await self.fetch(f"ALTER TABLE {table} ADD COLUMN {new} {kind} AFTER {old}", REWRITE_FACTOR)
            await self.fetch(f"UPDATE {table} SET {new} = {value} WHERE {old} IS NOT NULL", REWRITE_FACTOR)
            await self.commit()
            await self.fetch(f"ALTER TABLE {table} DROP COLUMN {old}, CHANGE COLUMN {new} {old} {kind}", REWRITE_FACTOR)
        finally:
            await self._unlock("UNLOCK TABLES")


def _insertion(target: Target, columns: Columns, group: Group) -> bytes:
    names, run = [KEY, RUN, SEQ], _string(target.run)
    cells = [[f"'{key}'" for key in group.keys], [run] * len(group.keys), list(map(str, group.seqs))]
    for field, values in zip(group.fields, group.columns, strict=True):
        column = columns.column_for(field)
        if column not in columns:
            continue
        literal = _LITERALS[columns.kinds[column]]
        names.append(_quote(column))
        cells.append(["NULL" if value is None else literal(value) for value in values])
    changed = names[1:] if target.replaces else [KEY]  # the same key again: the row stays as it is
    updates = ", ".join(f"{column} = VALUES({column})" for column in changed)
    rows = ",".join([f"({','.join(row)})" for row in zip(*cells, strict=True)])
    return (f"INSERT INTO {target.table} ({', '.join(names)}) VALUES {rows} ON DUPLICATE KEY UPDATE {updates}").encode()


def _type_of(kind: Kind) -> str:
    return _TYPES[kind] + (" CHARACTER SET utf8mb4" if kind is Kind.TEXT else "")


def _alteration(change: Change) -> str:
    """The clause of ALTER TABLE for one change."""
    verb = "ADD COLUMN" if change.old is None else "MODIFY COLUMN"
    return f"{verb} {_quote(change.column)} {_type_of(change.new)} NULL"


def _text(value: object) -> str:
    return _string(value if type(value) is str else text_of(value))


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
    Kind.JSON: lambda value: _string(json_of(value)),
    Kind.TIME: _time,
    None: _text,
}
"""A value as a literal, by the kind of its column."""
