"""A client for a PostgreSQL database: a few connections, and calls of Shoal's functions.

Each call is one statement. It ends within its timeout, also if the server does not answer.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
from msgspec import Struct

from shoal.clients.errors import FULL_FOR, Meaning, Severity, meaning_of, timeout_seconds
from shoal.errors import (
    FencedError,
    FrontierError,
    QueueFullError,
    RunError,
    ShoalError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    StoreRewoundError,
)
from shoal.system import chance, clock

# The parts of a PostgreSQL URL.


_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_TIMEOUT = 10.0
_FORM = "write postgresql://user:password@host:5432/database, optionally with ?schema=name and &timeout=seconds"


class PostgresAddress(Struct, frozen=True):
    """Where a database is, and in which schema Shoal's tables are."""

    dsn: str
    """The URL without Shoal's own options."""
    schema: str
    timeout: float
    """Seconds that a connection or a call may take."""
    place: str
    """A description without a password, for messages."""
    host: str | None
    """None if the URL leaves it to the driver (a socket, several hosts, the environment)."""
    port: int

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse a PostgreSQL URL. StoreError if it is invalid; the message never shows the password."""
        try:
            parts = urlsplit(url)
            has_several = "," in parts.netloc
            host, port = (None, 0) if has_several else (parts.hostname, parts.port or 5432)
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as exc:
            raise StoreError(f"invalid PostgreSQL URL; {_FORM}") from exc
        ours = {key: value for key, value in query if key in ("schema", "timeout")}
        schema = ours.get("schema", "shoal")
        if not _NAME.fullmatch(schema) or schema.startswith("pg_"):
            raise StoreError(
                f"invalid schema name ?schema={schema}: use at most 63 lowercase letters, digits and _; "
                "it must not start with pg_"
            )
        dsn = urlunsplit(parts._replace(query=urlencode([pair for pair in query if pair[0] not in ours])))
        shown = parts.netloc.rpartition("@")[2] or dict(query).get("host", "localhost")
        return cls(
            dsn=dsn,
            schema=schema,
            timeout=_timeout(ours.get("timeout")),
            place=f"PostgreSQL at {shown}{parts.path}",
            host=None if "host" in dict(query) else host,
            port=port,
        )


def _timeout(text: str | None) -> float:
    try:
        return timeout_seconds(text, _TIMEOUT)
    except ValueError as exc:
        raise StoreError(f"invalid PostgreSQL URL: {exc}; {_FORM}") from exc


# Turns the errors of asyncpg into Shoal's errors. Their messages never show a password.


NO_RUN, QUEUE_FULL, FENCED, REWOUND = "SH001", "SH002", "SH003", "SH004"
"""Error codes that Shoal's functions in the database raise."""
CONFLICT = "40001"
"""PostgreSQL's code for a call that conflicts with another one. It is retried."""

_NOTHING = "nothing was changed"
_AWAY, _UNCERTAIN, _FINAL = Severity.AWAY, Severity.UNCERTAIN, Severity.FINAL
CODES = {
    "08": Meaning(_AWAY),  # connection exceptions; poolers use 08P01 for a server that they cannot reach
    "0A": Meaning(_FINAL),  # not supported
    "21": Meaning(_FINAL),  # cardinality
    "22": Meaning(_FINAL),  # a value that does not fit
    "23": Meaning(_FINAL),  # a constraint, which another program added
    "23505": Meaning(_UNCERTAIN),  # two calls that insert the same row at the same moment
    "25006": Meaning(
        _AWAY,
        "it is read-only: a failover is under way, it is a standby, or an administrator made it so; "
        f"{_NOTHING}. If it stays so, name its primary in the URL",
    ),
    "25P03": Meaning(_AWAY),  # the server ended a connection that was idle in a transaction
    "25P04": Meaning(_AWAY),  # transaction_timeout
    "28": Meaning(_FINAL, "this user may not connect; check the user in the URL"),
    "28000": Meaning(
        _FINAL,
        "this user may not connect (pg_hba.conf); check the user, and whether TLS is required (?sslmode=require)",
    ),
    "28P01": Meaning(_FINAL, "the password is wrong or missing; check it in the URL"),
    "3D000": Meaning(_FINAL, "there is no such database; create it (createdb NAME), or name another in the URL"),
    "3F000": Meaning(_FINAL, "it lacks the functions of this version: a newer Shoal changed its tables; upgrade"),
    "40": Meaning(_AWAY),  # conflicts with other calls: the client has tried several times, the load will end
    "42": Meaning(_FINAL, "another program has changed Shoal's tables; use another ?schema=name"),
    "42501": Meaning(
        _FINAL, "this user may not do that; GRANT CREATE ON DATABASE to it, or name a schema that it owns"
    ),
    "42704": Meaning(_FINAL, "check the options behind the ? in the URL"),
    "53": Meaning(_AWAY, f"it lacks resources; {_NOTHING}. Give it more"),
    "53100": Meaning(_AWAY, f"its disk is full; {_NOTHING}. Free some space", is_full=True),
    "53200": Meaning(_AWAY, f"it is out of memory; {_NOTHING}. Give it more memory, or use smaller batches"),
    "53300": Meaning(_AWAY),  # too many clients
    "53400": Meaning(_AWAY, f"a limit in its configuration was reached; {_NOTHING}. Raise the limit"),
    "54": Meaning(_FINAL),  # a value or a statement that is too large for it
    "55006": Meaning(_AWAY),  # an object is in use
    "55P03": Meaning(_AWAY),  # another program holds a lock
    "57": Meaning(_AWAY),  # it starts, stops or crashed, or an administrator or a timeout ended the call
    "58030": Meaning(_AWAY, f"its disk fails; {_NOTHING}. Check the disk"),
    "XX": Meaning(_UNCERTAIN, "it has a bug or is damaged; check its log"),
    "XX001": Meaning(_FINAL, "its data is damaged; check its log"),
    "XX002": Meaning(_FINAL, "an index is damaged; check its log, and REINDEX the schema"),
}
"""SQLSTATE codes, and classes of them. https://www.postgresql.org/docs/current/errcodes-appendix.html"""
_STILL_CONNECTED = ("40", "531", "532", "534", "55")
"""Errors that say *away* and leave the connection usable. After a failover only a new one leads to the primary."""


def severity(code: str) -> Severity:
    """What an error with this SQLSTATE means."""
    return meaning_of(code, CODES).severity


def is_retryable(exc: BaseException) -> bool:
    """Whether the call conflicted with another one and was rolled back."""
    return isinstance(exc, asyncpg.DeadlockDetectedError | asyncpg.SerializationError)


def is_refusal(exc: BaseException) -> bool:
    """Whether the server refused a statement, and the connection is still usable."""
    if not isinstance(exc, asyncpg.PostgresError):
        return False
    code = exc.sqlstate or ""
    return severity(code) is not Severity.AWAY or code.startswith(_STILL_CONNECTED)


def timed_out(address: PostgresAddress) -> StoreAwayError:
    return StoreAwayError(f"{address.place} did not answer within {address.timeout:g} s")


def explain(exc: BaseException, address: PostgresAddress) -> ShoalError:
    """The error to raise instead: it says what failed, why, and what to do."""
    place = address.place
    if isinstance(exc, ShoalError):
        return exc
    if isinstance(exc, TimeoutError):
        return timed_out(address)
    if isinstance(exc, asyncpg.PostgresError):
        return _explain_answer(exc, exc.sqlstate or "", place)
    if isinstance(exc, asyncpg.ClientConfigurationError):
        return StoreError(f"invalid PostgreSQL URL: {exc}")
    if isinstance(exc, ssl.SSLError) or (isinstance(exc, ConnectionError) and "SSL" in str(exc)):
        return StoreError(f"no TLS connection to {place} ({exc}); check its certificate and ?sslmode=")
    if isinstance(exc, OSError | EOFError):
        return StoreAwayError(f"cannot reach {place}: {getattr(exc, 'strerror', None) or exc}. Is it running?")
    if isinstance(exc, asyncpg.InternalClientError) or "closed" in str(exc):  # the server closed it while it was idle
        return StoreAwayError(f"the connection to {place} was lost")
    if isinstance(exc, asyncpg.InterfaceError):
        return FrontierError(f"{place}: {exc}; nothing was changed")
    return StoreError(f"cannot use {place}: {exc!r:.200}")


def _explain_answer(exc: asyncpg.PostgresError, code: str, place: str) -> ShoalError:
    text = str(exc).splitlines()[0][:300] if str(exc) else type(exc).__name__
    if code == NO_RUN:
        return RunError("the run was deleted; nothing was changed")
    if code == QUEUE_FULL:
        return QueueFullError("the queue is full; nothing was pushed")
    if code == FENCED:
        return FencedError(text)
    if code == REWOUND:
        return StoreRewoundError(f"{place} went back in time: {text}. Nothing was changed; call recover()")
    meaning = meaning_of(code, CODES)
    if meaning.advice:
        return meaning.error(f"{place}: {meaning.advice} ({text})")
    if meaning.severity is Severity.AWAY:
        return meaning.error(f"{place} is not available: {text}")
    return meaning.error(f"{place}: {text}; {_NOTHING}")


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
        return clock.monotonic() - self._full_at < FULL_FOR

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
                        self._full_at = clock.monotonic()
                    raise error from exc
                await asyncio.sleep(chance.random() * 0.02 * 2**attempt)
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
