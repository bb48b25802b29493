"""A few connections to a database. Each call is one statement, and ends in time whatever the server does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import asyncpg

from shoal.errors import ShoalError, StoreAwayError, StoreError
from shoal.frontier.postgres.address import Address
from shoal.frontier.postgres.failures import explained, is_refusal, may_try_again, timed_out

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

OLDEST = 13
_CONNECTIONS = 2
"""One may be busy with something long; a thousand workers fit on a server."""
_TRIES = 8
_PATIENT = 60
"""So many times longer may a call take that reads or changes a whole run."""

# A dead client must not hold its locks, and a silent connection must not be forgotten by what lies between.
_SESSION = """
SELECT set_config('tcp_keepalives_idle', '30', false), set_config('tcp_keepalives_interval', '10', false),
    set_config('tcp_keepalives_count', '3', false),
    CASE WHEN current_setting('server_version_num')::integer >= 140000
        THEN set_config('client_connection_check_interval', '10s', false) END
"""


class Database:
    """Connections that are made when they are needed, and again after they were lost. All errors are ours."""

    def __init__(
        self,
        address: Address,
        *,
        connections: int = _CONNECTIONS,
        greet: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        """``greet`` is what comes first on every new connection, unless it is a pooled one."""
        self.address = address
        self._greet = greet
        self._idle: list[Connection] = []
        self._places = asyncio.Semaphore(connections)
        self._calls: set[asyncio.Task[list[asyncpg.Record]]] = set()
        self._statements: dict[str, str] = {}
        self._functions = address.schema
        self._pooled: bool | None = None
        """Whether something between gives each transaction another connection, as pgbouncer does; None: not known yet.
        Then nothing may outlive a transaction: no settings, no prepared statements, no LISTEN."""
        self._prepares: Callable[[Connection], Awaitable[str]] | None = None
        """Installs what this version needs in the database."""
        self._closed = False

    # -- calling

    async def call(self, function: str, *arguments: Any, patient: bool = False) -> list[asyncpg.Record]:
        """The rows that a function of the schema returns. StoreAwayError when nobody knows whether it happened.

        A caller who is cancelled leaves it to happen: a cancelled statement would take its connection with it.
        """
        if self._closed:
            raise StoreError(f"{self.address.place} is closed")
        call = asyncio.ensure_future(self._call(function, arguments, patient))
        self._calls.add(call)
        call.add_done_callback(self._forget)
        return await asyncio.shield(call)

    def _forget(self, call: asyncio.Task[list[asyncpg.Record]]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # if nobody waits for it any more, nobody is to be told

    async def value(self, function: str, *arguments: Any, patient: bool = False) -> Any:
        """The one value that a function returns."""
        return (await self.call(function, *arguments, patient=patient))[0][0]

    async def _call(self, function: str, arguments: tuple[Any, ...], patient: bool) -> list[asyncpg.Record]:
        statement = self._statements.get(function)
        if statement is None:
            marks = ", ".join(f"${number + 1}" for number in range(len(arguments)))
            statement = self._statements[function] = f'SELECT * FROM "{self._functions}".{function}({marks})'
        timeout = self.address.timeout * (_PATIENT if patient else 1)
        restored = False
        for attempt in range(1, _TRIES + 1):
            try:
                rows: list[asyncpg.Record] = await self._run(partial(self._fetch, statement, arguments), timeout)
                return rows
            except asyncpg.InvalidSchemaNameError as exc:
                if restored or self._prepares is None:
                    raise explained(exc, self.address) from exc
                restored = True  # a backup from before this version was restored: the functions are installed again
                await self._first(self._prepares)
            except asyncpg.PostgresError as exc:
                if attempt == _TRIES or not may_try_again(exc):
                    raise explained(exc, self.address) from exc
                await asyncio.sleep(random.random() * 0.02 * 2**attempt)
            except (asyncpg.InterfaceError, asyncpg.InternalClientError, ValueError, TypeError, OverflowError) as exc:
                raise explained(exc, self.address) from exc
        raise AssertionError  # the last attempt returned or raised

    async def _fetch(self, statement: str, arguments: tuple[Any, ...], link: Connection) -> list[asyncpg.Record]:
        if not self._pooled:
            return await link.fetch(statement, *arguments)
        async with link.transaction():  # else it could be parsed on one connection, and executed on another
            return await link.fetch(statement, *arguments)

    async def _run(self, step: Callable[[Connection], Any], timeout: float) -> Any:
        """``step`` on a connection; a connection on which it did not end well is not used again."""
        try:
            async with asyncio.timeout(timeout):
                await self._places.acquire()
        except TimeoutError as exc:
            raise timed_out(self.address) from exc
        try:
            link = await self._link()
            given_up: list[bool] = []

            def give_up() -> None:
                # Asking a silent server to cancel would wait for it once more. The others are as silent.
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
            self._places.release()

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
            raise explained(exc, self.address) from exc

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
                if link.get_server_version().major < OLDEST:
                    version = ".".join(map(str, link.get_server_version()[:2]))
                    raise StoreError(f"{address.place} has version {version}; Shoal needs {OLDEST} or later")
                if self._pooled is False:
                    await link.fetch(_SESSION)
                    if self._greet is not None:
                        await self._greet(link)
            except BaseException:
                link.terminate()
                raise
        return link

    async def open(self, prepare: Callable[[Connection], Awaitable[str]]) -> None:
        """The first connection, on which ``prepare`` makes the schema if need be, and says where the functions are.
        StoreError if that can't be."""
        first = asyncio.ensure_future(self._first(prepare))
        try:
            await asyncio.wait({first}, timeout=1.0)
            if not first.done() or isinstance(first.exception(), StoreAwayError):
                await self._check_kind()
            await first
        except BaseException:
            first.cancel()
            await self.close()
            raise

    async def _first(self, prepare: Callable[[Connection], Awaitable[str]]) -> None:
        self._prepares = prepare
        try:
            await self._run(partial(self._prepare, prepare), self.address.timeout * _PATIENT)
        except ShoalError:
            raise
        except Exception as exc:
            raise explained(exc, self.address) from exc

    async def _prepare(self, prepare: Callable[[Connection], Awaitable[str]], link: Connection) -> None:
        async with link.transaction():
            process = await link.fetchval("SELECT pg_backend_pid()")
        self._functions = await prepare(link)
        # A pooler tells its clients numbers that it made up, as they talk to no process of their own.
        self._pooled = process != link.get_server_pid()
        if not self._pooled:
            await link.close(timeout=self.address.timeout)  # the next one is made for more than a transaction

    async def _check_kind(self) -> None:
        """StoreError if what answers there is no PostgreSQL: the driver would wait for the rest of its answer."""
        address = self.address
        if address.host is not None:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(address.timeout):
                    if await _answers_otherwise(address.host, address.port):
                        raise StoreError(
                            f"what answers at {address.host}:{address.port} is no PostgreSQL; check the URL"
                        )

    async def close(self, grace: float | None = None) -> None:
        """What was asked for before is done first, if the server answers in time: that of a call, or ``grace``."""
        self._closed = True
        if self._calls:
            _, late = await asyncio.wait(set(self._calls), timeout=self.address.timeout if grace is None else grace)
            for call in late:
                call.cancel()
        for link in self._idle:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await link.close(timeout=1.0)
        self._idle.clear()


async def _answers_otherwise(host: str, port: int) -> bool:
    """Whether something else than PostgreSQL answers. That takes the first words of its protocol with one letter; who
    says nothing to them may answer a line of text."""
    may_i_speak_tls = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
    for words, answers in ((may_i_speak_tls, (b"S", b"N", b"E", b"")), (b"PING\r\n\r\n", (b"",))):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(words)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    return await reader.read(1) not in answers
        finally:
            writer.close()
    return False
