"""An endless site in the measuring process. It records when a node requests its first page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PAGES = 8
"""The number of start pages. Page N links to page N + PAGES."""
WAIT = 0.05
"""Seconds until a page is sent."""


class Site:
    """The site. It identifies nodes by their user agent."""

    def __init__(self, url: str) -> None:
        self.urls = [f"{url}/{number}" for number in range(PAGES)]
        self._awaited: dict[str, asyncio.Future[float]] = {}

    def first_visit(self, agent: str) -> asyncio.Future[float]:
        """Wait for the next request of this node, and return its time in seconds since the epoch."""
        self._awaited[agent] = asyncio.get_running_loop().create_future()
        return self._awaited[agent]

    def note(self, agent: str) -> None:
        if (waiting := self._awaited.pop(agent, None)) is not None and not waiting.done():
            waiting.set_result(time.time())


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Serve the site on a free port until the block ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                made.note(fields["user-agent"])
                await asyncio.sleep(WAIT)
                body = f'<a href="/{int(head[0].split(" ")[1][1:]) + PAGES}">on</a>'
                kind = f"Content-Type: text/html\r\nContent-Length: {len(body)}"
                writer.write(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n{body}".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the node was killed
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made = Site(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield made
    finally:
        server.close()
