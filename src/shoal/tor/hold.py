"""How long pages wait while a daemon runs but has no connection to its network."""

from __future__ import annotations

import time

_SECONDS = (1.0, 30.0)
"""Of a wait, first and at most."""


class Hold:
    """A wait of all pages. At its end some try again: a daemon does not connect unless somebody needs it."""

    def __init__(self) -> None:
        self._until, self._next = 0.0, _SECONDS[0]

    @property
    def active(self) -> bool:
        return time.monotonic() < self._until

    def begin(self) -> float:
        """Let pages wait, each time for longer. Return the seconds; 0 if they wait already."""
        if self.active:
            return 0.0
        seconds = self._next
        self._until = time.monotonic() + seconds
        self._next = min(_SECONDS[1], 2 * seconds)
        return seconds

    def reset(self) -> None:
        """The daemon is connected."""
        self._until, self._next = 0.0, _SECONDS[0]
