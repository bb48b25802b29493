"""What differs between the databases of `shoal.sinks.tablesink`: a value per dialect, and a connection per driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from shoal.sinks.keys import KEY
from shoal.sinks.tables import Batch, Change, Columns, Kind, Naming, Row
from shoal.system import chance, clock

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]

REWRITE_FACTOR = 20
"""The factor for the timeout of a statement that changes many rows, such as a change of a column's type."""
MAX_PAUSE = 0.05


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
    create_outputs: str
    for_update: str = " FOR UPDATE"
    """How a query locks its rows. Empty if a transaction locks the whole database."""
    user: str = ""
    """The query for the name of the user, as GRANT needs it."""
    add: str = "INSERT INTO {table} VALUES ({values}) ON CONFLICT DO NOTHING"
    """Insert a row unless its key exists."""
    table_option: str = "?table=name"
    """How to choose another table."""
    errors: tuple[type[Exception], ...]
    """All errors of the driver."""
    is_conflict: Callable[[Exception], bool]
    """Whether another process interfered: a deadlock, or a table that changed since it was checked."""
    is_retryable: Callable[[Exception], bool]
    is_denied: Callable[[Exception], bool] = lambda exc: False
    """Whether the user lacks a right."""


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
        return f"DELETE FROM {self.table} WHERE {KEY} IN ({listed_keys(keys)}) AND ({self.replaced})"


class Connection(Protocol):
    """One connection of a driver.

    The methods up to ``run`` are called by the event loop, the others only by steps that ``run`` runs. A driver that
    blocks runs these in a thread: there no call waits, and the whole transaction needs only one switch of threads.
    The methods with a body fit a driver that does not block.
    """

    async def open(self, *, creates: bool = True) -> None:
        """``creates``: a database that is a file is created if it is missing. Otherwise it is read as an empty one."""
        ...

    async def close(self) -> None: ...

    def discard(self) -> bool:
        """Close it at once, without asking the server: after an error or a cancellation its state is unknown. False if
        its state is known: it stays open, without a transaction."""
        ...

    def explain(self, exc: Exception) -> str:
        """Why a call failed, and what to do."""
        ...

    async def run(self, steps: Coroutine[Any, Any, T]) -> T:
        return await steps

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def begin(self, tables: Sequence[str] = (), statement: str = "", longer: int = 1) -> int:
        """Begin a transaction, lock the tables against changes of their columns if that is possible here, and run a
        statement. Return how many rows it changed."""
        ...

    async def commit(self) -> None:
        await self.execute("COMMIT")

    async def rollback(self) -> None:
        await self.execute("ROLLBACK")

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

    def batch(self, rows: Iterable[Row]) -> Batch:
        return Batch(rows)

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
    deadline = clock.monotonic() + timeout * REWRITE_FACTOR
    while not (await connection.fetch(take))[0][0]:
        if clock.monotonic() > deadline:
            raise TimeoutError(f"another process is still changing the table {name!r}")
        await connection.pause(chance.uniform(0.01, MAX_PAUSE))


def quoted(name: str) -> str:
    """A name as standard SQL quotes it."""
    return '"' + name.replace('"', '""') + '"'


def listed_keys(keys: Iterable[str]) -> str:
    """Keys as literals. They have no character that a database escapes."""
    return ", ".join(f"'{key}'" for key in keys)
