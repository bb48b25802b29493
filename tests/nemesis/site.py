"""A site that knows all its pages and logs every request to a file, for the judge of the nemesis tests.

It listens on several ports. Each port is a separate host for a crawler.

- The first host is fast: a graph of pages ``/n/<i>``, each reachable over several paths, some only through a redirect
  ``/r/<i>`` and a cross link; and start pages ``/s/<i>`` that nothing links to.
- The other hosts are slow: a chain of pages behind a robots.txt with a Crawl-delay.

A page holds a few records. Their number depends on how often the page was requested, so two visits of one page never
give the same items.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from tests.support import forking

REDIRECT_EVERY = 20
"""Every N-th page of the tree is linked through a redirect."""
HOLDING = "holding"
"""While this file exists next to the log, one page gets no response."""


@dataclass(frozen=True)
class Plan:
    """The size of a site."""

    pages: int = 800
    starts: int = 2000
    slow_hosts: int = 6
    slow_pages: int = 10
    crawl_delay: float = 0.6
    latency: float = 0.02
    """Seconds until a page of the fast host is sent, so that a crawl is not too fast on any machine."""


class Visit(NamedTuple):
    """One request, in seconds of the machine's monotonic clock: from its arrival to just before its response."""

    start: float
    end: float
    host: str
    path: str
    agent: str


def record_count(number: int, visit: int) -> int:
    """The number of records of a page when it is requested for the ``visit``-th time."""
    return 1 + (number + visit) % 3


def graph_links(number: int, pages: int) -> list[str]:
    """The links of a page of the fast host: three children in a tree, and three links across it."""
    children = [child for child in range(3 * number + 1, 3 * number + 4) if child < pages]
    across = [(number * 7 + 5) % pages, (number * 13 + 11) % pages, (number + pages // 2) % pages]
    return [
        *(f"/r/{child}" if child % REDIRECT_EVERY == 0 else f"/n/{child}" for child in children),
        *(f"/n/{other}" for other in across),
    ]


class Site:
    """The tests' view of a running site."""

    def __init__(self, urls: list[str], plan: Plan, log: Path) -> None:
        self.urls = urls
        self.plan = plan
        self._log = log

    def hold(self) -> None:
        """Stop responding for the last page of the first slow host, so that a crawl cannot end."""
        self._holding.touch()

    def let_go(self) -> None:
        """Respond for that page again."""
        self._holding.unlink(missing_ok=True)

    @property
    def _holding(self) -> Path:
        return self._log.with_name(HOLDING)

    @property
    def root(self) -> str:
        return f"{self.urls[0]}/n/0"

    @property
    def hosts(self) -> list[str]:
        return [url.removeprefix("http://") for url in self.urls]

    @property
    def start_urls(self) -> list[str]:
        """The root of the graph, then pages that nothing links to."""
        return [self.root, *(f"{self.urls[0]}/s/{number}" for number in range(self.plan.starts))]

    def pages(self) -> set[str]:
        """All pages with records, as host and path."""
        fast, *slow = self.hosts
        found = {f"{fast}/n/{number}" for number in range(self.plan.pages)}
        found |= {f"{fast}/s/{number}" for number in range(self.plan.starts)}
        found |= {f"{host}/n/{number}" for host in slow for number in range(self.plan.slow_pages)}
        return found

    def requests_so_far(self) -> int:
        return self._log.read_bytes().count(b"\n")

    def progress(self) -> float:
        """The fetched part of the site, from 0 to 1. The fast host and the slow hosts count half each."""
        fetched = {f"{visit.host}{visit.path}" for visit in self.visits()} & self.pages()
        fast = sum(page.startswith(self.hosts[0]) for page in fetched)
        slow = self.plan.slow_hosts * self.plan.slow_pages
        return fast / (self.plan.pages + self.plan.starts) / 2 + (len(fetched) - fast) / slow / 2

    def agents(self) -> set[str]:
        """The user agents that have sent requests."""
        return {visit.agent for visit in self.visits()}

    def visits(self) -> list[Visit]:
        """All requests in order of their responses, including robots.txt and redirects."""
        found = []
        for line in self._log.read_text().splitlines():
            start, end, host, path, agent = line.split("\t")
            found.append(Visit(float(start), float(end), host, path, agent))
        return found


@contextmanager
def site(folder: Path, plan: Plan) -> Iterator[Site]:
    """Run the site in its own process, with its log in the folder."""
    log = folder / "site.log"
    log.touch()
    command = [sys.executable, "-m", "tests.nemesis.site", "--log", str(log)]
    for name, value in vars(plan).items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    root = str(Path(__file__).parents[2])
    with forking.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        try:
            yield Site(json.loads(process.stdout.readline()), plan, log)
        finally:
            process.kill()


# -- the process of the site


class _Pages:
    """The responses and the log, shared by all connections."""

    def __init__(self, plan: Plan, log: TextIO) -> None:
        self.plan = plan
        self._holding = Path(log.name).with_name(HOLDING)
        self.urls: list[str] = []
        self._log = log
        self._visits: Counter[str] = Counter()

    def is_held(self, host_index: int, path: str) -> bool:
        return host_index == 1 and path == f"/n/{self.plan.slow_pages - 1}" and self._holding.exists()

    def answer(self, host_index: int, path: str, agent: str, arrived: float) -> bytes:
        data = self._answer(host_index, self._host(host_index), path)
        self.note(host_index, path, agent, arrived)
        return data

    def note(self, host_index: int, path: str, agent: str, arrived: float) -> None:
        """Log a request that is over: it has its response, or its client has left."""
        host = self._host(host_index)
        self._log.write(f"{arrived:.6f}\t{time.monotonic():.6f}\t{host}\t{path}\t{agent}\n")
        self._log.flush()

    def _host(self, host_index: int) -> str:
        return self.urls[host_index].removeprefix("http://")

    def _answer(self, host_index: int, host: str, path: str) -> bytes:
        if path == "/robots.txt":
            delay = f"Crawl-delay: {self.plan.crawl_delay}\n" if host_index else ""
            return _response(200, f"User-agent: *\n{delay}Disallow: /secret\n", "text/plain")
        kind, _, digits = path.removeprefix("/").partition("/")
        if kind not in ("n", "r", "s") or not digits.isdigit():
            return _response(404, "no such page")
        number = int(digits)
        if kind == "r":
            return _response(302, "", location=f"/n/{number}")
        return _response(200, self._page(host_index, f"{host}{path}", kind, number))

    def _page(self, host_index: int, page: str, kind: str, number: int) -> str:
        self._visits[page] += 1
        visit = self._visits[page]
        records = "".join(
            f'<p class="record" data-number="{index}" data-visit="{visit}">record</p>'
            for index in range(record_count(number, visit))
        )
        links = "".join(f'<a href="{link}">link</a>' for link in self._links(host_index, kind, number))
        return f"<!doctype html><title>{page}</title><h1>{page}</h1>{records}{links}"

    def _links(self, host_index: int, kind: str, number: int) -> list[str]:
        if kind == "s":
            return []
        if host_index:
            return [f"/n/{other}" for other in (number + 1, number + 2, 0) if other < self.plan.slow_pages]
        slow = [f"{url}/n/0" for url in self.urls[1:]] if number == 0 else []
        return [*graph_links(number, self.plan.pages), *slow]


def _response(status: int, body: str, content_type: str = "text/html; charset=utf-8", location: str = "") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}", f"Content-Length: {len(body.encode())}"]
    if location:
        lines.append(f"Location: {location}")
    return ("\r\n".join([*lines, "", ""]) + body).encode()


class _Connection(asyncio.Protocol):
    def __init__(self, pages: _Pages, host_index: int) -> None:
        self._pages = pages
        self._host_index = host_index
        self._buffer = b""
        self._answering: asyncio.Task[None] | None = None
        self._leave: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answering is not None and not self._answering.done():
            self._answering.cancel()
            self._leave()

    def data_received(self, data: bytes) -> None:
        arrived = time.monotonic()
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
            first, *headers = head.decode("latin-1").split("\r\n")
            agent = next((line[11:].strip() for line in headers if line.lower().startswith("user-agent:")), "")
            self._begin(first.split(" ")[1], agent, arrived)

    def _begin(self, path: str, agent: str, arrived: float) -> None:
        request = (self._host_index, path, agent, arrived)
        self._leave = lambda: self._pages.note(*request)
        self._answering = asyncio.get_running_loop().create_task(self._answer(request))

    async def _answer(self, request: tuple[int, str, str, float]) -> None:
        if self._host_index == 0:
            await asyncio.sleep(self._pages.plan.latency)
        while self._pages.is_held(self._host_index, request[1]):
            await asyncio.sleep(0.02)
        self._transport.write(self._pages.answer(*request))


async def _serve(plan: Plan, log: Path) -> None:
    with suppress(OSError):
        os.nice(-10)  # it measures times, so it must not be delayed
    loop = asyncio.get_running_loop()
    with log.open("a") as file:
        pages = _Pages(plan, file)
        for index in range(1 + plan.slow_hosts):
            server = await loop.create_server(lambda index=index: _Connection(pages, index), "127.0.0.1", 0)  # type: ignore[misc]
            pages.urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        print(json.dumps(pages.urls), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis.site")
    parser.add_argument("--log", type=Path, required=True)
    for name, default in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    log = options.pop("log")
    asyncio.run(_serve(Plan(**options), log))


if __name__ == "__main__":
    main()
