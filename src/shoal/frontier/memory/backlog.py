"""The ready requests of one host in memory, best first. If there are too many, the last ones are on disk.

Requests of equal priority leave in the order of their numbers. New requests arrive in that order, so a queue holds
them. The few that return (after a retry, a released lease) go into a small heap beside it, at their old place.
"""

from __future__ import annotations

import logging
import sqlite3
from array import array
from heapq import heappop, heappush

from shoal.errors import FrontierError

log = logging.getLogger("shoal.frontier")

SpilledRow = tuple[int, float, int, bytes]
"""(lane, rank, number, record)"""

ON_DISK = -1
"""In place of the number of a request."""

_CLEAN_AFTER = 512  # numbers that were taken


class Bucket:
    """The requests of one priority."""

    __slots__ = ("_fresh", "_returned", "_taken", "spilled")

    def __init__(self) -> None:
        self._fresh: array[int] = array("I")
        self._taken = 0
        """How many of the fresh ones were taken."""
        self._returned: list[int] = []
        self.spilled = 0

    def count(self) -> int:
        return len(self._fresh) - self._taken + len(self._returned) + self.spilled

    def push(self, number: int) -> None:
        """Add a request after all others."""
        self._fresh.append(number)

    def put_back(self, number: int) -> None:
        heappush(self._returned, number)

    def first(self) -> int | None:
        """The first request; `ON_DISK` if those after the ones that returned are on disk."""
        if self._taken < len(self._fresh):
            fresh = self._fresh[self._taken]
            return self._returned[0] if self._returned and self._returned[0] < fresh else fresh
        if self.spilled > 0:
            return ON_DISK
        return self._returned[0] if self._returned else None

    def remove_first(self, number: int) -> None:
        """Remove what `first` returned."""
        if self._returned and self._returned[0] == number:
            heappop(self._returned)
            return
        self._taken += 1
        if self._taken >= _CLEAN_AFTER and 2 * self._taken >= len(self._fresh):
            del self._fresh[: self._taken]
            self._taken = 0


class Backlog:
    """The queue of one lane. ``number`` identifies the lane in the spill file.

    Many hosts have one page only. So the first request of an empty queue needs no bucket.
    """

    __slots__ = ("_buckets", "_only", "_only_rank", "_order", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._only: int | None = None
        """The only request of the queue. Then there are no buckets."""
        self._only_rank = 0.0
        self._buckets: dict[float, Bucket] | None = None
        self._order: list[float] | None = None
        """The ranks of the buckets, as a heap."""

    def _bucket(self, rank: float) -> Bucket:
        """The bucket of a rank. It is added if there is none."""
        if self._buckets is None or self._order is None:
            self._buckets, self._order = {}, []
        if self._only is not None:
            only, self._only = self._only, None
            self._bucket(self._only_rank).push(only)
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = Bucket()
            heappush(self._order, rank)
        return bucket

    def push(self, rank: float, number: int) -> None:
        """Add a new request after all others of its rank (the negative of its priority)."""
        if self._buckets:
            (self._buckets.get(rank) or self._bucket(rank)).push(number)
        elif self._only is None:
            self._only, self._only_rank = number, rank
        else:
            self._bucket(rank).push(number)

    def put_back(self, rank: float, number: int) -> None:
        """Return a request to its old place."""
        if not self._buckets and self._only is None:
            self._only, self._only_rank = number, rank
        else:
            self._bucket(rank).put_back(number)

    def remove_best(self, rank: float, number: int) -> None:
        """Remove the best request, which is in memory."""
        if self._buckets:
            self._buckets[rank].remove_first(number)
        else:
            self._only = None

    def has_tail(self, rank: float) -> bool:
        """Whether later requests of this rank are on disk, so that new ones must go there too."""
        bucket = self._buckets.get(rank) if self._buckets else None
        return bucket is not None and bucket.spilled > 0

    def count_spilled(self, rank: float, count: int) -> None:
        self._bucket(rank).spilled += count

    def count(self) -> int:
        """How many requests it has. For an audit."""
        return (self._only is not None) + sum(bucket.count() for bucket in (self._buckets or {}).values())

    def best(self) -> tuple[float, int] | None:
        """Rank and number of the best request. The number is `ON_DISK` if requests of that rank must be read first."""
        if self._only is not None:
            return self._only_rank, self._only
        while self._order and self._buckets:
            rank = self._order[0]
            bucket = self._buckets[rank]
            number = bucket.first()
            if number is not None:
                return rank, number
            heappop(self._order)
            del self._buckets[rank]
        return None


class Spill:
    """Requests on disk, in a private temporary database that disappears with the process."""

    def __init__(self) -> None:
        # With an empty name SQLite makes a temporary file and unlinks it at once.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA cache_size = -4000")
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(
            "CREATE TABLE spill (lane INTEGER, rank REAL, number INTEGER, record BLOB, "
            "PRIMARY KEY (lane, rank, number)) WITHOUT ROWID"
        )

    def add(self, rows: list[SpilledRow]) -> bool:
        """Add requests. False if the disk is full; then none was added."""
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO spill VALUES (?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            log.warning("cannot spill the queue to disk: %s. It stays in memory", exc)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        return True

    def take(self, lane: int, rank: float, limit: int) -> list[tuple[int, bytes]]:
        """Remove and return the first requests of a lane and rank, in order, as (number, record)."""
        try:
            return self._take(lane, rank, limit)
        except sqlite3.Error as exc:
            raise FrontierError(f"cannot read requests that were spilled to disk: {exc}") from exc

    def _take(self, lane: int, rank: float, limit: int) -> list[tuple[int, bytes]]:
        rows = self._db.execute(
            "SELECT number, record FROM spill WHERE lane = ? AND rank = ? ORDER BY number LIMIT ?", (lane, rank, limit)
        ).fetchall()
        if rows:
            self._db.execute("DELETE FROM spill WHERE lane = ? AND rank = ? AND number <= ?", (lane, rank, rows[-1][0]))
        return rows

    def find(self, number: int) -> bytes | None:
        """The record of a request. It scans the whole table, so it is only for inspection."""
        row = self._db.execute("SELECT record FROM spill WHERE number = ?", (number,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._db.close()
