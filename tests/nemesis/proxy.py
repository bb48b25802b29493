"""A proxy that loses chosen responses: the server does the call, but the caller gets no response."""

from __future__ import annotations

import asyncio
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
