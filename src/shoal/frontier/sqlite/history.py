"""The events and histories of requests in a SQLite file. Call everything within a transaction."""

from __future__ import annotations

import msgspec

from shoal.frontier.rules import CLAIMED, DEAD, LEASED, STATE_NAMES, read_event
from shoal.frontier.sqlite.file import StoredRow
from shoal.frontier.sqlite.run_file import RunFile
from shoal.http import Request
from shoal.ports import Event, History, Holder

_decode = msgspec.msgpack.Decoder(Request).decode
_HISTORY = f"""
    SELECT id, state, attempts - (state = {LEASED} AND NOT begun), status, items, at, parent, kind, reason, payload,
        fingerprint,
        CASE WHEN state IN ({", ".join(map(str, sorted(CLAIMED)))}) THEN slot END
    FROM request
"""
_PAGE = 100  # dead requests that are read at once


def storable(text: str) -> str:
    """Replace what UTF-8 cannot encode: a server may have sent anything."""
    return text.encode(errors="replace").decode()


class Histories:
    """What happened to the requests of a run."""

    def __init__(self, run: RunFile) -> None:
        self._db = run.db
        self._run = run.number

    def add_event(self, request: int, at: float, what: str, detail: str, holder: Holder | None = None) -> None:
        """Record an event. ``holder``: the holder of the lease that it is about."""
        worker = "" if holder is None else storable(holder.slot)
        sql = "INSERT INTO event (request, at, what, detail, worker) VALUES (?, ?, ?, ?, ?)"
        self._db.execute(sql, (request, at, what, storable(detail), worker))

    def search(self, url: str) -> int | None:
        """Find a request by its URL whose fingerprint differs: it was not filtered, or is not a GET. Reads all rows."""
        rows = self._db.execute(
            "SELECT id, payload FROM request WHERE run = ? AND instr(payload, ?) > 0", (self._run, url.encode())
        )
        return next((number for number, payload in rows if _decode(payload).url == url), None)

    def of(self, request: int) -> History:
        """The history of a request."""
        return self._history(self._db.execute(f"{_HISTORY} WHERE id = ?", (request,)).fetchone())

    def _history(self, row: StoredRow) -> History:
        number, state, attempts, status, items, at, parent, kind, reason, payload, fingerprint, slot = row
        request = _decode(payload)
        above = self._db.execute("SELECT payload FROM request WHERE id = ?", (parent,)).fetchone()
        events = self._db.execute("SELECT at, what, detail, worker FROM event WHERE request = ? ORDER BY id", (number,))
        return History(
            url=request.url, state=STATE_NAMES[state], depth=request.depth, priority=request.priority,
            attempts=attempts, status=status, items=items, parent=_decode(above[0]).url if above else None,
            reason=reason or "", worker=slot or "", fingerprint=fingerprint, kind=kind or "",
            events=(*(read_event(*event) for event in events), Event(at, STATE_NAMES[state], worker=slot or "")),
        )  # fmt: skip

    def dead_page(self, after: int) -> list[tuple[int, History]]:
        """The next dead requests after this number, each with its number."""
        sql = f"{_HISTORY} WHERE run = ? AND state = {DEAD} AND id > ? ORDER BY id LIMIT ?"
        return [(row[0], self._history(row)) for row in self._db.execute(sql, (self._run, after, _PAGE)).fetchall()]

    def dead_kinds(self) -> dict[str, int]:
        sql = f"SELECT kind, count(*) FROM request WHERE run = ? AND state = {DEAD} GROUP BY kind"
        return dict(self._db.execute(sql, (self._run,)).fetchall())
