"""Inspect a run in a SQLite file: its counters, faults and their repair, histories, dead requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from functools import partial

import msgspec

from shoal.errors import DECODING_ERRORS
from shoal.frontier import rules
from shoal.frontier.faults import compare_counters, describe_losses, make_faults
from shoal.frontier.rules import DEAD, DONE, LEASED, READY, STATE_NAMES, WAITING
from shoal.frontier.sqlite.file import STORED, UNLISTED, SQLiteFile
from shoal.frontier.sqlite.items import SQLiteRoles, item_ids
from shoal.frontier.sqlite.leases import Leases
from shoal.frontier.sqlite.queue import Stages
from shoal.frontier.sqlite.run_file import Ledger, RunFile, Seen
from shoal.http import Request
from shoal.ports import REPAIRED_LEASE, History, LeaseHolder, LeaseKey, LeaseOutcome, Rewind, Stats, Waits
from shoal.urls.normalize import host_of

# Faults of a run in a SQLite file, and their repair. Call everything within a transaction.


log = logging.getLogger("shoal.frontier")

_decode = msgspec.msgpack.Decoder(Request).decode
_SLICE = (
    "(instr('0123456789ABCDEF', substr(hex(r.fingerprint), 1, 1)) * 16 + "
    "instr('0123456789ABCDEF', substr(hex(r.fingerprint), 2, 1)) - 17 >> 2)"
)
"""The slice of a fingerprint: see `shoal.frontier.sqlite.run_file`."""
_FAULTS = {
    "lanes": "LEFT JOIN lane l ON l.number = r.lane AND l.run = r.run"
    f" WHERE r.run = :run AND r.state <> {DONE} AND l.number IS NULL",
    "waiting": f"WHERE r.run = :run AND r.state = {WAITING} AND r.due IS NULL",
    "leases": f"WHERE r.run = :run AND r.state = {LEASED} AND (r.due IS NULL OR r.token IS NULL)",
    "failures": f"WHERE r.run = :run AND r.state = {DEAD} AND (r.kind IS NULL OR r.reason IS NULL)",
    "known": f"""
        LEFT JOIN seen s ON s.fingerprint = r.fingerprint AND s.run = r.run
        LEFT JOIN seen_slice p ON p.run = r.run AND p.slice = {_SLICE}
        WHERE r.run = :run AND (s.request IS NOT NULL) <> (r.id <= coalesce(p.through, 0))""",
}
"""Which requests have a fault, by its kind."""
_LISTED = ("role", "document", "host")
"""The tables whose rows the inventory lists."""


def find_faults(run: RunFile) -> Iterator[tuple[str, int, str]]:
    """Each fault as (kind, count, example), besides those of the counters."""
    own = {"run": run.number}
    for kind, which in _FAULTS.items():
        counted = "DISTINCT r.lane" if kind == "lanes" else "*"
        count, number = run.db.execute(f"SELECT count({counted}), min(r.id) FROM request r {which}", own).fetchone()
        yield kind, count, _url(run.file, number) if count else ""
    missing = _missing_items(run)
    yield "items", missing, _first_gap(run) if missing > 0 else ""
    for kind in _LISTED:
        lost = _lost(run, kind)
        yield f"{kind}s", len(lost), lost[0] if lost else ""
    (unlisted,) = run.db.execute(f"SELECT count(*) FROM ({UNLISTED}) WHERE run IN (0, :run)", own).fetchone()
    yield "inventory", unlisted, ""


def _lost(run: RunFile, kind: str) -> list[str]:
    """The names of this kind in the inventory that are gone from their table."""
    sql = f"""SELECT name FROM (SELECT run, kind, name FROM inventory WHERE run IN (0, ?1) AND kind = ?2
        EXCEPT SELECT * FROM ({STORED})) ORDER BY name"""
    return [name for (name,) in run.db.execute(sql, (run.number, kind))]


def _url(file: SQLiteFile, number: int) -> str:
    (payload,) = file.db.execute("SELECT payload FROM request WHERE id = ?", (number,)).fetchone()
    try:
        return _decode(payload).url
    except DECODING_ERRORS:
        return ""


def _missing_items(run: RunFile) -> int:
    sql = "SELECT count(*) FROM item WHERE id BETWEEN ? AND ?"
    (count,) = run.db.execute(sql, item_ids(run.number)).fetchone()
    missing: int = run.ledger().items - trimmed_items(run) - count
    return missing


def trimmed_items(run: RunFile) -> int:
    """How many items were deleted from the log. If the run does not know it, those before the first one."""
    trimmed = run.trimmed()
    if trimmed is None:
        first_id, last_id = item_ids(run.number)
        (first,) = run.db.execute("SELECT min(id) FROM item WHERE id BETWEEN ? AND ?", (first_id, last_id)).fetchone()
        trimmed = run.ledger().items if first is None else first - first_id - 1
    return trimmed


def _first_gap(run: RunFile) -> str:
    """The first item that the log lacks after one that it has."""
    first_id, _ = item_ids(run.number)
    sql = """SELECT min(i.id) + 1 - ?1 FROM item i WHERE i.id >= ?1 AND i.id < ?2
        AND NOT EXISTS (SELECT 1 FROM item n WHERE n.id = i.id + 1)"""
    (number,) = run.db.execute(sql, (first_id, first_id + run.ledger().items)).fetchone()
    return "" if number is None else f"item {number}"


def repair(run: RunFile) -> list[str]:
    """Restore what is missing, as far as possible. Returns what is lost. The caller reloads what it keeps in memory."""
    db, now, own = run.db, run.clock(), (run.number,)
    restore_lanes(run.file)
    db.execute(f"UPDATE request SET due = ? WHERE run = ? AND state = {WAITING} AND due IS NULL", (now, run.number))
    db.execute(
        f"UPDATE request SET due = ?, token = coalesce(token, 0) WHERE run = ? AND state = {LEASED}"
        " AND (due IS NULL OR token IS NULL)",
        (now + REPAIRED_LEASE, run.number),
    )
    db.execute(
        f"UPDATE request SET kind = coalesce(kind, ?), reason = coalesce(reason, ?)"
        f" WHERE run = ? AND state = {DEAD} AND (kind IS NULL OR reason IS NULL)",
        (rules.UNREADABLE, rules.LOST_DEATH, run.number),
    )
    if next(count for kind, count, _ in find_faults(run) if kind == "known"):
        db.execute("DELETE FROM seen WHERE run = ?", own)  # the fingerprints of the requests are enough
        db.execute("DELETE FROM seen_slice WHERE run = ?", own)
    ledger = run.ledger()
    counts = dict(db.execute("SELECT state, count(*) FROM request WHERE +run = ? GROUP BY +state", own).fetchall())
    for state, name in enumerate(STATE_NAMES):
        setattr(ledger, name, counts.get(state, 0))
    ledger.pushed = max(ledger.pushed, sum(counts.values()))
    run.save(ledger)
    return describe_losses(_repair_listed(run))


def _repair_listed(run: RunFile) -> list[tuple[str, str]]:
    """Let the inventory and what it lists agree. Returns what was lost. In a finished run, seeding stays finished."""
    lost = {kind: _lost(run, kind) for kind in _LISTED}
    if rules.SEED_ROLE in lost["role"] and run.state() == "finished":
        sql = "INSERT INTO role (run, role, token, until, cursor, finished) VALUES (?, ?, 0, 0, ?, true)"
        run.db.execute(sql, (run.number, rules.SEED_ROLE, b""))
        lost["role"].remove(rules.SEED_ROLE)
    # Nobody knows when a lost host was last contacted.
    hosts = [(name, run.clock()) for name in lost["host"]]
    run.db.executemany("INSERT INTO host (name, ended_at) VALUES (?, ?)", hosts)
    names = [(kind, name) for kind in _LISTED for name in lost[kind]]
    sql = "DELETE FROM inventory WHERE run IN (0, ?) AND kind = ? AND name = ?"
    run.db.executemany(sql, [(run.number, *name) for name in names])
    run.db.execute(f"INSERT OR IGNORE INTO inventory {UNLISTED}")
    return names


def restore_lanes(file: SQLiteFile) -> None:
    """Add the lanes that requests of any run belong to and that are missing. A new lane could get the number of a
    missing one, so this is done before a run is used."""
    db = file.db
    missing = db.execute(
        "SELECT DISTINCT lane FROM ("
        f" SELECT lane FROM request WHERE state = {READY}"
        f" UNION ALL SELECT lane FROM request WHERE state = {DEAD}"
        " UNION ALL SELECT lane FROM request WHERE run IN (SELECT number FROM run) AND due IS NOT NULL)"
        " WHERE lane NOT IN (SELECT number FROM lane)"
    ).fetchall()
    for (lane,) in missing:
        sql = f"SELECT id, run FROM request WHERE lane = ? AND state <> {DONE} LIMIT 1"
        request, run = db.execute(sql, (lane,)).fetchone()
        url = _url(file, request)
        host = host_of(url) if url else rules.UNREADABLE  # its record is damaged, too: an audit reports it
        log.warning("the queue of host %s was missing in %s; its requests are in a new one", host, file.path)
        db.execute("INSERT OR IGNORE INTO lane (run, host) VALUES (?, ?)", (run, host))
        (number,) = db.execute("SELECT number FROM lane WHERE run = ? AND host = ?", (run, host)).fetchone()
        db.execute("UPDATE request SET lane = ? WHERE lane = ? AND run = ?", (number, lane, run))


class SQLiteInspection:
    """See `shoal.ports.Inspection`."""

    def __init__(
        self,
        run: RunFile,
        seen: Seen,
        leases: Leases,
        roles: SQLiteRoles,
        stages: Stages,
        holders: Callable[[Collection[str]], list[LeaseHolder]],
    ) -> None:
        """``holders``: who has leased requests of hosts."""
        self._file = run
        self._seen = seen
        self._lanes = leases.lanes
        self._histories = leases.histories
        self._roles = roles
        self._stages = stages
        self._holders = holders

    async def stats(self) -> Stats:
        return await self._file.read(self._stats)

    def _stats(self) -> Stats:
        ledger = msgspec.structs.asdict(self._file.ledger())
        del ledger["newest"]
        return Stats(**ledger, trimmed=trimmed_items(self._file), seeding=not self._roles.is_finished(rules.SEED_ROLE))

    async def audit(self) -> Stats:
        return await self._file.read(self._audit)

    def _audit(self) -> Stats:
        # With "+" SQLite uses no index: it counts the requests themselves, in the order of the file.
        sql = "SELECT state, count(*) FROM request WHERE +run = ? GROUP BY +state"
        counts = {STATE_NAMES[state]: count for state, count in self._file.db.execute(sql, (self._file.number,))}
        states = {name: counts.get(name, 0) for name in STATE_NAMES}
        stored = self._stats()
        counted = msgspec.structs.replace(stored, **states, incoming=self._stages.count())
        faults = (*compare_counters(stored, counted, sum(states.values())), *find_faults(self._file))
        return msgspec.structs.replace(counted, faults=make_faults(faults))

    async def repair(self) -> list[str]:
        def step() -> list[str]:
            lost = repair(self._file)
            self._file.file.restore()
            return lost

        return await self._file.file.write(step)

    async def waits(self, hosts: Sequence[str]) -> Waits:
        def read() -> Waits:
            holders, file = self._holders(frozenset(hosts)), self._file
            waiting = f"run = ? AND due IS NOT NULL AND state = {WAITING}"
            sql = f"SELECT id, due FROM request WHERE {waiting} ORDER BY due LIMIT 1"
            row = file.db.execute(sql, (file.number,)).fetchone()
            if row is None:
                return Waits(holders=holders)
            sql = "SELECT detail FROM event WHERE request = ? ORDER BY id DESC LIMIT 1"
            event = file.db.execute(sql, row[:1]).fetchone()
            reason = rules.retry_reason(event[0]) if event is not None else ""
            return Waits(holders=holders, retry_in=max(0.0, row[1] - file.clock()), retry_reason=reason)

        return await self._file.read(read)

    async def rewinds(self) -> list[Rewind]:
        return []

    # -- histories

    async def find(self, request: Request, *, exact: bool = False, parent: bytes = b"") -> History | None:
        def step() -> History | None:
            if self._file.file.readonly:
                self._seen.load()
            fingerprint = rules.sought_fingerprint(request, parent)
            number = self._seen.find(fingerprint)
            if number is None and (staged := self._stages.find(fingerprint)):
                return staged
            if number is None and not exact:
                numbers = map(self._histories.search, rules.sought_urls(request))
                number = next((number for number in numbers if number is not None), None)
            return None if number is None else self._histories.of(number)

        return await self._file.read(step)

    async def lease_outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        sql = "SELECT state FROM request WHERE id = ? AND token = ?"
        names: dict[int, LeaseOutcome] = {DONE: "done", LEASED: "leased"}

        def step() -> list[LeaseOutcome]:
            if self._file.file.readonly:
                self._seen.load()
            rows = [
                self._file.db.execute(sql, (self._seen.find(lease.fingerprint), lease.token)).fetchone()
                for lease in leases
            ]
            return ["lost" if row is None else names.get(row[0], "lost") for row in rows]

        return await self._file.read(step)

    # -- dead requests

    async def dead_kinds(self) -> dict[str, int]:
        return await self._file.read(self._histories.dead_kinds)

    async def dead(self) -> AsyncIterator[History]:
        last = 0
        while page := await self._file.read(partial(self._histories.dead_page, last)):
            for _, history in page:
                yield history
            last = page[-1][0]

    async def retry_dead(self, kinds: Sequence[str] | None = None, *, only: Sequence[bytes] | None = None) -> int:
        def step(ledger: Ledger, now: float) -> int:
            numbers = None if only is None else [number for number in map(self._seen.find, only) if number is not None]
            return self._lanes.retry_dead(kinds, numbers, ledger, now)

        return await self._file.change(step)
