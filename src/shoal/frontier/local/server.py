"""Serves a store of this process to other processes of the machine, over a Unix socket.

Calls of one connection are answered as they end, in any order. Each call is one call of the store's own methods, so it
is as atomic as there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from shoal import __version__, clock
from shoal.errors import FrontierError, StoreAwayError, StoreError
from shoal.frontier.local import wire
from shoal.frontier.local.processes import ProcessSlot, ProcessWatch, peer_of, started_at
from shoal.ports import Frontier, History, Store

log = logging.getLogger("shoal.frontier")

_DEAD_PAGE = 200
_BACKLOG = 128
_CLOSE_TIMEOUT = 1.0
"""Seconds that the last answers may take when the server is closed."""
_CHANGES = frozenset({"push", "retry_dead", "repair", "transition", "update_host", "complete", "fail", "release"})
"""Calls after which there may be something to lease."""
_decode_hello = msgspec.msgpack.Decoder(tuple[wire.Hello]).decode
_decode_cursor = msgspec.msgpack.Decoder(tuple[int]).decode


class _Client(asyncio.Protocol):
    """A connection: the process at its other end, and the frontiers that it uses."""

    def __init__(self, server: FrontierServer) -> None:
        self.slot: ProcessSlot | None = None
        """None if the process is unknown. Then its leases end only when they expire."""
        self.frontiers: dict[bytes, Frontier] = {}
        self.dead: dict[int, AsyncIterator[History]] = {}
        self.transport: asyncio.Transport
        self.lost = asyncio.get_running_loop().create_future()
        self._server = server
        self._messages = wire.Messages()
        self._is_known = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._server.joined(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            for message in self._messages.feed(data):
                call = wire.decode_call(message)
                if self._is_known:
                    self._server.answer_soon(self, call)
                else:
                    self._greet(call)
        except (FrontierError, msgspec.MsgspecError) as exc:
            log.warning("a client of the frontier's socket sent a message that can't be read: %s", exc)
            self.transport.close()

    def _greet(self, call: wire.Call) -> None:
        if call.method != wire.HELLO:
            raise FrontierError(f"its first call must be {wire.HELLO!r}, not {call.method!r:.40}")
        (hello,) = _decode_hello(call.arguments)
        pid = peer_of(self.transport.get_extra_info("socket"), hello.pid)
        started = started_at(pid) if pid else None
        self.slot = None if started is None else ProcessSlot(pid, started, hello.client)
        self._is_known = True
        self.send(wire.frame(wire.encode((call.number, None, self._server.welcome))))

    def send(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)
        self._server.left(self)


class FrontierServer:
    """Serves one store. ``start``, then ``close``; the caller closes the store afterwards."""

    def __init__(
        self,
        store: Store,
        *,
        durable: bool,
        watch: ProcessWatch | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``durable``: the store survives this process. ``on_change``: called when a client may have added something to
        lease, or changed the state of a run."""
        self.on_change = on_change
        self.path = Path()
        """The socket, while it listens."""
        self._store = store
        self.welcome = wire.Welcome(__version__, secrets.token_hex(8), durable)
        """The answer to a greeting."""
        self._watch = watch or ProcessWatch()
        self._server: asyncio.AbstractServer | None = None
        self._clients: set[_Client] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def start(self, path: Path) -> None:
        """Listen at this path. StoreError if that is not possible."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(OSError):
                os.fchmod(listener.fileno(), 0o600)  # on Linux the file has this mode from its first moment on
            listener.bind(str(path))
            path.chmod(0o600)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(partial(_Client, self), sock=listener, backlog=_BACKLOG)
        except OSError as exc:
            listener.close()
            raise StoreError(f"cannot listen at {path}: {exc.strerror or exc}") from exc
        self.path = path
        self._watch.start()

    async def close(self) -> None:
        """Answer the calls that have arrived, and disconnect all clients."""
        if self._server is not None:
            self._server.close()
        await self._watch.stop()
        if self._calls:
            await asyncio.wait(self._calls)
        clients = list(self._clients)
        for client in clients:
            client.transport.close()
        if clients:
            await asyncio.wait([client.lost for client in clients], timeout=_CLOSE_TIMEOUT)
        for client in clients:
            client.transport.abort()

    @property
    def clients(self) -> int:
        """The number of connected clients."""
        return len(self._clients)

    async def wait_for_change(self) -> None:
        """Wait until a client connects or disconnects."""
        self._changed.clear()
        await self._changed.wait()

    # -- connections

    def joined(self, client: _Client) -> None:
        self._clients.add(client)
        self._changed.set()

    def left(self, client: _Client) -> None:
        self._clients.discard(client)
        self._changed.set()

    # -- calls

    def answer_soon(self, client: _Client, call: wire.Call) -> None:
        """Answer a call, in its own task."""
        answering = asyncio.create_task(self._answer(client, call))
        self._calls.add(answering)
        answering.add_done_callback(self._calls.discard)

    async def _answer(self, client: _Client, call: wire.Call) -> None:
        if clock.now() > call.not_after:
            return  # its client has given up, and may have repeated it
        try:
            result = await self._call(client, call)
            answer = wire.frame(wire.encode((call.number, None, result)))
        except asyncio.CancelledError:
            raise
        except msgspec.MsgspecError as exc:
            error = FrontierError(f"the arguments of {call.method} can't be read: {exc}")
            answer = wire.frame(wire.encode((call.number, wire.error_of(error), None)))
        except Exception as exc:  # every error of a call is sent to its client
            if not isinstance(exc, (FrontierError, ValueError)):
                log.debug("%s failed", call.method, exc_info=exc)
            answer = wire.frame(wire.encode((call.number, wire.error_of(exc), None)))
        client.send(answer)
        if call.method in _CHANGES:
            self.on_change()

    async def _call(self, client: _Client, call: wire.Call) -> Any:
        if not call.run:
            method = wire.STORE.get(call.method)
            if method is None:
                raise StoreError(f"the store has no call {call.method!r:.40}")
            result = await method.call(self._store, call.arguments)
            if call.method == "delete_run":
                for each in self._clients:
                    each.frontiers.clear()
            return result
        frontier = client.frontiers.get(call.run) or await self._open(client, call.run)
        if call.method == wire.DEAD:
            return await self._dead(client, frontier, *_decode_cursor(call.arguments))
        method = wire.FRONTIER.get(call.method)
        if method is None:
            raise StoreError(f"a frontier has no call {call.method!r:.40}")
        return await method.call(frontier, call.arguments)

    async def _open(self, client: _Client, run: bytes) -> Frontier:
        key = wire.decode_run_key(run)
        holder = key.holder
        if holder is None and client.slot is not None:
            holder = client.slot.holder
        frontier = await self._store.frontier(key.run_id, key.options, holder)
        if key.holder is None and client.slot is not None:
            self._watch.add(client.slot, key.run_id, frontier.fence)
        client.frontiers[run] = frontier
        return frontier

    async def _dead(self, client: _Client, frontier: Frontier, cursor: int) -> wire.DeadPage:
        """The next dead requests of a cursor; 0 makes a new one."""
        if cursor and cursor not in client.dead:
            raise StoreAwayError("the connection was lost while dead requests were listed; list them again")
        histories = client.dead.pop(cursor) if cursor else frontier.dead()
        page = []
        async for history in histories:
            page.append(history)
            if len(page) == _DEAD_PAGE:
                cursor = cursor or max(client.dead, default=0) + 1
                client.dead[cursor] = histories
                return wire.DeadPage(cursor, page)
        return wire.DeadPage(0, page)
