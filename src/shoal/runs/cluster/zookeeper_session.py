"""A ZooKeeper session for asyncio, on top of kazoo and its threads."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import re
import select
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from kazoo import exceptions
from kazoo.client import KazooClient, KazooState, TransactionRequest
from kazoo.handlers.threading import AsyncResult, SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import GetChildren, GetData, MultiHeader, Transaction, int_struct, stat_struct
from kazoo.security import make_digest_acl

from shoal.clients.errors import timeout_seconds
from shoal.config import mask
from shoal.errors import DECODING_ERRORS, CoordinatorAwayError, CoordinatorError
from shoal.runs.cluster import call_timeout
from shoal.system import clock, threads

_LONG_SESSION = 6.0  # seconds: long enough to skip a ping


# -- kazoo's threads and connection, with changes that Shoal needs


class _File(Protocol):
    """A socket or a pipe."""

    def fileno(self) -> int: ...


class DirectResult(AsyncResult):  # type: ignore[misc]
    """Calls its callbacks in the thread that reads the connection. Kazoo would wake another thread for them."""

    def _do_callbacks(self) -> None:
        for callback in self._callbacks:
            callback(self)


class Threads(SequentialThreadingHandler):  # type: ignore[misc]
    """Gives up an unreachable host in time to try the others. Kazoo would spend a whole session on it."""

    def __init__(self, connect_timeout: float) -> None:
        super().__init__()
        self._connect_timeout = connect_timeout

    def create_connection(self, *args: object, timeout: float, **kwargs: object) -> socket.socket:
        timeout = min(timeout, self._connect_timeout)
        return cast(socket.socket, super().create_connection(*args, timeout=timeout, **kwargs))

    def async_result(self) -> DirectResult:
        return DirectResult(self)

    def select(
        self, readers: Sequence[_File], writers: Sequence[_File], _: Sequence[_File] = (), timeout: float | None = None
    ) -> tuple[list[_File], list[_File], list[_File]]:
        """Use `poll`, which costs one system call. Kazoo creates, registers and closes an epoll object each time. A
        file is either read or written, not both."""
        poll = select.poll()
        files = {}
        for file, event in [(file, select.POLLIN) for file in readers] + [(file, select.POLLOUT) for file in writers]:
            fd = file.fileno()
            if fd < 0:
                raise OSError(errno.EBADF, "the connection is closed")
            files[fd] = file
            poll.register(fd, event)
        ready = [files[fd] for fd, _ in poll.poll(None if timeout is None else max(0, math.ceil(timeout * 1000)))]
        return [file for file in ready if file in readers], [file for file in ready if file in writers], []


class ZookeeperConnection(ConnectionHandler):  # type: ignore[misc]
    """Replaces the connection that a kazoo client was created with."""

    def __init__(self, client: KazooClient, connect_timeout: float) -> None:
        connection = client._connection
        super().__init__(client, connection.retry_sleeper, logger=connection.logger)
        self._connect_timeout = connect_timeout
        self.ttl = 0.0
        """Seconds without a message after which the server ends the session, as the server decided."""
        self.silent_from = math.inf
        """From this time of the monotonic clock on, send no pings. Otherwise kazoo's threads would keep the session
        alive when the rest of the process hangs."""
        self._last_request = -math.inf

    @property
    def wire(self) -> socket.socket | None:
        """The socket; None before it is connected."""
        return cast("socket.socket | None", self._socket)

    def drop(self, wire: socket.socket | None) -> None:
        """Close the socket if it is still in use, as it does not answer. Kazoo reconnects."""
        if wire is not None and wire is self._socket:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)

    def _invoke(self, timeout: float, *request: object, **options: object) -> object:
        """Send the first request, with a shorter timeout: a server that is starting may never answer it."""
        return super()._invoke(min(timeout, self._connect_timeout), *request, **options)

    def _connect(self, *place: object) -> tuple[float, float]:
        """Connect, and note the session timeout that the server granted. Kazoo returns only the read timeout in
        milliseconds, which is two thirds of it."""
        read_timeout, connect_timeout = super()._connect(*place)
        self.ttl = read_timeout * 1.5 / 1000
        return read_timeout, connect_timeout

    def _send_request(self, *args: object) -> None:
        self._last_request = clock.monotonic()
        super()._send_request(*args)

    def _send_ping(self, *args: object) -> None:
        """Skip a ping if there was a request lately, except in a short session."""
        now = clock.monotonic()
        is_recent = self.ttl >= _LONG_SESSION and now - self._last_request < self.ttl / 2
        if now < self.silent_from and not is_recent:
            super()._send_ping(*args)


# -- many reads in one call
#
# A heartbeat of a large cluster needs dozens of reads. ZooKeeper supports it since version 3.6,
# but kazoo does not. This follows kazoo's implementation of transactions.


Read: TypeAlias = GetData | GetChildren
"""Made by `data_of` and `children_of`."""
Answer: TypeAlias = Any
"""The data and stat of a znode, the names of its children, or None if it is missing."""


def data_of(path: str) -> Read:
    """A read of the data and stat of a znode."""
    return GetData(path, None)


def children_of(path: str) -> Read:
    """A read of the names of a znode's children."""
    return GetChildren(path, None)


class ReadAll(Transaction):  # type: ignore[misc]
    """The reads of ``operations``, in order. The answer is None for a missing znode."""

    type: ClassVar[int] = 22

    @classmethod
    def deserialize(cls, answer: bytes, offset: int) -> list[Answer]:
        answers = []
        header, offset = MultiHeader.deserialize(answer, offset)
        while not header.done:
            read, offset = _read_one(header, answer, offset)
            answers.append(read)
            header, offset = MultiHeader.deserialize(answer, offset)
        return answers


def _read_one(header: MultiHeader, answer: bytes, offset: int) -> tuple[Answer, int]:
    if header.type == GetData.type:
        data, stat = GetData.deserialize(answer, offset)
        return (data, stat), offset + int_struct.size + len(data or b"") + stat_struct.size
    if header.type == GetChildren.type:
        names = GetChildren.deserialize(answer, offset)
        return names, offset + int_struct.size + sum(int_struct.size + len(name.encode()) for name in names)
    if header.err == exceptions.NoNodeError.code:
        return None, offset + int_struct.size
    raise exceptions.EXCEPTIONS[header.err]()


# -- the parts of a ZooKeeper URL


_PORT = 2181
_TIMEOUT = 5.0
_FORM = "write zookeeper://user:password@host:2181,host2:2181/path?timeout=seconds; only one host is required"


class ZookeeperAddress(NamedTuple):
    """Where the servers are, the login, and the path of Shoal's znodes."""

    hosts: tuple[str, ...]
    """Each as ``host:port``."""
    login: tuple[str, str] | None
    chroot: str
    """The path above Shoal's znodes, or empty."""
    timeout: float
    """Seconds that a call may take."""
    shown: str
    """The URL without its password, for messages."""

    @classmethod
    def parse(cls, url: str) -> ZookeeperAddress:
        """CoordinatorError if it is not a valid ZooKeeper URL. The message never shows the password."""
        shown = mask(url).partition("?")[0]
        try:
            parts = urlsplit(url)
            if parts.scheme != "zookeeper" or parts.fragment:
                raise ValueError("it is not a zookeeper:// URL")
            query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            if wrong := sorted(query.keys() - {"timeout"}):
                raise ValueError(f"unknown option {wrong[0]!r}; the only option is timeout")
            login, at, places = parts.netloc.rpartition("@")
            return cls(
                hosts=tuple(_host(place) for place in places.split(",")),
                login=_login(login) if at else None,
                chroot=_chroot(parts.path),
                timeout=timeout_seconds(query.get("timeout"), _TIMEOUT),
                shown=shown,
            )
        except ValueError as exc:
            raise CoordinatorError(f"cannot use {shown}: {exc}; {_FORM}") from None  # the cause may show the password


def _host(place: str) -> str:
    parts = urlsplit(f"//{place}")
    if not parts.hostname or re.search(r"[\s/?#@]", place) or parts.port == 0:
        raise ValueError(f"{place!r} is not host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{parts.port or _PORT}"


def _login(text: str) -> tuple[str, str]:
    user, _, password = text.partition(":")
    if not user or not password:
        raise ValueError("the login needs a user and a password")
    if ":" in unquote(user):
        raise ValueError("the user name has a colon")
    return unquote(user), unquote(password)


def _chroot(path: str) -> str:
    names = [unquote(name) for name in path.rstrip("/").split("/")[1:]]
    for name in names:
        if name in ("", ".", "..") or not name.isprintable() or "/" in name:
            raise ValueError(f"invalid path element {name!r}")
    return "".join(f"/{name}" for name in names)


BadVersionError = exceptions.BadVersionError
NodeExistsError = exceptions.NodeExistsError
NoNodeError = exceptions.NoNodeError

_CLOSE_TIMEOUT = 1.0
_PROBE_TIMEOUT = 1.0
_MAX_RETRY_DELAY = 1.0  # seconds between two attempts to connect
_LOST = (exceptions.ConnectionClosedError, exceptions.ConnectionDropped, TimeoutError)
_AWAY = {
    -1: "system error",
    -4: "connection loss",
    -7: "operation timeout",
    -12: "unknown session",
    -13: "no quorum for a new configuration",
    -14: "reconfiguration in process",
    -112: "session expired",
    -118: "session moved",
    -119: "read-only",  # a server without a majority
    -122: "request timeout",
    -125: "quota exceeded",
    -127: "throttled operation",
}
"""Error codes of a server that cannot do it now. All others are final: the same call would get the same answer. Older
versions of kazoo have no exceptions for some of them."""

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # Shoal's own errors report lost connections


class ZookeeperSession:
    """A session. Kazoo keeps it alive, and starts another one after it has expired.

    Start calls with the ``..._async`` methods of ``client``, inside ``step``, and await them with ``result``.
    """

    def __init__(self, address: ZookeeperAddress, ttl: float) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._connected = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when a watched znode or the connection has changed."""
        self._watching = False
        connect_timeout = min(ttl, address.timeout) / (2 * len(address.hosts))
        self.client = KazooClient(
            hosts=",".join(address.hosts),
            timeout=ttl,
            handler=Threads(connect_timeout),
            auth_data=[("digest", ":".join(address.login))] if address.login else None,
            default_acl=[make_digest_acl(*address.login, all=True)] if address.login else None,
            connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": _MAX_RETRY_DELAY},
            logger=_log,
        )
        self._connection = self.client._connection = ZookeeperConnection(self.client, connect_timeout)
        self.client.add_listener(self._on_state)

    @classmethod
    async def open(cls, address: ZookeeperAddress, ttl: float) -> ZookeeperSession:
        """CoordinatorAwayError if no server answers in time, CoordinatorError if another kind of server does."""
        session = cls(address, ttl)
        session.client.start_async()
        try:
            async with asyncio.timeout(address.timeout):
                await session._connected.wait()
        except TimeoutError as exc:
            await session.close()
            if any(await asyncio.gather(*map(_is_other_server, address.hosts))):
                raise CoordinatorError(f"the server at {address.shown} is not ZooKeeper; check host and port") from exc
            raise CoordinatorAwayError(
                f"cannot reach {address.shown}: no answer. Is ZooKeeper running? Otherwise check host and port"
            ) from exc
        except BaseException:
            await session.close()
            raise
        return session

    @property
    def id(self) -> int:
        """The id of the session; 0 if there is none."""
        session = self.client.client_id
        return session[0] if session else 0

    @property
    def ttl(self) -> float:
        """Seconds without a message after which the server ends the session. Known after the first answer."""
        return self._connection.ttl

    def stay_alive(self, seconds: float) -> None:
        """Keep the session alive for this time only. Unless this is called again, the session of a process that hangs
        ends."""
        self._connection.silent_from = clock.monotonic() + seconds

    # -- calls

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Wrap calls to the server: they end in time, and their errors become Shoal's."""
        if self._closed:
            raise CoordinatorError(f"the session with {self.address.shown} is closed")
        if self.client.state != KazooState.CONNECTED:  # else kazoo would queue the calls
            raise self._away("the connection is lost")
        wire = self._connection.wire
        try:
            async with asyncio.timeout(min(self.address.timeout, call_timeout(self.ttl))):
                yield
        except _LOST as exc:
            if isinstance(exc, TimeoutError):
                self._connection.drop(wire)
            raise self._away(type(exc).__name__) from exc
        except (exceptions.NoAuthError, exceptions.AuthFailedError) as exc:
            raise CoordinatorError(
                f"{self.address.shown} denied access: another user owns the znodes, or the password is wrong. "
                "Pass user and password as zookeeper://user:password@host"
            ) from exc
        except exceptions.KazooException as exc:
            if (code := getattr(exc, "code", None)) in _AWAY:
                raise self._away(_AWAY[code]) from exc
            raise CoordinatorError(
                f"{self.address.shown} refuses the call: {type(exc).__name__} {exc}".rstrip()
            ) from exc
        except DECODING_ERRORS as exc:
            raise CoordinatorError(
                f"cannot read a znode at {self.address.shown} ({exc}): another program has changed it"
            ) from exc

    def _away(self, why: str) -> CoordinatorAwayError:
        return CoordinatorAwayError(f"cannot reach {self.address.shown}: {why}")

    async def read(self, *reads: Read) -> list[Answer]:
        """Read in one call. None for each missing znode."""
        pending = self.client.handler.async_result()
        self.client._call(ReadAll(reads), pending)
        answers: list[Answer] = await self.result(pending)
        return answers

    async def must_read(self, *reads: Read) -> list[Answer]:
        """The same, but NoNodeError if a znode is missing."""
        answers = await self.read(*reads)
        if None in answers:
            raise NoNodeError
        return answers

    async def watch(self, *, data: str, children: Sequence[str]) -> None:
        """Set ``changed`` when these znodes change. Does nothing if it is watching already."""
        if self._watching:
            return
        self._watching = True
        pending = [
            self.client.get_async(data, watch=self._wake),
            *(self.client.get_children_async(path, watch=self._wake) for path in children),
        ]
        try:
            await asyncio.gather(*map(self.result, pending))
        except BaseException:
            self._watching = False
            raise

    @property
    def is_watching(self) -> bool:
        """False after a change, or after the connection was lost."""
        return self._watching

    async def commit(self, transaction: TransactionRequest) -> list[Answer]:
        """Commit a transaction, or raise the error that rolled it back."""
        answers: list[Answer] = await self.result(transaction.commit_async())
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, _ROLLED_BACK):
                raise answer
        return answers

    async def result(self, pending: AsyncResult) -> Answer:
        """Await a call of the client."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def settle() -> None:
            if future.done():  # the caller is gone
                return
            if pending.exception is None:
                future.set_result(pending.value)
            else:
                future.set_exception(pending.exception)

        pending.rawlink(lambda _: self._call_soon(settle))
        return await future

    # -- callbacks from kazoo's threads

    def _wake(self, _event: object = None) -> None:
        """Note a change. Kazoo calls it once for each watch, and when the connection is lost."""
        self._call_soon(self._note_change)

    def _note_change(self) -> None:
        self._watching = False
        self.changed.set()

    def _on_state(self, state: str) -> None:
        """Called by kazoo when the state of the connection or session changes."""
        self._wake()
        if state == KazooState.CONNECTED:
            self._call_soon(self._connected.set)
        elif state == KazooState.SUSPENDED:
            self._call_soon(lambda: self._loop.call_later(self.ttl, self._forget_zxid))
        else:
            self.stay_alive(math.inf)  # until a member joins in the next session

    def _forget_zxid(self) -> None:
        """Forget the last transaction that was seen: a server that lost its data refuses clients that have seen later
        ones. Afterwards a server that lags may show old data."""
        if self.client.state == KazooState.SUSPENDED:
            self.client.last_zxid = 0

    def _call_soon(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    # -- closing

    async def close(self) -> None:
        """End the session. If the server cannot be reached, the session expires there."""
        if self._closed:
            return
        self._closed = True
        ended = asyncio.Event()

        def end() -> None:
            with suppress(exceptions.KazooException):
                self.client.stop()
                self.client.close()
            self._call_soon(ended.set)

        # a separate thread: kazoo may wait for ten seconds or more, and asyncio waits for its own threads at exit
        threads.start(end, "zookeeper-close")
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await ended.wait()


_ROLLED_BACK = (exceptions.RolledBackError, exceptions.RuntimeInconsistency)
"""Errors of the operations that did not cause the rollback."""


async def _is_other_server(host: str) -> bool:
    """Whether another kind of server answers."""
    name, _, port = host.rpartition(":")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(name.strip("[]"), int(port))
            try:
                writer.write(b"srvr\r\n\r\n")
                answer = await reader.read(200)
            finally:
                writer.close()
            return bool(answer) and not any(word in answer for word in (b"ookeeper", b"ooKeeper", b"whitelist"))
    return False
