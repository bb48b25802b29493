"""A clock for deadlines that also counts the time during which the machine is suspended."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Seconds from an arbitrary start. It never goes back, and goes on during suspension where the system can tell."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
