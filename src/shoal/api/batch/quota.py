"""Limits the bytes that a session stores: URLs, results, failures and redirects.

Each process counts the bytes it adds. It saves its count in the run as the cursor of a role of its own, and reads the
counts of the other processes there. So the limit holds for all processes together, and across restarts.

Besides, all sessions need room in the store. While it is full, pages wait in the frontier. A session that is closed for
good says why in the cursor of another role: then its pages fail at once with this reason, in all processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

from shoal.errors import FetchError, FrontierError, StoreFullError
from shoal.fetch.layers import Postponed
from shoal.http import Request, Response
from shoal.ports import Claim, Fetch, Roles, Room, Store
from shoal.system import chance, clock

PER_ENTRY = 200
"""Approximate bytes that a store needs per request or result, in addition to its content."""
_MAX_LOCATION_LENGTH = 8192
_ROLE_PREFIX = "room "
_CLOSED_ROLE = "room closed"
_ROLE_TTL = 60.0
_SAVE_FRACTION = 64  # a process saves its count when it has grown by this fraction of the limit ...
_SAVE_EVERY = 2.0  # ... or after this many seconds


FULL = "the store is full"
_MEASURE_EVERY = 1.0  # seconds between two looks at the room of a store ...
_MEASURE_FRACTION = 16  # ... unless this fraction of it was used since
_GROWN_FRACTION = 64


class StoreRoom:
    """The room that a store has for results, as this process knows it. All sessions of the process share it."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._room: Room | None = None
        self._measured_at = -_MEASURE_EVERY
        self._taken = 0
        """Bytes that this process used since it looked at the store."""
        self._taken_before = 0
        """The same for the time before. Some of them may still be on their way to the store."""
        self.has_grown = asyncio.Event()
        """Set when this process has used a good part of the store since somebody cleared it."""
        self._grown = 0
        self._needed = 1
        """Bytes of the largest page that found no room. There is room again when it fits."""
        self.capacity = 0
        """Bytes that the store can hold; 0 if it does not know."""
        self.full_since: float | None = None
        """When it was first seen full, on the monotonic clock. None: it is not."""

    @property
    def free(self) -> int | None:
        """Bytes that results may use; None if the store has no limit that it knows."""
        return None if self._room is None else self._room.free - self._taken - self._taken_before

    @property
    def is_full(self) -> bool:
        return not self.has(self._needed)

    def has(self, size: int) -> bool:
        """Whether there is room for so many bytes."""
        return self.free is None or self.free >= size

    def take(self, size: int) -> None:
        """Count bytes that will be stored."""
        self._taken += size
        self._grown += size
        if self._grown > self.capacity // _GROWN_FRACTION:
            self._grown = 0
            self.has_grown.set()

    async def measure(self, *, now: bool = False) -> None:
        """Look at the store, if that is due or ``now`` is true. If the store is away, what is known stays."""
        if self._store is None:
            return
        is_used = self._room is not None and self._taken > max(0, self._room.free) // _MEASURE_FRACTION
        if not (now or is_used) and clock.monotonic() - self._measured_at < _MEASURE_EVERY:
            return
        self._measured_at = clock.monotonic()
        with suppress(FrontierError):
            self._taken_before, self._taken = self._taken, 0
            self._room = await self._store.room()
            self.capacity = 0 if self._room is None else self._room.usable
            if self.is_full:
                self.full_since = self.full_since or self._measured_at
            else:
                self._needed, self.full_since = 1, None

    async def check(self, size: int) -> None:
        """StoreFullError if the store has no room for so many bytes."""
        await self.measure()
        if self.is_full or not self.has(size):
            raise StoreFullError(FULL)

    async def postpone_if_full(self, size: int, *, contacted: bool) -> None:
        """Postponed if there is no room for a page of this size. Then this process leases no pages until there is. It
        takes a moment: another process may lease this page again at once."""
        if not self.has(size):
            self._needed = max(self._needed, size)
            await asyncio.sleep(_MEASURE_EVERY)
            raise Postponed(FULL, contacted=contacted)


_rooms: WeakKeyDictionary[Store, StoreRoom] = WeakKeyDictionary()


def room_of(store: Store) -> StoreRoom:
    """The room of a store, the same for all sessions of this process."""
    return _rooms.setdefault(store, StoreRoom(store))


class Quota:
    """The bytes that a session may store. As a middleware, it refuses to fetch when they are used up."""

    def __init__(
        self, limit: int, initial: int = 0, frontier: Roles | None = None, room: StoreRoom | None = None
    ) -> None:
        """``initial``: bytes that the session needs before its first page. ``frontier``: where processes share their
        counts. ``room``: that of the store."""
        self.limit = limit
        self.room = StoreRoom() if room is None else room
        self.closed = ""
        """Why the session may store no more, whatever its limit is."""
        self._initial = initial
        self._used_here = 0
        self._used_elsewhere = 0
        self._frontier = frontier
        self._role = _ROLE_PREFIX + chance.token_hex(8)
        self._claim: Claim | None = None
        self._saved = 0
        self._synced_at = clock.monotonic()

    @property
    def used(self) -> int:
        return self._initial + self._used_here + self._used_elsewhere

    def use(self, size: int) -> bool:
        """Reserve ``size`` bytes. False if fewer are left; then nothing is reserved."""
        if self.closed or self.used + size > self.limit:
            return False
        self.use_anyway(size)
        return True

    def use_anyway(self, size: int) -> None:
        """Reserve ``size`` bytes even beyond the limit. For small entries that must be stored."""
        self._used_here += size
        self.room.take(size)

    @property
    def must_wait(self) -> bool:
        """Whether pages must not be leased, because the store is full."""
        return not self.closed and self.room.is_full

    def exceeded(self, *, contacted: bool = False) -> FetchError:
        """The error of a page for which no bytes are left."""
        message = self.closed or f"the session has reached its limit of {self.limit} bytes (serve.max_session_bytes)"
        return FetchError(message, kind="limit", retryable=False, contacted=contacted)

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        await self.sync()
        if self.closed or self.used >= self.limit:
            raise self.exceeded()
        await self.room.measure()
        await self.room.postpone_if_full(1, contacted=False)
        response = await fetch(request)
        await self.room.postpone_if_full(len(response.body), contacted=True)
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
        if not (now or has_grown) and clock.monotonic() - self._synced_at < _SAVE_EVERY:
            return
        self._synced_at = clock.monotonic()
        with suppress(FrontierError):  # the store is away: save it the next time
            if self._used_here != self._saved:
                await self._save(self._frontier)
            roles = {role.role: role.cursor for role in await self._frontier.roles()}
            self.closed = roles.get(_CLOSED_ROLE, b"").decode(errors="replace") or self.closed
            self._used_elsewhere = sum(
                int(cursor[:18])
                for role, cursor in roles.items()
                if role.startswith(_ROLE_PREFIX) and role != self._role and cursor.isdigit()
            )

    async def close(self, reason: str) -> None:
        """Let all further pages of the session fail with this reason, in all processes."""
        self.closed = reason
        if self._frontier is not None:
            claim = await self._frontier.claim(_CLOSED_ROLE, _ROLE_TTL)
            if claim is not None and not claim.cursor:
                await self._frontier.advance(claim, reason.encode(), _ROLE_TTL)

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
        return sum(size_of(key) + size_of(item) + 2 for key, item in value.items())
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Sequence):
        return sum(size_of(item) + 2 for item in value)
    return 8


def request_size(request: Request) -> int:
    """Approximate bytes of a queued request."""
    parts = (request.url, request.headers, request.cookies, request.redirects)
    return PER_ENTRY + sum(map(size_of, parts))
