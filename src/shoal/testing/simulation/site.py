"""A simulated web site that knows what it has, and writes down every request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from shoal.testing.simulation.world import World


class Visit(NamedTuple):
    """A request that a page was asked for with."""

    url: str
    process: str
    start: float
    end: float
    """When the site answered."""
    status: int


class Site:
    """Pages on some hosts, linked at random. Each page can be reached from the first one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.links: dict[str, list[str]] = {}
        """By URL."""
        self.visits: list[Visit] = []
        self.failure_rate = 0.0
        """The share of requests that end in a fault of the network, or in a status of 503."""
        self.needs_session = False
        """Whether pages need the cookie that the first page sets."""

    @property
    def start(self) -> str:
        return next(iter(self.links))

    def build(self, pages: int, hosts: int) -> None:
        """Make the pages."""
        random = self._world.random
        urls = [f"http://h{random.randrange(hosts)}.example/{number}" for number in range(pages)]
        self.links = {url: [] for url in urls}
        for number, url in enumerate(urls[1:], 1):
            self.links[urls[random.randrange(number)]].append(url)
        for url in urls:
            self.links[url] += random.sample(urls, min(len(urls), random.randrange(4)))

    async def fetch(self, request: Request) -> Response:
        random, process = self._world.random, self._world.current
        seconds = random.uniform(0.005, 0.2) if random.random() < 0.97 else random.uniform(1, 8)
        status = random.choice([0, 503]) if random.random() < self.failure_rate else self._status(request)
        start = self._world.loop.time()
        self.visits.append(Visit(request.url, process.name, start, start + seconds, status))
        await asyncio.sleep(seconds)
        if not status:
            raise FetchError("the connection was reset", kind="connection", retryable=True)
        headers = {"Content-Type": "text/html"}
        if request.url == self.start:
            headers["Set-Cookie"] = "session=yes; Path=/"
        links = "".join(f'<a href="{link}">x</a>' for link in self.links.get(request.url, ()))
        return Response(request.url, status=status, headers=headers, body=links.encode(), request=request)

    def _status(self, request: Request) -> int:
        if request.url not in self.links:
            return 404
        if self.needs_session and request.url != self.start and "session=yes" not in request.headers.get("Cookie", ""):
            return 403
        return 200

    def visits_of(self, host: str) -> list[Visit]:
        return [visit for visit in self.visits if host_of(visit.url) == host]


class SiteFetcher:
    """See `shoal.ports.Fetcher`."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def fetch(self, request: Request) -> Response:
        return await self._site.fetch(request)

    async def close(self) -> None:
        """Do nothing."""
