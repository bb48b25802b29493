"""robots.txt: fetched once for each origin, its word obeyed, its Crawl-delay kept by the frontier."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urljoin

from msgspec import Struct
from protego import Protego

from shoal.config import Robots as RobotsConfig
from shoal.errors import FetchError, RequestError
from shoal.http import Request, Response
from shoal.links import host_of, join_url, origin_of
from shoal.middleware import Postponed
from shoal.ports import Fetch, HostUpdate

_DISALLOWS = re.compile(r"(?im)^\s*disallow\s*:\s*[^\s#]")
_LONGEST = 500 * 1024  # as much as others read of it
_SHORTEST_CACHE = 60.0
_HOPS = 5


class Rules(Struct):
    """What an origin's robots.txt says. ``rules`` is None when it forbids nothing."""

    rules: Protego | None
    crawl_delay: float | None
    expires: float


class Robots:
    """Refuses what robots.txt disallows with a FetchError of the kind ``robots``.

    Fetching robots.txt uses up the host's turn: the page itself is Postponed, so the host never sees two requests
    closer than its delay.
    """

    def __init__(
        self,
        config: RobotsConfig,
        user_agent: str,
        update_host: Callable[[str, HostUpdate], Awaitable[None]],
    ) -> None:
        self._config = config
        self._user_agent = user_agent
        self._update_host = update_host
        self._rules: dict[str, Rules] = {}
        self._fetching: dict[str, asyncio.Future[None]] = {}

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        origin = origin_of(request.url)
        known = self._rules.get(origin)
        if known is None or known.expires < time.monotonic():
            await self._learn(origin, fetch)
            raise Postponed("robots.txt was fetched first", contacted=True)
        if known.rules is not None and not known.rules.can_fetch(request.url, self._user_agent):
            raise FetchError(
                f"robots.txt of {origin} disallows it", kind="robots", retryable=False, contacted=False
            )
        return await fetch(request)

    async def _learn(self, origin: str, fetch: Fetch) -> None:
        """Fetch it once, however many requests need it: the others are Postponed when it is there."""
        running = self._fetching.get(origin)
        if running is not None:
            await asyncio.wait([running])
            raise Postponed("robots.txt was fetched first", contacted=False)
        future = self._fetching[origin] = asyncio.get_running_loop().create_future()
        try:
            rules = read_rules(await _text(origin, fetch), self._user_agent, self._config)
            if rules.crawl_delay:
                await self._update_host(host_of(origin + "/"), HostUpdate(crawl_delay=rules.crawl_delay))
            self._rules[origin] = rules
        finally:
            del self._fetching[origin]
            future.set_result(None)


def read_rules(text: str, user_agent: str, config: RobotsConfig) -> Rules:
    """What a robots.txt means for us."""
    parsed = Protego.parse(text)
    delay = parsed.crawl_delay(user_agent)
    return Rules(
        rules=parsed if _DISALLOWS.search(text) else None,
        crawl_delay=min(float(delay), config.max_crawl_delay) if delay else None,
        expires=time.monotonic() + max(_SHORTEST_CACHE, config.cache_seconds),
    )


async def _text(origin: str, fetch: Fetch) -> str:
    """The file's text; empty if there is none. A host that can't say now is asked again later: its pages wait."""
    url = origin + "/robots.txt"
    try:
        for _ in range(_HOPS):
            response = await fetch(Request(url))
            location = response.headers.get("Location")
            if not 300 <= response.status < 400 or location is None:
                return response.body[:_LONGEST].decode("utf-8", "replace") if response.status == 200 else ""
            url = join_url(url, urljoin(url, location))
    except RequestError:
        return ""
    except FetchError as error:
        if 400 <= error.status < 500 and error.status != 429:
            return ""
        raise FetchError(
            f"robots.txt of {origin} can't be had: {error}",
            kind=error.kind if error.status == 0 else "robots unavailable",
            retryable=True,
            status=error.status,
            retry_after=error.retry_after,
            contacted=error.contacted,
        ) from error
    return ""
