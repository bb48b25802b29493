"""A server behind nginx that waits 20 to 400 ms, always the same time for a URL, and then lets nginx send the page."""

from __future__ import annotations

import asyncio
import sys
from zlib import crc32

LEAST, MOST = 0.020, 0.400


class Waiting(asyncio.Protocol):
    def __init__(self, inside: bytes) -> None:
        self.inside = inside
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            target = head.split(b" ", 2)[1]
            wait = LEAST + (MOST - LEAST) * (crc32(target) / 0xFFFFFFFF) ** 2  # most answers are fast
            asyncio.get_running_loop().call_later(wait, self.answer, target)

    def answer(self, target: bytes) -> None:
        assert isinstance(self.transport, asyncio.WriteTransport)
        if not self.transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\nX-Accel-Redirect: " + self.inside + target
            self.transport.write(head + b"\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n")


async def serve(port: int, inside: bytes) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Waiting(inside), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2].encode()))
