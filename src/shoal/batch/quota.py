"""Limits the bytes that a session stores: URLs, results, failures and redirects.

Each process counts the bytes it adds. It saves its count in the run as the cursor of a role of its own, and reads the
counts of the other processes there. So the limit holds for all processes together, and across restarts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from shoal.errors import FetchError, FrontierError
from shoal.http import Request, Response
from shoal.ports import Claim, Fetch, Roles

PER_ENTRY = 200
"""Approximate bytes that a store needs per request or result, in addition to its content."""
_MAX_LOCATION_LENGTH = 8192
_ROLE_PREFIX = "room "
_ROLE_TTL = 60.0
_SAVE_FRACTION = 64  # a process saves its count when it has grown by this fraction of the limit ...
_SAVE_EVERY = 2.0  # ... or after this many seconds


class Quota:
    """The bytes that a session may store. As a middleware, it refuses to fetch when they are used up."""

    def __init__(self, limit: int, initial: int = 0, frontier: Roles | None = None) -> None:
        """``initial``: bytes that the session needs before its first page. ``frontier``: where processes share their
        counts."""
        self.limit = limit
        self._initial = initial
        self._used_here = 0
        self._used_elsewhere = 0
        self._frontier = frontier
        self._role = _ROLE_PREFIX + secrets.token_hex(8)
        self._claim: Claim | None = None
        self._saved = 0
        self._synced_at = time.monotonic()

    @property
    def used(self) -> int:
        return self._initial + self._used_here + self._used_elsewhere

    def use(self, size: int) -> bool:
        """Reserve ``size`` bytes. False if fewer are left; then nothing is reserved."""
        if self.used + size > self.limit:
            return False
        self._used_here += size
        return True

    def use_anyway(self, size: int) -> None:
        """Reserve ``size`` bytes even beyond the limit. For small entries that must be stored."""
        self._used_here += size

    def exceeded(self, *, contacted: bool = False) -> FetchError:
        """The error of a page for which no bytes are left."""
        message = f"the session has reached its limit of {self.limit} bytes (serve.max_session_bytes)"
        return FetchError(message, kind="limit", retryable=False, contacted=contacted)

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        await self.sync()
        if self.used >= self.limit:
            raise self.exceeded()
        response = await fetch(request)
        location = response.headers.get("Location", "")
        if location and 300 <= response.status < 400:
            self._count_redirect(request, location)
        return response

    def _count_redirect(self, request: Request, location: str) -> None:
        """Count the target of a redirect: it is stored as a request, with the URLs that led to it."""
        if len(location) > _MAX_LOCATION_LENGTH:
            message = f"redirects to a URL of {len(location)} characters"
            raise FetchError(message, kind="redirects", retryable=False)
        if not self.use(request_size(request) + size_of(location)):
            raise self.exceeded(contacted=True)

    async def sync(self, *, now: bool = False) -> None:
        """Save the count of this process and read those of the others, if that is due or ``now`` is true."""
        if self._frontier is None:
            return
        has_grown = self._used_here - self._saved > self.limit // _SAVE_FRACTION
        if not (now or has_grown) and time.monotonic() - self._synced_at < _SAVE_EVERY:
            return
        self._synced_at = time.monotonic()
        with suppress(FrontierError):  # the store is away: save it the next time
            if self._used_here != self._saved:
                await self._save(self._frontier)
            self._used_elsewhere = sum(
                int(role.cursor[:18])
                for role in await self._frontier.roles()
                if role.role.startswith(_ROLE_PREFIX) and role.role != self._role and role.cursor.isdigit()
            )

    async def _save(self, frontier: Roles) -> None:
        used = self._used_here
        if self._claim is None:
            self._claim = await frontier.claim(self._role, _ROLE_TTL)
        if self._claim is None:  # this process lost the role a moment ago
            return
        cursor, claim = b"%d" % used, self._claim
        self._claim = None  # kept only if the cursor moves: a rewound store has another cursor
        if await frontier.advance(claim, cursor, _ROLE_TTL):
            self._claim, self._saved = claim.moved_to(cursor), used


def size_of(value: object) -> int:
    """Approximate bytes of a value in a store: its strings, and a few per element."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return sum(size_of(key) + size_of(each) + 2 for key, each in value.items())
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Sequence):
        return sum(size_of(each) + 2 for each in value)
    return 8


def request_size(request: Request) -> int:
    """Approximate bytes of a queued request."""
    parts = (request.url, request.headers, request.cookies, request.redirects)
    return PER_ENTRY + sum(map(size_of, parts))
