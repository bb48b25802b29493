"""What a crawl counts, and what it says of itself while it runs and when it ends."""

from __future__ import annotations

import time
from collections import Counter

from msgspec import Struct

from shoal.ports import HostState, Stats


class Counters:
    """What one process did. The run's own ledger is the frontier's."""

    __slots__ = (
        "bytes", "dropped", "errors", "fetched", "from_cache", "item_errors", "items", "leases_lost", "out_of_scope",
        "redirected", "retried", "started",
    )  # fmt: skip

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.fetched = self.from_cache = self.bytes = self.items = self.dropped = self.item_errors = 0
        self.redirected = self.retried = self.out_of_scope = self.leases_lost = 0
        self.errors: Counter[str] = Counter()
        """Failed attempts by kind."""

    def add(self, other: Counters) -> None:
        """What another part of the same process did."""
        for name in self.__slots__:
            if name not in ("errors", "started"):
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors.update(other.errors)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started


class Snapshot(Struct, frozen=True, kw_only=True):
    """A running crawl, at one moment."""

    stats: Stats
    hosts: list[HostState]
    in_flight: int
    counters: Counters


class Summary(Struct, frozen=True, kw_only=True):
    """How a crawl ended."""

    run_id: str
    spider: str
    state: str
    """``finished``; ``stopped`` (asked to); ``limit`` (scope.max_pages); ``failed`` (see ``error``)."""
    error: str
    stats: Stats
    dead_kinds: dict[str, int]
    counters: Counters
    elapsed: float
    outputs: tuple[str, ...]

    @property
    def lost(self) -> int:
        """Requests that the ledger can't account for: 0, or a bug."""
        stats = self.stats
        return stats.pushed - (stats.ready + stats.waiting + stats.leased + stats.done + stats.dead)

    @property
    def pages_per_second(self) -> float:
        return self.counters.fetched / self.elapsed if self.elapsed > 0 else 0.0


def counts(stats: Stats) -> dict[str, int]:
    """The ledger in the words of a work queue."""
    return {
        "pending": stats.ready + stats.waiting,
        "claimed": stats.leased,
        "completed": stats.done,
        "failed": stats.dead,
        "remaining": stats.remaining,
    }
