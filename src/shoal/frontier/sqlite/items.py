"""The item log of a run in a SQLite file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from shoal.frontier.rules import count_fitting
from shoal.frontier.sqlite.roles import SQLiteRoles
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.ports import LoggedItem

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
                del items[count_fitting([len(item.payload) for item in items], max_bytes) :]
            return items
        return await self._file.read(partial(self._read, after, limit, max_bytes))

    def _read(self, after: int, limit: int, max_bytes: int | None) -> list[LoggedItem]:
        rows = "FROM item WHERE id > ?1 + ?2 AND id <= ?3 ORDER BY id LIMIT ?4"
        if max_bytes is not None:  # SQLite knows the length of a value without reading it
            sizes = self._db.execute(f"SELECT length(payload) {rows}", (self._first, after, self._last, limit))
            limit = count_fitting([size for (size,) in sizes], max_bytes)
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
