"""The item log of a run in a SQLite file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.ports import LoggedItem


class SQLiteItemLog:
    """Items in the order in which their pages were completed. See `shoal.ports.ItemLog`.

    Only one process has the file, so nobody can rewind it. It ignores the proofs that a server checks (``last``,
    ``cursors``).
    """

    def __init__(self, run: RunFile) -> None:
        self._file = run
        self._db = run.db
        self._run = run.number

    async def read_items(self, after: int, limit: int, *, last: LoggedItem | None = None) -> list[LoggedItem]:
        sql = "SELECT seq, fingerprint, position, payload FROM item WHERE run = ? AND seq > ? ORDER BY seq LIMIT ?"
        return await self._file.read(
            lambda: [LoggedItem(*row) for row in self._db.execute(sql, (self._run, after, limit))]
        )

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        sql = "DELETE FROM item WHERE run = ? AND seq <= ?"
        await self._file.file.write(lambda: self._db.execute(sql, (self._run, through)))

    def append(self, pages: Iterable[tuple[bytes, int, Sequence[bytes]]], ledger: Ledger) -> None:
        """Log the items of pages: the fingerprint of each, how many items it has already, and the new ones.

        A dead request that is retried may have items. New ones get the numbers behind them, so no key is used twice.
        Call it within a transaction.
        """
        rows = []
        for fingerprint, before, items in pages:
            for position, payload in enumerate(items, before):
                ledger.items += 1
                rows.append((self._run, ledger.items, fingerprint, position, payload))
        self._db.executemany("INSERT INTO item VALUES (?, ?, ?, ?, ?)", rows)
