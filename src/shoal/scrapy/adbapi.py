"""``twisted.enterprise.adbapi``: a pool of database connections, for pipelines that write to a database in threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any, Protocol

from shoal.scrapy.failure import Failure
from shoal.scrapy.values import Function

log = logging.getLogger("shoal.scrapy")

_OWN_OPTIONS = "cp_"
"""The prefix of the pool's own options. All others go to the database library."""


class Cursor(Protocol):
    """What the pool uses of a cursor."""

    def execute(self, *args: object, **kwargs: object) -> object: ...

    def fetchall(self) -> object: ...

    def close(self) -> object: ...


class Connection(Protocol):
    """What the pool uses of a connection."""

    def cursor(self) -> Cursor: ...

    def commit(self) -> object: ...

    def rollback(self) -> object: ...

    def close(self) -> object: ...


class Query:
    """The result of a call in a thread. You can await it. An error goes to the errback, or to the log if there is
    none."""

    def __init__(self, future: Future[object]) -> None:
        self._future = future
        self._is_handled = False
        future.add_done_callback(self._report)

    def addCallback(self, function: Function, *args: object, **kwargs: object) -> Query:
        """Call a function with the result, in the thread of the query."""

        def ended(future: Future[object]) -> None:
            if future.exception() is None:
                function(future.result(), *args, **kwargs)

        self._future.add_done_callback(ended)
        return self

    def addErrback(self, function: Function, *args: object, **kwargs: object) -> Query:
        """Call a function with the error as a Failure, in the thread of the query."""
        self._is_handled = True

        def ended(future: Future[object]) -> None:
            if (error := future.exception()) is not None:
                function(Failure(error), *args, **kwargs)

        self._future.add_done_callback(ended)
        return self

    def addCallbacks(self, callback: Function, errback: Function | None = None) -> Query:
        self.addCallback(callback)
        return self if errback is None else self.addErrback(errback)

    def addBoth(self, function: Function, *args: object, **kwargs: object) -> Query:
        return self.addCallback(function, *args, **kwargs).addErrback(function, *args, **kwargs)

    def __await__(self) -> Generator[object, None, Any]:
        import asyncio

        self._is_handled = True
        return asyncio.wrap_future(self._future).__await__()

    def _report(self, future: Future[object]) -> None:
        if not self._is_handled and (error := future.exception()) is not None:
            log.error("a query failed: %s: %s", type(error).__name__, error)


class ConnectionPool:
    """Connections of a database library, one for each thread of the pool."""

    def __init__(
        self, dbapiName: str, *args: object, cp_max: int = 5, cp_openfun: Function | None = None, **options: object
    ) -> None:
        """``dbapiName`` is the module of the library. Options that begin with ``cp_`` are the pool's own."""
        self.dbapiName = dbapiName
        self.dbapi = import_module(dbapiName)
        self._args = args
        self._options = {name: value for name, value in options.items() if not name.startswith(_OWN_OPTIONS)}
        self._opened = cp_openfun
        self._threads = ThreadPoolExecutor(cp_max, thread_name_prefix="shoal-adbapi")
        self._local = threading.local()
        self._connections: list[Connection] = []

    def runInteraction(self, interaction: Function, *args: object, **kwargs: object) -> Query:
        """Call a function with a cursor in a thread, and commit. An error rolls back."""
        return Query(self._threads.submit(self._interact, interaction, args, kwargs))

    def runQuery(self, *args: object, **kwargs: object) -> Query:
        """Run one query; the result is its rows."""

        def query(cursor: Cursor) -> object:
            cursor.execute(*args, **kwargs)
            return cursor.fetchall()

        return self.runInteraction(query)

    def runOperation(self, *args: object, **kwargs: object) -> Query:
        """Run one statement that has no result."""

        def operation(cursor: Cursor) -> None:
            cursor.execute(*args, **kwargs)

        return self.runInteraction(operation)

    def runWithConnection(self, function: Function, *args: object, **kwargs: object) -> Query:
        """Call a function with a connection in a thread, and commit."""
        return Query(self._threads.submit(self._connected, function, args, kwargs))

    def start(self) -> None:
        """Threads and connections are made when they are needed."""

    def connect(self) -> Connection:
        """Return the connection of this thread."""
        connection: Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            opened: Connection = self.dbapi.connect(*self._args, **self._options)
            connection = self._local.connection = opened
            self._connections.append(connection)
            if self._opened is not None:
                self._opened(connection)
        return connection

    def close(self) -> None:
        """Wait for the running and queued queries, and close the connections."""
        self._threads.shutdown(wait=True)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    finalClose = close

    def _interact(self, interaction: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        def work(connection: Connection) -> object:
            cursor = connection.cursor()
            try:
                return interaction(cursor, *args, **kwargs)
            finally:
                cursor.close()

        return self._connected(work, (), {})

    def _connected(self, function: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        connection = self.connect()
        try:
            result = function(connection, *args, **kwargs)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        return result
