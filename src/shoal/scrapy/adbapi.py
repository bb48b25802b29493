"""``twisted.enterprise.adbapi``: a pool of database connections, for pipelines that write to a database in threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

from shoal.scrapy.failure import Failure

log = logging.getLogger("shoal.scrapy")

_OWN_OPTIONS = "cp_"
"""Begins the names of the pool's own options. The others are for the database."""


class Query:
    """The result of a call in a thread. It can be awaited; errors go to the errback, or else to the log."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self._is_handled = False
        future.add_done_callback(self._report)

    def addCallback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Query:
        """Call a function with the result, in the thread of the query."""

        def ended(future: Future[Any]) -> None:
            if future.exception() is None:
                function(future.result(), *args, **kwargs)

        self._future.add_done_callback(ended)
        return self

    def addErrback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Query:
        """Call a function with the error as a Failure, in the thread of the query."""
        self._is_handled = True

        def ended(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                function(Failure(error), *args, **kwargs)

        self._future.add_done_callback(ended)
        return self

    def addCallbacks(self, callback: Callable[..., Any], errback: Callable[..., Any] | None = None) -> Query:
        self.addCallback(callback)
        return self if errback is None else self.addErrback(errback)

    def addBoth(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Query:
        return self.addCallback(function, *args, **kwargs).addErrback(function, *args, **kwargs)

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio

        self._is_handled = True
        return asyncio.wrap_future(self._future).__await__()

    def _report(self, future: Future[Any]) -> None:
        if not self._is_handled and (error := future.exception()) is not None:
            log.error("a query failed: %s: %s", type(error).__name__, error)


class ConnectionPool:
    """Connections of a database library, one for each thread of the pool."""

    def __init__(self, dbapiName: str, *args: Any, **options: Any) -> None:
        """``dbapiName`` is the module of the library. Options that begin with ``cp_`` are the pool's own."""
        self.dbapiName = dbapiName
        self.dbapi = import_module(dbapiName)
        self._args = args
        self._options = {name: value for name, value in options.items() if not name.startswith(_OWN_OPTIONS)}
        self._opened: Callable[[Any], object] | None = options.get("cp_openfun")
        self._threads = ThreadPoolExecutor(options.get("cp_max", 5), thread_name_prefix="shoal-adbapi")
        self._local = threading.local()
        self._connections: list[Any] = []

    def runInteraction(self, interaction: Callable[..., Any], *args: Any, **kwargs: Any) -> Query:
        """Call a function with a cursor in a thread, and commit. An error rolls back."""
        return Query(self._threads.submit(self._interact, interaction, args, kwargs))

    def runQuery(self, *args: Any, **kwargs: Any) -> Query:
        """Run one query; the result is its rows."""
        return self.runInteraction(lambda cursor: (cursor.execute(*args, **kwargs), cursor.fetchall())[1])

    def runOperation(self, *args: Any, **kwargs: Any) -> Query:
        """Run one statement that has no result."""
        return self.runInteraction(lambda cursor: (cursor.execute(*args, **kwargs), None)[1])

    def runWithConnection(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Query:
        """Call a function with a connection in a thread, and commit."""
        return Query(self._threads.submit(self._connected, function, args, kwargs))

    def start(self) -> None:
        """Threads and connections are made when they are needed."""

    def connect(self) -> Any:
        """Return the connection of this thread."""
        if (connection := getattr(self._local, "connection", None)) is None:
            connection = self._local.connection = self.dbapi.connect(*self._args, **self._options)
            self._connections.append(connection)
            if self._opened is not None:
                self._opened(connection)
        return connection

    def close(self) -> None:
        """Wait for the queries that have begun or wait, and close the connections."""
        self._threads.shutdown(wait=True)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    finalClose = close

    def _interact(self, interaction: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def work(connection: Any) -> Any:
            cursor = connection.cursor()
            try:
                return interaction(cursor, *args, **kwargs)
            finally:
                cursor.close()

        return self._connected(work, (), {})

    def _connected(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        connection = self.connect()
        try:
            result = function(connection, *args, **kwargs)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise
        return result
