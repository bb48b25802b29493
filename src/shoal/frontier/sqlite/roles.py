"""The roles of a run in a SQLite file, and the fences of cluster slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.frontier.rules import check_cursor, check_fence, claim_epoch, claim_token, is_claimable, new_nonce
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.ports import Claim, Holder, LoggedItem, RoleState


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
        token = claim_token(nonce or new_nonce())

        def claim(_: Ledger, now: float) -> Claim | None:
            self.check_holder(holder)
            row = self._db.execute(
                "SELECT cursor, until, finished, token, claim_epoch FROM role WHERE run = ? AND role = ?",
                (self._run, role),
            ).fetchone()
            cursor, until, finished, held_token, epoch = row or (b"", 0.0, False, 0, 0)
            if not is_claimable(finished=finished, until=until, now=now, held_token=held_token, token=token):
                return None
            if token != held_token:
                epoch = claim_epoch(now=now, last=epoch, above=above)
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
        return await self._file.change(lambda _, now: self._advance(claim, cursor, now + ttl))

    def _advance(self, claim: Claim, cursor: bytes, until: float) -> bool:
        if not self.is_held(claim):
            return False
        self.check_cursor(claim, cursor)
        sql = "UPDATE role SET cursor = ?, until = ? WHERE run = ? AND role = ?"
        self._db.execute(sql, (cursor, until, self._run, claim.role))
        return True

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
        check_cursor(claim, self._db.execute(sql, (self._run, claim.role)).fetchone()[0], cursor)

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
        check_fence(slot, epoch, row[0] if row else None)
