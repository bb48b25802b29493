"""Items as rows of a PostgreSQL database: see `shoal.sinks.tables`.

Each write is one transaction. It first locks the tables against changes of their columns and looks at these; if one is
missing or too narrow, it lets go, makes the change in a transaction of its own (one process at a time), and begins
anew. So any number of processes can write to one table.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import urlencode

from shoal.errors import SinkError
from shoal.ports import LoggedItem
from shoal.sinks.keys import KEY, OWN, REGISTRY, RUN, SEQ, Progress, TableOptions
from shoal.sinks.rejects import Rejects
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
    json_of,
    not_ours,
    rows_by_table,
    text_of,
)

try:
    import asyncpg
except ImportError as exc:
    raise SinkError("PostgreSQL output needs asyncpg: pip install 'shoal[postgres]'") from exc

T = TypeVar("T")

log = logging.getLogger("shoal.sinks")

_NAMING = Naming(
    limit=63,
    length=lambda name: len(name.encode()),
    forbidden=re.compile("\0"),
    reserved=frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}),
)
_TYPES = {
    Kind.BOOL: "boolean", Kind.INT: "bigint", Kind.LONG: "bigint", Kind.BIG: "numeric", Kind.REAL: "double precision",
    Kind.TEXT: "text", Kind.BYTES: "bytea", Kind.JSON: "jsonb", Kind.TIME: "timestamp with time zone",
}  # fmt: skip
_KINDS = {name: kind for kind, name in _TYPES.items()}
_AS_TEXT = {
    Kind.BYTES: "replace(encode({}, 'base64'), E'\\n', '')",
    Kind.TIME: """
        coalesce(replace(to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '.000000Z', 'Z'), {0}::text)
    """,  # to_char makes nothing of infinity
}
"""How a column's values become text, where a cast would not give what `text_of` does."""

_COLUMNS = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = a.attrelid AND i.indisprimary AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum
    ) AS is_key
    FROM pg_attribute a
    WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
_BEGIN = """
    BEGIN;
    SELECT set_config('statement_timeout', '{0}', true), set_config('lock_timeout', '{0}', true);
    SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off';
"""
_CHANGED = ("40001", "40P01", "42P01", "42701", "42703", "42804", "42P07", "23505")
"""Another process was faster: a serialization failure, a deadlock, or another table than the one that was looked at."""
_LASTING = ("0A", "21", "22", "23", "28", "3D", "3F", "42", "54")
"""Classes of errors that another try won't help."""
_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_NUL_IN_JSON = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_CLOSING = 5.0  # seconds


class _Columns(Columns):
    """``casts`` are for columns whose type the user has chosen: they get text, and take what they understand."""

    def __init__(self, types: Mapping[str, str]) -> None:
        super().__init__(_NAMING, {name: _KINDS.get(kind) for name, kind in types.items()})
        self.casts = {
            name: f"::{kind}"
            for name, kind in types.items()
            if kind not in _KINDS and not kind.startswith("character")  # a cast would cut what is too long
        }


class PostgresSink:
    """See the module. NUL, which PostgreSQL has in no text, becomes U+FFFD."""

    def __init__(self, server: Server, options: TableOptions | None = None) -> None:
        self._server = server
        self._options = options or TableOptions()
        self._progress = Progress(server.name, self._options.key)
        self._rejects = Rejects(server.name, self._options.on_reject)
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._ready: set[str] = set()
        self._blank: dict[str, dict[str, None]] = {}

    async def open(self, state: bytes) -> None:
        await self.close(finished=False)
        self._rejects.open()
        self._progress.open(state)
        server = self._server
        async with self._errors():
            self._connection = await asyncpg.connect(
                "postgresql:///?" + urlencode(server.options),
                host=server.host or None, port=server.port, user=server.user, password=server.password,
                database=server.database, timeout=server.timeout,
                statement_cache_size=0,  # a pooler between here and the server may not know of prepared statements
            )  # fmt: skip
            if self._options.table is not None:
                await self._prepare(self._options.table, Batch(()))

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if not items:
            return
        tables, rejects = rows_by_table(items, self._options)
        batches = {name: Batch(rows) for name, rows in tables.items()}
        async with self._errors():
            await self._void(self._progress.void_behind(items))
            left = ATTEMPTS
            while not await self._try_to_write(batches, last=left == 1):
                left -= 1
                await asyncio.sleep(random.uniform(0, 0.05))
        self._progress.wrote(items)
        self._rejects.add([*rejects, *(reject for batch in batches.values() for reject in batch.rejects)])

    async def flush(self) -> bytes:
        """Every write was a durable transaction."""
        self._rejects.flush()
        return self._progress.flush()

    async def close(self, *, finished: bool) -> None:
        """At the end, fields that never had a value get their column too."""
        if finished:
            self._rejects.finish()
        try:
            if finished and self._connection is not None:
                async with self._errors():
                    await self._void(self._progress.void_behind())
                    for name, fields in self._blank.items():
                        await self._prepare(name, Batch(()), fields)
        finally:
            if self._connection is not None:
                connection, self._connection = self._connection, None
                self._ready.clear()
                await _close(connection, min(_CLOSING, self._server.timeout))

    # -- one write

    async def _try_to_write(self, batches: Mapping[str, Batch], *, last: bool) -> bool:
        """False: another process was in the way; nothing was written. That is an error at the last try."""
        try:
            for name, batch in batches.items():
                if name not in self._ready:
                    await self._prepare(name, batch)
            await self._begin("".join(f"LOCK TABLE {self._quoted(name)} IN ROW EXCLUSIVE MODE;" for name in batches))
            for name, batch in batches.items():
                columns = await self._columns(name)
                if columns is None or columns.changes(batch.kinds):
                    if last:
                        raise SinkError(f"can't write {self._server.name}: others keep changing the table {name!r}")
                    self._ready.discard(name)
                    await self._execute("ROLLBACK")
                    return False
                if self._options.key:
                    await self._drop_replaced(name, batch)
                for group in batch.groups:
                    await self._insert(name, columns, group)
            await self._execute("COMMIT")
        except asyncpg.PostgresError as exc:
            if last or exc.sqlstate not in _CHANGED:
                raise
            self._ready.clear()
            await self._execute("ROLLBACK")
            return False
        return True

    async def _drop_replaced(self, name: str, batch: Batch) -> None:
        """The rows that newer items of this batch replace as a whole. A row of a later item of this run stays."""
        keys = [key for group in batch.groups for key in group.keys]
        statement = f"DELETE FROM {self._quoted(name)} WHERE {KEY} = ANY($1) AND ({RUN} <> $2 OR {SEQ} <= $3)"
        await self._call(self._connected.execute(statement, keys, self._options.run, batch.last))

    async def _insert(self, name: str, columns: _Columns, group: Group) -> None:
        names, sources = [KEY, RUN, SEQ], ["$1::text[]", "$2::text[]", "$3::bigint[]"]
        cells: list[list[Any]] = [group.keys, [self._options.run] * len(group.keys), group.seqs]
        outer, inner = ["c1", "c2", "c3"], ["c1", "c2", "c3"]
        for field, values in zip(group.fields, group.columns, strict=True):
            home = columns.home(field)
            if home not in columns:  # it has no value in any row so far
                self._note_blank(name, field)
                continue
            kind, number = columns.kinds[home], len(names) + 1
            names.append(_quote(home))
            cells.append(_cells(kind, values))
            sources.append(f"${number}::{_TYPES[kind or Kind.TEXT]}[]")
            inner.append(f"c{number}")
            outer.append(f"c{number}{columns.casts.get(home, '')}")
        conflict = "NOTHING" if self._options.key else _update(names[1:], comparable=not columns.casts)
        await self._call(
            self._connected.execute(
                f"INSERT INTO {self._quoted(name)} AS old ({', '.join(names)}) "
                f"SELECT {', '.join(outer)} FROM unnest({', '.join(sources)}) AS new({', '.join(inner)}) "
                f"ON CONFLICT ({KEY}) DO {conflict}",
                *cells,
            )
        )

    def _note_blank(self, name: str, field: str) -> None:
        blank = self._blank.setdefault(name, {})
        if len(blank) < self._options.max_columns:
            blank[field] = None

    async def _void(self, behind: int | None) -> None:
        """Rows of this run behind this number come from pages that are crawled again.

        With a key of the user's, a row stays until a newer item replaces it: what it replaced is gone.
        """
        if behind is None:
            return
        run = self._options.run
        for name in [self._options.table] if self._options.table else await self._registered():
            await self._begin("SET LOCAL statement_timeout = 0")
            if await self._columns(name) is not None:
                verb = f"UPDATE {{}} SET {SEQ} = $2" if self._options.key else "DELETE FROM {}"
                statement = f"{verb.format(self._quoted(name))} WHERE {RUN} = $1 AND {SEQ} > $2"
                done = await self._call(self._connected.execute(statement, run, behind), REWRITE)
                if not done.endswith(" 0"):
                    log.info("%s of run %s in %s, behind item %d: they come again", done, run, name, behind)
            await self._execute("COMMIT")

    async def _registered(self) -> list[str]:
        """The tables that were made for types of items."""
        registry = self._quoted(REGISTRY)
        if await self._call(self._connected.fetchval("SELECT to_regclass($1) IS NULL", registry)):
            return []
        return [row["name"] for row in await self._call(self._connected.fetch(f"SELECT name FROM {registry}"))]

    # -- tables

    async def _columns(self, name: str) -> _Columns | None:
        """None: there is no such table. One that a sink did not make is a SinkError."""
        found = await self._call(self._connected.fetch(_COLUMNS, self._quoted(name)))
        if not found:
            return None
        names = {column["attname"] for column in found}
        if not (names.issuperset(OWN) and any(column["attname"] == KEY and column["is_key"] for column in found)):
            raise not_ours(self._server.name, name, "?table=name")
        return _Columns({column["attname"]: column["type"] for column in found})

    async def _prepare(self, name: str, batch: Batch, blank: Iterable[str] = ()) -> None:
        """Make the table, or its columns, such that the fields of the batch fit. One process at a time does that."""
        table = self._quoted(name)
        await self._begin()
        await self._take_lock(name)
        columns = await self._columns(name)
        if columns is None:
            columns = await self._create(table)
        if self._options.table is None:
            await self._register(name)
        batch.fit(columns, self._options.max_columns)
        kinds, blank = batch.kinds, list(blank)[: columns.room(self._options.max_columns)]
        await self._execute("SET LOCAL statement_timeout = 0")
        for column in columns.doubtful(kinds):
            small = f"SELECT NOT EXISTS (SELECT FROM {table} WHERE {beyond_exact(_quote(column))})"
            if await self._call(self._connected.fetchval(small), REWRITE):
                columns.kinds[column] = Kind.INT
        if changes := columns.changes(kinds, blank):
            longer = REWRITE if any(change.old for change in changes) else 1
            await self._execute(f"ALTER TABLE {table} {', '.join(map(_alteration, changes))}", longer)
        await self._execute("COMMIT")
        self._ready.add(name)

    async def _create(self, table: str) -> _Columns:
        await self._execute(
            f'CREATE TABLE {table} ({KEY} text COLLATE "C" PRIMARY KEY, {RUN} text COLLATE "C" NOT NULL, '
            f"{SEQ} bigint NOT NULL); CREATE INDEX ON {table} ({RUN}, {SEQ})"
        )
        return _Columns({KEY: "text", RUN: "text", SEQ: "bigint"})

    async def _register(self, name: str) -> None:
        registry = self._quoted(REGISTRY)
        if await self._call(self._connected.fetchval("SELECT to_regclass($1) IS NULL", registry)):
            await self._execute(f"CREATE TABLE IF NOT EXISTS {registry} (name text PRIMARY KEY)")
        await self._call(
            self._connected.execute(f"INSERT INTO {registry} VALUES ($1) ON CONFLICT (name) DO NOTHING", name)
        )

    async def _take_lock(self, table: str) -> None:
        """Until the end of the transaction. It asks again and again, so that it never waits for a frozen server."""
        digest = blake2b(_NAMING.fit(table).encode(), digest_size=8, person=b"shoal").digest()
        lock = int.from_bytes(digest, signed=True)
        until = time.monotonic() + self._server.timeout * REWRITE
        while not await self._call(self._connected.fetchval(f"SELECT pg_try_advisory_xact_lock({lock})")):
            if time.monotonic() > until:
                raise TimeoutError(f"another process has not been done with changing the table {table!r}")
            await asyncio.sleep(random.uniform(0.01, 0.05))

    def _quoted(self, name: str) -> str:
        table = _quote(_NAMING.fit(name))
        return table if self._server.schema is None else f"{_quote(self._server.schema)}.{table}"

    # -- calls

    @property
    def _connected(self) -> asyncpg.Connection[asyncpg.Record]:
        assert self._connection is not None, "not open"
        return self._connection

    async def _begin(self, then: str = "") -> None:
        """The server gives up a little before we do, and so says what it waited for."""
        await self._execute(_BEGIN.format(int(self._server.timeout * 900)) + then)

    async def _execute(self, statement: str, longer: int = 1) -> None:
        await self._call(self._connected.execute(statement), longer)

    async def _call(self, work: Awaitable[T], longer: int = 1) -> T:
        """A server that does not answer loses its connection: asyncpg would ask it to cancel, and wait for that too."""
        connection, timeout, late = self._connected, self._server.timeout * longer, False

        def give_up() -> None:
            nonlocal late
            late = True
            connection.terminate()

        timer = asyncio.get_running_loop().call_later(timeout, give_up)
        try:
            return await work
        except _ERRORS as exc:
            if late:
                raise TimeoutError(f"no answer for {timeout:g} s") from exc
            raise
        finally:
            timer.cancel()

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Whatever ended in an error, or was cancelled, left the connection in no state to go on with."""
        try:
            yield
        except BaseException as exc:
            if self._connection is not None:
                connection, self._connection = self._connection, None
                self._ready.clear()
                connection.terminate()
            if not isinstance(exc, _ERRORS):
                raise
            error = SinkError(f"can't write {self._server.name}: {self._advice(exc)}")
            raise error from (None if _is_lasting(exc) else exc)

    def _advice(self, exc: Exception) -> str:
        text = str(exc).partition("\n")[0] or type(exc).__name__
        match exc:
            case asyncpg.InvalidAuthorizationSpecificationError():
                return f"the server refuses the user or its password ({text}); correct them, or let the user in"
            case asyncpg.InvalidCatalogNameError():
                return f"there is no database {self._server.database!r} on that server; create it first"
            case asyncpg.InvalidSchemaNameError():
                return f"{text}; create the schema first, or name another with &schema=name"
            case asyncpg.InsufficientPrivilegeError():
                return f"no permission ({text}); grant it to the user, or choose another schema with &schema=name"
            case asyncpg.DiskFullError():
                return f"the disk of the server is full ({text}); free some space, then go on"
            case asyncpg.TooManyColumnsError():
                return f"the items have more fields than a table can have columns ({text}); put some into a nested one"
            case asyncpg.ProgramLimitExceededError():
                return f"an item is too large for a row ({text}); put some of its fields into a nested one"
            case asyncpg.UntranslatableCharacterError():
                return f"{text}; create the database with the encoding UTF8"
            case asyncpg.QueryCanceledError() | asyncpg.LockNotAvailableError():
                return f"not done in {self._server.timeout:g} s ({text}); is the table locked?"
            case ConnectionRefusedError():
                return "the server refuses connections; is it running, and is this its port?"
            case TimeoutError():
                return str(exc) or f"no answer for {self._server.timeout:g} s"
            case ValueError():
                return text
            case asyncpg.PostgresConnectionError() | asyncpg.InterfaceError() | ConnectionError():
                return f"the connection was lost ({text})"
            case _:
                return text


def _is_lasting(exc: Exception) -> bool:
    if isinstance(exc, asyncpg.PostgresError):
        return (exc.sqlstate or "").startswith(_LASTING)
    return isinstance(exc, ValueError)  # asyncpg's own: a bad option, or a value that it can't send


async def _close(connection: asyncpg.Connection[asyncpg.Record], timeout: float) -> None:
    try:
        with suppress(*_ERRORS):
            await connection.close(timeout=timeout)
    finally:
        connection.terminate()


def _alteration(change: Change) -> str:
    column, kind = _quote(change.column), _TYPES[change.new]
    if change.old is None:
        return f"ADD COLUMN IF NOT EXISTS {column} {kind}"
    as_text = _AS_TEXT.get(change.old, "{}::text").format(column)
    return f"ALTER COLUMN {column} TYPE {kind} USING {as_text if change.new is Kind.TEXT else f'{column}::{kind}'}"


def _update(columns: Sequence[str], *, comparable: bool) -> str:
    """A row that is as it should be is not written again: that would cost as much as a new one."""
    if not columns:
        return "NOTHING"
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
    old, new = (", ".join(f"{row}.{column}" for column in columns) for row in ("old", "excluded"))
    return f"UPDATE SET {updates}" + (f" WHERE ROW({old}) IS DISTINCT FROM ROW({new})" if comparable else "")


def _cells(kind: Kind | None, values: Sequence[Any]) -> list[Any]:
    match kind:
        case Kind.TEXT | None:
            return [value if type(value) is str and "\0" not in value else _text(value) for value in values]
        case Kind.JSON:
            return [None if value is None else _json(value) for value in values]
        case _:
            return list(values)


def _text(value: Any) -> str | None:
    return None if value is None else text_of(value).replace("\0", "\ufffd")


def _json(value: Any) -> str:
    text = json_of(value)
    return text if "\\u0000" not in text else _NUL_IN_JSON.sub("\\1\ufffd", text)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
