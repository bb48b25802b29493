"""What both HTTP fetchers have in common: their contract, default headers, and TLS without verification."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection
from contextvars import ContextVar
from typing import TypeAlias

from multidict import CIMultiDictProxy

from shoal.config import DnsSettings, HttpSettings
from shoal.errors import ConfigError
from shoal.fetch.connecting import Connector
from shoal.fetch.guard import AddressGuard
from shoal.fetch.resolving import Caller, Names, current_caller
from shoal.http import Request, Response
from shoal.http.decompress import ACCEPTED, decompress
from shoal.ports import Fetcher


class PageFetcher(ABC):
    """Fetches pages over persistent connections. It does not follow redirects: each hop is a separate request, so that
    politeness, scope and robots.txt apply to it.

    With a guard, it never connects to a refused address. If a name has refused and other addresses, it uses the others:
    a public site with a wrong DNS entry still works, and nothing private is reached. It uses only the proxies in
    ``upstreams``, which the operator trusts, and asks them only for hosts that can be public.
    """

    def __init__(
        self,
        config: HttpSettings,
        user_agent: str,
        guard: AddressGuard | None = None,
        upstreams: Collection[str] = (),
        *,
        max_file_bytes: int | None = None,
        knows_addresses: bool = False,
        dns: DnsSettings = DnsSettings(),
    ) -> None:
        """``max_file_bytes`` replaces the size limit for requests of files. ``knows_addresses``: exchanges have the
        addresses of servers."""
        if guard is not None and config.proxy is not None:
            raise ConfigError('"http.proxy" can\'t be used here: a proxy would bypass the address guard (serve.allow)')
        self._config = config
        self._user_agent = user_agent
        self._guard = guard
        self._upstreams = frozenset(upstreams)
        self._max_file_bytes = max_file_bytes
        self._knows_addresses = knows_addresses
        self._dns = dns
        self._connector = Connector(guard, Names(dns, config.dns_cache_seconds))
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Make what the fetcher itself needs. The last step of the constructor."""

    @abstractmethod
    async def fetch(self, request: Request, max_body_bytes: int | None = None) -> Response:
        """``max_body_bytes`` replaces the configured limit."""

    def limited_to(self, max_body_bytes: int) -> Fetcher:
        """A fetcher with another size limit that shares these connections. Closing it does not close them."""
        return LimitedFetcher(self, max_body_bytes, self._connector.names.new_caller())

    @abstractmethod
    async def close(self) -> None: ...


FREE_BYTES = 512 * 1024
"""Of each body, that need no room in a `BodyBudget`."""


class BodyBudget:
    """Bytes of large bodies that a process has at the same time. Pages with more than `FREE_BYTES` wait for room, first
    come, first served. A body that is larger than the whole budget waits until it is alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> asyncio.Future[None]:
        """Room for a body. It is done when there is some. Cancel it to leave the queue."""
        room = asyncio.get_running_loop().create_future()
        self._waiting.append((size, room))
        self._share_out()
        return room

    def give_back(self, size: int) -> None:
        self._used -= size
        self._share_out()

    def _share_out(self) -> None:
        while self._waiting:
            size, room = self._waiting[0]
            if not room.cancelled():
                if self._used and self._used + size > self._total:
                    return
                self._used += size
                room.set_result(None)
            self._waiting.popleft()


class BodyRoom:
    """The room of one page in a budget: reserved once, as soon as its body is large, until the page's task has ended.

    ``task``: handles the page, from the request to the last item."""

    def __init__(self, budget: BodyBudget, task: asyncio.Task[object]) -> None:
        self._budget = budget
        self._room: asyncio.Future[None] | None = None
        self._size = 0
        task.add_done_callback(self._end)

    def reserve(self, size: int) -> asyncio.Future[None]:
        """Reserve room for ``size`` bytes. Later calls return the same, whatever their size is."""
        if self._room is None:
            self._size = size
            self._room = self._budget.take(size)
        return self._room

    def _end(self, task: asyncio.Task[object]) -> None:
        if self._room is not None and not self._room.cancel():  # it had room
            self._budget.give_back(self._size)


body_room: ContextVar[BodyRoom | None] = ContextVar("body_room", default=None)
"""The room of the page that this task handles. None: bodies have no budget."""


class LimitedFetcher:
    """A fetcher that shares the connections of another, but not its limit of lookups."""

    def __init__(self, owner: PageFetcher, max_body_bytes: int, caller: Caller) -> None:
        self._owner = owner
        self._max_body_bytes = max_body_bytes
        self._caller = caller

    async def fetch(self, request: Request) -> Response:
        token = current_caller.set(self._caller)
        try:
            return await self._owner.fetch(request, self._max_body_bytes)
        finally:
            current_caller.reset(token)

    async def close(self) -> None:
        pass


ReceivedResponse: TypeAlias = tuple[int, CIMultiDictProxy[str], bytes, str, tuple[str, ...]]
"""A response as it was received: status, headers, body, transfer coding, flags. A tuple is cheap: each page has one."""


def make_response(request: Request, received: ReceivedResponse, elapsed: float, limit: int) -> Response:
    """The response with its body decompressed. FetchError if that is larger than ``limit``."""
    status, headers, body, transfer_coding, flags = received
    if transfer_coding and body:
        body, odd = decompress(body, transfer_coding, limit)
        flags += odd
    coding = headers.get("Content-Encoding")
    if coding and body:
        body, odd = decompress(body, coding, limit)
        flags += odd
    return Response(
        request.url, status=status, headers=headers, body=body, request=request, elapsed=elapsed, flags=flags
    )


def default_headers(config: HttpSettings, user_agent: str) -> dict[str, str]:
    """The headers of every request that does not set them itself."""
    return {
        "User-Agent": user_agent,
        "Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
        "Accept-Encoding": ACCEPTED,
        **config.headers,
    }


def without_verification() -> ssl.SSLContext:
    """Accepts any certificate (`http.verify_tls` = false)."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
