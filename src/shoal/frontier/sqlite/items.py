"""The roles and the item log of a run in a SQLite file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from shoal.frontier import rules
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.ports import Claim, Holder, LoggedItem, RoleState

# The roles of a run in a SQLite file, and the fences of cluster slots.


def slot_columns(holder: Holder | None) -> tuple[str | None, int | None]:
    """The values of the columns slot and epoch for a holder."""
    return (None, None) if holder is None else (holder.slot, holder.epoch)


class SQLiteRoles:
    """The roles of a run: the holder, expiry and cursor of each. See `shoal.ports.Roles`.

    The methods that are not async run within a transaction of the caller.
    """

    def __init__(self, run: RunFile) -> None:
        self._file = run
        self._db = run.db
        self._run = run.number

    async def claim(
        self, role: str, ttl: float, holder: Holder | None = None, *, nonce: bytes = b"", above: int = 0
    ) -> Claim | None:
        token = rules.claim_token(nonce or rules.new_nonce())

        def claim(_: Ledger, now: float) -> Claim | None:
            self.check_holder(holder)
            row = self._db.execute(
                "SELECT cursor, until, finished, token, claim_epoch FROM role WHERE run = ? AND role = ?",
                (self._run, role),
            ).fetchone()
            cursor, until, finished, held_token, epoch = row or (b"", 0.0, False, 0, 0)
            if not rules.is_claimable(finished=finished, until=until, now=now, held_token=held_token, token=token):
                return None
            if token != held_token:
                epoch = rules.claim_epoch(now=now, last=epoch, above=above)
            self._db.execute(
                "INSERT OR REPLACE INTO role (run, role, token, until, cursor, finished, slot, epoch, claim_epoch)"
                " VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?)",
                (self._run, role, token, now + ttl, cursor, *slot_columns(holder), epoch),
            )
            return Claim(role, token, cursor, epoch)

        return await self._file.change(claim)

    async def forget(self, role: str) -> bool:
        def forget(_: Ledger, now: float) -> bool:
            sql = "DELETE FROM role WHERE run = ? AND role = ? AND until <= ?"
            is_gone = self._db.execute(sql, (self._run, role, now)).rowcount > 0
            if is_gone:
                sql = "DELETE FROM inventory WHERE run = ? AND kind = 'role' AND name = ?"
                self._db.execute(sql, (self._run, role))
            return is_gone

        return await self._file.change(forget)

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        def advance(_: Ledger, now: float) -> bool:
            if not self.is_held(claim):
                return False
            self.check_cursor(claim, cursor)
            sql = "UPDATE role SET cursor = ?, until = ? WHERE run = ? AND role = ?"
            self._db.execute(sql, (cursor, now + ttl, self._run, claim.role))
            return True

        return await self._file.change(advance)

    async def relinquish(self, claim: Claim, *, finished: bool = False) -> bool:
        return await self._file.change(lambda *_: self._relinquish(claim, finished))

    def _relinquish(self, claim: Claim, finished: bool) -> bool:
        if finished and self.is_held(claim):
            self.check_cursor(claim, claim.cursor)
        sql = "UPDATE role SET token = 0, until = 0, finished = ? WHERE run = ? AND role = ? AND token = ?"
        return self._db.execute(sql, (finished, self._run, claim.role, claim.token)).rowcount > 0

    async def roles(self) -> list[RoleState]:
        return await self._file.read(self._roles)

    def _roles(self) -> list[RoleState]:
        now = self._file.clock()
        rows = self._db.execute("SELECT role, cursor, until, finished, slot FROM role WHERE run = ?", (self._run,))
        return [
            RoleState(role=role, cursor=cursor, held=until > now, finished=bool(finished), holder=slot or "")
            for role, cursor, until, finished, slot in rows
        ]

    # -- within a transaction

    def is_held(self, claim: Claim) -> bool:
        """Whether the claim still holds its role."""
        row = self._db.execute("SELECT token FROM role WHERE run = ? AND role = ?", (self._run, claim.role)).fetchone()
        return row is not None and row[0] == claim.token

    def check_cursor(self, claim: Claim, cursor: bytes) -> None:
        """StoreRewoundError unless this claim, which is held, may move its cursor to ``cursor``."""
        sql = "SELECT cursor FROM role WHERE run = ? AND role = ?"
        rules.check_cursor(claim, self._db.execute(sql, (self._run, claim.role)).fetchone()[0], cursor)

    def have_cursors(self, cursors: Mapping[str, bytes]) -> bool:
        """Whether these roles have these cursors."""
        rows = self._db.execute("SELECT role, cursor FROM role WHERE run = ?", (self._run,))
        return cursors.items() <= dict(rows.fetchall()).items()

    def save_cursor(self, role: str, cursor: bytes) -> None:
        self._db.execute("UPDATE role SET cursor = ? WHERE run = ? AND role = ?", (cursor, self._run, role))

    def is_finished(self, role: str) -> bool:
        row = self._db.execute("SELECT finished FROM role WHERE run = ? AND role = ?", (self._run, role)).fetchone()
        return row is not None and bool(row[0])

    def free(self, keeps: Callable[[Holder | None], bool]) -> None:
        """Free the roles whose holders are gone. ``keeps``: whether a holder is still alive."""
        held = self._db.execute("SELECT role, slot, epoch FROM role WHERE run = ? AND token != 0", (self._run,))
        for role, slot, epoch in held.fetchall():
            if not keeps(None if slot is None else Holder(slot, epoch)):
                self._db.execute("UPDATE role SET token = 0, until = 0 WHERE run = ? AND role = ?", (self._run, role))

    def fence(self, slot: str, epoch: int) -> None:
        """Fence a slot under this epoch, and free the roles that it holds under earlier ones. FencedError if it is
        fenced under a later epoch."""
        self._check_epoch(slot, epoch)
        self._db.execute("INSERT OR REPLACE INTO fence VALUES (?, ?, ?)", (self._run, slot, epoch))
        sql = "UPDATE role SET token = 0, until = 0 WHERE run = ? AND slot = ? AND epoch < ?"
        self._db.execute(sql, (self._run, slot, epoch))

    def check_holder(self, holder: Holder | None) -> None:
        """FencedError for a holder whose slot was fenced under a later epoch."""
        if holder is not None:
            self._check_epoch(holder.slot, holder.epoch)

    def _check_epoch(self, slot: str, epoch: int) -> None:
        row = self._db.execute("SELECT epoch FROM fence WHERE run = ? AND slot = ?", (self._run, slot)).fetchone()
        rules.check_fence(slot, epoch, row[0] if row else None)


_SEQUENCE_BITS = 40
"""The bits of an item's id that hold its sequence number; the run is above them. With one number as the key, the table
needs no index of its own."""
_MAX_RECENT = 4_000_000
"""Bytes of the last items that are kept in memory."""
_OVERHEAD = 250
"""Bytes that an item takes besides its payload."""


def item_ids(run: int) -> tuple[int, int]:
    """The first and the last id that an item of this run may have. Its id is the first one plus its sequence number."""
    return run << _SEQUENCE_BITS, (run + 1 << _SEQUENCE_BITS) - 1


class SQLiteItemLog:
    """Items in the order in which their pages were completed. See `shoal.ports.ItemLog`.

    Only one process has the file, so nobody can rewind it, and it does not check ``last``.

    The last items are also in memory, for the drainers of this process, which read each item soon after its page.
    """

    def __init__(self, run: RunFile, roles: SQLiteRoles) -> None:
        self._file = run
        self._roles = roles
        self._db = run.db
        self._first, self._last = item_ids(run.number)
        self._recent: deque[LoggedItem] = deque()
        """The last committed items. The thread of the file changes it."""
        self._recent_bytes = 0

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        recent = list(self._recent)
        if recent and recent[0].seq <= after + 1 <= recent[-1].seq:
            skip = after + 1 - recent[0].seq
            items = recent[skip : skip + limit]
            if max_bytes is not None:
                del items[rules.count_fitting([len(item.payload) for item in items], max_bytes) :]
            return items
        return await self._file.read(partial(self._read, after, limit, max_bytes))

    def _read(self, after: int, limit: int, max_bytes: int | None) -> list[LoggedItem]:
        rows = "FROM item WHERE id > ?1 + ?2 AND id <= ?3 ORDER BY id LIMIT ?4"
        if max_bytes is not None:  # SQLite knows the length of a value without reading it
            sizes = self._db.execute(f"SELECT length(payload) {rows}", (self._first, after, self._last, limit))
            limit = rules.count_fitting([size for (size,) in sizes], max_bytes)
        sql = f"SELECT id - ?1, fingerprint, position, payload {rows}"
        return [LoggedItem(*row) for row in self._db.execute(sql, (self._first, after, self._last, limit))]

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        def step() -> None:
            if not self._roles.have_cursors(cursors or {}):
                return
            last = min(self._first + through, self._last)
            deleted = self._db.execute("DELETE FROM item WHERE id BETWEEN ? AND ?", (self._first, last)).rowcount
            if deleted:
                sql = "UPDATE run SET trimmed = trimmed + ? WHERE number = ?"
                self._db.execute(sql, (deleted, self._file.number))
            self._file.file.on_commit(partial(self._forget, through))

        await self._file.file.write(step)

    def append(self, pages: Iterable[tuple[bytes, int, Sequence[bytes]]], ledger: Ledger) -> None:
        """Log the items of pages: the fingerprint of each, how many items it has already, and the new ones.

        A dead request that is retried may have items. New ones get the numbers after them, so no key is used twice.
        Call it within a transaction.
        """
        new = []
        for fingerprint, before, items in pages:
            for position, payload in enumerate(items, before):
                ledger.items += 1
                new.append(LoggedItem(ledger.items, fingerprint, position, payload))
        if new:
            first = self._first
            rows = [(first + item.seq, item.fingerprint, item.index, item.payload) for item in new]
            self._db.executemany("INSERT INTO item VALUES (?, ?, ?, ?)", rows)
            self._file.file.on_commit(partial(self._keep, new))

    def _keep(self, new: Sequence[LoggedItem]) -> None:
        self._recent.extend(new)
        self._recent_bytes += sum(_OVERHEAD + len(item.payload) for item in new)
        while self._recent_bytes > _MAX_RECENT:
            self._drop_first()

    def _forget(self, through: int) -> None:
        while self._recent and self._recent[0].seq <= through:
            self._drop_first()

    def _drop_first(self) -> None:
        self._recent_bytes -= _OVERHEAD + len(self._recent.popleft().payload)
