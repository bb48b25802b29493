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

    def push(self, number: int) -> None:
        """Add a request after all others."""
        self._fresh.append(number)

    def put_back(self, number: int) -> None:
        heappush(self._returned, number)

    def ends_on_disk(self) -> bool:
        """Whether the requests after those that returned are on disk."""
        return self.spilled > 0 and self._taken == len(self._fresh)

    def first(self) -> int | None:
        """The first request in memory."""
        fresh = self._fresh[self._taken] if self._taken < len(self._fresh) else None
        if self._returned and (fresh is None or self._returned[0] < fresh):
            return self._returned[0]
        return fresh

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
    """The queue of one lane. ``number`` identifies the lane in the spill file."""

    __slots__ = ("_buckets", "_order", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._buckets: dict[float, Bucket] = {}
        self._order: list[float] = []

    def __getitem__(self, rank: float) -> Bucket:
        return self._buckets[rank]

    def _bucket(self, rank: float) -> Bucket:
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = Bucket()
            heappush(self._order, rank)
        return bucket

    def push(self, rank: float, number: int) -> None:
        """Add a new request after all others of its rank (the negative of its priority)."""
        (self._buckets.get(rank) or self._bucket(rank)).push(number)

    def put_back(self, rank: float, number: int) -> None:
        """Return a request to its old place."""
        self._bucket(rank).put_back(number)

    def has_tail(self, rank: float) -> bool:
        """Whether later requests of this rank are on disk, so that new ones must go there too."""
        bucket = self._buckets.get(rank)
        return bucket is not None and bucket.spilled > 0

    def count_spilled(self, rank: float, count: int) -> None:
        self._bucket(rank).spilled += count

    def best(self) -> tuple[float, Bucket] | None:
        """The best rank that has requests."""
        while self._order:
            rank = self._order[0]
            bucket = self._buckets[rank]
            if bucket.spilled or bucket.first() is not None:
                return rank, bucket
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
