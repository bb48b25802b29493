"""A client for the tests of the gateway, and servers whose bytes the tests choose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Self
from urllib.parse import urlsplit

from shoal.fetch.browser.gateway import Gateway, Listener
from shoal.fetch.browser.gateway_conversation import GatewayLimits
from shoal.fetch.guard import AddressGuard
from tests.support.servers import StreamServer, read_body, read_head

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection to a listener."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams

    @classmethod
    async def to(cls, listener: Listener) -> Self:
        url = urlsplit(listener.url)
        return cls(await asyncio.open_connection(url.hostname, url.port))

    async def ask(self, data: bytes | str, *, to_head: bool = False) -> Reply:
        """Send these bytes, and read a response."""
        self.writer.write(data.encode("latin-1") if isinstance(data, str) else data)
        return await self.reply(to_head=to_head)

    async def get(self, url: str, *headers: str, method: str = "GET", body: str = "") -> Reply:
        lines = [f"{method} {url} HTTP/1.1", f"Host: {urlsplit(url).netloc}", *headers, "", body]
        return await self.ask("\r\n".join(lines), to_head=method == "HEAD")

    async def connect(self, url: str) -> Reply:
        """Open a tunnel to the host of this URL."""
        where = urlsplit(url).netloc
        return await self.ask(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n", to_head=True)

    async def reply(self, *, to_head: bool = False) -> Reply:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        status = int(first.split(" ")[1])
        if to_head or status in (204, 304):
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int((await self.reader.readline()).partition(b";")[0], 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            while (await self.reader.readline()).strip():
                pass
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Reply(status, headers, body)

    async def ended(self) -> bool:
        """Whether the gateway closes the connection, without sending anything more."""
        try:
            return await self.reader.read(65536) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.writer.transport.abort()


class Scripted(StreamServer):
    """Answers each request with the next of these bytes, and closes the connection after the last. It keeps the bytes
    of all requests."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__()
        self._answers = answers
        self.heard: list[str] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in self._answers:
            request = await read_head(reader)
            await read_body(reader, request)
            lines = [f"{request.method} {request.target}", *(f"{name}: {value}" for name, value in request.headers)]
            self.heard.append("\n".join(lines))
            writer.write(answer)
            await writer.drain()


class Conversing(StreamServer):
    """Serves each connection with this function."""

    def __init__(self, converse: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        super().__init__()
        self._converse = converse

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._converse(reader, writer)


@asynccontextmanager
async def listening(
    upstream: str | None = None, *, guard: AddressGuard | None = None, **limits: float
) -> AsyncIterator[Listener]:
    """A listener of a gateway of its own. At the end nothing of the gateway may be left."""
    before = asyncio.all_tasks()
    gateway = Gateway(guard, GatewayLimits(**limits))  # type: ignore[arg-type]
    try:
        yield await gateway.open(upstream)
    finally:
        await gateway.close()
        left = [task for task in asyncio.all_tasks() - before if "gateway" in repr(task.get_coro())]
        assert left == []


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
