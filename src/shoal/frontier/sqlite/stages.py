"""The links of large pages in a SQLite file that are not in the queue yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from shoal.errors import DECODING_ERRORS
from shoal.frontier.sqlite.lanes import NewRequest
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.frontier.sqlite.seen import Seen
from shoal.frontier.staging import Moved, Portion, first_of_each, incoming_history
from shoal.http import Request
from shoal.ports import History

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Portion).decode
_decode = msgspec.msgpack.Decoder(Request).decode


class Stages:
    """The staged links of a run: a row for each portion, in order. See `shoal.frontier.staging`."""

    def __init__(
        self, run: RunFile, seen: Seen, add_links: Callable[[Sequence[NewRequest], Ledger, float], Counter[int | None]]
    ) -> None:
        """``add_links`` returns how many of the links were refused, by page."""
        self._run = run
        self._db = run.db
        self._seen = seen
        self._add_links = add_links
        self._movers = 0

    # -- within a transaction

    def add(self, parent: int, portions: Sequence[Portion], ledger: Ledger) -> None:
        """Stage the links of a page."""
        self._db.executemany(
            "INSERT INTO stage (run, parent, size, links) VALUES (?, ?, ?, ?)",
            ((self._run.number, parent, len(portion), _pack(portion)) for portion in portions),
        )
        ledger.incoming += sum(map(len, portions))

    def help(self, ledger: Ledger, now: float) -> None:
        """Move a portion of the first page, unless the calls that ended large pages do that themselves. They may be
        gone: cancelled, or killed with their process."""
        if ledger.incoming and not self._movers:
            self._move_portion(None, ledger, now)

    def _move_portion(self, parent: int | None, ledger: Ledger, now: float) -> Moved | None:
        """Move a portion of this page, or of any page. None if nothing is staged."""
        row = self._db.execute(
            "SELECT id, parent, size, links FROM stage"
            " WHERE run = ?1 AND (?2 IS NULL OR parent = ?2) ORDER BY id LIMIT 1",
            (self._run.number, parent),
        ).fetchone()
        if row is None:
            return None
        number, parent, size, links = row
        try:
            portion = first_of_each(_unpack(links))
            known = self._seen.known(portion)
            new = [
                NewRequest(fingerprint, _decode(payload), parent, payload)
                for fingerprint, payload in portion.items()
                if fingerprint not in known
            ]
        except DECODING_ERRORS as exc:
            raise self._run.file.damaged(f"the links of request {parent} can't be read: {exc!r}") from exc
        refused = self._add_links(new, ledger, now)[parent]
        self._db.execute("DELETE FROM stage WHERE id = ?", (number,))
        ledger.incoming -= size
        ledger.duplicates += size - len(new)
        return Moved(len(new) - refused, refused)

    def find(self, fingerprint: bytes) -> History | None:
        """The history of a staged link. It reads all staged links, so it is only for inspection."""
        rows = self._db.execute(
            "SELECT s.links, r.payload FROM stage s JOIN request r ON r.id = s.parent"
            " WHERE s.run = ? AND instr(s.links, ?) > 0",
            (self._run.number, fingerprint),
        )
        for links, above in rows:
            payload = first_of_each(_unpack(links)).get(fingerprint)
            if payload is not None:
                return incoming_history(_decode(payload), _decode(above).url)
        return None

    def count(self) -> int:
        """The number of staged links, recounted."""
        sql = "SELECT coalesce(sum(size), 0) FROM stage WHERE run = ?"
        count: int = self._db.execute(sql, (self._run.number,)).fetchone()[0]
        return count

    # -- between transactions

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Use it around a call that stages and moves links. Meanwhile `help` does nothing, so that the call can count
        its links."""
        self._movers += 1
        try:
            yield
        finally:
            self._movers -= 1

    async def move(self, parent: int) -> Moved:
        """Move all links of a page into the queue, each portion in its own transaction. If the caller is cancelled or
        killed, `help` continues."""
        moved = Moved(0, 0)
        while (portion := await self._run.change(partial(self._move_portion, parent))) is not None:
            moved = moved.plus(portion)
        return moved
