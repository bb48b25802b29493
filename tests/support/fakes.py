"""Small stand-ins behind the ports: a web in memory, and a frontier whose calls a test can watch or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from shoal.config import Config
from shoal.frontier.memory import MemoryStore
from shoal.frontier.memory.store import MemoryFrontier
from shoal.http import Request, Response
from shoal.ports import Frontier, FrontierOptions, Run
from shoal.testing import FakeClock

SITE = "http://ex.com/"
CONFIG = Config().with_settings(
    {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "retry.base_delay": 0}
)


class Web:
    """A fetcher: answers requests from a dictionary of pages, and knows what was fetched and what is in flight."""

    def __init__(self, pages: Mapping[str, str | Response | Exception] | None = None) -> None:
        """``pages``: path to HTML, response or error. Other paths are empty pages."""
        self.pages = dict(pages or {})
        self.fetched: list[str] = []
        self.in_flight: list[str] = []
        self.most_in_flight = 0
        self.together: dict[str, set[str]] = {}
        """For each path, the paths that were in flight at the same time."""
        self.gate = asyncio.Event()
        """While it is clear, requests hang."""
        self.gate.set()
        self.delay: Callable[[str], float] = lambda path: 0.0
        """Seconds that a page takes."""
        self.closed = False

    async def fetch(self, request: Request) -> Response:
        path = request.url.removeprefix(SITE)
        self.fetched.append(path)
        for other in self.in_flight:
            self.together.setdefault(other, set()).add(path)
            self.together.setdefault(path, set()).add(other)
        self.in_flight.append(path)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        try:
            await asyncio.sleep(self.delay(path))
            await self.gate.wait()
        finally:
            self.in_flight.remove(path)
        page = self.pages.get(path, "")
        if isinstance(page, Exception):
            raise page
        return Response(request.url, body=page.encode(), request=request) if isinstance(page, str) else page

    async def close(self) -> None:
        self.closed = True


class Calls:
    """A frontier that notes its calls. A test may put a coroutine function in place of a method."""

    def __init__(self, inner: MemoryFrontier) -> None:
        self.inner = inner
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.replaced: dict[str, Callable[..., Awaitable[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        method = self.replaced.get(name) or getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments))
            return await method(*arguments, **options)

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


class SharedMemoryStore(MemoryStore):
    """A store in memory that is treated like one on a server."""

    shared = True


async def memory_store(
    state: Any = "running", kind: type[MemoryStore] = MemoryStore, clock: FakeClock | None = None
) -> MemoryStore:
    """A store with one run, called ``run``."""
    store = kind(clock=clock)
    await store.create_run(Run(run_id="run", spider="x", state=state, created_at=0.0))
    return store


async def memory_frontier(clock: FakeClock | None = None, **options: Any) -> MemoryFrontier:
    store = await memory_store(clock=clock)
    frontier = await store.frontier("run", FrontierOptions(**{"concurrency_per_host": 100, **options}))
    assert isinstance(frontier, MemoryFrontier)
    return frontier


async def seed(frontier: Frontier, *paths: str) -> None:
    """Push pages as start requests, and finish seeding."""
    claim = await frontier.claim("seed", 60)
    assert claim is not None
    await frontier.push([Request(SITE + path) for path in paths])
    await frontier.relinquish(claim, finished=True)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)
