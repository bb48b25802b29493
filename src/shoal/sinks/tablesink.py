"""The sink that writes items as rows of tables, in SQLite, PostgreSQL and MySQL.

`TableSink` has the steps: open at a saved state, delete stale rows, write, change columns, flush, close, count. What
differs between databases is in a `Dialect` (a value) and a `Connection` (one class per driver). `shoal.sinks.tables`
chooses the table and the column for a value, and `shoal.sinks.keys` the row.

Each write is one transaction. It first locks the tables against changes of their columns, and reads the columns. If one
is missing or too narrow, the sink rolls back, changes the table (one process at a time), and tries again. So any number
of runs can write to one table.

The table ``_shoal_outputs`` in the same database has a row for each output of a run, with the epoch of its newest
writer and the number of its last item. Each transaction moves this number on, if the number and the epoch are those
that the writer left. So a late writer changes nothing, and the writer notices a database that was set back. An export
has no epoch: it leaves this row alone, and writes so that no other writer of the same rows can lose one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

from shoal.errors import OutputTakenError, SinkError
from shoal.ports import LoggedItem, OutputCount
from shoal.sinks.dialects import MAX_PAUSE, REWRITE_FACTOR, Connection, Dialect, Rows, TableColumn, Target, listed_keys
from shoal.sinks.keys import (
    KEY,
    OUTPUTS,
    REGISTRY,
    RUN,
    SEQ,
    SYSTEM_COLUMNS,
    Reject,
    Rejects,
    SavedProgress,
    TableOptions,
    WriteProgress,
    decode_progress,
    read_state,
)
from shoal.sinks.tables import (
    Batch,
    Columns,
    Kind,
    Row,
    foreign_table,
    large_integers,
    rows_by_table,
)
from shoal.system import chance

log = logging.getLogger("shoal.sinks")

T = TypeVar("T")

_MAX_ATTEMPTS = 20
"""How often to try a transaction while other processes change or lock its tables."""
_ROW_KEY = ("run", "output", "log")
_EXPORTED = -1
"""The number of the log in the row for exports of missing items."""
_ROW = (*_ROW_KEY, "epoch", "seq", "rejected")
"""The columns of ``_shoal_outputs``."""


class _TableChangedError(Exception):
    """Another process has changed a table since it was checked."""


class _SetBackError(Exception):
    """The database is not as this writer left it."""


class _TableGoneError(_SetBackError):
    """A table that had rows of this output no longer exists."""


class TableSink:
    """Writes items as rows. Each write is one durable transaction, so a flush only returns the position.

    A repeated write changes nothing: it replaces the rows with the same keys.
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
        """``name``: the database as messages show it. ``prefix``: the schema before the name of each table."""
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
        self._written: set[str] = set()
        """The tables that got rows since the sink was opened."""
        self._known: dict[str, tuple[Sequence[TableColumn], Columns]] = {}
        self._blank: dict[str, dict[str, None]] = {}
        """By table, the fields that have had no value. They get a column when the run is finished."""
        self.added = 0
        """How many rows an export of missing items has added."""

    # -- open and close

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        await self._disconnect()
        self._rejects.open()
        self._written.clear()
        self._progress.open(state, epoch)
        self._connection = self._connect()
        async with self._errors() as connection:
            await connection.open()
            return await connection.run(self._open_output())

    def check_key(self, state: bytes) -> None:
        """Raise SinkError if the run itself writes these tables with another key. ``state``: that of the run."""
        WriteProgress(self._name, self._options.key).open(state, 0)

    async def _open_output(self) -> int | None:
        table, set_back_to = self._options.table, None
        if not self._options.export:
            await self._prepare_outputs()
            set_back_to = await self._retried(partial(self._take_row, await self._lost_tables()))
            if table is not None and await self._is_output("") and self._is_named(table, await self._registered()):
                raise self._written_twice(table)
        if table is not None and await self._columns(table) is None:
            await self._prepare(table, self._connected.batch(()))
        return set_back_to

    async def close(self, *, finished: bool) -> None:
        try:
            if finished and self._connection is not None:
                async with self._errors() as connection:
                    await connection.run(self._or_set_back(self._finish))
                self._rejects.finish()
        finally:
            await self._disconnect()

    async def _finish(self) -> None:
        stale_after = self._progress.stale_after()
        if self._options.export == "all":
            await self._retried(self._remove_unexported)
        elif self._options.export == "missing":
            await self._retried(self._record_completed)
        elif not self._options.export and stale_after is not None:
            await self._retried(partial(self._remove_stale, stale_after))
        for name in await self._lost_tables():
            if name in self._written or not self._options.export:
                raise _TableGoneError(name)
        for name, fields in self._blank.items():
            await self._prepare(name, self._connected.batch(()), fields)
        if not self._options.export:
            await self._check_row()

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
    async def _errors(self, verb: str = "write") -> AsyncIterator[Connection]:
        """Turn errors of the driver into a SinkError. It has a ``__cause__`` if a retry can help."""
        connection = self._connected
        try:
            yield connection
        except BaseException as exc:
            self._forget_tables()
            if connection.discard():
                self._connection = None
            if not isinstance(exc, self._dialect.errors):
                raise
            error = SinkError(f"can't {verb} {self._name}: {connection.explain(exc)}")
            raise error from (exc if self._dialect.is_retryable(exc) else None)

    # -- the row that fences the output

    @cached_property
    def _outputs(self) -> str:
        return self._quoted(OUTPUTS)

    @cached_property
    def _row_key(self) -> tuple[str, str, str]:
        """Run, output and log, as literals. A run has one log."""
        table = self._options.table
        return self._run, self._dialect.string("" if table is None else self._dialect.naming.fit(table)), "0"

    @cached_property
    def _is_row(self) -> str:
        """The condition for the row of this output."""
        return " AND ".join(f"{name} = {value}" for name, value in zip(_ROW_KEY, self._row_key, strict=True))

    async def _prepare_outputs(self) -> None:
        """Create the table ``_shoal_outputs`` unless it exists."""
        connection = self._connected
        try:
            columns = await connection.columns(self._outputs)
            if columns is None:
                async with connection.exclusive(OUTPUTS):
                    columns = await connection.columns(self._outputs)
                    if columns is None:
                        await connection.execute(self._dialect.create_outputs.format(table=self._outputs))
            elif not {column.name for column in columns}.issuperset(_ROW):
                raise SinkError(f"can't write {self._name}: Shoal did not create its table {OUTPUTS}; rename it")
        except self._dialect.errors as exc:
            if not self._dialect.is_denied(exc):
                raise
            await connection.rollback()
            user = (await connection.fetch(self._dialect.user))[0][0]
            raise SinkError(
                f"can't write {self._name}: it needs the table {OUTPUTS}, and permission was denied "
                f"({connection.explain(exc)}). Ask an administrator to create it and to grant access:\n"
                f"{self._dialect.create_outputs.format(table=self._outputs)};\n"
                f"GRANT SELECT, INSERT, UPDATE ON {self._outputs} TO {user};"
            ) from None

    async def _take_row(self, lost: Sequence[str]) -> int | None:
        """Store the epoch of this writer in the row. If the output was set back, return its position."""
        connection, progress = self._connected, self._progress
        await connection.begin()
        values = ", ".join([*self._row_key, str(progress.epoch), "0", "0"])
        is_new = await connection.execute(self._dialect.add.format(table=self._outputs, values=values))
        epoch, position, rejected = (
            await connection.fetch(
                f"SELECT epoch, seq, rejected FROM {self._outputs} WHERE {self._is_row}{self._dialect.for_update}"
            )
        )[0]
        if epoch > progress.epoch:
            await connection.rollback()
            raise OutputTakenError(self._name, epoch)
        position = progress.common_position(epoch, position)
        if lost := [name for name in lost if await self._columns(name) is None]:
            position = rejected = 0
            await self._reset_outputs(lost)
        elif is_new and progress.of_earlier_version is not None:
            position = await self._position_of_earlier_version(progress.of_earlier_version)
        await connection.execute(
            f"UPDATE {self._outputs} SET epoch = {progress.epoch}, seq = {position}, rejected = {rejected} "
            f"WHERE {self._is_row}"
        )
        await connection.commit()
        return progress.resume(position, rejected)

    async def _position_of_earlier_version(self, saved: int) -> int:
        """The last item in tables that an earlier version wrote. With a key of the user, the rows cannot tell: other
        runs may have replaced them."""
        if self._options.key:
            return saved
        last = 0
        for name in await self._tables():
            highest = f"SELECT max({SEQ}) FROM {self._quoted(name)} WHERE {RUN} = {self._run}"
            last = max(last, (await self._connected.fetch(highest))[0][0] or 0)
        return min(saved, last)

    async def _begin(self, position: int, rejected: int, tables: Sequence[str] = (), longer: int = 1) -> None:
        """Begin a transaction that moves the position in the row, if the row is as this writer left it."""
        progress = self._progress
        statement = (
            f"UPDATE {self._outputs} SET seq = {position}, rejected = {rejected} "
            f"WHERE {self._is_row} AND epoch = {progress.epoch} AND seq = {progress.position}"
        )
        if await self._connected.begin(tables, statement, longer):
            return
        try:
            await self._check_row()  # MySQL does not count a row that already has these values
        except SinkError:
            await self._connected.rollback()  # so that a newer writer need not wait for the end of this connection
            raise

    async def _commit(self, position: int) -> None:
        await self._connected.commit()
        self._progress.position = position

    async def _check_row(self) -> None:
        """Check that the row is as this writer left it. OutputTakenError if there is a newer writer, else SinkError."""
        if await self._connected.columns(self._outputs) is None:
            raise self._set_back(f"the table {OUTPUTS} is gone")
        rows = await self._connected.fetch(f"SELECT epoch, seq FROM {self._outputs} WHERE {self._is_row}")
        if rows == [(self._progress.epoch, self._progress.position)]:
            return
        if rows and rows[0][0] > self._progress.epoch:
            raise OutputTakenError(self._name, rows[0][0])
        raise self._set_back(f"its row in {OUTPUTS} is another one")

    def _set_back(self, reason: str) -> SinkError:
        """The error after which the output is opened again."""
        error = SinkError(f"{self._name} was set back, or another program changed it: {reason}")
        error.__cause__ = _SetBackError(reason)
        return error

    async def _or_set_back(self, steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run steps. If a table is gone, write all items of this output again."""
        try:
            await steps()
        except _TableGoneError as gone:
            await self._connected.rollback()
            if not self._options.export:
                await self._retried(self._start_over)
            raise self._set_back(f"the table {gone} is gone") from gone

    async def _start_over(self) -> None:
        await self._begin(0, 0)
        await self._reset_outputs(await self._lost_tables())
        await self._commit(0)

    async def _reset_outputs(self, lost: Sequence[str]) -> None:
        """Set the position to 0 for all runs that may have written to a lost table. Otherwise only the first run that
        needs the table would notice."""
        if self._options.table is None and lost:
            registry = self._quoted(REGISTRY)
            names = [name for (name,) in await self._connected.fetch(f"SELECT name FROM {registry}")]
            gone = [self._dialect.string(name) for name in names if self._dialect.naming.fit(name) in lost]
            await self._connected.execute(f"DELETE FROM {registry} WHERE name IN ({', '.join(gone)})")
        is_lost = f"output = {self._row_key[1]} AND seq > 0"
        if await self._connected.fetch(f"SELECT 1 FROM {self._outputs} WHERE {is_lost}"):  # MySQL would lock all rows
            await self._connected.execute(f"UPDATE {self._outputs} SET seq = 0, rejected = 0 WHERE {is_lost}")

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        if not items:
            return
        tables, rejects = rows_by_table(items, self._options)
        async with self._errors() as connection:
            await connection.run(self._or_set_back(partial(self._write, items, tables, rejects)))
        self._progress.wrote(items, rejects)
        self._rejects.add(rejects)

    async def flush(self) -> bytes:
        """Return the position. Every write was already durable."""
        self._rejects.flush()
        return self._progress.flush()

    async def _write(
        self, items: Sequence[LoggedItem], tables: Mapping[str, Sequence[Row]], rejects: list[Reject]
    ) -> None:
        """Write the rows of each table in one transaction. Add the items that do not fit to ``rejects``."""
        stale_after = self._progress.stale_after(items)
        if stale_after is not None and not self._options.export:
            await self._retried(partial(self._remove_stale, stale_after))
        batches = {name: self._connected.batch(rows) for name, rows in tables.items()}
        if self._options.export:
            await self._retried(partial(self._export_batches, batches, items, tables))
        else:
            await self._retried(partial(self._write_batches, batches, items, rejects))
        rejects += _rejects_of(batches)
        self._written.update(batches)

    async def _write_batches(
        self, batches: Mapping[str, Batch], items: Sequence[LoggedItem], rejects: Sequence[Reject]
    ) -> None:
        await self._prepare_all(batches)
        position, rejected = self._progress.after(items, [*rejects, *_rejects_of(batches)])
        await self._begin(position, rejected, [self._quoted(name) for name in batches])
        await self._insert(batches)
        _, all_rejected = self._progress.after(items, [*rejects, *_rejects_of(batches)])
        if all_rejected != rejected:
            await self._connected.execute(f"UPDATE {self._outputs} SET rejected = {all_rejected} WHERE {self._is_row}")
        await self._commit(position)

    async def _prepare_all(self, batches: Mapping[str, Batch]) -> None:
        for name, batch in batches.items():
            if name not in self._ready:
                await self._prepare(name, batch)

    async def _insert(self, batches: Mapping[str, Batch]) -> int:
        """Write rows in a transaction. If rows with a known key stay, return the number of new rows."""
        count = 0
        for name, batch in batches.items():
            columns = await self._columns(name, locks=True)
            if columns is None or columns.changes(batch.kinds):
                self._ready.discard(name)
                raise _TableChangedError(name)
            self._note_blank(name, batch.blank(columns))
            count += await self._connected.insert(self._target(name, batch), columns, batch)
        return count

    def _target(self, name: str, batch: Batch) -> Target:
        """Where the batch goes, and which rows it replaces. With a key of the user, these are deleted first: they may
        be of other runs and have other fields. A row of a later item of this run stays."""
        replaced = ""
        if self._options.key:
            own, earlier = f"{RUN} = {self._run}", f"{SEQ} <= {batch.last}"
            replaced = f"{own} AND {earlier}" if self._options.export == "missing" else f"NOT ({own}) OR {earlier}"
        replaces = not self._options.key and self._options.export != "missing"
        return Target(self._quoted(name), self._options.run, replaces, replaced)

    def _note_blank(self, name: str, fields: Iterable[str]) -> None:
        for field in fields:
            blank = self._blank.setdefault(name, {})
            if len(blank) < self._options.max_columns:
                blank[field] = None

    async def _retried(self, transaction: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a transaction. Repeat it if another process interferes."""
        attempts_left = _MAX_ATTEMPTS
        while True:
            attempts_left -= 1
            try:
                return await transaction()
            except _TableChangedError as exc:
                if not attempts_left:
                    raise SinkError(
                        f"can't write {self._name}: other processes changed the table {exc.args[0]!r} during each of "
                        f"{_MAX_ATTEMPTS} attempts"
                    ) from None
            except self._dialect.errors as exc:
                if not attempts_left or not self._dialect.is_conflict(exc):
                    raise
                self._forget_tables()
            await self._connected.rollback()
            if not self._options.export and await self._connected.columns(self._outputs) is None:
                raise self._set_back(f"the table {OUTPUTS} is gone")
            await self._connected.pause(chance.uniform(0, MAX_PAUSE))

    async def _remove_stale(self, seq: int) -> None:
        """Remove the rows of this run after item ``seq``. Their items are in the log, or, after a rewind, their pages
        are crawled again.

        With a key of the user, mark the rows as written at ``seq`` instead, so that a newer item replaces them: the
        rows that they replaced are gone.
        """
        await self._begin(seq, self._progress.rejected, longer=REWRITE_FACTOR)
        for name in await self._tables():
            if count := await self._remove_rows(name, f"{SEQ} > {seq}", seq):
                log.debug("%s: removed %d rows after item %d, the last saved position", name, count, seq)
        await self._commit(seq)

    async def _remove_rows(self, name: str, condition: str, seq: int) -> int:
        table = self._quoted(name)
        verb = f"UPDATE {table} SET {SEQ} = {seq}" if self._options.key else f"DELETE FROM {table}"
        return await self._connected.execute(f"{verb} WHERE {RUN} = {self._run} AND {condition}", REWRITE_FACTOR)

    # -- export

    async def _export_batches(
        self, batches: Mapping[str, Batch], items: Sequence[LoggedItem], tables: Mapping[str, Sequence[Row]]
    ) -> None:
        """Write rows without a fence: the run or another export may write the same rows at the same time."""
        await self._prepare_all(batches)
        await self._connected.begin([self._quoted(name) for name in batches], longer=REWRITE_FACTOR)
        added = await self._insert(batches)
        if self._options.export == "all" and not self._options.key:  # rows with a key stay until they are replaced
            rows_of = {self._dialect.naming.fit(name): rows for name, rows in tables.items()}
            for name in await self._tables():
                within = f"{SEQ} BETWEEN {items[0].seq} AND {items[-1].seq}"
                if keys := listed_keys(row.key for row in rows_of.get(name, ())):
                    within += f" AND {KEY} NOT IN ({keys})"
                await self._remove_rows(name, within, 0)
        await self._connected.commit()
        self.added += added

    async def _remove_unexported(self) -> None:
        """Remove the rows of this run after the last item of its log, unless the run itself writes this output."""
        seq = self._progress.last_written
        if seq is None:
            return
        after = f"{SEQ} > {seq}"
        if await self._connected.columns(self._outputs) is not None:
            after += f" AND NOT EXISTS (SELECT 1 FROM {self._outputs} WHERE {self._is_row})"
        await self._connected.begin(longer=REWRITE_FACTOR)
        for name in await self._tables():
            await self._remove_rows(name, after, seq)
        await self._connected.commit()

    async def _record_completed(self) -> None:
        """Record that the output has all items up to the last one of the log. The export has a row of its own: the
        row of the run belongs to its drainer, which may be writing now."""
        last = self._progress.last_written
        if last is None or self._progress.first_written != 1:
            return
        await self._prepare_outputs()
        await self._connected.begin()
        values = ", ".join([*self._row_key[:2], str(_EXPORTED), "0", "0", "0"])
        await self._connected.execute(self._dialect.add.format(table=self._outputs, values=values))
        await self._connected.execute(f"UPDATE {self._outputs} SET seq = {last} WHERE {self._is_export_row}")
        await self._connected.commit()

    @cached_property
    def _is_export_row(self) -> str:
        run, output, _ = self._row_key
        return f"run = {run} AND output = {output} AND log = {_EXPORTED}"

    # -- count

    async def count(self, state: bytes) -> OutputCount:
        saved = read_state(state, decode_progress, self._name)
        sink = TableSink(self._name, self._dialect, self._connect, self._options, prefix=self._prefix)
        sink._connection = self._connect()
        try:
            async with sink._errors("read") as connection:
                await connection.open(creates=False)
                return await connection.run(sink._count_rows(saved))
        finally:
            await sink._disconnect()

    async def _count_rows(self, saved: SavedProgress | None) -> OutputCount:
        rows: Rows = []
        if await self._connected.columns(self._outputs) is not None:
            condition = f"{self._is_row} OR {self._is_export_row}"
            rows = await self._connected.fetch(f"SELECT seq, rejected FROM {self._outputs} WHERE {condition}")
        items = 0
        for name in await self._tables():
            count = f"SELECT count(*) FROM {self._quoted(name)} WHERE {RUN} = {self._run}"
            items += (await self._connected.fetch(count, REWRITE_FACTOR))[0][0]
        was_fenced = saved is not None and saved.is_fenced
        position, rejected = (0 if was_fenced else None), 0
        if rows:
            position, rejected = max(seq for seq, _ in rows), max(count for _, count in rows)
        key = self._options.key if saved is None else tuple(saved.key)
        return OutputCount(items=items, position=position, rejected=rejected, key=key)

    # -- tables

    @cached_property
    def _run(self) -> str:
        """The run as a literal."""
        return self._dialect.string(self._options.run)

    def _quoted(self, name: str) -> str:
        return self._prefix + self._dialect.quote(self._dialect.naming.fit(name))

    async def _tables(self) -> list[str]:
        """The tables of this output that exist."""
        table = self._options.table
        names = [self._dialect.naming.fit(table)] if table is not None else await self._registered()
        return [name for name in names if await self._columns(name) is not None]

    async def _registered(self) -> list[str]:
        """The tables that were created for types of items."""
        if await self._connected.columns(self._quoted(REGISTRY)) is None:
            return []
        names = await self._connected.fetch(f"SELECT name FROM {self._quoted(REGISTRY)}")
        return list(dict.fromkeys(self._dialect.naming.fit(name) for (name,) in names))

    async def _lost_tables(self) -> list[str]:
        """The tables of this output that were created and no longer exist. A named table counts as created."""
        names = [self._options.table] if self._options.table is not None else await self._registered()
        return [name for name in names if await self._columns(name) is None]

    async def _is_expected(self, name: str) -> bool:
        """Whether the table was created before."""
        return self._options.table is not None or self._dialect.naming.fit(name) in await self._registered()

    async def _register(self, name: str) -> None:
        registry = self._quoted(REGISTRY)
        if await self._connected.columns(registry) is None:
            await self._connected.execute(self._dialect.create_registry.format(table=registry))
        values = self._dialect.string(self._dialect.naming.fit(name))
        await self._connected.execute(self._dialect.add.format(table=registry, values=values))
        if not self._options.export and await self._is_output(name):
            raise self._written_twice(name)

    async def _is_output(self, name: str) -> bool:
        """Whether this run also has this output in the same database. It is a table, or "" for a table per type."""
        if await self._connected.columns(self._outputs) is None:  # somebody dropped it
            return False
        rows = await self._connected.fetch(f"SELECT output FROM {self._outputs} WHERE run = {self._run} AND log = 0")
        return self._is_named(name, [output for (output,) in rows])

    def _written_twice(self, table: str) -> SinkError:
        """The error if two outputs write one table: each would remove rows of the other."""
        return SinkError(
            f"can't write {self._name}: two outputs of this run write its table {table!r}, one for a type of items and "
            f"one for all of them; choose another name in {self._dialect.table_option}"
        )

    def _is_named(self, name: str, names: Iterable[str]) -> bool:
        """Whether the database considers one of these names equal to ``name``."""
        naming = self._dialect.naming
        return naming.fold(naming.fit(name) if name else "") in map(naming.fold, names)

    async def _columns(self, name: str, *, locks: bool = False) -> Columns | None:
        """The columns of a table, or None if it does not exist. SinkError if no sink has created it."""
        table_columns = await self._connected.columns(self._quoted(name), locks=locks)
        if table_columns is None:
            return None
        if [column.name for column in table_columns if column.is_key] != [KEY] or not {
            column.name for column in table_columns
        }.issuperset(SYSTEM_COLUMNS):
            raise foreign_table(self._name, name, self._dialect.table_option)
        cached = self._known.get(name)
        if cached is None or cached[0] != table_columns:
            types = {column.name: column.type for column in table_columns}
            kinds = {column: self._dialect.kinds.get(type_.lower()) for column, type_ in types.items()}
            cached = self._known[name] = table_columns, Columns(self._dialect.naming, kinds, types)
        return cached[1]

    async def _prepare(self, name: str, batch: Batch, blank: Iterable[str] = ()) -> None:
        """Create the table, and add or widen columns so that the fields of the batch fit."""
        limit = self._options.max_columns
        connection, table = self._connected, self._quoted(name)
        async with connection.exclusive(self._dialect.naming.fit(name)):
            self._known.pop(name, None)
            columns = await self._columns(name)
            if columns is None:
                if self._progress.position and await self._is_expected(name):
                    raise _TableGoneError(name)
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


def _rejects_of(batches: Mapping[str, Batch]) -> list[Reject]:
    return [reject for batch in batches.values() for reject in batch.rejects]
