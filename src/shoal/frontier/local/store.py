"""A store that another process of this machine owns.

`SocketStore` and `SocketFrontier` have the methods of the ports. They are made from the tables in
`shoal.frontier.local.wire`: each one encodes its arguments and makes a call. Only methods that need more than that are
written here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import msgspec

from shoal import __version__
from shoal.errors import FrontierError, RequestError, StoreAwayError, StoreError
from shoal.frontier.local import wire
from shoal.frontier.local.places import TIMEOUT, LocalAddress
from shoal.frontier.receipts import release_if_cancelled
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Failure,
    Frontier,
    FrontierOptions,
    History,
    Holder,
    Lease,
    Leased,
    LoggedItem,
    Store,
)
from shoal.system import chance, clock

log = logging.getLogger("shoal.frontier")

_SLOW = frozenset({"audit", "repair", "find", "retry_dead", "dead_kinds", "delete_run", wire.DEAD})
"""Calls that may read a whole run."""
_SLOW_FACTOR = 60.0
_CLOSE_TIMEOUT = 1.0
"""Seconds that the last messages may take when the connection is closed."""
_NO_REQUEST = Request("http://none.invalid/")
_decode_welcome = msgspec.msgpack.Decoder(wire.Welcome).decode
_decode_dead = msgspec.msgpack.Decoder(wire.DeadPage).decode


# -- the connection to the owner


class _Link(asyncio.Protocol):
    """One open socket."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost = self._loop.create_future()
        self._messages = wire.Messages()
        self._waiting: dict[int, asyncio.Future[wire.Answer]] = {}
        self._number = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, method: str, run: bytes, arguments: msgspec.Raw, timeout: float) -> msgspec.Raw:
        if self._transport is None or not self.is_open:
            raise _closed()
        self._number += 1
        number = self._number
        message = wire.Call(number, clock.now() + timeout, method, run, arguments)
        self._transport.write(wire.frame(wire.encode(message)))
        answer: asyncio.Future[wire.Answer] = self._loop.create_future()
        self._waiting[number] = answer
        timer = self._loop.call_later(timeout, _give_up, answer, timeout)
        try:
            answered = await answer
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        if answered.error is not None:
            wire.raise_error(answered.error)
        return answered.result

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._messages.feed(data):
                answer = wire.decode_answer(message)
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (FrontierError, msgspec.MsgspecError):
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set_result(None)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_closed())

    async def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            if not (await asyncio.wait({self._lost}, timeout=_CLOSE_TIMEOUT))[0]:
                self._transport.abort()


def _give_up(answer: asyncio.Future[wire.Answer], timeout: float) -> None:
    if not answer.done():
        answer.set_exception(StoreAwayError(f"the process that owns the frontier did not answer in {timeout:g} s"))


def _closed() -> StoreAwayError:
    return StoreAwayError("the process that owns the frontier closed the connection")


class OwnerConnection:
    """Calls the owner of a frontier, many at a time, and connects again when the connection was lost."""

    def __init__(self, find: Callable[[], Awaitable[str]], timeout: float) -> None:
        """``find`` returns the path of the owner's socket; it may start an owner. ``timeout``: seconds for a call."""
        self._find = find
        self._timeout = timeout
        self._client = chance.token_hex(6)
        self._link: _Link | None = None
        self._welcome: wire.Welcome | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def call(self, method: str, run: bytes, arguments: msgspec.Raw) -> msgspec.Raw:
        """Make a call and return its encoded result. StoreAwayError if the owner does not answer; otherwise the error
        that the call raised in the owner."""
        link = self._link
        if link is None or not link.is_open:
            link = await self._connect()
        timeout = self._timeout * (_SLOW_FACTOR if method in _SLOW else 1.0)
        return await link.call(method, run, arguments, timeout)

    async def open(self) -> None:
        """Connect for the first time."""
        await self._connect()

    async def _connect(self) -> _Link:
        async with self._connecting:
            if self._link is not None and self._link.is_open:
                return self._link
            if self._is_closed:
                raise StoreError("the store is closed")
            await self._drop()
            try:
                link = self._link = await self._open_socket(await self._find())
                self._check(await self._greet(link))
            except BaseException:
                await self._drop()
                raise
            return link

    async def _open_socket(self, path: str) -> _Link:
        try:
            if os.getuid() not in (0, os.stat(path).st_uid):  # another user must not choose what is fetched
                raise StoreError(f"the socket {path} belongs to another user")
            async with asyncio.timeout(self._timeout):
                _, link = await asyncio.get_running_loop().create_unix_connection(_Link, path)
                return link
        except (OSError, TimeoutError) as exc:
            if self._welcome is not None and not self._welcome.durable:
                raise _ended() from exc
            reason = getattr(exc, "strerror", None) or "no answer"
            raise StoreAwayError(f"cannot connect to the process that owns the frontier, at {path}: {reason}") from exc

    async def _greet(self, link: _Link) -> wire.Welcome:
        hello = wire.Hello(__version__, self._client, os.getpid())
        arguments = msgspec.Raw(wire.encode((hello,)))
        return _decode_welcome(await link.call(wire.HELLO, b"", arguments, self._timeout))

    def _check(self, welcome: wire.Welcome) -> None:
        if welcome.version != __version__:
            raise StoreError(
                f"the process that owns the frontier runs Shoal {welcome.version}, this one {__version__}; "
                "use the same version"
            )
        before, self._welcome = self._welcome, welcome
        if before is not None and not before.durable and before.store != welcome.store:
            raise _ended()

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def close(self) -> None:
        self._is_closed = True
        await self._drop()


def _ended() -> StoreError:
    return StoreError(
        "the process that held the frontier in memory has ended, and the run is lost; "
        "to keep the next one, use --frontier sqlite:///file.db"
    )


# -- the store


class _Remote:
    """An object whose methods are calls to the owner."""

    def __init__(self, connection: OwnerConnection, methods: Mapping[str, wire.Method], run: bytes = b"") -> None:
        self._connection = connection
        self._methods = methods
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = self.__dict__.get("_methods", {}).get(name)
        if method is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        call = partial(self._bound, method)
        self.__dict__[name] = call
        return call

    async def _bound(self, method: wire.Method, *arguments: Any, **named: Any) -> Any:
        return await self._call(method, *method.bind(arguments, named))

    async def _call(self, method: wire.Method, *values: Any) -> Any:
        """A call with all arguments in the order of the port."""
        try:
            encoded = wire.encode(values)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise RequestError(f"the arguments of {method.name} can't be stored: {exc}") from exc
        return method.decode_result(await self._connection.call(method.name, self._run, msgspec.Raw(encoded)))


class SocketStore(_Remote):
    """See `shoal.ports.Store`."""

    shared: ClassVar[bool] = True

    def __init__(self, connection: OwnerConnection) -> None:
        super().__init__(connection, wire.STORE)

    @classmethod
    async def open(cls, url: str) -> Store:
        """Connect to the owner at ``local:NAME``. StoreAwayError if it does not answer."""
        address = LocalAddress.parse(url)

        async def find() -> str:
            return address.path

        return await cls.connect(find, address.timeout)

    @classmethod
    async def connect(cls, find: Callable[[], Awaitable[str]], timeout: float = TIMEOUT) -> Store:
        """Connect to the owner at the socket that ``find`` returns, now and whenever the connection was lost."""
        connection = OwnerConnection(find, timeout)
        await connection.open()
        return cast("Store", cls(connection))

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        key = wire.encode(wire.RunKey(run_id, options, holder))
        frontier = cast("Frontier", SocketFrontier(self._connection, wire.FRONTIER, key))
        await frontier.roles()  # RunError if there is no such run
        return frontier

    async def close(self) -> None:
        """Close the connection. Leases that were not released end with this process, or expire."""
        await self._connection.close()


class SocketFrontier(_Remote):
    """See `shoal.ports.Frontier`. Of a lease, only its fingerprint and token are sent to the owner."""

    def hold(self, holder: Holder) -> None:
        key = wire.decode_run_key(self._run)
        self._run = wire.encode(wire.RunKey(key.run_id, key.options, holder))

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        call = self._call(wire.FRONTIER["lease"], limit, ttl, counts_attempt, nonce)
        return await release_if_cancelled(call, self.release)

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        return _restored(leases, await self._call(wire.FRONTIER["renew"], _bare(leases), ttl), deadline)

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        deadline = clock.now() + ttl
        call = self._call(wire.FRONTIER["reissue"], _bare(leases), ttl, nonce)
        return _restored(leases, await release_if_cancelled(call, self.release), deadline)

    async def complete(self, completions: Sequence[Completion]) -> list[Any]:
        answer: list[Any] = await self._end("complete", completions)
        return answer

    async def fail(self, failures: Sequence[Failure]) -> list[Any]:
        answer: list[Any] = await self._end("fail", failures)
        return answer

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Any]]:
        answer: tuple[int, list[Any]] = await self._end("store_cookies", completions, cookies)
        return answer

    async def _end(self, name: str, ended: Sequence[Completion | Failure], *first: CookieWrite) -> Any:
        bare = [msgspec.structs.replace(page, lease=_bare_lease(page.lease)) for page in ended]
        return await self._call(wire.FRONTIER[name], *first, bare)

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        answer: list[bool] = await self._call(wire.FRONTIER["release"], _bare(leases), contacted)
        return answer

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        """``last`` is not sent: nothing can rewind the log of a local owner."""
        most = wire.ITEM_BYTES if max_bytes is None else min(max_bytes, wire.ITEM_BYTES)
        items: list[LoggedItem] = await self._call(wire.FRONTIER["read_items"], after, limit, None, most)
        return items

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        moved: bool = await self._call(wire.FRONTIER["advance"], claim, cursor, ttl, None)
        return moved

    async def dead(self) -> AsyncIterator[History]:
        cursor = 0
        while True:
            raw = await self._connection.call(wire.DEAD, self._run, msgspec.Raw(wire.encode((cursor,))))
            page = _decode_dead(raw)
            for history in page.histories:
                yield history
            cursor = page.cursor
            if not cursor:
                return

    async def close(self) -> None:
        """Do nothing: the connection belongs to the store."""


def _bare_lease(lease: Lease) -> Lease:
    return Lease(_NO_REQUEST, lease.fingerprint, lease.token, 0, "", 0.0)


def _bare(leases: Sequence[Lease]) -> list[Lease]:
    return list(map(_bare_lease, leases))


def _restored(leases: Sequence[Lease], answer: Sequence[Lease | None], deadline: float) -> list[Lease | None]:
    """The caller's leases with what the owner changed."""
    return [
        msgspec.structs.replace(lease, token=new.token, deadline=deadline) if new else None
        for lease, new in zip(leases, answer, strict=True)
    ]
