"""The clock that leases and sessions are counted by."""

from __future__ import annotations

import time
from collections.abc import Callable

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Seconds of a clock that never steps, and that counts the time in which the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def now() -> float:
        """Seconds of a clock that never steps. On this system it may stop while the machine is suspended."""
        return time.monotonic()


def steady_time() -> Callable[[], float]:
    """A clock that begins at the time of day and never steps, whatever is done to the system's clock."""
    start = time.time() - now()
    return lambda: start + now()
