"""What a file has of a run beside its queue: the ledger, the roles, the item log, what became of each URL.

Plain reads and writes within a transaction; nothing of it is kept in memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from shoal.frontier.rules import STATE_NAMES, check_cursor, check_fence
from shoal.http import Request
from shoal.ports import Claim, Event, History, Holder, LoggedItem, RoleState, Stats

_decode = msgspec.msgpack.Decoder(Request).decode
_COUNTERS = "pushed, ready, waiting, leased, done, dead, duplicates, items, newest"
_HISTORY = (
    "SELECT id, state, attempts - (state = 2 AND NOT begun), status, items, at, parent, reason, payload FROM request"
)
_PAGE = 100


class Ledger(msgspec.Struct):
    """A run's counters: read at the start of a transaction, written at its end."""

    pushed: int
    ready: int
    waiting: int
    leased: int
    done: int
    dead: int
    duplicates: int
    items: int
    newest: int


def storable(text: str) -> str:
    """Text without what UTF-8 can't say: a server may have sent anything."""
    return text.encode(errors="replace").decode()


def slot_of(holder: Holder | None) -> tuple[str | None, int | None]:
    """What the columns slot and epoch have of a holder."""
    return (None, None) if holder is None else (holder.slot, holder.epoch)


class Records:
    """The small tables of one run."""

    def __init__(self, db: sqlite3.Connection, run: int) -> None:
        self._db = db
        self._run = run

    # -- the ledger

    def ledger(self) -> Ledger:
        return Ledger(*self._db.execute(f"SELECT {_COUNTERS} FROM run WHERE number = ?", (self._run,)).fetchone())

    def save(self, ledger: Ledger) -> None:
        self._db.execute(
            f"UPDATE run SET ({_COUNTERS}) = (?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE number = ?",
            (*msgspec.structs.astuple(ledger), self._run),
        )

    def run_state(self) -> str:
        state: str = self._db.execute("SELECT state FROM run WHERE number = ?", (self._run,)).fetchone()[0]
        return state

    def stats(self) -> Stats:
        ledger = msgspec.structs.asdict(self.ledger())
        del ledger["newest"]
        row = self._db.execute("SELECT finished FROM role WHERE run = ? AND role = 'seed'", (self._run,)).fetchone()
        return Stats(**ledger, seeding=row is None or not row[0])

    def audit(self) -> Stats:
        # With "+" no index is used: it reads the requests themselves, in the order of the file.
        sql = "SELECT state, count(*) FROM request WHERE +run = ? GROUP BY +state"
        counts = {STATE_NAMES[state]: count for state, count in self._db.execute(sql, (self._run,))}
        return msgspec.structs.replace(self.stats(), **{name: counts.get(name, 0) for name in STATE_NAMES})

    # -- roles

    def claim(self, role: str, now: float, until: float, holder: Holder | None, token: int) -> Claim | None:
        self.check_holder(holder)
        row = self._db.execute(
            "SELECT cursor, until, finished, token FROM role WHERE run = ? AND role = ?", (self._run, role)
        ).fetchone()
        cursor, held_until, finished, held_by = row or (b"", 0.0, False, 0)
        if finished or (held_until > now and held_by != token):
            return None
        self._db.execute(
            "INSERT OR REPLACE INTO role VALUES (?, ?, ?, ?, ?, 0, ?, ?)",
            (self._run, role, token, until, cursor, *slot_of(holder)),
        )
        return Claim(role, token, cursor)

    def holds(self, role: str, token: int) -> bool:
        row = self._db.execute("SELECT token FROM role WHERE run = ? AND role = ?", (self._run, role)).fetchone()
        return row is not None and row[0] == token

    def check(self, claim: Claim, cursor: bytes) -> None:
        """StoreRewoundError unless this claim, which is held, may move its cursor to this one."""
        sql = "SELECT cursor FROM role WHERE run = ? AND role = ?"
        check_cursor(claim, self._db.execute(sql, (self._run, claim.role)).fetchone()[0], cursor)

    def set_cursor(self, role: str, cursor: bytes) -> None:
        self._db.execute("UPDATE role SET cursor = ? WHERE run = ? AND role = ?", (cursor, self._run, role))

    def advance(self, claim: Claim, cursor: bytes, until: float) -> bool:
        if not self.holds(claim.role, claim.token):
            return False
        self.check(claim, cursor)
        sql = "UPDATE role SET cursor = ?, until = ? WHERE run = ? AND role = ?"
        self._db.execute(sql, (cursor, until, self._run, claim.role))
        return True

    def relinquish(self, claim: Claim, *, finished: bool) -> bool:
        if finished and self.holds(claim.role, claim.token):
            self.check(claim, claim.cursor)
        sql = "UPDATE role SET token = 0, until = 0, finished = ? WHERE run = ? AND role = ? AND token = ?"
        return self._db.execute(sql, (finished, self._run, claim.role, claim.token)).rowcount > 0

    def free_roles(self) -> None:
        """Whoever held them is gone."""
        self._db.execute("UPDATE role SET token = 0, until = 0 WHERE run = ?", (self._run,))

    def fence(self, slot: str, epoch: int) -> None:
        """Remember the epoch, and free what the slot holds under earlier ones."""
        self._check_epoch(slot, epoch)
        self._db.execute("INSERT OR REPLACE INTO fence VALUES (?, ?, ?)", (self._run, slot, epoch))
        sql = "UPDATE role SET token = 0, until = 0 WHERE run = ? AND slot = ? AND epoch < ?"
        self._db.execute(sql, (self._run, slot, epoch))

    def check_holder(self, holder: Holder | None) -> None:
        """FencedError for one whose slot has another holder by now."""
        if holder is not None:
            self._check_epoch(holder.slot, holder.epoch)

    def _check_epoch(self, slot: str, epoch: int) -> None:
        row = self._db.execute("SELECT epoch FROM fence WHERE run = ? AND slot = ?", (self._run, slot)).fetchone()
        check_fence(slot, epoch, row[0] if row else None)

    def roles(self, now: float) -> list[RoleState]:
        rows = self._db.execute("SELECT role, cursor, until, finished FROM role WHERE run = ?", (self._run,))
        return [
            RoleState(role=role, cursor=cursor, held=until > now, finished=bool(finished))
            for role, cursor, until, finished in rows
        ]

    # -- notes, which belong to the file

    def remember(self, key: str, value: bytes, now: float, until: float) -> None:
        self._db.execute("DELETE FROM note WHERE until <= ?", (now,))
        self._db.execute("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", (key, value, until))

    def recall(self, key: str, now: float) -> bytes | None:
        row = self._db.execute("SELECT value FROM note WHERE key = ? AND until > ?", (key, now)).fetchone()
        return row[0] if row else None

    # -- items

    def append(self, pages: Iterable[tuple[bytes, int, Sequence[bytes]]], ledger: Ledger) -> None:
        """Log the items of pages: the fingerprint of each, how many items it has already, and the new ones. A dead
        request that is retried may have some; the new ones are numbered behind them, so no key is used twice."""
        rows = []
        for fingerprint, before, items in pages:
            for position, payload in enumerate(items, before):
                ledger.items += 1
                rows.append((self._run, ledger.items, fingerprint, position, payload))
        self._db.executemany("INSERT INTO item VALUES (?, ?, ?, ?, ?)", rows)

    def read_items(self, after: int, limit: int) -> list[LoggedItem]:
        sql = "SELECT seq, fingerprint, position, payload FROM item WHERE run = ? AND seq > ? ORDER BY seq LIMIT ?"
        return [LoggedItem(*row) for row in self._db.execute(sql, (self._run, after, limit))]

    def trim_items(self, through: int) -> None:
        self._db.execute("DELETE FROM item WHERE run = ? AND seq <= ?", (self._run, through))

    # -- histories

    def note(self, request: int, at: float, what: str, detail: str) -> None:
        sql = "INSERT INTO event (request, at, what, detail) VALUES (?, ?, ?, ?)"
        self._db.execute(sql, (request, at, what, storable(detail)))

    def search(self, url: str) -> int | None:
        """One with a name of its own: it was not filtered, or is no GET. Reads all, as only a person asks."""
        rows = self._db.execute(
            "SELECT id, payload FROM request WHERE run = ? AND instr(payload, ?) > 0", (self._run, url.encode())
        )
        return next((number for number, payload in rows if _decode(payload).url == url), None)

    def history(self, request: int) -> History:
        return self._history(self._db.execute(f"{_HISTORY} WHERE id = ?", (request,)).fetchone())

    def _history(self, row: tuple[Any, ...]) -> History:
        number, state, attempts, status, items, at, parent, reason, payload = row
        request = _decode(payload)
        above = self._db.execute("SELECT payload FROM request WHERE id = ?", (parent,)).fetchone()
        events = self._db.execute("SELECT at, what, detail FROM event WHERE request = ? ORDER BY id", (number,))
        return History(
            url=request.url, state=STATE_NAMES[state], depth=request.depth, priority=request.priority,
            attempts=attempts, status=status, items=items, parent=_decode(above[0]).url if above else None,
            reason=reason or "", events=(*(Event(*event) for event in events), Event(at, STATE_NAMES[state])),
        )  # fmt: skip

    def dead_page(self, after: int) -> list[tuple[int, History]]:
        """Some of the dead requests behind this one, each with its number."""
        sql = f"{_HISTORY} WHERE run = ? AND state = 4 AND id > ? ORDER BY id LIMIT ?"
        return [(row[0], self._history(row)) for row in self._db.execute(sql, (self._run, after, _PAGE)).fetchall()]

    def dead_kinds(self) -> dict[str, int]:
        sql = "SELECT kind, count(*) FROM request WHERE run = ? AND state = 4 GROUP BY kind"
        return dict(self._db.execute(sql, (self._run,)).fetchall())
