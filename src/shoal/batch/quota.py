"""How many bytes a session holds, of all that it keeps: URLs, results with every part of them, failures, redirects.

Each process counts what it adds, and saves its count in the run under a role of its own. It reads the counts of the
others there. So the limit holds for all processes of a fleet together, and across restarts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shoal.errors import FetchError, FrontierError
from shoal.http import Request, Response
from shoal.ports import Claim, Fetch, Roles

PER_ENTRY = 200
"""Bytes that a store needs for a request or a result besides what is in it, roughly."""
_LONGEST_LOCATION = 8192
_ROLE = "room "
_ROLE_TTL = 60.0
_STEP = 64  # a process saves its count when it has grown by this part of the limit ...
_EVERY = 2.0  # ... or after so many seconds


class Room:
    """What a session may hold. A layer around the fetcher refuses to fetch when it is used up."""

    def __init__(self, limit: int, base: int = 0, frontier: Roles | None = None) -> None:
        """``base``: what it holds from its beginning. ``frontier``: where processes share their counts."""
        self.limit = limit
        self._base = base
        self._here = 0
        self._elsewhere = 0
        self._frontier = frontier
        self._role = _ROLE + secrets.token_hex(8)
        self._claim: Claim | None = None
        self._saved = 0
        self._synced_at = time.monotonic()

    @property
    def used(self) -> int:
        return self._base + self._here + self._elsewhere

    def take(self, size: int) -> bool:
        """Use so many bytes; False, and nothing is used, if they are not left."""
        if self.used + size > self.limit:
            return False
        self._here += size
        return True

    def force(self, size: int) -> None:
        """Use so many bytes, also beyond the limit: of what has to be kept, and is small."""
        self._here += size

    def full(self, *, contacted: bool = False) -> FetchError:
        message = f"the session holds its {self.limit} bytes (serve.max_session_bytes)"
        return FetchError(message, kind="limit", retryable=False, contacted=contacted)

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        await self.sync()
        if self.used >= self.limit:
            raise self.full()
        response = await fetch(request)
        location = response.headers.get("Location", "")
        if location and 300 <= response.status < 400:
            self._take_redirect(request, location)
        return response

    def _take_redirect(self, request: Request, location: str) -> None:
        """Its target is a request of its own, with the way that led to it."""
        if len(location) > _LONGEST_LOCATION:
            message = f"redirects to a URL of {len(location)} characters"
            raise FetchError(message, kind="redirects", retryable=False)
        if not self.take(request_size(request) + size_of(location)):
            raise self.full(contacted=True)

    async def sync(self, *, now: bool = False) -> None:
        """Save what this process used, and read what the others did, if it is time to or ``now``."""
        if self._frontier is None:
            return
        grown = self._here - self._saved > self.limit // _STEP
        if not (now or grown) and time.monotonic() - self._synced_at < _EVERY:
            return
        self._synced_at = time.monotonic()
        with suppress(FrontierError):  # the store is away: saved the next time
            if self._here != self._saved:
                await self._save(self._frontier)
            self._elsewhere = sum(
                int(role.cursor)
                for role in await self._frontier.roles()
                if role.role.startswith(_ROLE) and role.role != self._role and role.cursor.isdigit()
            )

    async def _save(self, frontier: Roles) -> None:
        here = self._here
        if self._claim is None:
            self._claim = await frontier.claim(self._role, _ROLE_TTL)
        if self._claim is None:  # this process lost it a moment ago
            return
        cursor, claim = b"%d" % here, self._claim
        self._claim = None  # unless it is moved: a store that went back in time has another cursor
        if await frontier.advance(claim, cursor, _ROLE_TTL):
            self._claim, self._saved = claim.moved_to(cursor), here


def size_of(value: Any) -> int:
    """Bytes of a value as it is stored, roughly: of the texts in it, and a few for each element."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return sum(size_of(key) + size_of(each) + 2 for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return sum(size_of(each) + 2 for each in value)
    return 8


def request_size(request: Request) -> int:
    """Bytes of a request in a queue."""
    parts = (request.url, request.headers, request.cookies, request.redirects)
    return PER_ENTRY + sum(map(size_of, parts))
