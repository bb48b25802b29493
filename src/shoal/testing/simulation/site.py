"""A simulated web site that knows what it has, and writes down every request."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from shoal.testing.simulation.loop import Process
    from shoal.testing.simulation.world import World

Session: TypeAlias = Literal["none", "cookie", "login"]
"""What pages need: nothing, the cookie that the first page sets, or the cookie of a login."""
_SECRET = "open-sesame"


class Visit(Struct):
    """A request to the site."""

    url: str
    process: Process
    start: float
    answer: float
    """When the site answers."""
    status: int
    given_up_at: float = inf

    @property
    def end(self) -> float:
        """When it was over: a dead process has no connections."""
        return min(self.answer, self.given_up_at, max(self.start, self.process.killed_at))


class Site:
    """Pages on some hosts, linked at random. Each page can be reached from the first one."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.pages: dict[str, list[str]] = {}
        """The links of each page, by URL."""
        self.redirects: dict[str, str] = {}
        self.missing: set[str] = set()
        """URLs that pages link to, and that do not exist."""
        self.visits: list[Visit] = []
        """Requests, apart from those for robots.txt."""
        self.failure_rate = 0.0
        """The share of requests that end in a fault of the network, or in a status of 503."""
        self.session: Session = "none"
        self.crawl_delay = 0.0
        """What robots.txt asks for, in seconds."""
        self._sessions: set[str] = set()
        self.logins = 0

    @property
    def start(self) -> str:
        return next(iter(self.pages))

    def build(self, pages: int, hosts: int, redirects: int, missing: int) -> None:
        """Make so many pages, and links to so many redirects and missing pages."""
        random = self._world.random

        def urls(kind: str, count: int) -> list[str]:
            return [f"http://h{random.randrange(hosts)}.example/{kind}{number}" for number in range(count)]

        own = urls("", pages)
        self.pages = {url: [] for url in own}
        for number, url in enumerate(own[1:], 1):
            self.pages[own[random.randrange(number)]].append(url)
        for url in own:
            self.pages[url] += random.sample(own, min(len(own), random.randrange(4)))
        for url in urls("moved", redirects):
            self.redirects[url] = random.choice(own)
        self.missing = set(missing_urls := urls("missing", missing))
        for url in (*self.redirects, *missing_urls):
            self.pages[random.choice(own)].append(url)

    async def fetch(self, request: Request) -> Response:
        """Answer a request."""
        if request.url.endswith("/robots.txt"):
            return self._robots(request)
        random, process = self._world.random, self._world.current
        seconds = random.uniform(0.005, 0.2) if random.random() < 0.97 else random.uniform(1, 8)
        status = random.choice([0, 503]) if random.random() < self.failure_rate else self._status(request)
        start = self._world.loop.time()
        visit = Visit(request.url, process, start, start + seconds, status)
        self.visits.append(visit)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            visit.given_up_at = self._world.loop.time()
            raise
        if not status:
            raise FetchError("the connection was reset", kind="connection", retryable=True)
        headers = self._headers(request, status)
        links = "".join(f'<a href="{link}">x</a>' for link in self.pages.get(request.url, ()))
        body = links.encode() if status == 200 else b""
        return Response(request.url, status=status, headers=headers, body=body, request=request)

    def _robots(self, request: Request) -> Response:
        rules = f"User-agent: *\nCrawl-delay: {self.crawl_delay:g}" if self.crawl_delay else ""
        return Response(
            request.url, status=200, headers={"Content-Type": "text/plain"}, body=rules.encode(), request=request
        )

    def _status(self, request: Request) -> int:
        url = request.url
        if self._is_login(url):
            return 200 if _SECRET in url else 403
        if url in self.redirects:
            return 302
        if url in self.missing or url not in self.pages:
            return 404
        return 200 if self._has_session(request) else 403

    def _has_session(self, request: Request) -> bool:
        cookie = request.headers.get("Cookie", "")
        if self.session == "login":
            return cookie.removeprefix("session=") in self._sessions
        return self.session == "none" or request.url == self.start or cookie == "session=yes"

    def _headers(self, request: Request, status: int) -> dict[str, str]:
        headers = {"Content-Type": "text/html"}
        if status == 302:
            headers["Location"] = self.redirects[request.url]
        if request.url == self.start and self.session == "cookie" and status == 200:
            headers["Set-Cookie"] = "session=yes; Path=/"
        if self._is_login(request.url) and status == 200:
            self.logins += 1
            name = f"s{self.logins}"
            self._sessions = {name}  # a new login ends the one before
            headers["Set-Cookie"] = f"session={name}; Path=/"
        return headers

    def _is_login(self, url: str) -> bool:
        return urlsplit(url).path == "/login"

    @property
    def login_url(self) -> str:
        return f"http://{host_of(self.start)}/login?password={_SECRET}"

    def end_sessions(self) -> None:
        """Log everybody out."""
        self._sessions.clear()

    def visits_of(self, host: str) -> list[Visit]:
        """The requests to a host."""
        return [visit for visit in self.visits if host_of(visit.url) == host]


class SiteFetcher:
    """See `shoal.ports.Fetcher`."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def fetch(self, request: Request) -> Response:
        return await self._site.fetch(request)

    async def close(self) -> None:
        """Do nothing."""
