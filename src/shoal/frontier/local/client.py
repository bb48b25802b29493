"""The connection of a client to the process that owns a frontier. All calls share it, many at a time."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from shoal import __version__, clock
from shoal.errors import FrontierError, StoreAwayError, StoreError
from shoal.frontier.local import wire

_SLOW = frozenset({"audit", "repair", "find", "retry_dead", "dead_kinds", "delete_run", wire.DEAD})
"""Calls that may read a whole run."""
_SLOW_FACTOR = 60.0
_CLOSE_TIMEOUT = 1.0
"""Seconds that the last messages may take when the connection is closed."""
_decode_welcome = msgspec.msgpack.Decoder(wire.Welcome).decode


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
    """Calls the owner of a frontier, and connects again when the connection was lost."""

    def __init__(self, find: Callable[[], Awaitable[str]], timeout: float) -> None:
        """``find`` returns the path of the owner's socket; it may start an owner. ``timeout``: seconds for a call."""
        self._find = find
        self._timeout = timeout
        self._client = secrets.token_hex(6)
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
        known, self._welcome = self._welcome, welcome
        if known is not None and not known.durable and known.store != welcome.store:
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
