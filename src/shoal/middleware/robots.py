"""robots.txt: fetched once for each origin by all workers, its word obeyed, its Crawl-delay kept by the frontier."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import timedelta

from msgspec import Struct
from protego import Protego

from shoal.config import RobotsSettings
from shoal.errors import FetchError, FrontierError, RequestError
from shoal.http import Request, Response
from shoal.middleware import Postponed
from shoal.ports import Fetch, Hosts, HostUpdate
from shoal.urls.normalize import host_of, join_url, origin_of

_AGENT = re.compile(r"\s*user(?:-|\s+)?agent[\s:]+([^\s#][^#]*)", re.IGNORECASE)
_WORD = re.compile(r"(?<![\w-])(?=\S)")
_LONGEST = 500 * 1024  # as much as others read of it
_MOST_KEPT = 64 * 1024 * 1024  # characters of all files together
_SHORTEST_CACHE = 60.0
_LONGEST_HOLD = 60.0
_HOPS = 5
_RECALLED_FOR = 3600.0  # seconds before what another worker fetched is asked for in the frontier again


class Rules(Struct):
    """What an origin's robots.txt says until it ``expires``. ``rules`` is None when it forbids nothing.

    With an ``error`` it could not be had, for the last so many ``failures``.
    """

    rules: Protego | None
    crawl_delay: float | None
    expires: float
    size: int
    error: FetchError | None = None
    failures: int = 0


class Robots:
    """Refuses what robots.txt disallows with a FetchError of the kind ``robots``.

    Fetching robots.txt uses up the host's turn: the page itself is Postponed, so the host never sees two requests
    closer than its delay. While it can't be had, its pages fail and wait; it is not asked for again with each of them.
    """

    def __init__(
        self,
        config: RobotsSettings,
        user_agent: str,
        frontier: Hosts,
    ) -> None:
        self._config = config
        self._frontier = frontier
        self._user_agent = user_agent
        self._rules: dict[str, Rules] = {}
        self._size = 0
        self._fetching: dict[str, asyncio.Future[None]] = {}

    def forget(self) -> None:
        """Drop what is cached: the store went back in time, and may have lost the Crawl-delay that came with it."""
        self._rules.clear()
        self._size = 0

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        origin = origin_of(request.url)
        known, now = self._rules.get(origin), time.monotonic()
        if known is None or known.expires <= now:
            known = await self._recall(origin)
        if known is None:
            await self._learn(origin, fetch)
            raise Postponed("robots.txt was fetched first", contacted=True)
        if known.error is not None:
            raise _unavailable(origin, known.error, known.expires - now, contacted=False)
        if known.rules is not None and not known.rules.can_fetch(request.url, self._user_agent):
            raise FetchError(f"robots.txt of {origin} disallows it", kind="robots", retryable=False, contacted=False)
        return await fetch(request)

    async def _recall(self, origin: str) -> Rules | None:
        """What another worker, or an earlier process, has fetched."""
        try:
            text = await self._frontier.recall(f"robots {origin}")
        except FrontierError:
            return None
        if text is None:
            return None
        rules = read_rules(text.decode("utf-8", "replace"), self._user_agent, self._config)
        rules.expires = min(rules.expires, time.monotonic() + _RECALLED_FOR)
        self._keep(origin, rules)
        return rules

    async def _learn(self, origin: str, fetch: Fetch) -> None:
        """Fetch it once, however many requests need it: the others are Postponed when it is there."""
        running = self._fetching.get(origin)
        if running is not None:
            await asyncio.wait([running])
            raise Postponed("robots.txt was fetched first", contacted=False)
        future = self._fetching[origin] = asyncio.get_running_loop().create_future()
        try:
            text = await _text(origin, fetch)
            rules = read_rules(text, self._user_agent, self._config)
            await self._tell(origin, rules, text)
            self._keep(origin, rules)
        except FetchError as error:
            hold = self._keep_failure(origin, error)
            raise _unavailable(origin, error, hold, contacted=error.contacted) from error
        finally:
            del self._fetching[origin]
            future.set_result(None)

    async def _tell(self, origin: str, rules: Rules, text: str) -> None:
        """First the Crawl-delay: whoever recalls the text must already be held back by it."""
        before = self._rules.get(origin)
        try:
            if rules.crawl_delay != (before.crawl_delay if before is not None else None):
                await self._frontier.update_host(host_of(origin + "/"), HostUpdate(crawl_delay=rules.crawl_delay))
            holds = max(_SHORTEST_CACHE, self._config.cache_seconds)
            await self._frontier.remember(f"robots {origin}", text.encode("utf-8", "replace"), holds)
        except FrontierError as error:
            raise Postponed(f"robots.txt could not be stored: {error}", contacted=True) from error

    def _keep_failure(self, origin: str, error: FetchError) -> float:
        """Remember it for as long as the host asked, or twice as long each time; how long that is."""
        before = self._rules.get(origin)
        failures = before.failures + 1 if before is not None else 1
        hold = _LONGEST_HOLD if not _may_better(error) else min(2.0 ** min(failures - 1, 60), _LONGEST_HOLD)
        if error.retry_after is not None:
            hold = error.retry_after.total_seconds()
        delay = before.crawl_delay if before is not None else None
        # A copy: the error itself holds on to all that was on the stack, and that may be a page's body.
        kept = FetchError(str(error), kind=error.kind, retryable=error.retryable, status=error.status)
        self._keep(origin, Rules(None, delay, time.monotonic() + hold, 1000, kept, failures))
        return hold

    def _keep(self, origin: str, rules: Rules) -> None:
        """The longest known are forgotten when there are too many: they can be had again."""
        if old := self._rules.pop(origin, None):
            self._size -= old.size
        self._rules[origin] = rules
        self._size += rules.size
        while self._size > _MOST_KEPT and len(self._rules) > 1:
            self._size -= self._rules.pop(next(iter(self._rules))).size


def read_rules(text: str, user_agent: str, config: RobotsSettings) -> Rules:
    """What a robots.txt means for us."""
    parsed = Protego.parse(_for_us(text, user_agent))
    delay = parsed.crawl_delay(user_agent)
    forbids = re.search("dia?s", text, re.IGNORECASE) is not None  # the ways to misspell it, too
    return Rules(
        rules=parsed if forbids else None,
        crawl_delay=min(delay, config.max_crawl_delay) if delay else None,
        expires=time.monotonic() + max(_SHORTEST_CACHE, config.cache_seconds),
        size=1000 + (len(text) if forbids else 0),
    )


def _for_us(text: str, user_agent: str) -> str:
    """The file with ``*`` for the group that is meant for us, and one name for all the others.

    The parser keeps every rule of a group once for each of its robots: thousands of both would fill the memory.
    """
    name = user_agent.lower()
    starts = [word.start() for word in _WORD.finditer(name)]
    lines = text.splitlines()
    robots: dict[int, str] = {}
    ours = ""
    for number, line in enumerate(lines):
        if match := _AGENT.match(line):
            robot = robots[number] = match[1].replace("*", "").strip().lower()
            if len(robot) > len(ours) and any(name.startswith(robot, start) for start in starts):
                ours = robot
    for number, robot in robots.items():
        lines[number] = "User-agent: *" if robot == ours else "User-agent: <another>"
    return "\n".join(lines)


async def _text(origin: str, fetch: Fetch) -> str:
    """The file's text; empty if there is none. A host that can't say now is asked again later: its pages wait."""
    url = origin + "/robots.txt"
    try:
        for _ in range(_HOPS):
            response = await fetch(Request(url))
            location = response.headers.get("Location")
            if response.status == 429 or response.status >= 500:  # a spider may ask to get these pages
                raise FetchError(f"it answered {response.status}", kind="", retryable=True, status=response.status)
            if not 300 <= response.status < 400 or location is None:
                return response.body[:_LONGEST].decode("utf-8-sig", "replace") if response.ok else ""
            url = join_url(url, location)
    except RequestError:
        return ""
    except FetchError as error:
        if 300 <= error.status < 500 and error.status != 429:
            return ""
        raise
    return ""


def _may_better(error: FetchError) -> bool:
    return error.retryable or error.status != 0


def _unavailable(origin: str, error: FetchError, hold: float, *, contacted: bool) -> FetchError:
    """For a page whose robots.txt can't be had: it may be asked for again after ``hold`` seconds."""
    return FetchError(
        f"robots.txt of {origin} can't be had: {error}",
        kind=error.kind if error.status == 0 else "robots unavailable",
        retryable=_may_better(error),
        status=error.status,
        retry_after=timedelta(seconds=hold),
        contacted=contacted,
    )
