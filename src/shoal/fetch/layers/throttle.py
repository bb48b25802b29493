"""Learns a delay for each host: from 429 and 503, and from answers that become slower. Which statuses are errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta

from msgspec import UNSET, Struct, UnsetType

from shoal.config import RetrySettings, ThrottleSettings
from shoal.errors import FetchError, FrontierError
from shoal.http import Request, Response
from shoal.ports import Fetch, HostUpdate, Lease
from shoal.system import chance, clock
from shoal.urls.normalize import host_of

# Which answers are errors, whether a retry can help, and when to retry.

MAX_RETRY_AFTER = ThrottleSettings().max_retry_after


class StatusCheck:
    """Turns an error status into a FetchError. Redirects with a Location pass: the engine follows them."""

    def __init__(
        self, retried: Collection[int], handled: Collection[int] = (), max_retry_after: float = MAX_RETRY_AFTER
    ) -> None:
        self._retried = frozenset(retried)
        self._handled = frozenset(handled)
        self._max_retry_after = max_retry_after

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        response = await fetch(request)
        status = response.status
        if 200 <= status < 300 or status in self._handled or (300 <= status < 400 and "Location" in response.headers):
            return response
        error = FetchError(
            f"the server answered {status}",
            kind=f"http {status}",
            retryable=status in self._retried,
            status=status,
            retry_after=retry_after_of(response, self._max_retry_after),
            contacted=not response.from_cache,
        )
        error.response = response
        raise error


class RetryPolicy:
    """How long a failed request waits: as long as the server asks, else with exponential backoff and jitter."""

    def __init__(self, config: RetrySettings, random_fraction: Callable[[], float] = lambda: chance.random()) -> None:
        self._config = config
        self._random = random_fraction

    def retry_in(self, error: FetchError, attempt: int) -> float | None:
        """Seconds until the next attempt. None: give up, the request is dead."""
        if not error.retryable or attempt >= self._config.max_attempts:
            return None
        if error.retry_after is not None:
            return error.retry_after.total_seconds()
        delay = self._config.base_delay * 2.0 ** min(attempt - 1, 60)
        return min(self._config.max_delay, delay * (0.75 + 0.5 * self._random()))


def retry_after_of(response: Response, limit: float) -> timedelta | None:
    """The wait that the answer asks for. None: none."""
    return parse_retry_after(response.headers.get("Retry-After"), datetime.fromtimestamp(clock.time(), UTC), limit)


def parse_retry_after(value: str | None, now: datetime, limit: float = MAX_RETRY_AFTER) -> timedelta | None:
    """The wait that a Retry-After header asks for, between zero and ``limit`` seconds; None if it is missing or
    invalid. Every wait that a server asks for comes from here: without the limit, one answer could stop all runs on its
    host for a day."""
    if not value:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        wait = timedelta(seconds=min(int(value[:9]), 10**9))
    else:
        from email.utils import parsedate_to_datetime  # few crawls need it

        try:
            moment = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        wait = moment - now
    return min(max(wait, timedelta(0)), timedelta(seconds=limit))


log = logging.getLogger("shoal.throttle")

_MAX_HOSTS = 100_000
_OVERLOADED = frozenset({429, 503})
_SLOW_FACTOR = 3.0  # a host is overloaded at this many times its usual latency
_DECAY = 0.8  # each good answer multiplies the learned delay by this
_FIRST_DELAY = 0.25  # seconds, after the first overload
_MIN_DELAY = 0.02


class LearnedDelay(Struct):
    """What was learned about one host."""

    usual: float = 0.0
    """Latency without overload. It falls fast and rises slowly."""
    recent: float = 0.0
    delay: float = 0.0


def after_answer(host: LearnedDelay, latency: float, config: ThrottleSettings) -> LearnedDelay:
    """Learn from a good answer that took ``latency`` seconds."""
    usual = latency if not host.usual or latency < host.usual else host.usual + 0.02 * (latency - host.usual)
    capped = min(latency, _SLOW_FACTOR * max(host.recent, config.slow_after))  # one slow page is not a slow host
    recent = host.recent + 0.3 * (capped - host.recent)
    if recent > max(config.slow_after, _SLOW_FACTOR * usual):
        delay = max(host.delay, min(recent, config.max_delay))
    else:
        delay = host.delay * _DECAY
        if delay < _MIN_DELAY:
            delay = 0.0
    return LearnedDelay(usual, recent, delay)


def after_overload(host: LearnedDelay, config: ThrottleSettings) -> LearnedDelay:
    """Learn from an answer that says the host is overloaded."""
    delay = min(config.max_delay, max(_FIRST_DELAY, host.delay * config.backoff_factor))
    return LearnedDelay(host.usual, host.recent, delay)


class Throttle:
    """Measures each fetch and reports delays to the frontier, which applies them to the whole fleet.

    A host that asks for a pause with Retry-After is blocked for all runs. It also gets a delay, so when the block ends
    one request tries it. If the host still asks, it is blocked again.
    """

    def __init__(self, config: ThrottleSettings, update_host: Callable[[str, HostUpdate], Awaitable[None]]) -> None:
        self._config = config
        self._update_host = update_host
        self._hosts: dict[str, LearnedDelay] = {}
        self._reported: dict[str, float] = {}
        self._slowed: dict[str, float] = {}
        """When each host was last overloaded."""

    def adopt(self, lease: Lease) -> None:
        """Start from the delay in the frontier, which any worker may have learned."""
        host = self._hosts.get(lease.host)
        if (host.delay if host is not None else 0.0) != lease.learned_delay:
            learned = host or LearnedDelay()
            self._learn(lease.host, LearnedDelay(learned.usual, learned.recent, lease.learned_delay))
            self._reported[lease.host] = lease.learned_delay

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        name = host_of(request.url)
        started = clock.monotonic()
        try:
            response = await fetch(request)
        except FetchError as error:
            if error.status in _OVERLOADED:
                await self._overloaded(name, started, error.status, error.retry_after)
            raise
        if response.status in _OVERLOADED:  # a spider may handle these statuses itself
            retry_after = retry_after_of(response, self._config.max_retry_after)
            await self._overloaded(name, started, response.status, retry_after)
        elif not response.from_cache:
            host = self._learn(
                name, after_answer(self._hosts.get(name) or LearnedDelay(), response.elapsed, self._config)
            )
            if host.delay != self._reported.get(name, 0.0):
                await self._report(name, host.delay)
        return response

    async def _overloaded(self, name: str, started: float, status: int, retry_after: timedelta | None) -> None:
        """Slow down. Several answers to concurrent requests count as one overload."""
        host = self._hosts.get(name) or LearnedDelay()
        if started >= self._slowed.get(name, 0.0):
            host = self._learn(name, after_overload(host, self._config))
            self._slowed[name] = clock.monotonic()
        if retry_after:
            reason = f"answered {status} with Retry-After"
            await self._report(name, host.delay, block_for=retry_after.total_seconds(), block_reason=reason)
        else:
            await self._report(name, host.delay)

    def _learn(self, name: str, host: LearnedDelay) -> LearnedDelay:
        if name not in self._hosts and len(self._hosts) >= _MAX_HOSTS:
            oldest = next(iter(self._hosts))
            del self._hosts[oldest]
            self._reported.pop(oldest, None)
            self._slowed.pop(oldest, None)
        self._hosts[name] = host
        return host

    async def _report(
        self, name: str, delay: float, block_for: float | UnsetType = UNSET, block_reason: str = ""
    ) -> None:
        """Report a delay that changed by 10 % or more: the frontier may be a remote server. Failures are retried."""
        reported = self._reported.get(name)
        if block_for is UNSET and delay and reported is not None and abs(delay - reported) < 0.1 * reported:
            return
        try:
            await self._update_host(
                name, HostUpdate(learned_delay=delay or None, block_for=block_for, block_reason=block_reason)
            )
        except FrontierError as error:  # do not lose the fetched page
            log.warning("can't store the delay of %s: %s", name, error)
        else:
            self._reported[name] = delay
