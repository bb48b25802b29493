"""Obeys robots.txt. The workers fetch it once per origin and share it, and the frontier keeps its Crawl-delay."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta

from msgspec import Struct
from protego import Protego

from shoal.config import RobotsSettings
from shoal.errors import FetchError, FrontierError, RequestError
from shoal.fetch.layers import Postponed
from shoal.http import Request, Response
from shoal.ports import Fetch, Hosts, HostUpdate
from shoal.system import clock
from shoal.urls.normalize import host_of, join_url, normalize_url, origin_of

_DISALLOW = re.compile("dia?s", re.IGNORECASE)  # includes common misspellings
_EMPTY_RULE = re.compile(r"\s*+[a-z]++\s*+:?\s*+(#.*)?", re.IGNORECASE)  # `Disallow:` allows everything
_AGENT = re.compile(r"\s*user(?:-|\s+)?agent[\s:]+([^\s#][^\s#/]*)", re.IGNORECASE)  # without a version
_RULE = re.compile(
    r"\s*(?:user(?:-|\s+)?agent|allow|dis{1,2}al{1,2}[oa]w|diasllow|crawl[-\s]delay|request[-\s]rate|visit[-\s]time)"
    r"(?![\w-])",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?<![\w-])(?=\S)")
MAX_BYTES = 500 * 1024  # of one file: the least that RFC 9309 asks for
_MAX_CACHED = 64 * 1024 * 1024  # characters of all files together
_MIN_CACHE_SECONDS = 60.0
_MAX_HOLD = 60.0
_MAX_REDIRECTS = 5
_RECALL_SECONDS = 3600.0  # how long a file from the frontier is cached


class RobotsRules(Struct):
    """The robots.txt of an origin, valid until it ``expires``. ``rules`` is None if everything is allowed.

    ``error`` is set if the file could not be fetched. ``failures`` counts the failed attempts in a row.
    """

    rules: Protego | None
    crawl_delay: float | None
    expires: float
    size: int
    error: FetchError | None = None
    failures: int = 0


class Robots:
    """Refuses pages that robots.txt disallows with a FetchError of the kind ``robots``.

    A fetch of robots.txt takes the place of the page, and the page is Postponed. So two requests to a host are never
    closer than its delay. If robots.txt can't be fetched, the pages of its origin fail and wait. Not each of them
    fetches it again.
    """

    def __init__(self, config: RobotsSettings, user_agent: str, frontier: Hosts) -> None:
        self._config = config
        self._frontier = frontier
        self._user_agent = user_agent
        self._rules: dict[str, RobotsRules] = {}
        self._size = 0
        self._fetching: dict[str, asyncio.Future[None]] = {}

    def forget(self) -> None:
        """Clear the cache after a rewind of the store, which may have lost a Crawl-delay."""
        self._rules.clear()
        self._size = 0

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        origin = origin_of(request.url)
        rules = self._rules.get(origin)
        if rules is None or rules.error is not None or rules.expires <= clock.monotonic():
            rules = await self._rules_of(origin, fetch)
        if rules.rules is not None and not rules.rules.can_fetch(normalize_url(request.url), self._user_agent):
            raise FetchError(f"robots.txt of {origin} disallows it", kind="robots", retryable=False, contacted=False)
        return await fetch(request)

    async def allows(self, url: str) -> bool:
        """Whether the page is known to be allowed. Fetches no robots.txt."""
        origin = origin_of(url)
        rules = self._rules.get(origin)
        if rules is None or rules.expires <= clock.monotonic():
            rules = await self._recall(origin)
        if rules is None or rules.error is not None:
            return False
        return rules.rules is None or rules.rules.can_fetch(normalize_url(url), self._user_agent)

    async def fetch_first(self, request: Request, fetch: Fetch) -> Response:
        """Fetch only the robots.txt of a request, unless it is known. The request itself is Postponed, or fails because
        its robots.txt can't be fetched."""
        await self._rules_of(origin_of(request.url), fetch)
        raise Postponed("robots.txt is known", contacted=False)

    async def _rules_of(self, origin: str, fetch: Fetch) -> RobotsRules:
        """The rules of an origin. Raises Postponed if it had to fetch them: the fetch takes the place of the page."""
        rules, now = self._rules.get(origin), clock.monotonic()
        if rules is None or rules.expires <= now:
            rules = await self._recall(origin)
        if rules is None:
            await self._learn(origin, fetch)
            raise Postponed("robots.txt was fetched first", contacted=True)
        if rules.error is not None:
            raise _unavailable(origin, rules.error, rules.expires - now, contacted=False)
        return rules

    async def _recall(self, origin: str) -> RobotsRules | None:
        """The rules that another worker or an earlier process has fetched."""
        try:
            text = await self._frontier.recall(fact_name(origin))
        except FrontierError:
            return None
        if text is None:
            return None
        rules = read_rules(text.decode("utf-8", "replace"), self._user_agent, self._config)
        rules.expires = min(rules.expires, clock.monotonic() + _RECALL_SECONDS)
        self._keep(origin, rules)
        return rules

    async def _learn(self, origin: str, fetch: Fetch) -> None:
        """Fetch robots.txt once. Other requests that need it wait for this fetch, and are then Postponed."""
        running = self._fetching.get(origin)
        if running is not None:
            await asyncio.wait([running])
            raise Postponed("robots.txt was fetched first", contacted=False)
        future = self._fetching[origin] = asyncio.get_running_loop().create_future()
        try:
            text = await _text(origin, fetch)
            rules = read_rules(text, self._user_agent, self._config)
            await self._share(origin, rules, text)
            self._keep(origin, rules)
        except FetchError as error:
            hold = self._keep_failure(origin, error)
            raise _unavailable(origin, error, hold, contacted=error.contacted) from error
        finally:
            del self._fetching[origin]
            future.set_result(None)

    async def _share(self, origin: str, rules: RobotsRules, text: str) -> None:
        """Store the Crawl-delay, then the text: the delay must apply before another worker can recall the text."""
        old = self._rules.get(origin)
        try:
            if old is None or rules.crawl_delay != old.crawl_delay:  # an earlier process may have stored one
                await self._frontier.update_host(host_of(origin + "/"), HostUpdate(crawl_delay=rules.crawl_delay))
            seconds = max(_MIN_CACHE_SECONDS, self._config.cache_seconds)
            await self._frontier.remember(fact_name(origin), text.encode("utf-8", "replace"), seconds)
        except FrontierError as error:
            raise Postponed(f"can't store robots.txt: {error}", contacted=True) from error

    def _keep_failure(self, origin: str, error: FetchError) -> float:
        """Cache a failure for as long as the host asks, or with exponential backoff. Return the seconds."""
        old = self._rules.get(origin)
        failures = old.failures + 1 if old is not None else 1
        hold = _MAX_HOLD if not _is_temporary(error) else min(2.0 ** min(failures - 1, 60), _MAX_HOLD)
        if error.retry_after is not None:
            hold = error.retry_after.total_seconds()
        delay = old.crawl_delay if old is not None else None
        # Keep a copy: the traceback of the error would keep everything on the stack alive, such as the body of a page.
        copy = FetchError(str(error), kind=error.kind, retryable=error.retryable, status=error.status)
        self._keep(origin, RobotsRules(None, delay, clock.monotonic() + hold, 1000, copy, failures))
        return hold

    def _keep(self, origin: str, rules: RobotsRules) -> None:
        """Cache rules. If the cache is too large, drop the oldest."""
        if old := self._rules.pop(origin, None):
            self._size -= old.size
        self._rules[origin] = rules
        self._size += rules.size
        while self._size > _MAX_CACHED and len(self._rules) > 1:
            self._size -= self._rules.pop(next(iter(self._rules))).size


def fact_name(origin: str) -> str:
    """The name under which the frontier keeps the robots.txt of an origin."""
    return f"robots {origin}"


def read_rules(text: str, user_agent: str, config: RobotsSettings) -> RobotsRules:
    """The rules in a robots.txt for this user agent."""
    rules = Protego.parse(_with_own_group(text, user_agent))
    delay = rules.crawl_delay(user_agent)
    may_disallow = any(_DISALLOW.search(line) and not _EMPTY_RULE.fullmatch(line) for line in text.splitlines())
    return RobotsRules(
        rules=rules if may_disallow else None,
        crawl_delay=min(delay, config.max_crawl_delay) if delay else None,
        expires=clock.monotonic() + max(_MIN_CACHE_SECONDS, config.cache_seconds),
        size=1000 + (len(text) if may_disallow else 0),
    )


def _with_own_group(text: str, user_agent: str) -> str:
    """The file in which the group for this user agent is named ``*``, and all other groups have one name.

    The parser stores each rule of a group once for each of its robots. Thousands of both would fill the memory. It also
    ends a list of robots at a line that it does not know. So these lines are left out.
    """
    name = user_agent.lower()
    starts = [word.start() for word in _WORD.finditer(name)]
    lines = [line for line in text.splitlines() if _RULE.match(line)]
    robots: dict[int, str] = {}
    ours = ""
    for number, line in enumerate(lines):
        if match := _AGENT.match(line):
            robot = robots[number] = match[1].replace("*", "").lower()
            if len(robot) > len(ours) and any(name.startswith(robot, start) for start in starts):
                ours = robot
    for number, robot in robots.items():
        lines[number] = "User-agent: *" if robot == ours else "User-agent: <another>"
    return "\n".join(lines)


async def _text(origin: str, fetch: Fetch) -> str:
    """The text of the file. Empty if there is none. FetchError if the host can't answer now."""
    url = origin + "/robots.txt"
    try:
        for _ in range(1 + _MAX_REDIRECTS):
            response = await fetch(Request(url, render=False))
            location = response.headers.get("Location")
            if response.status == 429 or response.status >= 500:  # a spider may handle these statuses itself
                raise FetchError(
                    f"the server answered {response.status}", kind="", retryable=True, status=response.status
                )
            if not 300 <= response.status < 400 or location is None:
                return response.body[:MAX_BYTES].decode("utf-8-sig", "replace") if response.ok else ""
            url = join_url(url, location)
    except RequestError:
        return ""
    except FetchError as error:
        if 300 <= error.status < 500 and error.status != 429:
            return ""
        raise
    return ""


def _is_temporary(error: FetchError) -> bool:
    return error.retryable or error.status != 0


def _unavailable(origin: str, error: FetchError, hold: float, *, contacted: bool) -> FetchError:
    """The error for a page whose robots.txt can't be fetched. It may be retried after ``hold`` seconds."""
    return FetchError(
        f"can't fetch robots.txt of {origin}: {error}",
        kind=error.kind if error.status == 0 else "robots unavailable",
        retryable=_is_temporary(error),
        status=error.status,
        retry_after=timedelta(seconds=hold),
        contacted=contacted,
    )
