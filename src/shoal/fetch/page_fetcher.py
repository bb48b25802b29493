"""What both HTTP fetchers have in common: their contract, default headers, and TLS without verification."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable
from typing import Protocol

from shoal.config import HttpSettings
from shoal.fetch.decompress import ACCEPTED
from shoal.fetch.resolving import Caller, current_caller
from shoal.http import Request, Response
from shoal.ports import Fetcher


class PageFetcher(Fetcher, Protocol):
    """A fetcher whose size limit can be another one for each request."""

    def fetch(self, request: Request, max_body_bytes: int | None = None) -> Awaitable[Response]: ...

    def limited_to(self, max_body_bytes: int) -> Fetcher: ...


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
