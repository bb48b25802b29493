"""Learns how much a host bears: from 429 and 503, and from answers that take longer and longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import UNSET, Struct

from shoal.config import Throttle as ThrottleConfig
from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.links import host_of
from shoal.ports import Fetch, HostUpdate

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


def after_answer(host: Learned, latency: float, config: ThrottleConfig) -> Learned:
    """A good answer came after ``latency`` seconds."""
    usual = latency if not host.usual or latency < host.usual else host.usual + 0.02 * (latency - host.usual)
    recent = latency if not host.recent else host.recent + 0.3 * (latency - host.recent)
    if recent > max(config.slow_after, _SLOWER * usual):
        delay = max(host.delay, min(recent, config.max_delay))
    else:
        delay = host.delay * _FORGET
        if delay < _NEGLIGIBLE:
            delay = 0.0
    return Learned(usual, recent, delay)


def after_overload(host: Learned, config: ThrottleConfig) -> Learned:
    """The host said that it has too much to do."""
    delay = min(config.max_delay, max(_FIRST, host.delay * config.backoff_factor))
    return Learned(host.usual, host.recent, delay)


class Throttle:
    """Measures each fetch, and tells the frontier, which keeps the delay for the whole fleet."""

    def __init__(self, config: ThrottleConfig, update_host: Callable[[str, HostUpdate], Awaitable[None]]) -> None:
        self._config = config
        self._update_host = update_host
        self._hosts: dict[str, Learned] = {}
        self._told: dict[str, float] = {}

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        name = host_of(request.url)
        try:
            response = await fetch(request)
        except FetchError as error:
            if error.status in _OVERLOADED:
                host = self._hosts[name] = after_overload(self._hosts.get(name) or Learned(), self._config)
                await self._tell(name, host, error)
            raise
        if not response.from_cache:
            host = self._hosts[name] = after_answer(
                self._hosts.get(name) or Learned(), response.elapsed, self._config
            )
            if host.delay != self._told.get(name, 0.0):
                await self._tell(name, host, None)
        return response

    async def _tell(self, name: str, host: Learned, error: FetchError | None) -> None:
        """Only changes that matter: the frontier may be a server away."""
        block = error.retry_after.total_seconds() if error is not None and error.retry_after else None
        told = self._told.get(name, 0.0)
        if block is None and host.delay and abs(host.delay - told) < 0.1 * told:
            return
        self._told[name] = host.delay
        await self._update_host(
            name,
            HostUpdate(
                learned_delay=host.delay or None,
                block_for=UNSET if block is None else block,
                block_reason=f"answered {error.status} with Retry-After" if error is not None else "",
            ),
        )
