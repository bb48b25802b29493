"""Runs in a SQLite file: needs no server, survives ``kill -9``, and memory does not grow with the URLs.

`shoal.frontier.sqlite.file` says what a kill and a power cut can lose.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import msgspec

from shoal.frontier.composed import ComposedFrontier, FencedFrontier, LocalSessions, LocalWorkers
from shoal.frontier.host_policy import DEFAULT_HOST
from shoal.frontier.politeness import OpenRuns, apply_update
from shoal.frontier.rules import HALTED, RESTING, moved, no_run, read_run, readable_runs, run_exists
from shoal.frontier.sqlite.file import SQLiteFile, StoredRow
from shoal.frontier.sqlite.inspection import SQLiteInspection, restore_lanes
from shoal.frontier.sqlite.items import SQLiteItemLog, SQLiteRoles, item_ids
from shoal.frontier.sqlite.lanes import SharedHosts, StoredLanes
from shoal.frontier.sqlite.leases import Leases
from shoal.frontier.sqlite.queue import SQLiteQueue
from shoal.frontier.sqlite.run_file import RunFile, Seen
from shoal.ports import (
    Document,
    Frontier,
    FrontierOptions,
    Holder,
    HostState,
    HostUpdate,
    Room,
    Run,
    RunState,
)
from shoal.ports.documents import check_document
from shoal.system.clock import steady_time


class SQLiteHosts:
    """The hosts as one run sees them, and the facts that all runs share. See `shoal.ports.Hosts`."""

    def __init__(self, run: RunFile, hosts: SharedHosts, lanes: StoredLanes, reload: Callable[[], None]) -> None:
        """``reload`` reads the lanes and leases of the run from the file."""
        self._file = run
        self._hosts = hosts
        self._lanes = lanes
        self._reload = reload

    async def update_host(self, host: str, update: HostUpdate) -> None:
        def step() -> None:
            changed = self._hosts.load(host) if host == DEFAULT_HOST else self._lanes.lane(host).host
            apply_update(self._hosts.by_name, changed, update, self._file.clock())
            self._hosts.save([changed])

        await self._file.file.write(step)

    async def host_states(self, limit: int = 100) -> list[HostState]:
        """In a file that is opened readonly, only requests of this run count as in flight."""

        def step() -> list[HostState]:
            self._refresh()
            return self._lanes.table.states(self._file.clock(), limit)

        return await self._file.read(step)

    async def host_state(self, host: str) -> HostState:
        def step() -> HostState:
            self._refresh()
            return self._lanes.table.state(self._hosts.read(host), self._file.clock())

        return await self._file.read(step)

    def _refresh(self) -> None:
        """Reload the hosts of a file that is opened readonly, because another process writes to it."""
        if self._file.file.readonly:
            self._hosts.forget()
            self._reload()

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        def step() -> None:
            now = self._file.clock()
            self._file.db.execute("DELETE FROM note WHERE until <= ?", (now,))
            self._file.db.execute("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", (key, value, now + ttl))

        await self._file.file.write(step)

    async def recall(self, key: str) -> bytes | None:
        def step() -> bytes | None:
            sql = "SELECT value FROM note WHERE key = ? AND until > ?"
            row = self._file.db.execute(sql, (key, self._file.clock())).fetchone()
            return row[0] if row else None

        return await self._file.read(step)


class SQLiteFrontier(ComposedFrontier):
    """See `shoal.ports.Frontier`. Each call is one transaction.

    One process works on a file at a time. So the frontier keeps in memory what it needs most often: the best requests
    of each lane, the politeness of each host, the held leases, the newest fingerprints. It reads all of that from the
    file when the run is opened, and again after a transaction was rolled back.
    """

    def __init__(self, store: SQLiteStore, file: SQLiteFile, run_id: str, number: int) -> None:
        hosts, runs, sessions = store.hosts, store.frontiers, store.sessions
        self._run = run = RunFile(file, number, store.clock)
        self._seen = seen = Seen(file.db, number)
        self._lanes = lanes = StoredLanes(run, run_id, hosts)
        self._roles = roles = SQLiteRoles(run)
        items = SQLiteItemLog(run, roles)
        self._leases = leases = Leases(run, lanes, hosts)
        self._queue = queue = SQLiteQueue(
            run, seen, leases, items, roles, lambda now: runs.expire_others(self, now), store.put
        )
        self.expire_leases = queue.expire_leases
        self.held_at = leases.held_at
        holders = partial(sessions.holders, runs)
        inspection = SQLiteInspection(run, seen, leases, roles, queue.stages, holders)
        workers = LocalWorkers(run_id, sessions, queue.fence, leases.holders)
        sqlite_hosts = SQLiteHosts(run, hosts, lanes, self._load_queue)
        super().__init__(queue, roles, workers, items, sqlite_hosts, inspection)

    def enter(self, state: RunState) -> None:
        """Stop or resume leasing: the run is paused or cancelled, or runs again."""
        self._queue.halted = state in HALTED
        self._lanes.table.is_resting = state in RESTING

    # -- memory and file; the store calls these within a transaction

    def load(self) -> None:
        """Read from the file everything that the frontier keeps in memory, with new hosts. When all runs are loaded,
        the store calls ``place``."""
        self._load_queue()
        self.enter(self._run.state())
        self._seen.load()

    def _load_queue(self) -> None:
        self._run.load()
        self._lanes.load()
        self._leases.load()

    @property
    def options(self) -> FrontierOptions:
        return self._run.options

    def set_options(self, options: FrontierOptions) -> None:
        """Change the options of the run."""
        self._run.save_options(options)
        self._lanes.table.set_options(options, self._run.clock())

    def place(self) -> None:
        """Make the lanes available for leasing."""
        self._lanes.place(self._run.clock())

    def end_old_leases(self, keeps: Callable[[Holder | None], bool]) -> None:
        """End the leases and roles of processes that are gone. Each lease that had begun was an attempt."""
        ledger = self._run.ledger()
        self._leases.lose(self._leases.of_dead_holders(keeps), ledger, self._run.clock())
        self._run.save(ledger)
        self._roles.free(keeps)
        self.place()


_LAST = "\U0010ffff"  # sorts after every printable character
_RUN = "SELECT run_id, spider, state, created_at, settings, project, ended_at FROM run"
_BELONGS = "(?1 IS NULL OR spider = ?1) AND (?2 IS NULL OR project = ?2)"
_RUNS = (
    f"{_RUN} WHERE {_BELONGS} AND (?3 IS NULL OR state IN (SELECT value FROM json_each(?3)))"
    " ORDER BY number DESC LIMIT ?4"
)
_TABLES_OF_A_RUN = ("lane", "request", "seen", "seen_slice", "stage", "role", "fence", "inventory")
_DELETE_RUN = (
    "DELETE FROM event WHERE request IN (SELECT id FROM request WHERE run = ?)",
    *(f"DELETE FROM {table} WHERE run = ?" for table in _TABLES_OF_A_RUN),
    "DELETE FROM run WHERE number = ?",
)
_encode = msgspec.msgpack.Encoder().encode


Keeps: TypeAlias = "Callable[[SQLiteStore, str, Holder | None], bool]"
"""See `SQLiteStore.open`."""


class SQLiteStore:
    """Runs, their frontiers and documents in a file, with the politeness that the runs share. See `shoal.ports.Store`.

    One process works on a file at a time.
    """

    shared: ClassVar[bool] = False

    def __init__(self, file: SQLiteFile, clock: Callable[[], float], keeps: Keeps) -> None:
        self._file = file
        self.clock = clock
        self._keeps = keeps
        self.hosts = SharedHosts(file.db)
        self.frontiers: OpenRuns[SQLiteFrontier] = OpenRuns()
        self.sessions: LocalSessions = LocalSessions(clock)
        self._opening = asyncio.Lock()
        self._largest = 0
        file.restore = self._restore

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        clock: Callable[[], float] | None = None,
        keeps: Keeps = lambda store, run_id, holder: False,
    ) -> SQLiteStore:
        """Open a file, or create it. StoreBusyError while another process works on it, unless ``readonly``; StoreError
        if it cannot be used.

        ``keeps``: whether a holder of leases and roles in the file is still alive. It is called with the store, the run
        and the holder, in the thread of the file. By default all holders are gone."""
        return await cls.on(SQLiteFile(path, readonly=readonly), clock or steady_time(), keeps)

    @classmethod
    async def on(cls, file: SQLiteFile, clock: Callable[[], float], keeps: Keeps) -> SQLiteStore:
        """Open a file that is not open yet. See `open`."""
        await file.open()
        store = cls(file, clock, keeps)
        try:
            if not file.readonly:
                await file.write(store._correct_times)
                await file.write(partial(restore_lanes, file))
        except BaseException:
            await store.close()
            raise
        return store

    async def room(self) -> Room | None:
        """That of the disk. Its size is what the file has, and what the disk had left for it at most: other programs
        may need some of it for a while."""
        disk = os.statvfs(os.path.dirname(self._file.path) or ".")
        pages, unused, size = await self._file.read(self._count_pages)
        free = unused * size + disk.f_bavail * disk.f_frsize
        self._largest = max(self._largest, (pages - unused) * size + free)
        return Room(self._largest - free, self._largest)

    def _count_pages(self) -> tuple[int, int, int]:
        count, unused, size = (
            self._file.db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return count, unused, size

    def _correct_times(self) -> None:
        """Set the times in the file back if the clock was set back since it was last used. Otherwise they lie in the
        future, and hosts wait longer than their delay."""
        db = self._file.db
        (last,) = db.execute(
            "SELECT max((SELECT coalesce(max(ended_at), 0) FROM host),"
            " (SELECT coalesce(max(at), 0) FROM request WHERE due IS NOT NULL))"
        ).fetchone()
        ahead = last - self.clock()
        if ahead > 0:
            db.execute("UPDATE host SET ended_at = ended_at - ?1, blocked_until = max(0, blocked_until - ?1)", (ahead,))
            db.execute("UPDATE request SET due = due - ?1, at = at - ?1 WHERE due IS NOT NULL", (ahead,))
            db.execute("UPDATE note SET until = until - ?1", (ahead,))

    def _restore(self) -> None:
        """Read everything that is in memory from the file again."""
        frontiers = list(self.frontiers.values())
        self.hosts.forget()
        for frontier in frontiers:
            frontier.load()
        for frontier in frontiers:
            frontier.place()

    async def create_run(self, run: Run) -> Run:
        def create() -> Run:
            if not self._add(run):
                raise run_exists(run.run_id)
            return run

        return await self._file.write(create)

    def _add(self, run: Run) -> bool:
        added = self._file.db.execute(
            "INSERT OR IGNORE INTO run (run_id, spider, state, created_at, settings, project, ended_at, trimmed)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (run.run_id, run.spider, run.state, run.created_at, _encode(run.settings), run.project, run.ended_at),
        )
        return added.rowcount > 0

    async def transition(self, run_id: str, state: RunState, *, among: Sequence[RunState] | None = None) -> Run:
        def change() -> Run:
            run = self._run(run_id)
            if run is None:
                raise no_run(run_id)
            changed = moved(run, state, among)
            self._file.db.execute(
                "UPDATE run SET state = ?, ended_at = ? WHERE run_id = ?", (changed.state, changed.ended_at, run_id)
            )
            return changed

        changed = await self._file.write(change)
        if run_id in self.frontiers:
            self.frontiers[run_id].enter(state)
        return changed

    async def delete_run(self, run_id: str) -> None:
        def delete() -> None:
            row = self._file.db.execute("SELECT number FROM run WHERE run_id = ?", (run_id,)).fetchone()
            if row is None:
                raise no_run(run_id)
            for statement in _DELETE_RUN:
                self._file.db.execute(statement, row)
            self._file.db.execute("DELETE FROM item WHERE id BETWEEN ? AND ?", item_ids(*row))
            self._delete_documents(run_id)
            self.frontiers.pop(run_id, None)
            self.sessions.forget_run(run_id)
            self._restore()

        await self._file.write(delete)

    async def get_run(self, run_id: str) -> Run | None:
        return await self._file.read(partial(self._run, run_id))

    async def run_state(self, run_id: str) -> RunState | None:
        def read() -> RunState | None:
            row = self._file.db.execute("SELECT state FROM run WHERE run_id = ?", (run_id,)).fetchone()
            return row[0] if row else None

        return await self._file.read(read)

    async def run_states(self, spider: str, project: str | None = None) -> dict[str, RunState]:
        query = f"SELECT run_id, state FROM run WHERE {_BELONGS} ORDER BY number"
        return await self._file.read(lambda: dict(self._file.db.execute(query, (spider, project)).fetchall()))

    def _run(self, run_id: str) -> Run | None:
        row = self._file.db.execute(f"{_RUN} WHERE run_id = ?", (run_id,)).fetchone()
        return _run_of(row) if row else None

    async def list_runs(
        self,
        spider: str | None = None,
        project: str | None = None,
        *,
        states: Sequence[RunState] | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        def runs() -> list[Run]:
            listed = None if states is None else json.dumps(states)
            rows = self._file.db.execute(_RUNS, (spider, project, listed, -1 if limit is None else limit))
            return readable_runs(rows, _run_of)

        return await self._file.read(runs)

    async def get_document(self, key: str) -> Document | None:
        documents = await self._documents("key = ?", (key,), 1)
        return documents[0] if documents else None

    async def list_documents(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Document]:
        return await self._documents("key >= ? AND key < ? AND key > ?", (prefix, prefix + _LAST, after), limit)

    async def _documents(self, condition: str, values: tuple[str, ...], limit: int) -> list[Document]:
        query = f"SELECT key, value, version FROM document WHERE {condition} ORDER BY key LIMIT ?"

        def read() -> list[Document]:
            return [Document(*row) for row in self._file.db.execute(query, (*values, limit))]

        return await self._file.read(read)

    async def put_document(
        self, key: str, value: bytes | None, *, replaces: bytes, version: bytes, run: Run | None = None
    ) -> bool:
        return await self._file.write(lambda: self.put(key, value, replaces, version, run))

    def put(self, key: str, value: bytes | None, replaces: bytes, version: bytes, run: Run | None = None) -> bool:
        """See ``put_document``, within a transaction."""
        check_document(key, value, version)
        db = self._file.db
        row = db.execute("SELECT version FROM document WHERE key = ?", (key,)).fetchone()
        stored = row[0] if row else b""
        if stored == version or (value is None and not stored):
            return True
        if stored != replaces:
            return False
        if value is None:
            db.execute("DELETE FROM document WHERE key = ?", (key,))
            db.execute("DELETE FROM inventory WHERE run = 0 AND kind = 'document' AND name = ?", (key,))
        elif stored:
            db.execute("UPDATE document SET version = ?, value = ? WHERE key = ?", (version, value, key))
        else:
            db.execute("INSERT INTO document VALUES (?, ?, ?)", (key, version, value))
        if run is not None:
            self._add(run)
        return True

    def _delete_documents(self, run_id: str) -> None:
        """Delete the documents of a run, within a transaction."""
        own = f"run/{run_id}/", f"run/{run_id}/{_LAST}"
        self._file.db.execute("DELETE FROM document WHERE key >= ? AND key < ?", own)
        listed = "run = 0 AND kind = 'document' AND name >= ? AND name < ?"
        self._file.db.execute(f"DELETE FROM inventory WHERE {listed}", own)

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        """The frontier of a run, the same object each time. The first call ends the leases and roles in the file whose
        holders are gone. Options have no effect on a file that is opened readonly."""

        def load() -> SQLiteFrontier:
            row = self._file.db.execute("SELECT number FROM run WHERE run_id = ?", (run_id,)).fetchone()
            if row is None:
                raise no_run(run_id)
            frontier = SQLiteFrontier(self, self._file, run_id, row[0])
            if not self._file.readonly:
                if options is not None:
                    frontier.set_options(options)
                frontier.load()
                frontier.end_old_leases(lambda held_by: self._keeps(self, run_id, held_by))
            return frontier

        async with self._opening:
            if run_id not in self.frontiers:
                self.frontiers[run_id] = await (
                    self._file.read(load) if self._file.readonly else self._file.write(load)
                )
            opened = self.frontiers[run_id]
            if options is not None and options != opened.options and not self._file.readonly:
                await self._file.write(partial(opened.set_options, options))
        return opened if holder is None else FencedFrontier(opened, holder)

    async def close(self) -> None:
        """Close the file. Leases that are still held end when the run is opened again, as after a crash."""
        await self._file.close()


def _run_of(row: StoredRow) -> Run:
    return read_run(*row)
