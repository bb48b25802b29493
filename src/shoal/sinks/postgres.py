"""Items as rows of a PostgreSQL database. See `shoal.sinks.serversink` for how it writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import TypeVar
from urllib.parse import urlencode

from shoal.errors import SinkError
from shoal.sinks.keys import KEY, REGISTRY, RUN, SEQ, SYSTEM_COLUMNS
from shoal.sinks.postgres_sql import (
    BEGIN,
    NAMING,
    SELECT_COLUMNS,
    TYPES,
    PostgresColumns,
    alteration,
    cells,
    quote,
    update_clause,
)
from shoal.sinks.serversink import REWRITE_FACTOR, ServerSink
from shoal.sinks.tables import Batch, Change, Group, Kind, Row, foreign_table, large_integers

try:
    import asyncpg
except ImportError as exc:
    raise SinkError("PostgreSQL output needs asyncpg: pip install 'shoal[postgres]'") from exc

T = TypeVar("T")

_CONFLICTS = ("40001", "40P01", "42P01", "42701", "42703", "42804", "42P07", "23505")
"""A serialization failure, a deadlock, or a table that changed since it was checked."""
_PERMANENT = ("0A", "21", "22", "23", "28", "3D", "3F", "42", "54")
"""Classes of errors that a retry cannot help."""
_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_CLOSE_TIMEOUT = 5.0  # seconds


class PostgresSink(ServerSink[PostgresColumns]):
    """See the module. NUL, which PostgreSQL does not allow in text, becomes U+FFFD."""

    _DRIVER_ERRORS = _ERRORS
    _connection: asyncpg.Connection[asyncpg.Record] | None = None

    # -- connection

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None

    @property
    def _connected(self) -> asyncpg.Connection[asyncpg.Record]:
        assert self._connection is not None, "not open"
        return self._connection

    async def _connect(self) -> None:
        server = self._server
        self._connection = await asyncpg.connect(
            "postgresql:///?" + urlencode(server.options),
            host=server.host or None, port=server.port, user=server.user, password=server.password,
            database=server.database, timeout=server.timeout,
            statement_cache_size=0,  # a connection pooler may not support prepared statements
        )  # fmt: skip

    async def _disconnect(self) -> None:
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        self._ready.clear()
        try:
            with suppress(*_ERRORS):
                await connection.close(timeout=min(_CLOSE_TIMEOUT, self._server.timeout))
        finally:
            connection.terminate()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.terminate()

    async def _begin(self, then: str = "") -> None:
        """Begin a transaction. The server times out a little earlier than this client, and so can say what it waited
        for."""
        await self._execute(BEGIN.format(int(self._server.timeout * 900)) + then)

    async def _commit(self) -> None:
        await self._execute("COMMIT")

    async def _rollback(self) -> None:
        await self._execute("ROLLBACK")

    async def _execute(self, statement: str, longer: int = 1) -> None:
        await self._call(self._connected.execute(statement), longer)

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

    # -- write

    def _batch(self, rows: Sequence[Row]) -> Batch:
        return Batch(rows)

    async def _begin_write(self, names: Sequence[str]) -> None:
        await self._begin("".join(f"LOCK TABLE {self._quoted(name)} IN ROW EXCLUSIVE MODE;" for name in names))

    async def _locked_columns(self, name: str) -> PostgresColumns | None:
        return await self._columns(name)

    async def _write_batch(self, name: str, columns: PostgresColumns, batch: Batch) -> None:
        if self._options.key:
            await self._delete_replaced(name, batch)
        for group in batch.groups:
            await self._insert(name, columns, group)

    async def _delete_replaced(self, name: str, batch: Batch) -> None:
        """Delete the rows that the items of this batch replace. A row of a later item of this run stays."""
        keys = [key for group in batch.groups for key in group.keys]
        statement = f"DELETE FROM {self._quoted(name)} WHERE {KEY} = ANY($1) AND ({RUN} <> $2 OR {SEQ} <= $3)"
        await self._call(self._connected.execute(statement, keys, self._options.run, batch.last))

    async def _insert(self, name: str, columns: PostgresColumns, group: Group) -> None:
        names, sources = [KEY, RUN, SEQ], ["$1::text[]", "$2::text[]", "$3::bigint[]"]
        values: list[Sequence[object]] = [group.keys, [self._options.run] * len(group.keys), group.seqs]
        outer, inner = ["c1", "c2", "c3"], ["c1", "c2", "c3"]
        for field, given in zip(group.fields, group.columns, strict=True):
            column = columns.column_for(field)
            if column not in columns:  # no row has a value for it so far
                self._note_blank(name, field)
                continue
            kind, number = columns.kinds[column], len(names) + 1
            names.append(quote(column))
            values.append(cells(kind, given))
            sources.append(f"${number}::{TYPES[kind or Kind.TEXT]}[]")
            inner.append(f"c{number}")
            outer.append(f"c{number}{columns.casts.get(column, '')}")
        conflict = "NOTHING" if self._options.key else update_clause(names[1:], comparable=not columns.casts)
        await self._call(
            self._connected.execute(
                f"INSERT INTO {self._quoted(name)} AS old ({', '.join(names)}) "
                f"SELECT {', '.join(outer)} FROM unnest({', '.join(sources)}) AS new({', '.join(inner)}) "
                f"ON CONFLICT ({KEY}) DO {conflict}",
                *values,
            )
        )

    async def _remove_rows_after(self, name: str, seq: int) -> int:
        await self._begin("SET LOCAL statement_timeout = 0")
        count = 0
        if await self._columns(name) is not None:
            verb = f"UPDATE {{}} SET {SEQ} = $2" if self._options.key else "DELETE FROM {}"
            statement = f"{verb.format(self._quoted(name))} WHERE {RUN} = $1 AND {SEQ} > $2"
            work = self._connected.execute(statement, self._options.run, seq)
            count = int((await self._call(work, REWRITE_FACTOR)).rpartition(" ")[2])
        await self._commit()
        return count

    # -- tables

    def _quoted(self, name: str) -> str:
        table = quote(NAMING.fit(name))
        return table if self._server.schema is None else f"{quote(self._server.schema)}.{table}"

    async def _columns(self, name: str) -> PostgresColumns | None:
        found = await self._call(self._connected.fetch(SELECT_COLUMNS, self._quoted(name)))
        if not found:
            return None
        types = {column["attname"]: column["type"] for column in found}
        has_key = any(column["attname"] == KEY and column["is_key"] for column in found)
        if not has_key or not types.keys() >= set(SYSTEM_COLUMNS):
            raise foreign_table(self._name, name, "?table=name")
        return PostgresColumns(types)

    @asynccontextmanager
    async def _exclusive(self, name: str) -> AsyncIterator[None]:
        """One transaction, under an advisory lock. It takes as long as a rewrite of the table."""
        digest = blake2b(NAMING.fit(name).encode(), digest_size=8, person=b"shoal").digest()
        lock = int.from_bytes(digest, signed=True)
        await self._begin()
        await self._poll_lock(name, f"SELECT pg_try_advisory_xact_lock({lock})")
        await self._execute("SET LOCAL statement_timeout = 0")
        yield
        await self._commit()

    async def _is_true(self, condition: str, longer: int = 1) -> bool:
        return bool(await self._call(self._connected.fetchval(condition), longer))

    async def _create(self, name: str) -> PostgresColumns:
        table = self._quoted(name)
        await self._execute(
            f'CREATE TABLE {table} ({KEY} text COLLATE "C" PRIMARY KEY, {RUN} text COLLATE "C" NOT NULL, '
            f"{SEQ} bigint NOT NULL); CREATE INDEX ON {table} ({RUN}, {SEQ})"
        )
        return PostgresColumns({KEY: "text", RUN: "text", SEQ: "bigint"})

    async def _has_registry(self) -> bool:
        found = self._connected.fetchval("SELECT to_regclass($1) IS NOT NULL", self._quoted(REGISTRY))
        return bool(await self._call(found))

    async def _register(self, name: str) -> None:
        registry = self._quoted(REGISTRY)
        if not await self._has_registry():
            await self._execute(f"CREATE TABLE IF NOT EXISTS {registry} (name text PRIMARY KEY)")
        statement = f"INSERT INTO {registry} VALUES ($1) ON CONFLICT (name) DO NOTHING"
        await self._call(self._connected.execute(statement, name))

    async def _registered(self) -> list[str]:
        if not await self._has_registry():
            return []
        statement = f"SELECT name FROM {self._quoted(REGISTRY)}"
        return [row["name"] for row in await self._call(self._connected.fetch(statement))]

    async def _has_large_integers(self, name: str, column: str) -> bool:
        return await self._is_true(large_integers(self._quoted(name), quote(column)), REWRITE_FACTOR)

    async def _alter(self, name: str, changes: Sequence[Change]) -> None:
        longer = REWRITE_FACTOR if any(change.old for change in changes) else 1
        await self._execute(f"ALTER TABLE {self._quoted(name)} {', '.join(map(alteration, changes))}", longer)

    # -- errors

    def _is_conflict(self, exc: Exception) -> bool:
        return isinstance(exc, asyncpg.PostgresError) and exc.sqlstate in _CONFLICTS

    def _is_retryable(self, exc: Exception) -> bool:
        if isinstance(exc, asyncpg.PostgresError):
            return not (exc.sqlstate or "").startswith(_PERMANENT)
        return not isinstance(exc, ValueError)  # asyncpg's own: a bad option, or a value that it can't send

    def _explain(self, exc: Exception) -> str:
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
