"""Proxies: one loses chosen responses (the server does the call, but the caller gets no response), one delivers what a
client sends too late."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias

from tests.nemesis.wire_formats import FORMATS, Call, Calls

How = Literal["cut", "silence"]
"""``cut`` closes the connection instead of sending the response. ``silence`` keeps it open and sends nothing more."""

Loses: TypeAlias = Callable[[Call, int], How | None]
"""Whether the response of a call is lost. The number counts calls of that kind."""


class LossyProxy:
    """Forwards everything but the chosen responses. Refused calls are forwarded and not counted."""

    def __init__(self, kind: str, port: int, loses: Loses) -> None:
        self.calls: Counter[Call] = Counter()
        self.lost: Counter[Call] = Counter()
        self.port = 0
        self._format = FORMATS[kind]
        self._to = port
        self.loses = loses
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**20)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to, limit=2**20)
                try:
                    await _Link(self, self._format(), reader, writer, far_reader, far_writer).run()
                finally:
                    far_writer.transport.abort()
        except asyncio.CancelledError:  # at the end of the test; asyncio would log the error
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Link:
    """One client and its connection to the server. A client sends a call after the response of the previous one."""

    def __init__(
        self, proxy: LossyProxy, calls: Calls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader, far_writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self._proxy = proxy
        self._calls = calls
        self._near = reader, writer
        self._far = far_reader, far_writer
        self._call: Call | None = None
        """The call that the client waits for."""
        self._answer = b""
        """The response so far."""

    async def run(self) -> None:
        ways = {asyncio.create_task(self._forth()), asyncio.create_task(self._back())}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _forth(self) -> None:
        while data := await self._near[0].read(2**16):
            for call in self._calls.feed(data):
                self._call = call
            self._far[1].write(data)
            await self._far[1].drain()

    async def _back(self) -> None:
        while data := await self._far[0].read(2**16):
            if self._call is not None:
                self._answer += data
                if not self._calls.is_complete(self._answer):
                    continue
                call, data = self._call, self._answer
                self._call, self._answer = None, b""
                how = None if self._calls.is_refused(data) else self._fate(self._calls.refined(call, data))
                if how == "cut":
                    return
                if how == "silence":
                    await asyncio.Event().wait()  # until the client gives up
            self._near[1].write(data)
            await self._near[1].drain()

    def _fate(self, call: Call) -> How | None:
        self._proxy.calls[call] += 1
        how = self._proxy.loses(call, self._proxy.calls[call])
        if how is not None:
            self._proxy.lost[call] += 1
        return how


@contextmanager
def lossy(kind: str, port: int, loses: Loses) -> Iterator[LossyProxy]:
    proxy = LossyProxy(kind, port, loses)
    try:
        yield proxy
    finally:
        proxy.close()


class HoldingProxy:
    """Forwards a port. ``hold`` keeps back the next data from a client that has a mark, and all that follows it on this
    connection, as a network does that delivers a statement late. Other connections go on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._armed: tuple[bytes, float] | None = None
        self._released = threading.Event()
        self.held = threading.Event()
        """Whether something was held back since the last ``hold``."""
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, mark: bytes, seconds: float = 3600.0) -> None:
        """Hold back the next data with this mark, for this time or until ``release``."""
        self.held.clear()
        self._released.clear()
        self._armed = mark, seconds

    def release(self) -> None:
        """Let everything pass."""
        self._armed = None
        self._released.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                threading.Thread(target=self._forth, args=(near, far), daemon=True).start()
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(2**16):
                armed = self._armed
                if armed is not None and armed[0] in data:
                    self._armed = None
                    self.held.set()
                    self._released.wait(armed[1])
                far.sendall(data)
        _end(far)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while data := far.recv(2**16):
                near.sendall(data)
        _end(near)

    def close(self) -> None:
        self.release()
        _end(self._listener)
        self._listener.close()


def _end(connection: socket.socket) -> None:
    """End a connection, also if another thread reads from it: a plain close would leave the peer waiting."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
