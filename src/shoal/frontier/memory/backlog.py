"""The ready requests of one host in memory, best first. If there are too many, the last ones are on disk.

Requests of equal priority leave in the order of their sequence numbers. New requests arrive in that order, so a deque
holds them. The few that return (after a retry, a released lease) go into a small heap beside it, at their old place.
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

    __slots__ = ("fresh", "returned", "spilled")

    def __init__(self) -> None:
        self.fresh: deque[int] = deque()
        self.returned: list[Entry] = []
        self.spilled = 0


class Backlog:
    """The queue of one lane. ``number`` identifies the lane in the spill file."""

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
        """Add a new request behind all others of its rank (the negative of its priority)."""
        self._bucket(rank).fresh.append(fingerprint)

    def put_back(self, rank: float, sequence: int, fingerprint: int) -> None:
        """Return a request to its old place."""
        heappush(self._bucket(rank).returned, (sequence, fingerprint))

    def has_tail(self, rank: float) -> bool:
        """Whether later requests of this rank are on disk, so that new ones must go there too."""
        bucket = self._buckets.get(rank)
        return bucket is not None and bucket.spilled > 0

    def count_spilled(self, rank: float, count: int) -> None:
        self._bucket(rank).spilled += count

    def best(self) -> tuple[float, _Bucket] | None:
        """The best rank that has requests."""
        while self._order:
            rank = self._order[0]
            bucket = self._buckets[rank]
            if bucket.fresh or bucket.returned or bucket.spilled:
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
            "CREATE TABLE spill (lane INTEGER, rank REAL, sequence INTEGER, fingerprint BLOB, record BLOB, "
            "PRIMARY KEY (lane, rank, sequence)) WITHOUT ROWID"
        )

    def add(self, rows: list[tuple[int, float, int, bytes, bytes]]) -> bool:
        """Add rows of (lane, rank, sequence, fingerprint, record). False if the disk is full; then none was added."""
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO spill VALUES (?, ?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as exc:
            log.warning("cannot spill the queue to disk: %s. It stays in memory", exc)
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        return True

    def take(self, lane: int, rank: float, limit: int) -> list[tuple[bytes, bytes]]:
        """Remove and return the first requests of a lane and rank, in order, as (fingerprint, record)."""
        try:
            return self._take(lane, rank, limit)
        except sqlite3.Error as exc:
            raise FrontierError(f"cannot read requests that were spilled to disk: {exc}") from exc

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
        """The record of a request. It scans the table, which is fine for a person's question."""
        row = self._db.execute("SELECT record FROM spill WHERE fingerprint = ?", (fingerprint,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._db.close()
