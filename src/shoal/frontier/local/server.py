"""Serves a store of this process to other processes of the machine, over a Unix socket.

Calls of one connection are answered as they end, in any order. Each call is one call of the store's own methods, so it
is as atomic as there.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from shoal import __version__
from shoal.errors import FrontierError, ShoalError, StoreAwayError, StoreBusyError, StoreError
from shoal.frontier.local import places, wire
from shoal.frontier.local.places import ProcessSlot, ProcessWatch
from shoal.frontier.local.store import SocketStore
from shoal.ports import Frontier, History, Holder, Store
from shoal.system import chance, clock, threads

log = logging.getLogger("shoal.frontier")

T = TypeVar("T")

_DEAD_PAGE = 200
_BACKLOG = 128
_CLOSE_TIMEOUT = 1.0
"""Seconds that the last answers may take when the server is closed."""
_IDLE = 0.5
"""Seconds without a client after which an owner exits."""
_FIRST = 10.0
"""Seconds that the first client has to connect."""
_PATIENCE = 10.0
"""Seconds that another process may take to begin or to end its work on a file."""
_BETWEEN_TRIES = 0.05
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
        pid = places.peer_of(self.transport.get_extra_info("socket"), hello.pid)
        started = places.started_at(pid) if pid else None
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
        self.welcome = wire.Welcome(__version__, chance.token_hex(8), durable)
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
                for other in self._clients:
                    other.frontiers.clear()
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


# -- the process that owns a frontier and serves it: ``python -m shoal.frontier.local.server FILE``
#
# Clients start it when they need it and nobody else owns the frontier. It detaches itself from the client that
# started it, and exits when no client has been connected for a moment. So it outlives a killed client as long as
# others need it, and no longer.


async def open_owned(file: str | None, watch: ProcessWatch) -> Store:
    """Open the store of a SQLite file to own it, or a new one in memory. StoreBusyError while another process works on
    the file.

    Leases of processes that still run are kept, and watched. Those of cluster slots are kept until the slots are
    fenced."""
    if file is None:
        from shoal.frontier.memory import MemoryStore

        return MemoryStore()
    from shoal.frontier.sqlite import SQLiteStore

    def keeps(store: SQLiteStore, run_id: str, holder: Holder | None) -> bool:
        async def fence(slot: str, epoch: int) -> int:
            return await (await store.frontier(run_id)).fence(slot, epoch)

        slot = None if holder is None else ProcessSlot.of(holder)
        if slot is None:
            return holder is not None
        if slot.is_alive:
            watch.add(slot, run_id, fence)
            return True
        return False

    return await SQLiteStore.open(file, keeps=keeps)


@asynccontextmanager
async def serving(store: Store, watch: ProcessWatch, file: str | None, name: str) -> AsyncIterator[FrontierServer]:
    """Serve a store that `open_owned` opened. A store in memory is announced under this name, or one like it.
    StoreError if there is no place for a socket."""
    with places.reserved(name if file is None else places.name_of_file(file), exact=file is not None) as path:
        server = FrontierServer(store, durable=file is not None, watch=watch)
        await server.start(path)
        try:
            if file is not None:
                from shoal.frontier.sqlite.file_lock import announce_socket  # a crawl in memory needs no SQLite

                announce_socket(file, str(path))
            yield server
        finally:
            await server.close()


# -- starting one


class PendingOwner:
    """An owner that is being started. It writes a line when it serves, or fails."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines = lines

    def wait(self) -> str:
        """Block until the owner serves, and return the path of its socket. Raises the error that the owner failed with,
        such as StoreBusyError."""
        line = self._lines.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            raise StoreError(
                "the process that owns the frontier ended before it could serve; its standard error says why"
            ) from None
        if "path" not in answer:
            wire.raise_error((answer["error"], answer["message"]))
        return str(answer["path"])


def start_owner(file: str) -> str:
    """Start an owner of a SQLite file. See `PendingOwner.wait`."""
    command = [sys.executable, "-m", __spec__.name, os.path.abspath(file)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        return PendingOwner(child.stdout).wait()


def main(file: str) -> None:
    """Detach from the process that started this one, and own a file."""
    if os.fork():
        os._exit(0)  # its parent waits only for the line
    answers = os.dup(1)
    _redirect_to_null(1)
    run_owner("", file, answers)


def run_owner(name: str, file: str | None, answers: int) -> None:
    """Own a frontier until nobody needs it. ``answers``: where to write the line for `PendingOwner`."""
    import uvloop

    places.name_process("shoal-frontier")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.raiseExceptions = False  # standard error may be closed before this process ends
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    uvloop.run(_serve(name, file, answers))


async def _serve(name: str, file: str | None, answers: int) -> None:
    try:
        watch = ProcessWatch()
        store = await open_owned(file, watch)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            server = await stack.enter_async_context(serving(store, watch, file, name))
            _report_start({"path": str(server.path)}, answers)
            await _until_idle(server)
    except ShoalError as exc:
        kind, message = wire.error_of(exc)
        _report_start({"error": kind, "message": message}, answers)


def _report_start(answer: dict[str, str], answers: int) -> None:
    """Report to the process that started this one: the path of the socket, or the error."""
    with suppress(OSError):
        os.write(answers, json.dumps(answer).encode() + b"\n")
        os.close(answers)


def _redirect_to_null(output: int) -> None:
    """Release this process's end of an output that it inherited, so that its reader does not wait for this process."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, output)
    os.close(nothing)


async def _until_idle(server: FrontierServer) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    patience = _FIRST
    while not stopping.done():
        changing = asyncio.create_task(server.wait_for_change())
        timeout = None if server.clients else patience
        await asyncio.wait({changing, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        has_changed = changing.done()
        changing.cancel()
        if not has_changed and not server.clients:
            return
        if not server.clients:
            _redirect_to_null(2)
        patience = _IDLE


# -- find the process that owns a SQLite file, or start one


async def join_owner(file: str) -> Store | None:
    """The store of the process that works on a file now. None if there is none, or it cannot be reached."""

    async def find() -> str:
        path = _socket_of(file)
        if path is None:
            raise StoreAwayError(f"the process that worked on {file} has ended")
        return path

    return None if _socket_of(file) is None else await SocketStore.connect(find)


async def join_or_open(file: str, open_it: Callable[[], Awaitable[Store]]) -> Store:
    """The store of the process that works on a file now, or the one that ``open_it`` opens if there is none.

    Waits for a process that no longer serves clients but still has to close the file. StoreBusyError if another process
    uses the file alone."""
    from shoal.frontier.sqlite.file_lock import announced_socket  # takes a while to import

    until = clock.monotonic() + _PATIENCE
    while True:
        # The name of a socket stays in the lock file until its process has closed the file.
        may_be_closing = announced_socket(file) is not None
        try:
            return await join_owner(file) or await open_it()
        except (StoreBusyError, StoreAwayError):
            if not may_be_closing or clock.monotonic() > until:
                raise
            await asyncio.sleep(_BETWEEN_TRIES)


async def share_file(file: str) -> Store:
    """The store in a file, for one of several processes of this machine. A process that owns the file is started if
    there is none, now and whenever it was lost. StoreError as `SQLiteStore.open`."""

    async def find() -> str:
        path = _socket_of(file)
        return await threads.call(start_owner, file) if path is None else path

    # StoreAwayError: it listened a moment ago, and ended before it answered.
    return await patiently(lambda: SocketStore.connect(partial(patiently, find, StoreBusyError)), StoreAwayError)


async def start_new_owner(file: str) -> str:
    """Start a process that owns a file, and return its socket. Wait a few seconds for another process that works on the
    file to end; StoreBusyError if it does not."""
    return await patiently(lambda: threads.call(start_owner, file), StoreBusyError)


async def patiently(step: Callable[[], Awaitable[T]], error: type[Exception], seconds: float = _PATIENCE) -> T:
    """Repeat a step that raises this error, for some seconds: another process begins or ends its work on the file."""
    until = clock.monotonic() + seconds
    while True:
        try:
            return await step()
        except error:
            if clock.monotonic() > until:
                raise
            await asyncio.sleep(_BETWEEN_TRIES)


def _socket_of(file: str) -> str | None:
    """The socket of the process that works on a file. None if nobody listens there."""
    from shoal.frontier.sqlite.file_lock import announced_socket

    path = announced_socket(file)
    if path is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # it is busy, or frozen
        except OSError:
            return None
    return path


if __name__ == "__main__":
    main(sys.argv[1])
