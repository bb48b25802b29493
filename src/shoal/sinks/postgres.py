"""Items as rows of a PostgreSQL database. See `shoal.sinks.tablesink`.

NUL, which PostgreSQL does not allow in text, becomes U+FFFD.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import TypeVar
from urllib.parse import urlencode

from shoal.clients.errors import Severity
from shoal.errors import SinkError
from shoal.messages import pip_install
from shoal.sinks.dialects import REWRITE_FACTOR, Connection, Dialect, Rows, TableColumn, Target, poll_lock, quoted
from shoal.sinks.keys import KEY, RUN, SEQ, TableOptions
from shoal.sinks.tables import Batch, Change, Columns, DatabaseServer, Group, Kind, Naming, json_of, text_of
from shoal.sinks.tablesink import TableSink

try:
    import asyncpg

    from shoal.clients.postgres import severity
except ImportError as exc:
    raise SinkError(f"PostgreSQL output needs asyncpg: {pip_install('postgres')}") from exc

T = TypeVar("T")

_TYPES = {
    Kind.BOOL: "boolean", Kind.INT: "bigint", Kind.LONG: "bigint", Kind.BIG: "numeric", Kind.REAL: "double precision",
    Kind.TEXT: "text", Kind.BYTES: "bytea", Kind.JSON: "jsonb", Kind.TIME: "timestamp with time zone",
}  # fmt: skip
_AS_TEXT = {
    Kind.BYTES: "replace(encode({}, 'base64'), E'\\n', '')",
    Kind.TIME: """
        coalesce(replace(to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '.000000Z', 'Z'), {0}::text)
    """,  # to_char returns NULL for infinity
}
"""How the values of a column become text, where a cast differs from `text_of`."""
_NUL_IN_JSON = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")

_SELECT_COLUMNS = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = a.attrelid AND i.indisprimary AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum
    ) AS is_key
    FROM pg_attribute a
    WHERE a.attrelid = to_regclass({}) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
_SELECT_VERSION = """
    SELECT string_agg(attnum || ' ' || xmin, ',' ORDER BY attnum) FROM pg_attribute WHERE attrelid = to_regclass({})
"""
"""Another value after each change of a column: much cheaper than to read all of them before each write."""
_BEGIN = """
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SELECT set_config('statement_timeout', '{0}', true), set_config('lock_timeout', '{1}', true),
        set_config('idle_in_transaction_session_timeout', '{1}', true),
        CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END;
"""
"""A process that is frozen in a transaction must not block its successor, so the server ends an idle one."""
_CONFLICTS = ("40001", "40P01", "42P01", "42701", "42703", "42804", "42P07", "23505")
"""A serialization failure, a deadlock, or a table that changed since it was checked."""
_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_CLOSE_TIMEOUT = 5.0  # seconds


def postgres_sink(server: DatabaseServer, options: TableOptions | None = None) -> TableSink:
    """The sink for a PostgreSQL database."""
    prefix = "" if server.schema is None else f"{quoted(server.schema)}."
    return TableSink(server.name, POSTGRES, lambda: PostgresConnection(server), options, prefix=prefix)


def _string(text: str) -> str:
    """A literal that does not depend on settings of the server."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _is_retryable(exc: Exception) -> bool:
    if isinstance(exc, asyncpg.PostgresError):
        return severity(exc.sqlstate or "") is not Severity.FINAL
    return not isinstance(exc, ValueError)  # asyncpg's own: a bad option, or a value that it can't send


POSTGRES = Dialect(
    naming=Naming(
        limit=63,
        length=lambda name: len(name.encode()),
        forbidden=re.compile("\0"),
        reserved=frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}),
    ),
    quote=quoted,
    string=_string,
    kinds={name: kind for kind, name in _TYPES.items()},
    create=(
        f'CREATE TABLE {{table}} ({KEY} text COLLATE "C" PRIMARY KEY, {RUN} text COLLATE "C" NOT NULL, '
        f"{SEQ} bigint NOT NULL)",
        f"CREATE INDEX ON {{table}} ({RUN}, {SEQ})",
    ),
    create_registry="CREATE TABLE IF NOT EXISTS {table} (name text PRIMARY KEY)",
    create_outputs=(
        'CREATE TABLE {table} (run text COLLATE "C", output text COLLATE "C", log integer, epoch bigint NOT NULL, '
        "seq bigint NOT NULL, rejected bigint NOT NULL, PRIMARY KEY (run, output, log))"
    ),
    user="SELECT quote_ident(current_user)",
    errors=_ERRORS,
    is_conflict=lambda exc: isinstance(exc, asyncpg.PostgresError) and exc.sqlstate in _CONFLICTS,
    is_retryable=_is_retryable,
    is_denied=lambda exc: isinstance(exc, asyncpg.InsufficientPrivilegeError),
)


class PostgresConnection(Connection):
    """A connection of asyncpg."""

    def __init__(self, server: DatabaseServer) -> None:
        self._server = server
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._described: dict[str, tuple[str, Sequence[TableColumn]]] = {}
        """By table: the version of its columns, and these."""

    @property
    def _connected(self) -> asyncpg.Connection[asyncpg.Record]:
        assert self._connection is not None, "not open"
        return self._connection

    async def open(self, *, creates: bool = True) -> None:
        server = self._server
        self._connection = await asyncpg.connect(
            "postgresql:///?" + urlencode(server.options),
            host=server.host or None,
            port=server.port,
            user=server.user,
            password=server.password,
            database=server.database,
            timeout=server.timeout,
            statement_cache_size=0,  # a connection pooler may not support prepared statements
        )

    async def close(self) -> None:
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        try:
            with suppress(*_ERRORS):
                await connection.close(timeout=min(_CLOSE_TIMEOUT, self._server.timeout))
        finally:
            connection.terminate()

    def discard(self) -> bool:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.terminate()
        return True

    def explain(self, exc: Exception) -> str:
        text, server = str(exc).partition("\n")[0] or type(exc).__name__, self._server
        match exc:
            case asyncpg.InvalidAuthorizationSpecificationError():
                return f"the server refuses the user or the password ({text}); check both, or allow the user to connect"
            case asyncpg.InvalidCatalogNameError():
                return f"the server has no database {server.database!r}; create it first"
            case asyncpg.InvalidSchemaNameError():
                return f"{text}; create the schema first, or choose another with &schema=name"
            case asyncpg.InsufficientPrivilegeError():
                return f"{text}; grant the permission to the user, or choose another schema with &schema=name"
            case asyncpg.ReadOnlySQLTransactionError():
                return f"the server is read-only ({text}): a failover is under way, or it is a standby"
            case asyncpg.DiskFullError():
                return f"the disk of the server is full ({text}); free some space, then resume the run"
            case asyncpg.TooManyColumnsError():
                return f"the items have more fields than a table can have columns ({text}); nest some of them"
            case asyncpg.ProgramLimitExceededError():
                return f"an item is too large for a row ({text}); nest some of its fields"
            case asyncpg.UntranslatableCharacterError():
                return f"{text}; create the database with the encoding UTF8"
            case asyncpg.QueryCanceledError() | asyncpg.LockNotAvailableError():
                return f"no result within {server.timeout:g} s ({text}); is the table locked?"
            case ConnectionRefusedError():
                return "connection refused; is the server running, and is the port correct?"
            case TimeoutError():
                return str(exc) or f"no answer for {server.timeout:g} s"
            case ValueError():
                return text
            case asyncpg.PostgresConnectionError() | asyncpg.InterfaceError() | ConnectionError():
                return f"the connection was lost ({text})"
            case _:
                return text

    async def begin(self, tables: Sequence[str] = (), statement: str = "", longer: int = 1) -> int:
        """The server times out a little earlier than this client, and so can say what it waited for."""
        timeout = int(self._server.timeout * 900)
        locks = "".join(f"LOCK TABLE {table} IN ROW EXCLUSIVE MODE;" for table in tables)
        return await self.execute(_BEGIN.format(timeout if longer == 1 else 0, timeout) + locks + statement, longer)

    async def execute(self, statement: str, longer: int = 1, *values: Sequence[object]) -> int:
        count = (await self._call(self._connected.execute(statement, *values), longer)).rpartition(" ")[2]
        return int(count) if count.isdigit() else 0

    async def fetch(self, statement: str, longer: int = 1) -> Rows:
        return [tuple(row) for row in await self._call(self._connected.fetch(statement), longer)]

    async def _call(self, work: Awaitable[T], longer: int = 1) -> T:
        """Drop the connection after the timeout. asyncpg would ask the server to cancel, and wait for that too."""
        connection, timeout, is_late = self._connected, self._server.timeout * longer, False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            connection.terminate()

        timer = asyncio.get_running_loop().call_later(timeout, give_up)
        try:
            return await work
        except _ERRORS as exc:
            if is_late:
                raise TimeoutError(f"no answer for {timeout:g} s") from exc
            raise
        finally:
            timer.cancel()

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        """One transaction, under an advisory lock. It takes as long as a rewrite of the table."""
        digest = blake2b(name.encode(), digest_size=8, person=b"shoal").digest()
        lock = int.from_bytes(digest, signed=True)
        await self.begin()
        await poll_lock(self, name, f"SELECT pg_try_advisory_xact_lock({lock})", self._server.timeout)
        await self.execute("SET LOCAL statement_timeout = 0")
        yield
        await self.commit()

    async def columns(self, table: str, *, locks: bool = False) -> Sequence[TableColumn] | None:
        version = (await self.fetch(_SELECT_VERSION.format(_string(table))))[0][0]
        known = self._described.get(table)
        if known is None or known[0] != version:
            described = await self.fetch(_SELECT_COLUMNS.format(_string(table)))
            known = self._described[table] = version, [TableColumn(*column) for column in described]
        return known[1] or None

    async def insert(self, target: Target, columns: Columns, batch: Batch) -> int:
        count = 0
        for group in batch.groups:
            deleted = await self.execute(target.deletion(group.keys)) if target.replaced else 0
            count += await self._insert_group(target, columns, group) - deleted
        return count

    async def _insert_group(self, target: Target, columns: Columns, group: Group) -> int:
        names, sources = [KEY, RUN, SEQ], ["$1::text[]", "$2::text[]", "$3::bigint[]"]
        values: list[Sequence[object]] = [group.keys, [target.run] * len(group.keys), group.seqs]
        outer, inner = ["c1", "c2", "c3"], ["c1", "c2", "c3"]
        is_comparable = True
        for field, cells in zip(group.fields, group.columns, strict=True):
            column = columns.column_for(field)
            if column not in columns:
                continue
            kind, type_, number = columns.kinds[column], columns.types[column], len(names) + 1
            names.append(quoted(column))
            values.append(_cells(kind, cells))
            sources.append(f"${number}::{_TYPES[kind or Kind.TEXT]}[]")
            inner.append(f"c{number}")
            # A user chose the type: it gets text, and the server converts it. A cast would cut a text that is too long.
            cast = "" if kind is not None or type_.startswith("character") else f"::{type_}"
            outer.append(f"c{number}{cast}")
            is_comparable = is_comparable and not cast
        conflict = _update_clause(names[1:], comparable=is_comparable) if target.replaces else "NOTHING"
        return await self.execute(
            f"INSERT INTO {target.table} AS old ({', '.join(names)}) "
            f"SELECT {', '.join(outer)} FROM unnest({', '.join(sources)}) AS new({', '.join(inner)}) "
            f"ON CONFLICT ({KEY}) DO {conflict}",
            1,
            *values,
        )

    async def alter(self, table: str, changes: Sequence[Change]) -> None:
        longer = REWRITE_FACTOR if any(change.old for change in changes) else 1
        await self.execute(f"ALTER TABLE {table} {', '.join(map(_alteration, changes))}", longer)


def _alteration(change: Change) -> str:
    """The clause of ALTER TABLE for one change."""
    column, kind = quoted(change.column), _TYPES[change.new]
    if change.old is None:
        return f"ADD COLUMN IF NOT EXISTS {column} {kind}"
    as_text = _AS_TEXT.get(change.old, "{}::text").format(column)
    return f"ALTER COLUMN {column} TYPE {kind} USING {as_text if change.new is Kind.TEXT else f'{column}::{kind}'}"


def _update_clause(columns: Sequence[str], *, comparable: bool) -> str:
    """What ON CONFLICT does. It skips a row that is already equal: an update costs as much as a new row."""
    if not columns:
        return "NOTHING"
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
    old, new = (", ".join(f"{row}.{column}" for column in columns) for row in ("old", "excluded"))
    return f"UPDATE SET {updates}" + (f" WHERE ROW({old}) IS DISTINCT FROM ROW({new})" if comparable else "")


def _cells(kind: Kind | None, values: Sequence[object]) -> list[object]:
    """Values as asyncpg takes them for a column of this kind. NUL becomes U+FFFD."""
    match kind:
        case Kind.TEXT | None:
            return [value if type(value) is str and "\0" not in value else _text(value) for value in values]
        case Kind.JSON:
            return [None if value is None else _json(value) for value in values]
        case _:
            return list(values)


def _text(value: object) -> str | None:
    return None if value is None else text_of(value).replace("\0", "\ufffd")


def _json(value: object) -> str:
    text = json_of(value)
    return text if "\\u0000" not in text else _NUL_IN_JSON.sub("\\1\ufffd", text)
