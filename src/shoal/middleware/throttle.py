"""Learns how much a host bears: from 429 and 503, and from answers that take longer and longer."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from msgspec import UNSET, Struct, UnsetType

from shoal.config import ThrottleSettings
from shoal.errors import FetchError, FrontierError
from shoal.http import Request, Response
from shoal.middleware.retry import parse_retry_after
from shoal.ports import Fetch, HostUpdate, Lease
from shoal.urls.normalize import host_of

log = logging.getLogger("shoal.throttle")

_MOST_HOSTS = 100_000
_OVERLOADED = frozenset({429, 503})
_SLOWER = 3.0  # times its usual latency: a host that struggles
_FORGET = 0.8  # of the learned delay is kept with each good answer
_FIRST = 0.25  # seconds, for a host that complains the first time; doubled each time after that
_NEGLIGIBLE = 0.02


class Learned(Struct):
    """What is known of one host."""

    usual: float = 0.0
    """Latency when all is well: falls fast, rises slowly."""
    recent: float = 0.0
    delay: float = 0.0


def after_answer(host: Learned, latency: float, config: ThrottleSettings) -> Learned:
    """A good answer came after ``latency`` seconds."""
    usual = latency if not host.usual or latency < host.usual else host.usual + 0.02 * (latency - host.usual)
    capped = min(latency, _SLOWER * max(host.recent, config.slow_after))  # one slow page is no slow host
    recent = host.recent + 0.3 * (capped - host.recent)
    if recent > max(config.slow_after, _SLOWER * usual):
        delay = max(host.delay, min(recent, config.max_delay))
    else:
        delay = host.delay * _FORGET
        if delay < _NEGLIGIBLE:
            delay = 0.0
    return Learned(usual, recent, delay)


def after_overload(host: Learned, config: ThrottleSettings) -> Learned:
    """The host said that it has too much to do."""
    delay = min(config.max_delay, max(_FIRST, host.delay * config.backoff_factor))
    return Learned(host.usual, host.recent, delay)


class Throttle:
    """Measures each fetch, and tells the frontier, which keeps the delay for the whole fleet."""

    def __init__(self, config: ThrottleSettings, update_host: Callable[[str, HostUpdate], Awaitable[None]]) -> None:
        self._config = config
        self._update_host = update_host
        self._hosts: dict[str, Learned] = {}
        self._told: dict[str, float] = {}
        self._slowed: dict[str, float] = {}
        """When each host was last found to have too much to do."""

    def heard(self, lease: Lease) -> None:
        """What the frontier says was learned, by any worker, at any time before: this one goes on from there."""
        host = self._hosts.get(lease.host)
        if (host.delay if host is not None else 0.0) != lease.learned_delay:
            known = host or Learned()
            self._learn(lease.host, Learned(known.usual, known.recent, lease.learned_delay))
            self._told[lease.host] = lease.learned_delay

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        name = host_of(request.url)
        started = time.monotonic()
        try:
            response = await fetch(request)
        except FetchError as error:
            if error.status in _OVERLOADED:
                await self._overloaded(name, started, error.status, error.retry_after)
            raise
        if response.status in _OVERLOADED:  # a spider may ask to get these pages
            retry_after = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
            await self._overloaded(name, started, response.status, retry_after)
        elif not response.from_cache:
            host = self._learn(name, after_answer(self._hosts.get(name) or Learned(), response.elapsed, self._config))
            if host.delay != self._told.get(name, 0.0):
                await self._tell(name, host.delay)
        return response

    async def _overloaded(self, name: str, started: float, status: int, retry_after: timedelta | None) -> None:
        """Several answers to requests that were under way at once are one complaint."""
        host = self._hosts.get(name) or Learned()
        if started >= self._slowed.get(name, 0.0):
            host = self._learn(name, after_overload(host, self._config))
            self._slowed[name] = time.monotonic()
        if retry_after:
            reason = f"answered {status} with Retry-After"
            await self._tell(name, host.delay, block_for=retry_after.total_seconds(), block_reason=reason)
        else:
            await self._tell(name, host.delay)

    def _learn(self, name: str, host: Learned) -> Learned:
        if name not in self._hosts and len(self._hosts) >= _MOST_HOSTS:
            oldest = next(iter(self._hosts))
            del self._hosts[oldest]
            self._told.pop(oldest, None)
            self._slowed.pop(oldest, None)
        self._hosts[name] = host
        return host

    async def _tell(
        self, name: str, delay: float, block_for: float | UnsetType = UNSET, block_reason: str = ""
    ) -> None:
        """Only changes that matter: the frontier may be a server away. What it can't take now, it is told again."""
        told = self._told.get(name)
        if block_for is UNSET and delay and told is not None and abs(delay - told) < 0.1 * told:
            return
        try:
            await self._update_host(
                name, HostUpdate(learned_delay=delay or None, block_for=block_for, block_reason=block_reason)
            )
        except FrontierError as error:  # the page that was fetched is worth more
            log.warning("the frontier could not be told to slow down for %s: %s", name, error)
        else:
            self._told[name] = delay
