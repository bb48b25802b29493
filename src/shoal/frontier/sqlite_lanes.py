"""The ready requests of a run in a file: which is the best of each host, and which host may be fetched from.

Kept in memory is only the number of each lane's requests and its best one; the rest is read when it is leased.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from shoal.frontier.hosts import Host, Key, Lane, LaneTable
from shoal.ports import FrontierOptions, HostState

_POLITENESS = ("delay", "concurrency", "crawl_delay", "learned_delay", "blocked_until", "block_reason", "ended_at")
_COLUMNS = ", ".join(_POLITENESS)


class SharedHosts:
    """The hosts of a file that its runs have met in this process."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.by_name: dict[str, Host] = {}
        self._db = db

    def load(self, name: str) -> None:
        """Have this host, with the politeness that the file knows of."""
        if name in self.by_name:
            return
        host = self.by_name[name] = Host(name)
        row = self._db.execute(f"SELECT {_COLUMNS} FROM host WHERE name = ?", (name,)).fetchone()
        if row is not None:
            for field, value in zip(_POLITENESS, row, strict=True):
                setattr(host, field, value)

    def save(self, hosts: Iterable[Host]) -> None:
        self._db.executemany(
            f"INSERT OR REPLACE INTO host (name, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(host.name, *(getattr(host, field) for field in _POLITENESS)) for host in hosts],
        )


class StoredLanes:
    """The lanes of one run. ``lane.queue`` is the number of a lane in the file."""

    def __init__(self, db: sqlite3.Connection, run: int, hosts: SharedHosts, options: FrontierOptions) -> None:
        self._db = db
        self._run = run
        self._hosts = hosts
        self._options = options
        self._table: LaneTable[int] = LaneTable(hosts.by_name, options)
        self._by_number: dict[int, Lane[int]] = {}

    def load(self) -> None:
        """Make it anew from the file. The hosts have none of its lanes yet. Then the caller counts what is in flight,
        and places the lanes."""
        self._table = LaneTable(self._hosts.by_name, self._options)
        self._by_number = {}
        for number, name in self._db.execute("SELECT number, host FROM lane WHERE run = ?", (self._run,)).fetchall():
            lane = self._add(number, name)
            sql = "SELECT count(*) FROM request WHERE lane = ? AND state = 0"
            (lane.ready,) = self._db.execute(sql, (number,)).fetchone()
            lane.best = next(iter(self._keys(lane, 1)), None)

    def place(self, now: float) -> None:
        for lane in self._by_number.values():
            self._table.place(lane, now)

    def __getitem__(self, number: int) -> Lane[int]:
        return self._by_number[number]

    def named(self, name: str) -> Lane[int]:
        """The lane of this host; a new one if there is none."""
        lane = self._table.by_name.get(name)
        if lane is None:
            number = self._db.execute("INSERT INTO lane (run, host) VALUES (?, ?)", (self._run, name)).lastrowid
            assert number is not None
            lane = self._add(number, name)
        return lane

    def _add(self, number: int, name: str) -> Lane[int]:
        self._hosts.load(name)
        lane = self._by_number[number] = self._table.add(name, number)
        return lane

    def _keys(self, lane: Lane[int], limit: int) -> list[Key]:
        sql = "SELECT rank, id FROM request WHERE lane = ? AND state = 0 ORDER BY rank, id LIMIT ?"
        return self._db.execute(sql, (lane.queue, limit)).fetchall()

    def queue(self, lane: Lane[int], key: Key, now: float) -> None:
        """A request is ready, new or once more."""
        lane.ready += 1
        if lane.best is None or key < lane.best:
            lane.best = key
            self._table.place(lane, now)

    def choose(self, limit: int, now: float) -> list[tuple[Lane[int], Key]]:
        """Take the best requests of hosts that are due, in order. Their rows are for the caller to change."""
        chosen: list[tuple[Lane[int], Key]] = []
        ahead: dict[int, list[Key]] = {}
        while len(chosen) < limit and (lane := self._table.take_best(now)) is not None:
            keys = ahead.get(lane.queue)
            if keys is None:
                most = min(limit - len(chosen), lane.limit - lane.host.in_flight)
                keys = ahead[lane.queue] = self._keys(lane, most + 1)[::-1]
            chosen.append((lane, keys.pop()))
            lane.best = keys[-1] if keys else None
            lane.ready -= 1
            lane.host.in_flight += 1
            self._table.place(lane, now)
        return chosen

    def next_due(self) -> float | None:
        """When the next waiting host becomes due."""
        return self._table.next_due()

    def states(self, now: float, limit: int) -> list[HostState]:
        return self._table.states(now, limit)
