"""A simulated database server for rows of items, and connections to it. Statements cross the network one by one."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from shoal.sinks.dialects import Rows, Target
from shoal.sinks.sqlite import SQLITE, SQLiteConnection
from shoal.sinks.tables import Columns, Row
from shoal.sinks.tablesink import TableSink

if TYPE_CHECKING:
    from shoal.testing.simulation.world import World

T = TypeVar("T")
_TIMEOUT = 10.0
"""Seconds after which a client gives up a statement."""
_IDLE = 30.0
"""Seconds after which the server ends a transaction whose client is silent."""


class ConnectionLostError(sqlite3.OperationalError):
    """The client does not know whether its last statement took effect."""


DIALECT = replace(
    SQLITE,
    is_retryable=lambda exc: isinstance(exc, ConnectionLostError) or "locked" in str(exc),
    table_option="?table=",
)


class SimulatedDatabase:
    """Has one file, and one transaction at a time. It can be set back to an older state."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.path = world.folder / "database"
        self.turn = asyncio.Lock()
        """For transactions."""
        self.connections: set[DatabaseConnection] = set()
        self._copy: Path | None = None

    def sink(self, url: str, options: object) -> TableSink:
        """A sink for the process that runs now."""
        return TableSink("the simulated database", DIALECT, lambda: DatabaseConnection(self))

    def back_up(self) -> None:
        """Copy the data."""
        if self.path.exists():
            self._copy = self.path.with_suffix(".copy")
            with sqlite3.connect(self.path) as source, sqlite3.connect(self._copy) as copy:
                source.backup(copy)

    def restore(self) -> bool:
        """Replace the data by the copy. The server restarts for it. False if there is no copy."""
        if self._copy is None:
            return False
        for connection in list(self.connections):
            connection.end()
        shutil.move(self._copy, self.path)
        self._copy = None
        return True


class DatabaseConnection(SQLiteConnection):
    """One connection to the server. Its transaction ends with it."""

    def __init__(self, database: SimulatedDatabase) -> None:
        super().__init__(str(database.path))
        self._server = database
        self._world = database.world
        self._calls: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        """What is on its way to the server, in order."""
        self._session: asyncio.Task[None] | None = None
        self._has_turn = False
        self._world.current.on_kill(self._hang_up)

    # -- the client

    async def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Have the server do something. ConnectionLostError if no answer arrives."""
        network, loop, caller = self._world.network, self._world.loop, self._world.current
        answered: asyncio.Future[T] = loop.create_future()

        def answer(result: T | None, error: Exception | None) -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(result)  # type: ignore[arg-type]
            else:
                answered.set_exception(error)

        async def execute() -> None:
            await asyncio.sleep(network.delay())
            result, error = None, None
            try:
                result = await work()
            except Exception as exc:  # every error is sent to the client
                error = exc
            if not network.loses():
                loop.call_later(network.delay(), answer, result, error, context=caller.context)

        if self._session is None:
            raise ConnectionLostError("the connection is closed")
        if not network.loses():
            self._calls.put_nowait(execute)
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await answered
        except TimeoutError:
            self._hang_up()
            raise ConnectionLostError(f"no answer for {_TIMEOUT:g} s") from None

    async def open(self, *, creates: bool = True) -> None:
        self._session = self._world.machine.start(self._serve())
        self._server.connections.add(self)
        await self._call(lambda: _as_coroutine(lambda: SQLiteConnection._open(self, creates)))

    async def close(self) -> None:
        self._hang_up()

    def discard(self) -> bool:
        self._hang_up()
        return True

    def explain(self, exc: Exception) -> str:
        return str(exc)

    def _hang_up(self) -> None:
        """Close the connection. The server notices when it has done what is on its way."""
        self._calls.put_nowait(self._leave)

    async def run(self, steps: Coroutine[Any, Any, T]) -> T:
        try:
            return await steps
        except Exception:
            with suppress(sqlite3.Error):
                await self.rollback()
            raise

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def begin(self, tables: Sequence[str] = (), statement: str = "", longer: int = 1) -> int:
        await self._call(self._begin)
        return await self.execute(statement) if statement else 0

    async def commit(self) -> None:
        await self._call(self._commit)

    async def rollback(self) -> None:
        await self._call(self._abort)

    async def execute(self, statement: str, longer: int = 1) -> int:
        return await self._call(lambda: SQLiteConnection.execute(self, statement))

    async def fetch(self, statement: str, longer: int = 1) -> Rows:
        return await self._call(lambda: SQLiteConnection.fetch(self, statement))

    async def _insert_alike(self, target: Target, columns: Columns, fields: Sequence[str], rows: list[Row]) -> int:
        await self._call(lambda: _as_coroutine(lambda: None))
        return await super()._insert_alike(target, columns, fields, rows)

    # -- the server

    async def _serve(self) -> None:
        """Execute one call after another. A client that is silent in a transaction loses its connection."""
        while self._session is not None:
            try:
                async with asyncio.timeout(_IDLE if self._has_turn else None):
                    call = await self._calls.get()
            except TimeoutError:
                self.end()
            else:
                await call()

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT / 2):
                await self._server.turn.acquire()
        except TimeoutError:
            raise sqlite3.OperationalError("database is locked") from None
        self._has_turn = True
        if self._session is None:  # it ended meanwhile
            self._end_turn()
        self._connected.execute("BEGIN IMMEDIATE")

    async def _commit(self) -> None:
        self._connected.execute("COMMIT")
        self._end_turn()

    async def _abort(self) -> None:
        self._roll_back()
        self._end_turn()

    async def _leave(self) -> None:
        self.end()

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._server.turn.release()

    def end(self) -> None:
        """End the connection from the side of the server. What was not committed is undone."""
        self._session = None
        self._server.connections.discard(self)
        if self._database is not None:
            self._database.close()
            self._database = None
        self._end_turn()

    @property
    def _connected(self) -> sqlite3.Connection:
        if self._database is None:
            raise ConnectionLostError("the server closed the connection")
        return self._database


async def _as_coroutine(work: Callable[[], T]) -> T:
    return work()
