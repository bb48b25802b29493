"""How long a process waits for an output, or a store of files, that is down."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from shoal.system import clock

log = logging.getLogger("shoal.sinks")

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 30.0
HURRY = 8.0
"""Seconds that a process that stops waits at most."""


class Patience:
    """Pauses after failures, for a limited time that counts from the first failure since ``worked``. Pauses grow."""

    def __init__(self, seconds: float, *, first_pause: float = _FIRST_PAUSE) -> None:
        self._seconds = seconds
        self._first_pause = first_pause
        self._failures = 0
        self._since = 0.0
        self._hurried = asyncio.Event()
        self.is_hurried = False

    def worked(self) -> None:
        """Forget the failures so far."""
        self._failures = 0

    def hurry(self) -> None:
        """Wait for a few seconds at most: the process stops."""
        self.is_hurried = True
        self._seconds = min(self._seconds, HURRY)
        self._hurried.set()

    @property
    def left(self) -> float:
        """The seconds that are left. They count from the first failure."""
        return self._seconds if not self._failures else self._since + self._seconds - clock.monotonic()

    async def pause(self, error: Exception, *, since: float | None = None) -> bool:
        """Log a failure, and pause before the next attempt. Return False at once if the time is up. ``since``: when the
        failures began, on the monotonic clock, if that is longer ago."""
        if not self._failures:
            self._since = clock.monotonic() if since is None else since
        seconds_left = self._since + self._seconds - clock.monotonic()
        if seconds_left <= 0:
            return False
        seconds = min(seconds_left, _LONGEST_PAUSE, self._first_pause * 2.0 ** min(self._failures, 10))
        self._failures += 1
        log.warning("%s; trying again in %.2g s, giving up in %.0f s", error, seconds, seconds_left)
        self._hurried.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
        return True

    @property
    def failing_since(self) -> float | None:
        """When the failures began, on the monotonic clock. None if it works."""
        return self._since if self._failures else None

    @property
    def spent(self) -> str:
        """How long it has waited, for a message."""
        return f"{clock.monotonic() - self._since:.0f} s"
