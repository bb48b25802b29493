"""The clock for leases and sessions."""

from __future__ import annotations

import time
from collections.abc import Callable

if hasattr(time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return the seconds of a clock that never jumps and that keeps running while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def now() -> float:
        """Return the seconds of a clock that never jumps. On this system it may stop while the machine is suspended."""
        return time.monotonic()


def steady_time() -> Callable[[], float]:
    """Return a clock that starts at the time of day and never jumps, even if the system clock does."""
    start = time.time() - now()
    return lambda: start + now()
