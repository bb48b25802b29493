"""The lanes of a run in a SQLite file: the ready requests of each host, and which host is due.

Memory holds the hosts and, for each lane, the number of its ready requests and the keys of the best ones: about 1 KB a
host. The requests themselves are read when they are leased.
"""

from __future__ import annotations

import sqlite3
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import msgspec

from shoal.frontier import rules
from shoal.frontier.host_policy import DEFAULT_HOST
from shoal.frontier.politeness import Host, Key, Lane, LaneTable
from shoal.frontier.rules import DEAD, READY
from shoal.frontier.sqlite.run_file import Ledger, RunFile
from shoal.http import Request
from shoal.urls.normalize import host_of

_POLITENESS = ("delay", "concurrency", "crawl_delay", "learned_delay", "blocked_until", "block_reason", "ended_at")
_COLUMNS = ", ".join(_POLITENESS)
_MAX_AHEAD = 64
"""Keys that a lane keeps in memory, or reads at once. Lanes share `_ALL_AHEAD` if there are many."""
_MIN_AHEAD = 4
_ALL_AHEAD = 1 << 16


class NewRequest(NamedTuple):
    """A request that the run does not have yet, and its msgpack."""

    fingerprint: bytes
    request: Request
    parent: int | None
    payload: bytes


class StoredQueue:
    """The ready requests of one lane. ``number`` identifies the lane in the file.

    ``ahead`` has the keys of the best ones, best first. A ready request that is not there is worse than all that are.
    """

    __slots__ = ("ahead", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ahead: list[Key] = []


StoredLane: TypeAlias = Lane[StoredQueue]


class SharedHosts:
    """The hosts of a file that runs have used in this process."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.by_name: dict[str, Host] = {}
        self._db = db
        self._file_has_others: bool | None = None
        """Whether the file may have hosts that are not in ``by_name``. None: not known yet."""

    def forget(self) -> None:
        """Read all hosts from the file again when they are needed."""
        self.by_name.clear()
        self._file_has_others = None

    def load(self, name: str) -> Host:
        """The host with this name, with its politeness from the file."""
        host = self.by_name.get(name)
        if host is None:
            host = self.by_name[name] = self.read(name)
        return host

    def read(self, name: str) -> Host:
        """The same, but the host is not kept in memory."""
        if name in self.by_name:
            return self.by_name[name]
        host = Host(name)
        if self._file_has_others is None:
            self._file_has_others = bool(self._db.execute("SELECT EXISTS (SELECT 1 FROM host)").fetchone()[0])
        if not self._file_has_others:  # a new file
            return host
        row = self._db.execute(f"SELECT {_COLUMNS} FROM host WHERE name = ?", (name,)).fetchone()
        if row is not None:
            for field, value in zip(_POLITENESS, row, strict=True):
                setattr(host, field, value)
        return host

    def save(self, hosts: Iterable[Host]) -> None:
        self._db.executemany(
            f"INSERT OR REPLACE INTO host (name, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(host.name, *(getattr(host, field) for field in _POLITENESS)) for host in hosts],
        )

    def save_ends(self, hosts: Iterable[Host]) -> None:
        """Save only when the last fetch from each host ended. Each page needs this."""
        self._db.executemany(
            "INSERT INTO host (name, ended_at) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET ended_at = excluded.ended_at",
            [(host.name, host.ended_at) for host in hosts],
        )


class StoredLanes:
    """The lanes of one run and their ready requests. Call all methods within a transaction."""

    def __init__(self, run: RunFile, run_id: str, hosts: SharedHosts) -> None:
        self._db = run.db
        self._file = run
        self._run = run.number
        self._run_id = run_id
        self._hosts = hosts
        self.table: LaneTable[StoredQueue] = LaneTable(hosts.by_name, run.options, run_id)
        self._by_number: dict[int, StoredLane] = {}

    def load(self) -> None:
        """Read the lanes from the file into new hosts. The caller then counts the requests in flight and places the
        lanes."""
        self._hosts.load(DEFAULT_HOST)
        self.table = LaneTable(self._hosts.by_name, self._file.options, self._run_id)
        self._by_number = {}
        sql = (
            "SELECT lane, count(*) FROM request"
            f" WHERE state = {READY} AND lane IN (SELECT number FROM lane WHERE run = ?) GROUP BY lane"
        )
        ready = dict(self._db.execute(sql, (self._run,)).fetchall())
        for number, name in self._db.execute("SELECT number, host FROM lane WHERE run = ?", (self._run,)).fetchall():
            lane = self._add_lane(number, name)
            if number in ready:
                lane.ready = ready[number]
                lane.queue.ahead = self._read_ahead(lane, None, 1)
                lane.best = lane.queue.ahead[0]

    def place(self, now: float) -> None:
        for lane in self._by_number.values():
            self.table.place(lane, now)

    def __getitem__(self, number: int) -> StoredLane:
        return self._by_number[number]

    def lane(self, name: str) -> StoredLane:
        """The lane of a host. It is added if the run has none."""
        lane = self.table.by_name.get(name)
        if lane is None:
            number = self._db.execute("INSERT INTO lane (run, host) VALUES (?, ?)", (self._run, name)).lastrowid
            assert number is not None
            lane = self._add_lane(number, name)
        return lane

    def _add_lane(self, number: int, name: str) -> StoredLane:
        self._hosts.load(name)
        lane = self._by_number[number] = self.table.add(name, StoredQueue(number))
        return lane

    def _read_ahead(self, lane: StoredLane, after: Key | None, limit: int) -> list[Key]:
        """The keys of the best ready requests of a lane that are worse than ``after``."""
        sql = (
            f"SELECT rank, id FROM request WHERE lane = ? AND state = {READY} AND (rank, id) > (?, ?)"
            " ORDER BY rank, id LIMIT ?"
        )
        rank, number = (-inf, 0) if after is None else after
        return self._db.execute(sql, (lane.queue.number, rank, number, limit)).fetchall()

    def add(self, new: Sequence[NewRequest], now: float, refused: Collection[bytes] = ()) -> dict[bytes, int]:
        """Store new requests after all others of their priority; those that are refused are dead. Returns their
        numbers in the file."""
        (number,) = self._db.execute("SELECT coalesce(max(id), 0) FROM request").fetchone()
        rows, dead = [], []
        numbers = {}
        by_name, run = self.table.by_name, self._run
        for fingerprint, request, parent, payload in new:
            number += 1
            rank = 0.0 - request.priority
            host = host_of(request.url)
            lane = by_name.get(host) or self.lane(host)
            row = (number, run, lane.queue.number, rank, now, parent, fingerprint, payload)
            numbers[fingerprint] = number
            if refused and fingerprint in refused:
                dead.append((*row, DEAD, rules.FULL_KIND, rules.FULL_REASON % self._file.options.link_limit))
                continue
            rows.append(row)
            self.add_ready(lane, (rank, number), now)
        self._db.executemany(
            "INSERT INTO request (id, run, lane, rank, at, parent, fingerprint, payload)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        if dead:
            self._db.executemany(
                "INSERT INTO request (id, run, lane, rank, at, parent, fingerprint, payload, state, kind, reason)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                dead,
            )
        return numbers

    def add_ready(self, lane: StoredLane, key: Key, now: float) -> None:
        """Count a request as ready. The caller changes its row."""
        ahead = lane.queue.ahead
        if len(ahead) == lane.ready or key < ahead[-1]:
            insort(ahead, key)
            if len(ahead) > _MAX_AHEAD:
                ahead.pop()
        lane.ready += 1
        if lane.best is None or key < lane.best:
            lane.best = key
            self.table.place(lane, now)

    def choose(self, limit: int, now: float) -> list[tuple[StoredLane, Key]]:
        """Take the best requests of hosts that are due, in order. The caller changes their rows."""
        chosen: list[tuple[StoredLane, Key]] = []
        self.table.reopen(now)
        while len(chosen) < limit and (lane := self.table.take_best(now)) is not None:
            key = lane.queue.ahead.pop(0)
            chosen.append((lane, key))
            lane.ready -= 1
            if lane.ready and not lane.queue.ahead:
                # In the file, the requests that were chosen are still ready.
                most = max(_MIN_AHEAD, min(_MAX_AHEAD, _ALL_AHEAD // (1 + len(self._by_number))))
                lane.queue.ahead = self._read_ahead(lane, key, most)
            lane.best = lane.queue.ahead[0] if lane.ready else None
            lane.host.in_flight += 1
            self.table.place(lane, now)
        return chosen

    def retry_dead(self, kinds: Sequence[str] | None, only: Sequence[int] | None, ledger: Ledger, now: float) -> int:
        """Make dead requests of these kinds ready. None: of all kinds but `KINDS_NOT_RETRIED`. Refused links come last,
        as many as there is room for. ``only``: limit this to the requests with these numbers."""
        dead = f"run = ? AND state = {DEAD} AND kind"
        if only is not None:
            dead = f"id IN ({', '.join(map(str, only))}) AND {dead}"
        others = rules.KINDS_NOT_RETRIED | {rules.FULL_KIND} if kinds is None else set(kinds) - {rules.FULL_KIND}
        listed = msgspec.json.encode(sorted(others)).decode()
        chosen = f"{dead} {'NOT ' if kinds is None else ''}IN (SELECT value FROM json_each(?))"
        count = self._revive(chosen, (self._run, listed), rules.RETRIED_DETAIL, ledger, now)
        if rules.is_retried(rules.FULL_KIND, kinds):
            room = rules.room_for_links(self._file.options.link_limit, ledger.ready + ledger.waiting)
            chosen = f"id IN (SELECT id FROM request WHERE {dead} = ? ORDER BY rank, id LIMIT ?)"
            which = (self._run, rules.FULL_KIND, -1 if room is None else room)
            count += self._revive(chosen, which, rules.ADMITTED_DETAIL, ledger, now)
        return count

    def _revive(self, chosen: str, which: tuple[object, ...], detail: str, ledger: Ledger, now: float) -> int:
        """Make the chosen dead requests ready: a condition of SQL and its parameters."""
        for number, lane, rank in self._db.execute(f"SELECT id, lane, rank FROM request WHERE {chosen}", which):
            self.add_ready(self._by_number[lane], (rank, number), now)
        self._db.execute(
            f"INSERT INTO event (request, at, what, detail, worker) SELECT id, ?, ?, ?, '' FROM request WHERE {chosen}",
            (now, rules.RETRIED_EVENT, detail, *which),
        )
        count = self._db.execute(
            f"UPDATE request SET state = {READY}, attempts = 0, kind = NULL, reason = NULL, at = ? WHERE {chosen}",
            (now, *which),
        ).rowcount
        ledger.ready += count
        ledger.dead -= count
        return count
