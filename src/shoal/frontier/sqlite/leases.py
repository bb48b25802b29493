"""Histories and leases of a run in a SQLite file. Leases are in the rows of their requests, with a copy in memory.

Call everything within a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from shoal.errors import DECODING_ERRORS
from shoal.frontier import rules
from shoal.frontier.politeness import Host, Key
from shoal.frontier.rules import DEAD, DONE, LEASED, READY, STATE_NAMES, WAITING
from shoal.frontier.sqlite.file import StoredRow
from shoal.frontier.sqlite.items import slot_columns
from shoal.frontier.sqlite.lanes import SharedHosts, StoredLane, StoredLanes
from shoal.frontier.sqlite.run_file import Ledger, RunFile, Seen
from shoal.http import Request
from shoal.ports import Event, History, Holder, Lease

_HISTORY = f"""
    SELECT id, state, attempts - (state = {LEASED} AND NOT begun), status, items, at, parent, kind, reason, payload,
        fingerprint,
        CASE WHEN state IN ({", ".join(map(str, sorted(rules.CLAIMED)))}) THEN slot END
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
            events=(*(rules.read_event(*event) for event in events), Event(at, STATE_NAMES[state], worker=slot or "")),
        )  # fmt: skip

    def dead_page(self, after: int) -> list[tuple[int, History]]:
        """The next dead requests after this number, each with its number."""
        sql = f"{_HISTORY} WHERE run = ? AND state = {DEAD} AND id > ? ORDER BY id LIMIT ?"
        return [(row[0], self._history(row)) for row in self._db.execute(sql, (self._run, after, _PAGE)).fetchall()]

    def dead_kinds(self) -> dict[str, int]:
        sql = f"SELECT kind, count(*) FROM request WHERE run = ? AND state = {DEAD} GROUP BY kind"
        return dict(self._db.execute(sql, (self._run,)).fetchall())


_decode = msgspec.msgpack.Decoder(Request).decode


class HeldLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that is held."""

    number: int
    fingerprint: bytes
    token: int
    attempts: int
    items: int
    lane: StoredLane
    rank: float
    holder: Holder | None
    begun: bool
    """False while the last of its attempts does not count yet."""
    origin: tuple[int, bytes] | None = None
    """The old token and the nonce, if it was reissued."""


class LeaseCall(msgspec.Struct, frozen=True):
    """The arguments of a call to ``lease``. ``deadline`` is on this process's clock."""

    limit: int
    ttl: float
    deadline: float
    holder: Holder | None
    begun: bool
    nonce: bytes


class Leases:
    """Grants, extends and ends the leases of one run. Call all methods within a transaction."""

    def __init__(self, run: RunFile, lanes: StoredLanes, hosts: SharedHosts) -> None:
        self._file = run
        self._db = run.db
        self._run = run.number
        self.lanes = lanes
        self._hosts = hosts
        self.histories = Histories(run)
        self._held: dict[bytes, HeldLease] = {}

    def load(self) -> None:
        """Read the leases from the file, and count them as in flight. The lanes are loaded already."""
        self._held = {}
        rows = self._db.execute(
            "SELECT id, fingerprint, token, attempts, items, lane, rank, slot, epoch, begun, origin, nonce FROM request"
            f" WHERE run = ? AND due IS NOT NULL AND state = {LEASED}",
            (self._run,),
        )
        for number, name, token, attempts, items, lane_number, rank, slot, epoch, begun, before, nonce in rows:
            lane = self.lanes[lane_number]
            lane.host.in_flight += 1
            holder = None if slot is None else Holder(slot, epoch)
            origin = None if nonce is None else (before, nonce)
            self._held[name] = HeldLease(number, name, token, attempts, items, lane, rank, holder, bool(begun), origin)

    def of_dead_holders(self, keeps: Callable[[Holder | None], bool]) -> list[HeldLease]:
        """The leases whose holders are gone. ``keeps``: whether a holder is still alive."""
        return [held for held in self._held.values() if not keeps(held.holder)]

    def holders(self) -> list[Holder | None]:
        """The holder of each lease."""
        return [held.holder for held in list(self._held.values())]

    def held_at(self, hosts: Collection[str]) -> list[tuple[str, str]]:
        """See `shoal.frontier.politeness.OpenRun`."""
        return [
            (held.lane.host.name, "" if held.holder is None else held.holder.slot)
            for held in self._held.values()
            if held.lane.host.name in hosts
        ]

    def fenced(self, slot: str, epoch: int) -> list[HeldLease]:
        """The leases that the slot holds under earlier epochs."""
        return [held for held in self._held.values() if rules.is_fenced(held.holder, slot, epoch)]

    def has_completed(self, lease: Lease, seen: Seen) -> bool:
        """Whether the request is done under the token of this lease: its completion is repeated."""
        number = seen.find(lease.fingerprint)
        sql = f"SELECT state = {DONE} AND token = ? FROM request WHERE id = ?"
        row = None if number is None else self._db.execute(sql, (lease.token, number)).fetchone()
        return row is not None and bool(row[0])

    # -- granting

    def granted_under(self, call: LeaseCall) -> list[Lease]:
        """The held leases that were granted to this call, by their tokens."""
        base = rules.token_base(call.nonce)
        held = [lease for lease in self._held.values() if base < lease.token <= base + rules.MAX_LEASES]
        sql = "SELECT payload FROM request WHERE id = ?"
        return [
            Lease(
                _decode(self._db.execute(sql, (lease.number,)).fetchone()[0]), lease.fingerprint, lease.token,
                lease.attempts, lease.lane.host.name, call.deadline, lease.lane.host.learned_delay or 0.0,
            )
            for lease in sorted(held, key=lambda lease: lease.token)
        ]  # fmt: skip

    def grant(
        self, chosen: Sequence[tuple[StoredLane, Key]], call: LeaseCall, ledger: Ledger, now: float
    ) -> list[Lease]:
        """Lease the chosen requests. StoreError if the file is damaged."""
        sql = (
            "SELECT id, fingerprint, attempts, items, payload FROM request WHERE id IN (SELECT value FROM json_each(?))"
        )
        numbers = msgspec.json.encode([number for _, (_, number) in chosen]).decode()
        rows = {row[0]: row for row in self._db.execute(sql, (numbers,))}
        holder, begun, until = call.holder, call.begun, now + call.ttl
        leases, changes, slot, token = [], [], slot_columns(holder), rules.token_base(call.nonce)
        for lane, (rank, number) in chosen:
            try:
                _, fingerprint, attempts, items, payload = rows[number]
                request = _decode(payload)
            except (KeyError, *DECODING_ERRORS) as exc:
                raise self._file.file.damaged(f"request {number} can't be read: {exc!r}") from exc
            token, attempt = token + 1, attempts + 1
            self._held[fingerprint] = HeldLease(number, fingerprint, token, attempt, items, lane, rank, holder, begun)
            learned = lane.host.learned_delay or 0.0
            leases.append(Lease(request, fingerprint, token, attempt, lane.host.name, call.deadline, learned))
            changes.append((token, *slot, begun, attempt, until, now, number))
        self._db.executemany(
            f"UPDATE request SET state = {LEASED}, token = ?, slot = ?, epoch = ?, begun = ?, origin = NULL,"
            " nonce = NULL, attempts = ?, due = ?, at = ? WHERE id = ?",
            changes,
        )
        ledger.ready -= len(leases)
        ledger.leased += len(leases)
        return leases

    # -- extending

    def current(self, lease: Lease) -> HeldLease | None:
        """The held lease, if the token of ``lease`` is its current one."""
        held = self._held.get(lease.fingerprint)
        return held if held is not None and held.token == lease.token else None

    def renew(self, leases: Sequence[Lease], until: float, deadline: float) -> list[Lease | None]:
        current = list(map(self.current, leases))
        self._db.executemany(
            "UPDATE request SET due = ? WHERE id = ?", [(until, held.number) for held in current if held]
        )
        return [
            msgspec.structs.replace(lease, deadline=deadline) if held else None
            for lease, held in zip(leases, current, strict=True)
        ]

    def reissue(self, leases: Sequence[Lease], until: float, deadline: float, nonce: bytes) -> list[Lease | None]:
        reissued: list[Lease | None] = []
        changes: dict[bytes, tuple[int, int, bytes, float, int]] = {}
        for lease in leases:
            held, origin = self._held.get(lease.fingerprint), (lease.token, nonce)
            if held is None or held.fingerprint in changes or (held.token != lease.token and held.origin != origin):
                reissued.append(None)
                continue
            if held.token == lease.token:
                token = rules.reissued_token(nonce, lease.token)
                held = msgspec.structs.replace(held, token=token, begun=True, origin=origin)
                self._held[held.fingerprint] = held
            changes[held.fingerprint] = (held.token, *origin, until, held.number)
            reissued.append(msgspec.structs.replace(lease, token=held.token, deadline=deadline))
        self._db.executemany(
            "UPDATE request SET token = ?, begun = 1, origin = ?, nonce = ?, due = ? WHERE id = ?", changes.values()
        )
        return reissued

    # -- ending

    def select_ending(self, leases: Iterable[Lease]) -> list[HeldLease | None]:
        """The leases that a batch ends; None for a stale one, and for the second of two equal ones."""
        ending: set[int] = set()
        selected: list[HeldLease | None] = []
        for held in map(self.current, leases):
            selected.append(held if held and held.number not in ending else None)
            if held:
                ending.add(held.number)
        return selected

    def end(self, ended: Sequence[tuple[HeldLease, bool]], ledger: Ledger, now: float) -> None:
        """Drop leases, each with whether its host was contacted. The caller has changed their rows."""
        contacted: dict[str, Host] = {}
        for held, was_contacted in ended:
            del self._held[held.fingerprint]
            host = held.lane.host
            host.end_lease(now, contacted=was_contacted)
            if was_contacted:
                contacted[host.name] = host
        self.lanes.table.called = now
        self._hosts.save_ends(contacted.values())
        ledger.leased -= len(ended)

    def release(self, unused: Sequence[HeldLease], ledger: Ledger, now: float, *, contacted: bool) -> None:
        """End leases whose attempt does not count."""
        self._db.executemany(
            f"UPDATE request SET state = {READY}, due = NULL, token = NULL, attempts = ?, at = ? WHERE id = ?",
            [(held.attempts - 1, now, held.number) for held in unused],
        )
        for held in unused:
            self.lanes.add_ready(held.lane, (held.rank, held.number), now)
        ledger.ready += len(unused)
        self.end([(held, contacted) for held in unused], ledger, now)

    def lose(self, lost: Sequence[HeldLease], ledger: Ledger, now: float) -> None:
        """End leases whose worker is lost."""
        self.release([held for held in lost if not held.begun], ledger, now, contacted=False)
        lost = [held for held in lost if held.begun]
        ready, dead = [], []
        for held in lost:
            reason = rules.lost_reason(held.attempts)
            self.histories.add_event(held.number, now, rules.LOST_EVENT, reason, held.holder)
            if held.attempts >= self._file.options.max_attempts:
                dead.append((rules.LOST_KIND, reason, now, held.number))
            else:
                ready.append((now, held.number))
                self.lanes.add_ready(held.lane, (held.rank, held.number), now)
        self._db.executemany(
            f"UPDATE request SET state = {READY}, due = NULL, token = NULL, at = ? WHERE id = ?", ready
        )
        self._db.executemany(
            f"UPDATE request SET state = {DEAD}, due = NULL, token = NULL, kind = ?, reason = ?, at = ? WHERE id = ?",
            dead,
        )
        ledger.ready += len(ready)
        ledger.dead += len(dead)
        self.end([(held, True) for held in lost], ledger, now)

    # -- time

    def expire(self, now: float, ledger: Ledger | None = None) -> float | None:
        """End leases that have run out, and make requests ready that have waited long enough.

        Returns when the next one is due. Without a ledger of the caller, it reads and saves its own.
        """
        moment = self._next_moment()
        if moment is None or moment > now:
            return moment
        own = ledger or self._file.ledger()
        lost = []
        sql = "SELECT state, id, lane, rank, fingerprint FROM request WHERE run = ? AND due <= ?"
        for state, number, lane, rank, fingerprint in self._db.execute(sql, (self._run, now)):
            if state == LEASED:
                lost.append(self._held[fingerprint])
            else:
                own.waiting -= 1
                own.ready += 1
                self.lanes.add_ready(self.lanes[lane], (rank, number), now)
        self._db.execute(
            f"UPDATE request SET state = {READY}, due = NULL WHERE run = ? AND due <= ? AND state = {WAITING}",
            (self._run, now),
        )
        self.lose(lost, own, now)
        if ledger is None:
            self._file.save(own)
        return self._next_moment()

    def _next_moment(self) -> float | None:
        """When the next lease expires or the next waiting request is ready."""
        sql = "SELECT min(due) FROM request WHERE run = ? AND due IS NOT NULL"
        moment: float | None = self._db.execute(sql, (self._run,)).fetchone()[0]
        return moment
