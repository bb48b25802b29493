"""Fetchers and the layers around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from shoal.http import Request, Response

Fetch: TypeAlias = Callable[[Request], Awaitable[Response]]


class Fetcher(Protocol):
    """Request in, response out. FetchError says whether a retry can help."""

    def fetch(self, request: Request) -> Awaitable[Response]: ...

    async def close(self) -> None: ...


class Middleware(Protocol):
    """One layer around the fetcher."""

    def __call__(self, request: Request, fetch: Fetch) -> Awaitable[Response]: ...
