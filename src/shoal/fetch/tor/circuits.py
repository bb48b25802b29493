"""Chooses which pages share a circuit. It does no I/O.

Tor never sends two streams through the same circuit if their SOCKS credentials differ. So the credentials of a page
name its circuit: the user says to whom it belongs, and the password is the generation, which changes with each renewal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from msgspec import Struct

from shoal.system import chance, clock

PROBE_EVERY = 2.0
"""Seconds between two checks whether a daemon still answers."""
_MAX_KEPT = 10_000
"""Isolation keys whose circuit is remembered. A forgotten one gets another circuit."""
_RENEW_PAUSE = 10.0
"""Seconds between two renewals because of blocks, as between two new identities in Tor itself: each one costs the
network a circuit."""


class Circuit(NamedTuple):
    """The SOCKS credentials of a circuit."""

    user: str
    password: str


class _CircuitInUse(Struct):
    circuit: Circuit
    pages: int = 0
    renewed: float = float("-inf")
    """When a block last renewed it, on the clock."""


class Circuits:
    """The circuits of one worker. No other worker has the same, even if both use one daemon."""

    def __init__(self, pages: int | None = None, clock: Callable[[], float] = lambda: clock.monotonic()) -> None:
        """``pages``: a circuit is renewed after so many. None: never."""
        self._pages = pages
        self._clock = clock
        self._secret = chance.token_bytes(16)
        self._generations = count(1)
        self._current: dict[str, _CircuitInUse] = {}

    def take(self, isolation: str) -> Circuit:
        """The circuit for the next page of an isolation key."""
        current = self._current.pop(isolation, None)
        if current is None:
            current = _CircuitInUse(self._new(isolation))
        elif self._pages is not None and current.pages >= self._pages:
            current.circuit, current.pages = self._new(isolation), 0
        current.pages += 1
        self._current[isolation] = current  # the one that was used last is the last one
        if len(self._current) > _MAX_KEPT:
            del self._current[next(iter(self._current))]
        return current.circuit

    def renew(self, isolation: str) -> None:
        """Use another circuit from the next page on."""
        current = self._current.get(isolation)
        if current is not None:
            current.circuit, current.pages = self._new(isolation), 0

    def blocked(self, isolation: str, circuit: Circuit) -> bool:
        """The host blocked a page of this circuit: renew it, unless that happened already or a moment ago. Return
        whether it was renewed."""
        current, now = self._current.get(isolation), self._clock()
        if current is None or current.circuit != circuit or now < current.renewed + _RENEW_PAUSE:
            return False
        current.renewed = now
        self.renew(isolation)
        return True

    def _new(self, isolation: str) -> Circuit:
        user = hashlib.blake2b(isolation.encode(), key=self._secret, digest_size=16).hexdigest()
        return Circuit(user, str(next(self._generations)))


# How long pages wait while a daemon runs but has no connection to its network.

_SECONDS = (1.0, 30.0)
"""Of a wait, first and at most."""


class Hold:
    """A wait of all pages. At its end some try again: a daemon does not connect unless somebody needs it."""

    def __init__(self) -> None:
        self._until, self._next = 0.0, _SECONDS[0]

    @property
    def active(self) -> bool:
        return clock.monotonic() < self._until

    def begin(self) -> float:
        """Let pages wait, each time for longer. Return the seconds; 0 if they wait already."""
        if self.active:
            return 0.0
        seconds = self._next
        self._until = clock.monotonic() + seconds
        self._next = min(_SECONDS[1], 2 * seconds)
        return seconds

    def reset(self) -> None:
        """The daemon is connected."""
        self._until, self._next = 0.0, _SECONDS[0]
