"""What one process remembers of its identities. The store decides; this saves questions and judges failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_MAX_ENTRIES = 50_000
_RECHECK_SECONDS = 5.0  # a rest that is remembered longer than this is asked for again

T = TypeVar("T")


class ShortMemory:
    """Bounded. Forgetting is always safe: the store is asked again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._assigned: dict[str, tuple[str, float]] = {}
        self._rests: dict[tuple[str, str], tuple[float, float, bool]] = {}
        """By identity and host: when to ask the store again, when it returns, and whether it is final."""
        self._works: dict[str, dict[str, None]] = {}
        """The identities that fetched pages of a host since their last failure or block there."""
        self.failures: dict[str, int] = {}
        """Failures in a row, by identity."""

    def assigned(self, host: str) -> str | None:
        name, until = self._assigned.get(host, (None, 0.0))
        return name if until > self._clock() else None

    def assign(self, host: str, name: str, seconds: float) -> None:
        _put(self._assigned, host, (name, self._clock() + seconds))

    def rests(self, name: str, host: str) -> bool:
        """Whether the identity rests for sure. False: ask the store."""
        return self._rests.get((name, host), (0.0, 0.0, False))[0] > self._clock()

    def rest(self, name: str, host: str, seconds: float, *, is_final: bool = False) -> None:
        now = self._clock()
        again = now + min(max(seconds, 0.0), _RECHECK_SECONDS)
        _put(self._rests, (name, host), (again, now + seconds, is_final))

    def returns_in(self, names: Iterable[str], host: str) -> float:
        """Seconds until the first of these identities returns to a host, as far as this process knows."""
        now = self._clock()
        return min((self._rests.get((name, host), (0.0, now, False))[1] - now for name in names), default=60.0)

    def is_final(self, name: str, host: str) -> bool:
        return self._rests.get((name, host), (0.0, 0.0, False))[2]

    def resting(self) -> int:
        now = self._clock()
        return sum(returns > now for _, returns, _ in self._rests.values())

    def works(self, name: str, host: str) -> bool:
        return name in self._works.get(host, ())

    def works_for_another(self, name: str, host: str) -> bool:
        """Whether the host answers another identity."""
        return any(other != name for other in self._works.get(host, ()))

    def set_works(self, name: str, host: str) -> None:
        if host not in self._works:
            _put(self._works, host, {})
        self._works[host][name] = None

    def unset_works(self, name: str, host: str) -> None:
        self._works.get(host, {}).pop(name, None)


K = TypeVar("K")


def _put(entries: dict[K, T], key: K, value: T) -> None:
    """Store a value. The oldest is dropped when there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > _MAX_ENTRIES:
        del entries[next(iter(entries))]
