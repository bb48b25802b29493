"""A client for a PostgreSQL database: a few connections, and calls of Shoal's functions.

Each call is one statement. It ends within its timeout, also if the server does not answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeAlias, TypeVar

import asyncpg

from shoal.errors import ShoalError, StoreAwayError, StoreError, StoreFullError
from shoal.stores.postgres.address import PostgresAddress
from shoal.stores.postgres.errors import explain, is_refusal, is_retryable, timed_out
from shoal.stores.severity import FULL_FOR

T = TypeVar("T")
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

MIN_VERSION = 13
_CONNECTIONS = 2
"""One of them may be busy with a long call. With two, a thousand workers fit on a server."""
_MAX_TRIES = 8
_PATIENT_FACTOR = 60
"""The factor for the timeout of a call that reads or changes a whole run."""

# A dead client must not hold its locks, and a firewall must not drop an idle connection.
_SESSION = """
SELECT set_config('tcp_keepalives_idle', '30', false), set_config('tcp_keepalives_interval', '10', false),
    set_config('tcp_keepalives_count', '3', false),
    CASE WHEN current_setting('server_version_num')::integer >= 140000
        THEN set_config('client_connection_check_interval', '10s', false) END
"""


def storable_text(text: str) -> str:
    """Text that PostgreSQL can store. Lone surrogates and NUL are replaced: a website may have sent anything."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode(errors="replace").decode().replace("\0", "\ufffd")


class PostgresClient:
    """Calls Shoal's functions in a database. Many tasks may use it at the same time. It reconnects itself."""

    def __init__(
        self,
        address: PostgresAddress,
        *,
        connections: int = _CONNECTIONS,
        on_connect: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        """``on_connect`` is called with every new connection, unless it is a pooled one."""
        self.address = address
        self._on_connect = on_connect
        self._idle: list[Connection] = []
        self._permits = asyncio.Semaphore(connections)
        self._calls: set[asyncio.Task[list[asyncpg.Record]]] = set()
        self._statements: dict[str, str] = {}
        self._functions = address.schema
        self._pooled: bool | None = None
        """Whether a pooler such as pgbouncer gives each transaction another connection; None: not known yet. Then
        nothing may outlive a transaction: no settings, no prepared statements, no LISTEN."""
        self._install: Callable[[Connection], Awaitable[str]] | None = None
        self._closed = False
        self._full_at = -inf

    @property
    def was_full(self) -> bool:
        """Whether it refused a call in the last seconds because its disk is full."""
        return time.monotonic() - self._full_at < FULL_FOR

    # -- calls

    async def call(self, function: str, *arguments: object, patient: bool = False) -> list[asyncpg.Record]:
        """The rows that a function of the schema returns. After a StoreAwayError the call may have succeeded or not.

        If the caller is cancelled, the call still runs to its end: cancelling a statement would cost its connection.
        """
        if self._closed:
            raise StoreError(f"the connection to {self.address.place} is closed")
        call = asyncio.ensure_future(self._call(function, arguments, patient))
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return await asyncio.shield(call)

    def _forget(self, call: asyncio.Task[list[asyncpg.Record]]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # marks it as retrieved, as the caller may be gone

    async def value(self, function: str, *arguments: object, patient: bool = False) -> Any:
        """The single value that a function returns."""
        return (await self.call(function, *arguments, patient=patient))[0][0]

    async def _call(self, function: str, arguments: tuple[object, ...], patient: bool) -> list[asyncpg.Record]:
        statement = self._statements.get(function)
        if statement is None:
            marks = ", ".join(f"${number + 1}" for number in range(len(arguments)))
            statement = self._statements[function] = f'SELECT * FROM "{self._functions}".{function}({marks})'
        timeout = self.address.timeout * (_PATIENT_FACTOR if patient else 1)
        restored = False
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                return await self._run(partial(self._fetch, statement, arguments), timeout)
            except asyncpg.InvalidSchemaNameError as exc:
                if restored or self._install is None:
                    raise explain(exc, self.address) from exc
                restored = True  # a backup was restored that does not have this version's functions
                await self._run_install(self._install)
            except asyncpg.PostgresError as exc:
                if attempt == _MAX_TRIES or not is_retryable(exc):
                    error = explain(exc, self.address)
                    if isinstance(error, StoreFullError):
                        self._full_at = time.monotonic()
                    raise error from exc
                await asyncio.sleep(random.random() * 0.02 * 2**attempt)
            except (asyncpg.InterfaceError, asyncpg.InternalClientError, ValueError, TypeError, OverflowError) as exc:
                raise explain(exc, self.address) from exc
        raise AssertionError  # the last attempt returned or raised

    async def _fetch(self, statement: str, arguments: tuple[object, ...], link: Connection) -> list[asyncpg.Record]:
        if not self._pooled:
            return await link.fetch(statement, *arguments)
        async with link.transaction():  # else a pooler could prepare it on one connection and execute it on another
            return await link.fetch(statement, *arguments)

    async def _run(self, step: Callable[[Connection], Awaitable[T]], timeout: float) -> T:
        """Run ``step`` on a connection. A connection on which it failed is not used again."""
        try:
            async with asyncio.timeout(timeout):
                await self._permits.acquire()
        except TimeoutError as exc:
            raise timed_out(self.address) from exc
        try:
            link = await self._link()
            given_up: list[bool] = []

            def give_up() -> None:
                # Cancelling would wait for the silent server again. The other connections are silent too.
                given_up.append(True)
                link.terminate()
                self._drop_idle()

            alarm = asyncio.get_running_loop().call_later(timeout, give_up)
            try:
                result = await step(link)
            except BaseException as exc:
                if given_up:
                    raise timed_out(self.address) from exc
                if not is_refusal(exc):
                    link.terminate()
                raise
            finally:
                alarm.cancel()
                self._put_back(link)
            return result
        finally:
            self._permits.release()

    def _put_back(self, link: Connection) -> None:
        if link.is_closed():
            return
        if self._closed:
            link.terminate()
        else:
            self._idle.append(link)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().terminate()

    # -- connecting

    async def _link(self) -> Connection:
        while self._idle:
            link = self._idle.pop()
            if not link.is_closed():
                return link
        try:
            return await self._connect()
        except ShoalError:
            raise
        except Exception as exc:
            raise explain(exc, self.address) from exc

    async def _connect(self) -> Connection:
        address = self.address
        async with asyncio.timeout(address.timeout):
            link: Connection = await asyncpg.connect(
                address.dsn,
                timeout=address.timeout,
                max_cached_statement_lifetime=0,
                statement_cache_size=100 if self._pooled is False else 0,
                server_settings={"application_name": "shoal"},
            )
            try:
                if link.get_server_version().major < MIN_VERSION:
                    version = ".".join(map(str, link.get_server_version()[:2]))
                    raise StoreError(f"{address.place} has version {version}; Shoal needs {MIN_VERSION} or later")
                if self._pooled is False:
                    await link.fetch(_SESSION)
                    if self._on_connect is not None:
                        await self._on_connect(link)
            except BaseException:
                link.terminate()
                raise
        return link

    async def open(self, install: Callable[[Connection], Awaitable[str]]) -> None:
        """Connect. ``install`` creates tables and functions if they are missing, and returns the functions' schema.
        StoreError if that fails, StoreAwayError if the server cannot be reached."""
        first = asyncio.ensure_future(self._run_install(install))
        try:
            await asyncio.wait({first}, timeout=1.0)
            if not first.done() or isinstance(first.exception(), StoreAwayError):
                await self._check_kind()
            await first
        except BaseException:
            first.cancel()
            await self.close()
            raise

    async def _run_install(self, install: Callable[[Connection], Awaitable[str]]) -> None:
        self._install = install
        try:
            await self._run(partial(self._prepare, install), self.address.timeout * _PATIENT_FACTOR)
        except ShoalError:
            raise
        except Exception as exc:
            raise explain(exc, self.address) from exc

    async def _prepare(self, install: Callable[[Connection], Awaitable[str]], link: Connection) -> None:
        async with link.transaction():
            process = await link.fetchval("SELECT pg_backend_pid()")
        self._functions = await install(link)
        # A pooler reports a made-up process ID to its clients: they have no server process of their own.
        self._pooled = process != link.get_server_pid()
        if not self._pooled:
            await link.close(timeout=self.address.timeout)  # the next connection gets settings for its whole life

    async def _check_kind(self) -> None:
        """StoreError if another kind of server answers: the driver would wait for the rest of its answer."""
        address = self.address
        if address.host is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(address.timeout):
                    if await _is_other_server(address.host, address.port):
                        raise StoreError(
                            f"the server at {address.host}:{address.port} is not PostgreSQL; check the URL"
                        )

    async def close(self, grace: float | None = None) -> None:
        """Close the connections. First wait for calls in progress: ``grace`` seconds, or the timeout of a call."""
        self._closed = True
        if self._calls:
            _, late = await asyncio.wait(set(self._calls), timeout=self.address.timeout if grace is None else grace)
            for call in late:
                call.cancel()
        for link in self._idle:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await link.close(timeout=1.0)
        self._idle.clear()


async def _is_other_server(host: str, port: int) -> bool:
    """Whether another kind of server answers. PostgreSQL answers an SSLRequest with one letter; a server that stays
    silent may answer a line of text."""
    ssl_request = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
    for message, answers in ((ssl_request, (b"S", b"N", b"E", b"")), (b"PING\r\n\r\n", (b"",))):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(message)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    return await reader.read(1) not in answers
        finally:
            writer.close()
    return False
