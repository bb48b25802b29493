"""What one process remembers of its identities. The store decides; this saves calls to it, and rates failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_MAX_ENTRIES = 50_000
_RECHECK_SECONDS = 5.0  # a rest that is remembered longer than this is asked for again

_MAX_ANSWERED = 4  # identities of a host whose last answer is remembered
_EVIDENCE_SECONDS = 60.0  # an answer to another identity in this time shows that a host is not down

K = TypeVar("K")
T = TypeVar("T")


class ShortMemory:
    """A bounded cache of the state of identities. Forgetting is always safe: the store is asked again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._assigned: dict[str, tuple[str, float]] = {}
        self._rests: dict[tuple[str, str], tuple[float, float, bool]] = {}
        """By identity and host: when to ask the store again, when it returns, and whether it is final."""
        self._works: dict[str, set[str]] = {}
        """The identities that work on a host."""
        self._answered: dict[str, dict[str, float]] = {}
        """By host: when it last answered the identities that used it last."""
        self._failed: dict[tuple[str, str], float] = {}
        """When an identity last failed on a host."""
        self._rows: dict[str, tuple[int, float]] = {}
        """By identity: failures in a row, and when the first was."""
        self._good: dict[str, str] = {}
        """By host: a page that was fetched successfully."""

    def assigned(self, host: str) -> str | None:
        name, until = self._assigned.get(host, (None, 0.0))
        return name if until > self._clock() else None

    def assign(self, host: str, name: str, seconds: float) -> None:
        before = self._assigned.get(host, (name, 0.0))[0]
        if before != name:
            self.unset_works(before, host)  # it may have been blocked elsewhere, so it must prove itself again
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
        """Whether the identity fetched pages of a host since its last failure or block there."""
        return name in self._works.get(host, ())

    def set_works(self, name: str, host: str) -> None:
        if host not in self._works:
            _put(self._works, host, set())
        self._works[host].add(name)

    def succeeded(self, name: str, host: str) -> None:
        self._rows.pop(name, None)
        if host not in self._answered:
            _put(self._answered, host, {})
        _put(self._answered[host], name, self._clock(), _MAX_ANSWERED)

    def answers_another(self, name: str, host: str) -> bool:
        """Whether the host answered another identity since this one failed on it, or a short while ago."""
        since = max(self._failed.get((name, host), 0.0), self._clock() - _EVIDENCE_SECONDS)
        return any(other != name and at >= since for other, at in self._answered.get(host, {}).items())

    def failed(self, name: str, host: str, *, counts: bool) -> tuple[int, float]:
        """Note a failure. Returns how many counted in a row, and the seconds since the first of them."""
        now = self._clock()
        _put(self._failed, (name, host), now)
        count, since = self._rows.get(name, (0, now))
        if counts:
            count += 1
            self._rows[name] = (count, since)
        return count, now - since

    def good(self, host: str) -> str | None:
        """A page of the host that was fetched successfully; None if there is none."""
        return self._good.get(host)

    def set_good(self, host: str, url: str) -> None:
        if host not in self._good:
            _put(self._good, host, url)

    def unset_works(self, name: str, host: str) -> None:
        self._works.get(host, set()).discard(name)


def _put(entries: dict[K, T], key: K, value: T, most: int = _MAX_ENTRIES) -> None:
    """Store a value. The oldest is dropped when there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        del entries[next(iter(entries))]
