"""A site in its own process that records who connected for each request.

``/list?count=20`` links to the pages ``/page/0`` and so on. Each ends after ``wait`` seconds of its query, and not
while the gate is closed. Pages below ``/blocked`` answer 403 to the address that asked first, and 200 to all others.
It listens on all addresses.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tests.support import forking
from tests.support.servers import answer, read_head


class Visit(NamedTuple):
    """A request, and the address and port from which its connection came."""

    host: str
    path: str
    address: str
    port: int


class TorSite:
    """The tests' view of the site."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._seen = 0

    def visits(self, prefix: str = "/page/") -> list[Visit]:
        """The requests since `forget`, in order of arrival."""
        return [visit for visit in self._all()[self._seen :] if visit.path.startswith(prefix)]

    def forget(self) -> None:
        self._seen = len(self._all())

    def wait_for(self, count: int, timeout: float = 60.0) -> None:
        """Until so many pages were asked for since `forget`."""
        until = time.monotonic() + timeout
        while len(self.visits()) < count:
            assert time.monotonic() < until, f"only {len(self.visits())} pages after {timeout:g} s"
            time.sleep(0.05)

    @contextmanager
    def closed_gate(self) -> Iterator[None]:
        """Pages are requested but not answered while the block runs. So nothing ends before a fault had its effect."""
        self._ask("close")
        try:
            yield
        finally:
            self._ask("open")

    def _all(self) -> list[Visit]:
        return [Visit(*visit) for visit in self._ask("log")]

    def _ask(self, what: str) -> list[Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/{what}") as found:
            answer: list[Any] = json.load(found)
        return answer


@contextmanager
def tor_site() -> Iterator[TorSite]:
    with forking.Popen([sys.executable, "-m", "tests.support.tor_site"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield TorSite(int(server.stdout.readline()))
        finally:
            server.kill()


# -- the process of the site


class _Site:
    def __init__(self) -> None:
        self.log: list[Visit] = []
        self.blocked = ""
        self.gate = asyncio.Event()
        self.gate.set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("peername")[:2]
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while True:
                request = await read_head(reader)
                url = urlsplit(request.target)
                query = parse_qs(url.query)
                if not url.path.startswith("/-/"):
                    self.log.append(Visit(request.header("host"), url.path, address, port))
                if url.path.startswith("/page/"):
                    await self.gate.wait()
                await asyncio.sleep(float(query.get("wait", ["0"])[0]))
                writer.write(self._answer(url.path, query, address))
                await writer.drain()
        writer.close()

    def _answer(self, path: str, query: dict[str, list[str]], address: str) -> bytes:
        if path == "/-/open":
            self.gate.set()
        if path == "/-/close":
            self.gate.clear()
        if path.startswith("/-/"):
            return answer(json.dumps(self.log), content_type="application/json")
        if path.startswith("/blocked"):
            self.blocked = self.blocked or address
            return answer("<h1>Blocked</h1>", status=403 if address == self.blocked else 200)
        if path == "/list":
            wait = query.get("wait", ["0"])[0]
            links = (f'<a href="/page/{i}?wait={wait}">{i}</a>' for i in range(int(query["count"][0])))
            return answer("<h1>List</h1>" + "\n".join(links))
        if path == "/to":
            return answer(b"", ("Location", query["url"][0]), status=302)
        return answer(f"<h1>Page {path}</h1>") if path.startswith("/page/") else answer("<h1>None</h1>", status=404)


async def _serve() -> None:
    server = await asyncio.start_server(_Site().converse, "0.0.0.0", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
