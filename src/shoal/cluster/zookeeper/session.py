"""A ZooKeeper session for asyncio, on top of kazoo and its threads."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from kazoo import exceptions
from kazoo.client import KazooClient, KazooState, TransactionRequest
from kazoo.handlers.threading import AsyncResult
from kazoo.security import make_digest_acl

from shoal.cluster import call_timeout
from shoal.cluster.zookeeper.address import ZookeeperAddress
from shoal.cluster.zookeeper.connection import Threads, ZookeeperConnection
from shoal.cluster.zookeeper.reads import Answer, Read, ReadAll
from shoal.errors import DECODING_ERRORS, CoordinatorAwayError, CoordinatorError

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
        known = self.client.client_id
        return known[0] if known else 0

    @property
    def ttl(self) -> float:
        """Seconds without a message after which the server ends the session. Known after the first answer."""
        return self._connection.ttl

    def stay_alive(self, seconds: float) -> None:
        """Keep the session alive for this time only. Unless this is called again, the session of a process that hangs
        ends."""
        self._connection.silent_from = time.monotonic() + seconds

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
        threading.Thread(target=end, daemon=True).start()
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
