"""The sink that writes items as rows of tables, in SQLite, PostgreSQL and MySQL.

`TableSink` has the steps: open at a saved state, delete stale rows, write, change columns, flush, close. What differs
between databases is a `Dialect` (a value) and a `Connection` (one class per driver). `shoal.sinks.tables` decides which
table and column a value goes to, `shoal.sinks.keys` which row.

Each write is one transaction. It first locks the tables against changes of their columns and reads these. If a column
is missing or too narrow, it rolls back, changes the table (one process at a time), and tries again. So any number of
processes can write to one table.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from shoal.errors import SinkError
from shoal.ports import LoggedItem
from shoal.sinks.keys import KEY, REGISTRY, RUN, SEQ, SYSTEM_COLUMNS, TableOptions, WriteProgress
from shoal.sinks.rejects import Reject, Rejects
from shoal.sinks.tables import (
    Batch,
    Change,
    Columns,
    Kind,
    Naming,
    Row,
    foreign_table,
    large_integers,
    rows_by_table,
)

log = logging.getLogger("shoal.sinks")

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]

REWRITE_FACTOR = 20
"""The factor for the timeout of a statement that changes many rows, such as a change of a column's type."""
_MAX_ATTEMPTS = 20
"""How often a transaction is tried while other processes change or lock its tables."""
_MAX_PAUSE = 0.05


class Dialect(Struct, frozen=True, kw_only=True):
    """What statements and errors of a database look like."""

    naming: Naming
    quote: Callable[[str], str]
    string: Callable[[str], str]
    """A text as a literal."""
    kinds: Mapping[str, Kind]
    """By type of a column. Empty if columns have no types."""
    create: tuple[str, ...]
    """Statements that create a ``{table}`` with an ``{index}``."""
    create_registry: str
    add: str = "INSERT INTO {table} VALUES ({values}) ON CONFLICT DO NOTHING"
    """Insert a row unless its key exists."""
    table_option: str = "?table=name"
    """How to choose another table."""
    errors: tuple[type[Exception], ...]
    """All errors of the driver."""
    is_conflict: Callable[[Exception], bool]
    """Whether another process interfered: a deadlock, or a table that changed since it was checked."""
    is_retryable: Callable[[Exception], bool]


class TableColumn(NamedTuple):
    """A column as the database describes it. ``is_key``: it belongs to the primary key."""

    name: str
    type: str
    is_key: bool


class Target(NamedTuple):
    """The table that a batch goes to."""

    table: str
    """As in a statement."""
    run: str
    replaces: bool
    """Whether a row with the same key is replaced. Otherwise it stays."""
    replaced: str = ""
    """A condition: the rows with the same keys that are deleted first."""

    def deletion(self, keys: Iterable[str]) -> str:
        """The statement that deletes the rows that others with these keys replace."""
        return f"DELETE FROM {self.table} WHERE {KEY} IN ({_listed(keys)}) AND ({self.replaced})"


class Connection(Protocol):
    """One connection of a driver.

    The methods up to ``run`` are called by the event loop, the others only by steps that ``run`` runs. A driver that
    blocks runs these in a thread: there no call waits, and the whole transaction needs only one switch of threads.
    """

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def discard(self) -> bool:
        """Close it at once, without asking the server: after an error or a cancellation its state is unknown. False if
        its state is known: it stays open, without a transaction."""
        ...

    def explain(self, exc: Exception) -> str:
        """Why a call failed, and what to do."""
        ...

    async def run(self, steps: Coroutine[Any, Any, T]) -> T: ...

    async def pause(self, seconds: float) -> None: ...

    async def begin(self, tables: Sequence[str] = (), statement: str = "", longer: int = 1) -> int:
        """Begin a transaction, lock the tables against changes of their columns if that is possible here, and run a
        statement. Return how many rows it changed."""
        ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...

    async def execute(self, statement: str, longer: int = 1) -> int:
        """Return how many rows it changed. It may take ``longer`` times the timeout."""
        ...

    async def fetch(self, statement: str, longer: int = 1) -> Rows: ...

    def exclusive(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold the lock of a table: only one process at a time has it. If the steps fail, roll back."""
        ...

    async def columns(self, table: str, *, locks: bool = False) -> Sequence[TableColumn] | None:
        """The columns of a table; None if there is no such table. ``locks``: they do not change until the transaction
        ends."""
        ...

    def batch(self, rows: Iterable[Row]) -> Batch: ...

    async def insert(self, target: Target, columns: Columns, batch: Batch) -> int:
        """Write the rows of a batch, without the fields that have no column. Return how many rows were inserted, less
        those that were deleted before. Rows that do not fit are rejected in the batch."""
        ...

    async def alter(self, table: str, changes: Sequence[Change]) -> None: ...


def run_blocking(steps: Coroutine[Any, Any, T]) -> T:
    """Run steps whose calls block, and never wait for the event loop."""
    try:
        steps.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("a call to a blocking driver waited")


async def poll_lock(connection: Connection, name: str, take: str, timeout: float) -> None:
    """Poll for the lock of a table. A blocking wait could hang on a frozen server."""
    deadline = time.monotonic() + timeout * REWRITE_FACTOR
    while not (await connection.fetch(take))[0][0]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process is still changing the table {name!r}")
        await connection.pause(random.uniform(0.01, _MAX_PAUSE))


class _TableChangedError(Exception):
    """Another process changed a table since it was checked."""


class TableSink:
    """Writes items as rows. Each write is one durable transaction, so a flush only has to return the position.

    A write that is repeated changes nothing: it replaces the rows with the same keys.
    """

    def __init__(
        self,
        name: str,
        dialect: Dialect,
        connect: Callable[[], Connection],
        options: TableOptions | None = None,
        *,
        prefix: str = "",
    ) -> None:
        """``name`` is the database as messages show it, ``prefix`` the schema before the name of each table."""
        self._name = name
        self._dialect = dialect
        self._connect = connect
        self._options = options or TableOptions()
        self._prefix = prefix
        self._connection: Connection | None = None
        self._progress = WriteProgress(name, self._options.key)
        self._rejects = Rejects(name, self._options.on_reject)
        self._ready: set[str] = set()
        """The tables that had all columns when they were last checked."""
        self._known: dict[str, tuple[Sequence[TableColumn], Columns]] = {}
        self._blank: dict[str, dict[str, None]] = {}
        """By table, the fields that never had a value. They get a column when the run is finished."""

    # -- open and close

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        await self._disconnect()
        self._rejects.open()
        self._progress.open(state)
        self._connection = self._connect()
        async with self._errors() as connection:
            await connection.open()
            if self._options.table is not None:
                await connection.run(self._prepare(self._options.table, connection.batch(())))
        return None

    async def close(self, *, finished: bool) -> None:
        try:
            if finished and self._connection is not None:
                async with self._errors() as connection:
                    await connection.run(self._finish())
                self._rejects.finish()
        finally:
            await self._disconnect()

    async def _finish(self) -> None:
        stale_after = self._progress.stale_after()
        if stale_after is not None:
            await self._retried(partial(self._remove_stale, stale_after))
        for name, fields in self._blank.items():
            await self._prepare(name, self._connected.batch(()), fields)

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None, "not open"
        return self._connection

    async def _disconnect(self) -> None:
        self._forget_tables()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    def _forget_tables(self) -> None:
        self._ready.clear()
        self._known.clear()

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[Connection]:
        """Turn errors of the driver into a SinkError. Its ``__cause__`` is set if a retry can help."""
        connection = self._connected
        try:
            yield connection
        except BaseException as exc:
            self._forget_tables()
            if connection.discard():
                self._connection = None
            if not isinstance(exc, self._dialect.errors):
                raise
            error = SinkError(f"can't write {self._name}: {connection.explain(exc)}")
            raise error from (exc if self._dialect.is_retryable(exc) else None)

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if not items:
            return
        tables, rejects = rows_by_table(items, self._options)
        async with self._errors() as connection:
            rejects += await connection.run(self._write(items, tables))
        self._progress.wrote(items)
        self._rejects.add(rejects)

    async def flush(self) -> bytes:
        """Return the position. Every write was already durable."""
        self._rejects.flush()
        return self._progress.flush()

    async def _write(self, items: Sequence[LoggedItem], tables: Mapping[str, Sequence[Row]]) -> list[Reject]:
        """Write the rows of each table in one transaction. Return the items that do not fit."""
        stale_after = self._progress.stale_after(items)
        if stale_after is not None:
            await self._retried(partial(self._remove_stale, stale_after))
        batches = {name: self._connected.batch(rows) for name, rows in tables.items()}
        await self._retried(partial(self._write_batches, batches))
        return [reject for batch in batches.values() for reject in batch.rejects]

    async def _write_batches(self, batches: Mapping[str, Batch]) -> None:
        connection = self._connected
        for name, batch in batches.items():
            if name not in self._ready:
                await self._prepare(name, batch)
        await connection.begin([self._quoted(name) for name in batches])
        for name, batch in batches.items():
            columns = await self._columns(name, locks=True)
            if columns is None or columns.changes(batch.kinds):
                self._ready.discard(name)
                raise _TableChangedError(name)
            self._note_blank(name, batch.blank(columns))
            await connection.insert(self._target(name, batch), columns, batch)
        await connection.commit()

    def _target(self, name: str, batch: Batch) -> Target:
        """With a key chosen by the user, the rows that the batch replaces are deleted first: they may be of other
        runs and have other fields. A row of a later item of this run stays."""
        replaced = f"{RUN} <> {self._run} OR {SEQ} <= {batch.last}" if self._options.key else ""
        return Target(self._quoted(name), self._options.run, not self._options.key, replaced)

    def _note_blank(self, name: str, fields: Iterable[str]) -> None:
        for field in fields:
            blank = self._blank.setdefault(name, {})
            if len(blank) < self._options.max_columns:
                blank[field] = None

    async def _retried(self, transaction: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a transaction, again if another process interfered."""
        left = _MAX_ATTEMPTS
        while True:
            left -= 1
            try:
                return await transaction()
            except _TableChangedError as exc:
                if not left:
                    raise SinkError(
                        f"can't write {self._name}: other processes changed the table {exc.args[0]!r} during each of "
                        f"{_MAX_ATTEMPTS} attempts"
                    ) from None
            except self._dialect.errors as exc:
                if not left or not self._dialect.is_conflict(exc):
                    raise
                self._forget_tables()
            await self._connected.rollback()
            await self._connected.pause(random.uniform(0, _MAX_PAUSE))

    async def _remove_stale(self, seq: int) -> None:
        """Remove the rows of this run after item ``seq``. The item log has their items, or, after a rewind, their pages
        are crawled again.

        With a key chosen by the user, mark them as written at ``seq`` instead, so that a newer item replaces them. The
        rows that they once replaced are gone.
        """
        connection = self._connected
        await connection.begin(longer=REWRITE_FACTOR)
        for name in await self._tables():
            table = self._quoted(name)
            verb = f"UPDATE {table} SET {SEQ} = {seq}" if self._options.key else f"DELETE FROM {table}"
            count = await connection.execute(f"{verb} WHERE {RUN} = {self._run} AND {SEQ} > {seq}", REWRITE_FACTOR)
            if count:
                log.debug("%s: removed %d rows after item %d, the last saved position", name, count, seq)
        await connection.commit()

    # -- tables

    @property
    def _run(self) -> str:
        """The run as a literal."""
        return self._dialect.string(self._options.run)

    def _quoted(self, name: str) -> str:
        return self._prefix + self._dialect.quote(self._dialect.naming.fit(name))

    async def _tables(self) -> list[str]:
        """The tables of this output that exist."""
        names = [self._options.table] if self._options.table is not None else await self._registered()
        return [name for name in names if await self._columns(name) is not None]

    async def _registered(self) -> list[str]:
        """The tables that were created for types of items."""
        if await self._connected.columns(self._quoted(REGISTRY)) is None:
            return []
        names = await self._connected.fetch(f"SELECT name FROM {self._quoted(REGISTRY)}")
        return list(dict.fromkeys(self._dialect.naming.fit(name) for (name,) in names))

    async def _register(self, name: str) -> None:
        registry = self._quoted(REGISTRY)
        if await self._connected.columns(registry) is None:
            await self._connected.execute(self._dialect.create_registry.format(table=registry))
        values = self._dialect.string(self._dialect.naming.fit(name))
        await self._connected.execute(self._dialect.add.format(table=registry, values=values))

    async def _columns(self, name: str, *, locks: bool = False) -> Columns | None:
        """The columns of a table; None if there is no such table. SinkError for one that no sink created."""
        described = await self._connected.columns(self._quoted(name), locks=locks)
        if described is None:
            return None
        if [column.name for column in described if column.is_key] != [KEY] or not {
            column.name for column in described
        }.issuperset(SYSTEM_COLUMNS):
            raise foreign_table(self._name, name, self._dialect.table_option)
        known = self._known.get(name)
        if known is None or known[0] != described:
            types = {column.name: column.type for column in described}
            kinds = {column: self._dialect.kinds.get(type_.lower()) for column, type_ in types.items()}
            known = self._known[name] = described, Columns(self._dialect.naming, kinds, types)
        return known[1]

    async def _prepare(self, name: str, batch: Batch, blank: Iterable[str] = ()) -> None:
        """Create the table, and add or widen columns so that the fields of the batch fit."""
        limit = self._options.max_columns
        connection, table = self._connected, self._quoted(name)
        async with connection.exclusive(self._dialect.naming.fit(name)):
            self._known.pop(name, None)
            columns = await self._columns(name)
            if columns is None:
                index = self._dialect.quote(self._dialect.naming.fit(f"{name}_run_seq"))
                for statement in self._dialect.create:
                    await connection.execute(statement.format(table=table, index=index))
                columns = await self._columns(name)
                assert columns is not None
            if self._options.table is None:
                await self._register(name)
            batch.fit(columns, limit)
            blank = list(blank)[: columns.room(limit)]
            for column in columns.maybe_exact(batch.kinds):
                values = large_integers(table, self._dialect.quote(column))
                if not (await connection.fetch(values, REWRITE_FACTOR))[0][0]:
                    columns.kinds[column] = Kind.INT
            if changes := columns.changes(batch.kinds, blank):
                await connection.alter(table, changes)
            self._known.pop(name, None)
        self._ready.add(name)


def _listed(keys: Iterable[str]) -> str:
    """Keys as literals. They have no character that a database escapes."""
    return ", ".join(f"'{key}'" for key in keys)
