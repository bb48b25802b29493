"""The connections of a fetcher: which ones are idle, and when a new one may be opened.

A TLS handshake costs as much CPU time as twenty requests over an open connection. So a request for a host that has TLS
connections waits for a moment until one of them is free. While requests wait and this process has nothing to do, the
number of connections doubles every few milliseconds. A fast server is used over a few connections, a slow one soon over
as many as there are requests, and a busy crawler spends its time on pages.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from shoal.fetch.http_connection import HttpConnection

_MAX_IDLE = 512  # connections that wait for another request, to all hosts together
_MANY_IDLE = 256  # with more than these, no host keeps a second one: each needs 50 KB for TLS
_CHECK_AFTER = 0.002  # seconds between two checks whether waiting requests should open connections
_BUSY = 0.75  # the process is busy if it worked for this share of the time: SQLite has a thread of its own
_MAX_WAITS = 64  # every so many requests that would wait, one opens a connection: waiting has a cost, too
_MAX_WAIT = 0.06  # seconds until waiting requests open connections even if the process is busy: a few rounds of pages

Place = HttpConnection | None
"""A connection that can be used, or None: the permission to open one."""


class _Origin:
    """The connections to one origin."""

    __slots__ = ("busy", "checked_at", "idle", "timer", "waiters", "waits", "waits_since", "worked")

    def __init__(self) -> None:
        self.idle: list[HttpConnection] = []
        self.busy = 0
        """Connections that are in use or being opened."""
        self.waits = 0
        """Requests that have waited since the last one that did not."""
        self.waiters: deque[asyncio.Future[Place]] = deque()
        self.timer: asyncio.TimerHandle | None = None
        self.waits_since = self.checked_at = self.worked = 0.0
        """When the wait began, when it was last checked, and the CPU time of the process then."""


class ConnectionPool:
    """Keeps connections that can be used again, at most ``_MAX_IDLE`` of them, each for ``keep_alive_seconds``. Hosts
    share the first ``_MANY_IDLE``; more are kept only for hosts that have no other.

    A request calls `take`, uses the connection or opens one, and calls `give_back`.
    """

    def __init__(self, keep_alive_seconds: float) -> None:
        self._keep_alive = keep_alive_seconds
        self._origins: dict[str, _Origin] = {}
        self._idle_since: dict[HttpConnection, float] = {}  # the longest idle one first
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def idle_connections(self) -> int:
        """How many connections are idle."""
        return len(self._idle_since)

    def take(self, origin: str) -> Place | asyncio.Future[Place]:
        """A place for one request. If it is a future, pass it to `wait`."""
        known = self._origins.get(origin)
        if known is None:
            known = self._origins[origin] = _Origin()
        if known.idle:
            known.busy += 1
            connection = known.idle.pop()
            del self._idle_since[connection]
            return connection
        known.waits += 1
        if known.busy == 0 or known.waits >= _MAX_WAITS or self._closed or not origin.startswith("https:"):
            known.waits = 0
            known.busy += 1
            return None
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        known.waiters.append(waiter)
        if known.timer is None:
            known.waits_since = known.checked_at = time.monotonic()
            known.worked = time.process_time()
            known.timer = self._later(_CHECK_AFTER, lambda: self._check(origin, known))
        return waiter

    async def wait(self, origin: str, waiter: asyncio.Future[Place]) -> Place:
        """Wait for the place that `take` promised."""
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it came at the same moment, and nobody else has it
                self.give_back(origin, waiter.result())
            raise

    def give_back(self, origin: str, connection: Place) -> None:
        """Return a place. Pass the connection if there is one: it is kept if it can be used again, else closed."""
        known = self._origins[origin]
        if connection is not None:
            if connection.reusable and self._keep_alive > 0 and not self._closed:
                connection.remember_session()
            else:
                connection.abort()
                connection = None
        while known.waiters:
            waiter = known.waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)  # it takes over the place, too
                return
        known.busy -= 1
        if connection is not None:
            self._keep(known, connection)
        else:
            self._forget_unused(origin, known)

    def _check(self, origin: str, known: _Origin) -> None:
        """Let waiting requests open as many connections as there are, unless this process is busy."""
        now, worked = time.monotonic(), time.process_time()
        is_busy = worked - known.worked > _BUSY * (now - known.checked_at)
        known.checked_at, known.worked = now, worked
        if not is_busy or now > known.waits_since + _MAX_WAIT:
            known.waits_since = now
            more = known.busy
            while known.waiters and more:
                waiter = known.waiters.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    known.busy += 1
                    more -= 1
        known.timer = None
        if known.waiters:
            known.timer = self._later(_CHECK_AFTER, lambda: self._check(origin, known))
        else:
            self._forget_unused(origin, known)

    def _keep(self, known: _Origin, connection: HttpConnection) -> None:
        known.idle.append(connection)
        self._idle_since[connection] = asyncio.get_running_loop().time()
        if len(self._idle_since) > _MANY_IDLE and len(known.idle) > 1:
            self.drop(known.idle[0])
        elif len(self._idle_since) > _MAX_IDLE:
            self.drop(next(iter(self._idle_since)))
        if self._sweeper is None:
            self._sweeper = self._later(self._keep_alive, self._sweep)

    def drop(self, connection: HttpConnection) -> None:
        """Close an idle connection, or forget one that closed by itself."""
        if self._idle_since.pop(connection, None) is not None:
            known = self._origins[connection.origin]
            known.idle.remove(connection)
            self._forget_unused(connection.origin, known)
            connection.abort()

    def _forget_unused(self, origin: str, known: _Origin) -> None:
        if not (known.busy or known.idle or known.waiters or known.timer):
            del self._origins[origin]

    def _sweep(self) -> None:
        """Close the connections that were idle for too long."""
        self._sweeper = None
        expired = asyncio.get_running_loop().time() - self._keep_alive
        while self._idle_since:
            connection, since = next(iter(self._idle_since.items()))
            if since > expired:
                self._sweeper = self._later(since - expired, self._sweep)
                return
            self.drop(connection)

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call)

    def close(self) -> None:
        """Close all idle connections. Requests that wait for a connection may open one, which is the fetcher's to
        refuse."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._idle_since):
            self.drop(connection)
        for known in self._origins.values():
            if known.timer is not None:
                known.timer.cancel()
                known.timer = None
            for waiter in known.waiters:
                if not waiter.done():
                    waiter.set_result(None)
                    known.busy += 1
            known.waiters.clear()
