"""The part of a SQLite file that belongs to one run: its transactions, its counters, and its fingerprints."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from shoal.frontier.sqlite.file import SQLiteFile
from shoal.ports import FrontierOptions, RunState

T = TypeVar("T")

_decode_options = msgspec.msgpack.Decoder(FrontierOptions).decode
_COUNTERS = "pushed, ready, waiting, leased, done, dead, duplicates, items, newest, incoming, redirects, item_errors"


class Ledger(msgspec.Struct):
    """The counters of a run: read at the start of a transaction, written at its end."""

    pushed: int
    ready: int
    waiting: int
    leased: int
    done: int
    dead: int
    duplicates: int
    items: int
    newest: int
    incoming: int
    redirects: int
    item_errors: int


class RunFile:
    """Runs steps on a run's rows, each as one transaction in the thread of the file."""

    def __init__(self, file: SQLiteFile, number: int, clock: Callable[[], float]) -> None:
        self.number = number
        self.clock = clock
        self.file = file
        self.db = file.db
        self.options = FrontierOptions()
        """The options of the run. The file has the same ones."""
        self.cookies = 0
        """The version of its cookies, as in the file: it never starts again, whoever opens the file."""

    def load(self) -> None:
        """Read the options and the version of the cookies from the file. A run in which nobody has taken part yet has
        no options."""
        query = "SELECT options, cookies FROM run WHERE number = ?"
        stored, self.cookies = self.db.execute(query, (self.number,)).fetchone()
        self.options = _decode_options(stored) if stored else FrontierOptions()

    def count_cookies(self) -> None:
        """The cookies changed: they get another version."""
        query = "UPDATE run SET cookies = cookies + 1 WHERE number = ? RETURNING cookies"
        (self.cookies,) = self.db.execute(query, (self.number,)).fetchone()

    def save_options(self, options: FrontierOptions) -> None:
        sql = "UPDATE run SET options = ? WHERE number = ?"
        self.db.execute(sql, (msgspec.msgpack.encode(options), self.number))
        self.options = options

    async def change(self, step: Callable[[Ledger, float], T]) -> T:
        """Run ``step`` with the ledger and the time as one transaction. See `SQLiteFile.write`."""

        def transaction() -> T:
            ledger = self.ledger()
            before = msgspec.structs.astuple(ledger)
            result = step(ledger, self.clock())
            if msgspec.structs.astuple(ledger) != before:
                self.save(ledger)
            return result

        return await self.file.write(transaction)

    async def read(self, step: Callable[[], T]) -> T:
        """Run ``step`` on one state of the file."""
        return await self.file.read(step)

    def ledger(self) -> Ledger:
        return Ledger(*self.db.execute(f"SELECT {_COUNTERS} FROM run WHERE number = ?", (self.number,)).fetchone())

    def trimmed(self) -> int | None:
        """How many items were deleted from the log. None if that is not known: the run began in an older format."""
        trimmed: int | None
        (trimmed,) = self.db.execute("SELECT trimmed FROM run WHERE number = ?", (self.number,)).fetchone()
        return trimmed

    def save(self, ledger: Ledger) -> None:
        self.db.execute(
            f"UPDATE run SET ({_COUNTERS}) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE number = ?",
            (*msgspec.structs.astuple(ledger), self.number),
        )

    def state(self) -> RunState:
        state: RunState = self.db.execute("SELECT state FROM run WHERE number = ?", (self.number,)).fetchone()[0]
        return state


# The fingerprints of the requests that a run in a file has already.
#
# Fingerprints are spread evenly. An index over them that is updated with every insert writes one page of the file
# for each new URL: with a million URLs this costs more than everything else. So the index lags behind. The newest
# fingerprints are in memory, and in the rows of their requests, which are read when the file is opened. When there
# are too many, one slice of them (those that start with the same bits) moves to the index in order, many to a page.


_SLICES = 64
_SHIFT = 2
"""The first byte shifted by this is the slice."""
_MAX_IN_MEMORY = 1 << 16
"""Newest fingerprints in memory, about 10 MB."""
_QUERY_SIZE = 64
"""Fingerprints that one query asks for."""


class Seen:
    """The fingerprints that a run has. Call it within transactions of the file, and ``load`` after a rollback."""

    def __init__(self, db: sqlite3.Connection, run: int) -> None:
        self._db = db
        self._run = run
        self._newest: list[dict[bytes, int]] = []
        self._through: list[int] = []
        """Up to which request each slice is in the index. 0: none of it is."""
        self._size = 0
        self._next = 0

    def load(self) -> None:
        """Read the newest fingerprints: those that the index does not have yet."""
        self._newest = [{} for _ in range(_SLICES)]
        self._through = through = [0] * _SLICES
        for slice_, request in self._db.execute("SELECT slice, through FROM seen_slice WHERE run = ?", (self._run,)):
            through[slice_] = request
        rows = self._db.execute(
            "SELECT id, fingerprint FROM request"
            " WHERE id > ? AND id <= (SELECT newest FROM run WHERE number = ?) AND +run = ?",
            (min(through), self._run, self._run),
        )
        for request, fingerprint in rows:
            slice_ = fingerprint[0] >> _SHIFT
            if request > through[slice_]:
                self._newest[slice_][fingerprint] = request
        self._size = sum(map(len, self._newest))
        self._next = through.index(min(through))

    def known(self, fingerprints: Iterable[bytes]) -> set[bytes]:
        """Which of these fingerprints the run has."""
        known = set()
        rest = []
        newest, through = self._newest, self._through
        for fingerprint in fingerprints:
            slice_ = fingerprint[0] >> _SHIFT
            if fingerprint in newest[slice_]:
                known.add(fingerprint)
            elif through[slice_]:
                rest.append(fingerprint)
        for start in range(0, len(rest), _QUERY_SIZE):
            chunk = rest[start : start + _QUERY_SIZE]
            marks = ",".join("?" * len(chunk))
            sql = f"SELECT fingerprint FROM seen WHERE fingerprint IN ({marks}) AND run = ?"
            known.update([row[0] for row in self._db.execute(sql, (*chunk, self._run))])
        return known

    def find(self, fingerprint: bytes) -> int | None:
        """The number of the request with this fingerprint."""
        newest = self._newest[fingerprint[0] >> _SHIFT].get(fingerprint)
        if newest is not None:
            return newest
        row = self._db.execute(
            "SELECT request FROM seen WHERE fingerprint = ? AND run = ?", (fingerprint, self._run)
        ).fetchone()
        return row[0] if row else None

    def add(self, fingerprints: dict[bytes, int]) -> None:
        """Add requests that were inserted in this transaction, in ascending order."""
        newest = self._newest
        for fingerprint, request in fingerprints.items():
            newest[fingerprint[0] >> _SHIFT][fingerprint] = request
        self._size += len(fingerprints)
        while self._size > _MAX_IN_MEMORY:
            self._move_to_index(self._next, request)
            self._next = (self._next + 1) % _SLICES

    def _move_to_index(self, slice_: int, through: int) -> None:
        run = self._run
        rows = [(fingerprint, run, request) for fingerprint, request in sorted(self._newest[slice_].items())]
        self._db.executemany("INSERT INTO seen VALUES (?, ?, ?)", rows)
        self._db.execute("INSERT OR REPLACE INTO seen_slice VALUES (?, ?, ?)", (run, slice_, through))
        self._newest[slice_] = {}
        self._through[slice_] = through
        self._size -= len(rows)
