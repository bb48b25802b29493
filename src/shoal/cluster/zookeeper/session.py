"""A session with ZooKeeper, for asyncio. Kazoo keeps it, in threads of its own."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import msgspec
from kazoo import exceptions
from kazoo.client import KazooClient, KazooState, TransactionRequest
from kazoo.security import make_digest_acl

from shoal.cluster import call_timeout
from shoal.cluster.zookeeper.address import Address
from shoal.cluster.zookeeper.connection import Connection, Threads
from shoal.cluster.zookeeper.reads import Read, ReadAll
from shoal.errors import CoordinatorAwayError, CoordinatorError

BadVersionError = exceptions.BadVersionError
NodeExistsError = exceptions.NodeExistsError
NoNodeError = exceptions.NoNodeError

Pending: TypeAlias = Any
"""What kazoo's ``..._async`` methods return."""

_MOMENT = 1.0
"""Seconds that the end of a session is waited for, and for a word of what may be no ZooKeeper."""
_REST = 1.0
"""The longest that kazoo rests between two attempts to reach a server, in seconds."""
_AWAY = (
    exceptions.ConnectionLoss, exceptions.ConnectionClosedError, exceptions.SessionExpiredError,
    exceptions.SessionMovedError, exceptions.OperationTimeoutError, exceptions.ConnectionDropped, TimeoutError,
)  # fmt: skip

_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)  # what kazoo has to tell of connections that come and go, our errors tell


class Session:
    """Kazoo keeps it alive by itself, and replaces it by another when it has expired.

    ``client`` starts calls with its ``..._async`` methods, inside of ``step``; ``result`` awaits one.
    """

    def __init__(self, address: Address, ttl: float) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._connected = asyncio.Event()
        self.changed = asyncio.Event()
        """Something that is watched has changed, or the connection has."""
        self._watching = False
        patience = min(ttl, address.timeout) / (2 * len(address.hosts))
        self.client = KazooClient(
            hosts=",".join(address.hosts),
            timeout=ttl,
            handler=Threads(patience),
            auth_data=[("digest", ":".join(address.login))] if address.login else None,
            default_acl=[make_digest_acl(*address.login, all=True)] if address.login else None,
            connection_retry={"max_tries": -1, "delay": 0.05, "max_delay": _REST},
            logger=_log,
        )
        self._connection = self.client._connection = Connection(self.client, patience)
        self.client.add_listener(self._turned)

    @classmethod
    async def open(cls, address: Address, ttl: float) -> Session:
        """CoordinatorAwayError if nobody answers in time."""
        session = cls(address, ttl)
        session.client.start_async()
        try:
            async with asyncio.timeout(address.timeout):
                await session._connected.wait()
        except TimeoutError as exc:
            await session.close()
            if any(await asyncio.gather(*map(_answers_otherwise, address.hosts))):
                raise CoordinatorError(
                    f"what answers at {address.shown} is not ZooKeeper; look at host and port"
                ) from exc
            raise CoordinatorAwayError(
                f"{address.shown} can't be reached or does not answer; look at host and port, and whether it runs"
            ) from exc
        except BaseException:
            await session.close()
            raise
        return session

    @property
    def id(self) -> int:
        """0 while there is none."""
        known = self.client.client_id
        return known[0] if known else 0

    @property
    def ttl(self) -> float:
        """Seconds after which the server forgets a client that is not heard of, as it has decided. Not known before the
        first answer."""
        return self._connection.ttl

    def stay_alive(self, seconds: float) -> None:
        """Be silent from then on, so that the session ends if this is not called again. Without it a process that hangs
        would seem to live."""
        self._connection.silent_from = time.monotonic() + seconds

    # -- calls

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Around what is asked of the server: it ends in time, and its errors are ours."""
        if self._closed:
            raise CoordinatorError(f"the session with {self.address.shown} is closed")
        if self.client.state != KazooState.CONNECTED:  # or kazoo would keep the calls and make them later
            raise self._away("the connection is lost")
        wire = self._connection.wire
        try:
            async with asyncio.timeout(min(self.address.timeout, call_timeout(self.ttl))):
                yield
        except _AWAY as exc:
            if isinstance(exc, TimeoutError):
                self._connection.drop(wire)
            raise self._away(type(exc).__name__) from exc
        except (exceptions.NoAuthError, exceptions.AuthFailedError) as exc:
            raise CoordinatorError(
                f"{self.address.shown} does not allow it: the znodes are another user's, or the password is wrong; "
                "give both as zookeeper://user:password@host"
            ) from exc
        except exceptions.KazooException as exc:
            raise CoordinatorError(f"{self.address.shown} refuses: {type(exc).__name__} {exc}".rstrip()) from exc
        except msgspec.MsgspecError as exc:
            raise CoordinatorError(
                f"a znode at {self.address.shown} is not what Shoal made it ({exc}): something else has changed it"
            ) from exc

    def _away(self, why: str) -> CoordinatorAwayError:
        return CoordinatorAwayError(f"{self.address.shown} can't be reached or does not answer ({why})")

    async def read(self, *reads: Read) -> list[Any]:
        """What `data_of` and `children_of` ask for, in one call; None for each that is not there."""
        pending = self.client.handler.async_result()
        self.client._call(ReadAll(reads), pending)
        answers: list[Any] = await self.result(pending)
        return answers

    async def must_read(self, *reads: Read) -> list[Any]:
        """The same of what has to be there: NoNodeError if somebody has deleted it."""
        answers = await self.read(*reads)
        if None in answers:
            raise NoNodeError
        return answers

    async def watch(self, *, data: str, children: Sequence[str]) -> None:
        """See to it that ``changed`` is set when they change. Nothing is asked while that is so already."""
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
        """Not so any more after a change, or when the connection was lost."""
        return self._watching

    async def commit(self, transaction: TransactionRequest) -> list[Any]:
        """All of it or nothing: raises the error that undid it."""
        answers: list[Any] = await self.result(transaction.commit_async())
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, _UNDONE):
                raise answer
        return answers

    async def result(self, pending: Pending) -> Any:
        """What a call of the client's gives."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle() -> None:
            if future.done():  # nobody waits for it any more
                return
            if pending.exception is None:
                future.set_result(pending.value)
            else:
                future.set_exception(pending.exception)

        pending.rawlink(lambda _: self._tell(settle))
        return await future

    # -- what kazoo's threads have to tell

    def _wake(self, _event: object = None) -> None:
        """A watch of kazoo's. Each of them tells one change, and that a connection was lost."""
        self._tell(self._note_change)

    def _note_change(self) -> None:
        self._watching = False
        self.changed.set()

    def _turned(self, state: str) -> None:
        """The connection is lost or there again, or the session is over."""
        self._wake()
        if state == KazooState.CONNECTED:
            self._tell(self._connected.set)
        elif state == KazooState.SUSPENDED:
            self._tell(lambda: self._loop.call_later(self.ttl, self._be_modest))
        else:
            self.stay_alive(math.inf)  # until somebody joins in the next session

    def _be_modest(self) -> None:
        """A server that has lost its data refuses whoever has seen more than it has, for ever: so that is forgotten
        after a while. A server that lags behind the others may then show what was before."""
        if self.client.state == KazooState.SUSPENDED:
            self.client.last_zxid = 0

    def _tell(self, what: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(what)

    # -- the end

    async def close(self) -> None:
        """Ends the session, if the server hears of it; else it ends there by itself, in time."""
        if self._closed:
            return
        self._closed = True
        ended = asyncio.Event()

        def end() -> None:
            with suppress(exceptions.KazooException):
                self.client.stop()
                self.client.close()
            self._tell(ended.set)

        # kazoo may wait for ten seconds and more, and asyncio for its own threads at the end: so it is none of those
        threading.Thread(target=end, daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOMENT):
                await ended.wait()


_UNDONE = (exceptions.RolledBackError, exceptions.RuntimeInconsistency)
"""What a transaction says of the steps that were not to blame."""


async def _answers_otherwise(host: str) -> bool:
    """Whether something says there what ZooKeeper never would."""
    name, _, port = host.rpartition(":")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_MOMENT):
            reader, writer = await asyncio.open_connection(name.strip("[]"), int(port))
            try:
                writer.write(b"srvr\r\n\r\n")
                answer = await reader.read(200)
            finally:
                writer.close()
            return bool(answer) and not any(word in answer for word in (b"ookeeper", b"ooKeeper", b"whitelist"))
    return False
