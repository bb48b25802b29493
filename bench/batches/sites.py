"""The sites: nginx, which responds at once, and a slow server.

As a program it is the slow server: it prints its port, and serves the files of a folder.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batches.setup import FOLDER, Setup, read_line, running
from crawl.server import Serving, serve
from crawl.site import path_of

WAIT = 0.05
"""Seconds until the slow site responds."""


@contextmanager
def fast(setup: Setup) -> Iterator[Serving]:
    with serve(setup.nginx, Path(setup.root), FOLDER / "nginx", [], log=True) as serving:
        yield serving


@contextmanager
def slow(setup: Setup) -> Iterator[Serving]:
    words = ("-m", "batches.sites", setup.root, str(setup.pages))
    with running(setup, "slow-site", *words, core=setup.site_core, talks=True) as process:
        yield Serving(f"http://127.0.0.1:{int(read_line(process))}/", process.pid)


SITES = {"slow": slow, "fast": fast}


class _Slow(asyncio.Protocol):
    """One connection. Requests that arrive before the last response was sent are answered after it."""

    def __init__(self, pages: dict[bytes, bytes]) -> None:
        self._pages = pages
        self._received = b""

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *heads, self._received = (self._received + data).split(b"\r\n\r\n")
        for head in heads:
            asyncio.get_running_loop().call_later(WAIT, self._transport.write, self._pages[head.split(b" ", 2)[1]])


def _answers(root: Path, pages: int) -> dict[bytes, bytes]:
    """The whole response for each path, with its headers."""
    bodies = {"/robots.txt": (b"text/plain", (root / "robots.txt").read_bytes())}
    for number in range(pages):
        path = path_of(number)
        bodies[path] = (b"text/html; charset=utf-8", (root / (path.lstrip("/") or "index.html")).read_bytes())
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
    return {path.encode(): head % (kind, len(body), body) for path, (kind, body) in bodies.items()}


async def _serve(root: Path, pages: int) -> None:
    answers = _answers(root, pages)
    server = await asyncio.get_running_loop().create_server(lambda: _Slow(answers), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
