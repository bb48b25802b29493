"""One host's ready requests in memory, best first, with their tails on disk when there are too many.

Requests of equal priority leave in the order of their sequence numbers. New ones arrive in that order, so a deque
serves; the few that come back (a retry, a released lease) wait in a small heap beside it, at their old place.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import deque
from heapq import heappop, heappush

from shoal.errors import FrontierError

log = logging.getLogger("shoal.frontier")

Entry = tuple[int, int]
"""(sequence, fingerprint as a number)"""


class _Bucket:
    """The requests of one priority."""

    __slots__ = ("back", "fresh", "spilled")

    def __init__(self) -> None:
        self.fresh: deque[int] = deque()
        self.back: list[Entry] = []
        self.spilled = 0


class Backlog:
    """The queue of one lane. ``sequence`` tells the sequence number of a fingerprint in memory."""

    __slots__ = ("_buckets", "_order", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._buckets: dict[float, _Bucket] = {}
        self._order: list[float] = []

    def _bucket(self, rank: float) -> _Bucket:
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = _Bucket()
            heappush(self._order, rank)
        return bucket

    def push(self, rank: float, fingerprint: int) -> None:
        """A new request: behind all others of its rank (the negative of its priority)."""
        self._bucket(rank).fresh.append(fingerprint)

    def put_back(self, rank: float, sequence: int, fingerprint: int) -> None:
        """One that was here before: to its old place."""
        heappush(self._bucket(rank).back, (sequence, fingerprint))

    def has_tail(self, rank: float) -> bool:
        """Whether later requests of this rank are on disk, so that new ones must go there too."""
        bucket = self._buckets.get(rank)
        return bucket is not None and bucket.spilled > 0

    def count_spilled(self, rank: float, count: int) -> None:
        self._bucket(rank).spilled += count

    def best(self) -> tuple[float, _Bucket] | None:
        """The best rank with anything in it."""
        while self._order:
            rank = self._order[0]
            bucket = self._buckets[rank]
            if bucket.fresh or bucket.back or bucket.spilled:
                return rank, bucket
            heappop(self._order)
            del self._buckets[rank]
        return None


class Spill:
    """Requests on disk, in a private temporary database that vanishes with the process."""

    def __init__(self) -> None:
        # An empty name is a temporary file that SQLite unlinks at once; sorted inserts and range reads are its trade.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA cache_size = -4000")
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(
            "CREATE TABLE spill (lane INTEGER, rank REAL, sequence INTEGER, fingerprint BLOB, record BLOB, "
            "PRIMARY KEY (lane, rank, sequence)) WITHOUT ROWID"
        )

    def add(self, rows: list[tuple[int, float, int, bytes, bytes]]) -> bool:
        """Rows of (lane, rank, sequence, fingerprint, record). False: the disk has no room, and nothing was added."""
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO spill VALUES (?, ?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            log.warning("the queue can't spill to disk and stays in memory: %s", exc)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        return True

    def take(self, lane: int, rank: float, limit: int) -> list[tuple[bytes, bytes]]:
        """The first of a lane's rank, in order; they are gone from the disk then."""
        try:
            return self._take(lane, rank, limit)
        except sqlite3.Error as exc:
            raise FrontierError(f"requests that were spilled to disk can't be read back: {exc}") from exc

    def _take(self, lane: int, rank: float, limit: int) -> list[tuple[bytes, bytes]]:
        rows = self._db.execute(
            "SELECT sequence, fingerprint, record FROM spill WHERE lane = ? AND rank = ? ORDER BY sequence LIMIT ?",
            (lane, rank, limit),
        ).fetchall()
        if rows:
            self._db.execute(
                "DELETE FROM spill WHERE lane = ? AND rank = ? AND sequence <= ?", (lane, rank, rows[-1][0])
            )
        return [(fingerprint, record) for _, fingerprint, record in rows]

    def find(self, fingerprint: bytes) -> bytes | None:
        """One record; reads all of it, as only a person asks."""
        row = self._db.execute("SELECT record FROM spill WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._db.close()
