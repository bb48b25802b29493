"""The clock for deadlines."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on a clock that never steps and goes on while the machine is suspended, where the system has one.

    ``time.monotonic`` stops in a suspended machine on Linux: a lease would look good there long after its store has
    given it to somebody else.
    """
    return time.clock_gettime(_CLOCK)
