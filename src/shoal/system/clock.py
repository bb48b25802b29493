"""The clocks of this process. Use them as ``clock.monotonic()``, so that a simulation can replace them."""

from __future__ import annotations

import time as _time
from collections.abc import Callable

time = _time.time
"""Return the time of day in seconds since 1970. It jumps when somebody sets the clock of the machine."""
monotonic = _time.monotonic
"""Return the seconds of a clock that never jumps. It may stop while the machine is suspended."""

if hasattr(_time, "CLOCK_BOOTTIME"):

    def now() -> float:
        """Return the seconds of a clock that never jumps and that keeps running while the machine is suspended. It is
        for leases and sessions."""
        return _time.clock_gettime(_time.CLOCK_BOOTTIME)

else:

    def now() -> float:
        """Return the seconds of a clock that never jumps. On this system it may stop while the machine is suspended."""
        return _time.monotonic()


def steady_time() -> Callable[[], float]:
    """Return a clock that starts at the time of day and never jumps, even if the system clock does."""
    start = time() - now()
    return lambda: start + now()
