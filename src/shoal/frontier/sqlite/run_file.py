"""The part of a SQLite file that belongs to one run: its transactions and its counters."""

from __future__ import annotations

from collections.abc import Callable
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

    def load_options(self) -> None:
        """Read the options from the file. A run in which nobody has taken part yet has none."""
        (stored,) = self.db.execute("SELECT options FROM run WHERE number = ?", (self.number,)).fetchone()
        self.options = _decode_options(stored) if stored else FrontierOptions()

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
        found: int | None
        (found,) = self.db.execute("SELECT trimmed FROM run WHERE number = ?", (self.number,)).fetchone()
        return found

    def save(self, ledger: Ledger) -> None:
        self.db.execute(
            f"UPDATE run SET ({_COUNTERS}) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE number = ?",
            (*msgspec.structs.astuple(ledger), self.number),
        )

    def state(self) -> RunState:
        state: RunState = self.db.execute("SELECT state FROM run WHERE number = ?", (self.number,)).fetchone()[0]
        return state
