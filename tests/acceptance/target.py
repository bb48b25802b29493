"""A site in its own process that records every request.

The URL of a page says how it behaves: ``/a?wait=0.5&status=503&after=2&link=/b&link=/c``. ``after`` is its Retry-After.
With ``gate=1`` it responds only after `Target.open_gate`, with ``again=1`` only to the first request. Each port is a
separate host for a crawler.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, cast
from urllib.parse import parse_qs, urlsplit

from tests.support import forking
from tests.support.servers import answer


class Visit(NamedTuple):
    """A request in seconds of the machine's monotonic clock, from its arrival to just before its response is written.

    So a slow site can make the measured pause between two requests longer, never shorter.
    """

    host: str
    path: str
    agent: str
    start: float
    end: float | None
    """The end of the response, or when the client disconnected. None while the request is in progress."""


class Target:
    """The tests' view of the site."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.url = urls[0]

    def _ask(self, what: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/-/{what}") as found:
            body: bytes = found.read()
            return body

    def visits(self, url: str | None = None) -> list[Visit]:
        """All requests in order of arrival, or those to one host."""
        seen = [Visit(*visit) for visit in json.loads(self._ask("log"))]
        return [visit for visit in seen if url is None or visit.host == host_of(url)]

    def open_gate(self) -> None:
        self._ask("open")

    def mend(self) -> None:
        """Ignore ``status`` in URLs from now on."""
        self._ask("mend")

    def hurry(self) -> None:
        """Ignore ``wait`` in URLs from now on."""
        self._ask("hurry")

    def wait_until(self, holds: Callable[[list[Visit]], bool], timeout: float = 60.0) -> list[Visit]:
        until = time.monotonic() + timeout
        while not holds(seen := self.visits()):
            assert time.monotonic() < until, f"after {timeout:g} s the site has seen only {seen[-20:]}"
            time.sleep(0.05)  # each question takes a few milliseconds of CPU time
        return seen

    def wait_for(self, count: int, url: str | None = None, timeout: float = 60.0) -> list[Visit]:
        """Wait for this many more requests to the site, or to one of its hosts."""
        before = len(self.visits(url))
        host = None if url is None else host_of(url)
        return self.wait_until(
            lambda seen: sum(host in (None, visit.host) for visit in seen) >= before + count, timeout
        )


def host_of(url: str) -> str:
    return urlsplit(url).netloc


def closest(visits: Sequence[Visit]) -> float:
    """The shortest time from the end of a request to the start of the next; negative if two overlap."""
    ended, shortest = float("-inf"), float("inf")
    for visit in sorted(visits, key=lambda visit: visit.start):
        shortest = min(shortest, visit.start - ended)
        ended = max(ended, float("inf") if visit.end is None else visit.end)
    return shortest


def most_at_once(visits: Sequence[Visit]) -> int:
    moments = [(visit.start, 1) for visit in visits]
    moments += [(visit.end, -1) for visit in visits if visit.end is not None]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


@contextmanager
def target(*robots: str | None) -> Iterator[Target]:
    """Run the site with one port per robots.txt. None: no robots.txt."""
    command = [sys.executable, "-m", "tests.acceptance.target", json.dumps(robots or [None])]
    with forking.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield Target(json.loads(server.stdout.readline()))
        finally:
            server.kill()


# -- the process of the site


class Site:
    """The state that all connections share."""

    def __init__(self) -> None:
        self.log: list[list[str | float | None]] = []
        self.gate = asyncio.Event()
        self.mended = False
        self.in_a_hurry = False
        self.asked: set[str] = set()

    async def wait(self, target: str, query: dict[str, list[str]]) -> None:
        is_first = target not in self.asked
        self.asked.add(target)
        if "gate" in query or ("again" in query and not is_first):
            await self.gate.wait()
        if not self.in_a_hurry and (seconds := float(query.get("wait", ["0"])[0])):
            await asyncio.sleep(seconds)

    def order(self, word: str) -> bytes:
        """Handle a command of the tests."""
        if word == "open":
            self.gate.set()
        elif word == "mend":
            self.mended = True
        elif word == "hurry":
            self.in_a_hurry = True
        return answer(json.dumps(self.log), content_type="application/json")

    def page(self, target: str, query: dict[str, list[str]]) -> bytes:
        links = "".join(f'<a href="{link}">x</a>' for link in query.get("link", ()))
        status = 200 if self.mended else int(query.get("status", ["200"])[0])
        after = [("Retry-After", seconds) for seconds in query.get("after", ()) if status != 200]
        return answer(f"<h1>{urlsplit(target).path}</h1>{links}", *after, status=status)


class Connection(asyncio.Protocol):
    """One connection. Handles one request at a time."""

    def __init__(self, site: Site, robots: str | None) -> None:
        self._site = site
        self._robots = robots
        self._buffer = b""
        self._visit: list[str | float | None] | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._visit is not None:
            self._visit[-1] = time.monotonic()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        arrived = time.monotonic()
        self._buffer += data
        head, end, self._buffer = self._buffer.partition(b"\r\n\r\n")
        if not end:
            self._buffer = head
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        self._begin(lines[0].split(" ")[1], headers, arrived)

    def _begin(self, target: str, headers: dict[str, str], arrived: float) -> None:
        if target.startswith("/-/"):
            self._transport.write(self._site.order(target[3:]))
            return
        self._visit = [headers.get("host", ""), target, headers.get("user-agent", ""), arrived, None]
        self._site.log.append(self._visit)
        self._task = asyncio.get_running_loop().create_task(self._answer(target))

    async def _answer(self, target: str) -> None:
        query = parse_qs(urlsplit(target).query)
        if target == "/robots.txt":
            found = self._robots
            data = answer(status=404) if found is None else answer(found, content_type="text/plain")
        else:
            await self._site.wait(target, query)
            data = self._site.page(target, query)
        assert self._visit is not None
        self._visit[-1], self._visit = time.monotonic(), None
        self._transport.write(data)


async def serve(robots: list[str | None]) -> None:
    with suppress(OSError):
        os.nice(-10)  # it measures times, so it must not be delayed
    loop, site, urls = asyncio.get_running_loop(), Site(), []
    for text in robots:
        made = await loop.create_server(lambda text=text: Connection(site, text), "127.0.0.1", 0, backlog=1024)  # type: ignore[misc]
        urls.append(f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}")
    print(json.dumps(urls), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
