"""The frontier in a SQLite file: nothing to install, survives ``kill -9``, and memory does not grow with the URLs.

One process works on a file at a time, so it keeps in memory what has to be decided quickly: the best request of each
lane, the politeness of each host, the leases that are out, the newest fingerprints. All of it can be made anew from
the file at any moment, which is done when the file is opened and whenever a transaction was rolled back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from shoal.errors import FrontierError, QueueFullError, RunError
from shoal.frontier.hosts import Host, Key, Lane, LaneTable
from shoal.frontier.rules import (
    DEAD,
    LEASED,
    LOST_KIND,
    SPARED_KINDS,
    STATE_NAMES,
    WAITING,
    check_transition,
    child_fingerprint,
    lost_reason,
    push_fingerprint,
)
from shoal.frontier.sqlite_file import SQLiteFile
from shoal.frontier.sqlite_seen import Seen
from shoal.http import Request
from shoal.links import host_of
from shoal.ports import (
    Claim,
    Completion,
    Event,
    Failure,
    FrontierOptions,
    History,
    HostState,
    HostUpdate,
    Lease,
    Leased,
    LoggedItem,
    Pushed,
    RequestState,
    Run,
    RunState,
    Stats,
)

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode
_decode_settings = msgspec.msgpack.Decoder(dict[str, Any]).decode
_RUN = "SELECT run_id, spider, state, created_at, settings FROM run"
_HOST = "delay, concurrency, crawl_delay, learned_delay, blocked_until, block_reason, ended_at"
_HISTORY = "SELECT id, state, attempts, status, items, at, parent, reason, payload FROM request"
_PAGE = 100


class _Ledger(msgspec.Struct):
    """A run's counters, read at the start of a transaction and written at its end."""

    pushed: int
    ready: int
    waiting: int
    leased: int
    done: int
    dead: int
    duplicates: int
    items: int
    token: int
    newest: int


class _Held(msgspec.Struct, frozen=True):
    """A lease that is out."""

    request: int
    fingerprint: bytes
    token: int
    attempts: int
    lane: Lane[int]
    rank: float


class _Offer(msgspec.Struct, frozen=True):
    """The children of one request."""

    parent: int
    fingerprint: bytes
    children: Sequence[Request]


class SQLiteStore:
    """Runs and their frontiers in a file, and the politeness that they share."""

    def __init__(self, file: SQLiteFile, clock: Callable[[], float]) -> None:
        self.file = file
        self.clock = clock
        self.hosts: dict[str, Host] = {}
        self._frontiers: dict[str, SQLiteFrontier] = {}
        file.restore = self._restore

    @classmethod
    async def open(
        cls, path: str | os.PathLike[str], *, readonly: bool = False, clock: Callable[[], float] = time.time
    ) -> SQLiteStore:
        """StoreBusyError while another process works on it, unless ``readonly``; StoreError if it can't be used."""
        file = SQLiteFile(path, readonly=readonly)
        await file.open()
        return cls(file, clock)

    def _restore(self) -> None:
        self.hosts.clear()
        for frontier in self._frontiers.values():
            frontier.load()

    def host(self, name: str) -> Host:
        """A host with the politeness that the file has for it."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = Host(name)
            row = self.file.db.execute(f"SELECT {_HOST} FROM host WHERE name = ?", (name,)).fetchone()
            if row is not None:
                (
                    host.delay, host.concurrency, host.crawl_delay, host.learned_delay,
                    host.blocked_until, host.block_reason, host.ended_at,
                ) = row  # fmt: skip
        return host

    def save_hosts(self, hosts: Iterable[Host]) -> None:
        self.file.db.executemany(
            f"INSERT OR REPLACE INTO host (name, {_HOST}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    host.name, host.delay, host.concurrency, host.crawl_delay, host.learned_delay,
                    host.blocked_until, host.block_reason, host.ended_at,
                )
                for host in hosts
            ],
        )  # fmt: skip

    # -- runs

    async def create_run(self, run: Run) -> Run:
        def create() -> Run:
            if self._run(run.run_id) is not None:
                raise RunError(f"there is a run {run.run_id} already")
            self.file.db.execute(
                "INSERT INTO run (run_id, spider, state, created_at, settings) VALUES (?, ?, ?, ?, ?)",
                (run.run_id, run.spider, run.state, run.created_at, _encode(run.settings)),
            )
            return run

        return await self.file.write(create)

    async def transition(self, run_id: str, state: RunState) -> Run:
        def change() -> Run:
            run = self._run(run_id)
            check_transition(run_id, run, state)
            assert run is not None
            self.file.db.execute("UPDATE run SET state = ? WHERE run_id = ?", (state, run_id))
            return msgspec.structs.replace(run, state=state)

        return await self.file.write(change)

    def _run(self, run_id: str) -> Run | None:
        row = self.file.db.execute(f"{_RUN} WHERE run_id = ?", (run_id,)).fetchone()
        return _run_of(row) if row else None

    async def get_run(self, run_id: str) -> Run | None:
        return await self.file.read(partial(self._run, run_id))

    async def list_runs(self, spider: str | None = None) -> list[Run]:
        def runs() -> list[Run]:
            rows = self.file.db.execute(f"{_RUN} WHERE ?1 IS NULL OR spider = ?1 ORDER BY number DESC", (spider,))
            return [_run_of(row) for row in rows]

        return await self.file.read(runs)

    async def frontier(self, run_id: str, options: FrontierOptions) -> SQLiteFrontier:
        """The run's frontier; the same one each time. Leases and roles in the file are of a process that is gone."""

        def find() -> SQLiteFrontier:
            frontier = self._frontiers.get(run_id)
            if frontier is None:
                row = self.file.db.execute("SELECT number FROM run WHERE run_id = ?", (run_id,)).fetchone()
                if row is None:
                    raise RunError(f"there is no run {run_id}")
                frontier = SQLiteFrontier(self, row[0], options)
                if not self.file.readonly:
                    frontier.load()
                    frontier.recover()
            return frontier

        frontier = await (self.file.read(find) if self.file.readonly else self.file.write(find))
        return self._frontiers.setdefault(run_id, frontier)

    async def close(self) -> None:
        await self.file.close()


def _run_of(row: tuple[Any, ...]) -> Run:
    run_id, spider, state, created_at, settings = row
    return Run(run_id=run_id, spider=spider, state=state, created_at=created_at, settings=_decode_settings(settings))


class SQLiteFrontier:
    """See `shoal.ports.Frontier`. Each method is one transaction, in the thread of the file."""

    def __init__(self, store: SQLiteStore, run: int, options: FrontierOptions) -> None:
        self._store = store
        self._file = store.file
        self._db = store.file.db
        self._clock = store.clock
        self._run = run
        self._options = options
        self._seen = Seen(self._db, run)
        self._lanes: LaneTable[int] = LaneTable(store.hosts, options)
        self._by_number: dict[int, Lane[int]] = {}
        self._held: dict[bytes, _Held] = {}

    # -- what is kept in memory

    def load(self) -> None:
        """Make it anew from the file."""
        self._load_lanes()
        self._seen.load()

    def _load_lanes(self) -> None:
        self._lanes = LaneTable(self._store.hosts, self._options)
        self._by_number = {}
        self._held = {}
        lanes = self._db.execute("SELECT number, host FROM lane WHERE run = ?", (self._run,)).fetchall()
        for number, name in lanes:
            lane = self._add_lane(number, name)
            (lane.ready,) = self._db.execute(
                "SELECT count(*) FROM request WHERE lane = ? AND state = 0", (number,)
            ).fetchone()
            lane.best = next(iter(self._best_keys(lane, 1)), None)
        leased = self._db.execute(
            "SELECT id, fingerprint, token, attempts, lane, rank FROM request"
            " WHERE run = ? AND due IS NOT NULL AND state = 2",
            (self._run,),
        )
        for request, fingerprint, token, attempts, number, rank in leased:
            lane = self._by_number[number]
            lane.host.in_flight += 1
            self._held[fingerprint] = _Held(request, fingerprint, token, attempts, lane, rank)
        now = self._clock()
        for lane in self._by_number.values():
            self._lanes.place(lane, now)

    def recover(self) -> None:
        """End what a process that is gone held: each of its leases was an attempt."""
        ledger = self._read_ledger()
        self._lose(list(self._held.values()), ledger, self._clock())
        self._save_ledger(ledger)
        self._db.execute("UPDATE role SET token = 0, until = 0 WHERE run = ?", (self._run,))

    def _lane(self, name: str) -> Lane[int]:
        lane = self._lanes.by_name.get(name)
        if lane is None:
            number = self._db.execute("INSERT INTO lane (run, host) VALUES (?, ?)", (self._run, name)).lastrowid
            assert number is not None
            lane = self._add_lane(number, name)
        return lane

    def _add_lane(self, number: int, name: str) -> Lane[int]:
        self._store.host(name)
        lane = self._by_number[number] = self._lanes.add(name, number)
        return lane

    def _best_keys(self, lane: Lane[int], limit: int) -> list[Key]:
        return self._db.execute(
            "SELECT rank, id FROM request WHERE lane = ? AND state = 0 ORDER BY rank, id LIMIT ?", (lane.queue, limit)
        ).fetchall()

    def _requeue(self, lane: Lane[int], key: Key, now: float) -> None:
        lane.ready += 1
        if lane.best is None or key < lane.best:
            lane.best = key
            self._lanes.place(lane, now)

    # -- transactions

    async def _change(self, step: Callable[[_Ledger], T]) -> T:
        def transaction() -> T:
            ledger = self._read_ledger()
            result = step(ledger)
            self._save_ledger(ledger)
            return result

        return await self._file.write(transaction)

    def _read_ledger(self) -> _Ledger:
        row = self._db.execute(
            "SELECT pushed, ready, waiting, leased, done, dead, duplicates, items, token, newest"
            " FROM run WHERE number = ?",
            (self._run,),
        ).fetchone()
        return _Ledger(*row)

    def _save_ledger(self, ledger: _Ledger) -> None:
        self._db.execute(
            "UPDATE run SET (pushed, ready, waiting, leased, done, dead, duplicates, items, token, newest)"
            " = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE number = ?",
            (*msgspec.structs.astuple(ledger), self._run),
        )

    # -- pushing

    async def push(self, requests: Sequence[Request], *, seed: Claim | None = None, cursor: bytes = b"") -> Pushed:
        return await self._change(partial(self._push, requests, seed, cursor))

    def _push(self, requests: Sequence[Request], seed: Claim | None, cursor: bytes, ledger: _Ledger) -> Pushed:
        if seed is not None and not self._holds("seed", seed.token):
            return Pushed(0, 0)
        names = [push_fingerprint(request, seed, cursor, index) for index, request in enumerate(requests)]
        fresh = self._unseen(names)
        most = self._options.max_queue_size
        if most is not None and ledger.ready + ledger.waiting + len(fresh) > most:
            raise QueueFullError(f"the queue holds its maximum of {most} requests; nothing was pushed")
        self._enqueue([(names[index], requests[index], None) for index in fresh], ledger, self._clock())
        ledger.duplicates += len(names) - len(fresh)
        if seed is not None:
            self._db.execute("UPDATE role SET cursor = ? WHERE run = ? AND role = 'seed'", (cursor, self._run))
        return Pushed(len(fresh), len(names) - len(fresh))

    def _push_children(self, offers: Sequence[_Offer], ledger: _Ledger, now: float) -> list[int]:
        """How many of each offer were new."""
        names: list[bytes] = []
        entries: list[tuple[int, Request]] = []
        for place, offer in enumerate(offers):
            for index, child in enumerate(offer.children):
                names.append(child_fingerprint(child, offer.fingerprint, index))
                entries.append((place, child))
        added = [0] * len(offers)
        rows = []
        for index in self._unseen(names):
            place, child = entries[index]
            added[place] += 1
            rows.append((names[index], child, offers[place].parent))
        self._enqueue(rows, ledger, now)
        ledger.duplicates += len(names) - len(rows)
        return added

    def _unseen(self, names: Sequence[bytes]) -> list[int]:
        """Where in ``names`` each that the run has not yet stands first."""
        first: dict[bytes, int] = {}
        for index, name in enumerate(names):
            first.setdefault(name, index)
        known = self._seen.known(first)
        return [index for name, index in first.items() if name not in known]

    def _enqueue(self, entries: Sequence[tuple[bytes, Request, int | None]], ledger: _Ledger, now: float) -> None:
        if not entries:
            return
        (number,) = self._db.execute("SELECT coalesce(max(id), 0) FROM request").fetchone()
        rows = []
        numbers = {}
        for name, request, parent in entries:
            number += 1
            rank = 0.0 - request.priority
            lane = self._lane(host_of(request.url))
            rows.append((number, self._run, lane.queue, rank, now, parent, name, _encode(request)))
            numbers[name] = number
            self._requeue(lane, (rank, number), now)
        self._db.executemany(
            "INSERT INTO request (id, run, lane, rank, at, parent, fingerprint, payload)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        self._seen.add(numbers)
        ledger.newest = number
        ledger.pushed += len(rows)
        ledger.ready += len(rows)

    # -- leasing

    async def lease(self, limit: int, ttl: float) -> Leased:
        deadline = time.monotonic() + ttl
        job = asyncio.ensure_future(self._change(partial(self._lease, limit, ttl, deadline)))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # It happens all the same, and then nobody works on what it took.
            with suppress(FrontierError):
                await self.release((await job).leases)
            raise

    def _lease(self, limit: int, ttl: float, deadline: float, ledger: _Ledger) -> Leased:
        now = self._clock()
        moment = self._next_moment()
        if moment is not None and moment <= now:
            self._wake(ledger, now)
            moment = self._next_moment()
        chosen = self._choose(limit, now)
        leases = self._take(chosen, ledger, now, now + ttl, deadline)
        moments = [moment, now + ttl if leases else None, self._lanes.next_due()]
        return Leased(leases, max(0.0, min((m for m in moments if m is not None), default=now) - now) if any(moments) else None)

    def _next_moment(self) -> float | None:
        """When the next lease is lost or the next waiting request is ready."""
        row = self._db.execute("SELECT min(due) FROM request WHERE run = ? AND due IS NOT NULL", (self._run,)).fetchone()
        return row[0]  # type: ignore[no-any-return]

    def _wake(self, ledger: _Ledger, now: float) -> None:
        """Give back expired leases, and make ready what has waited long enough."""
        lost = []
        rows = self._db.execute(
            "SELECT state, id, lane, rank, fingerprint FROM request WHERE run = ? AND due <= ?", (self._run, now)
        )
        for state, request, number, rank, fingerprint in rows:
            if state == LEASED:
                lost.append(self._held[fingerprint])
            else:
                ledger.waiting -= 1
                ledger.ready += 1
                self._requeue(self._by_number[number], (rank, request), now)
        self._db.execute(
            "UPDATE request SET state = 0, due = NULL WHERE run = ? AND due <= ? AND state = 1", (self._run, now)
        )
        self._lose(lost, ledger, now)

    def _lose(self, lost: Sequence[_Held], ledger: _Ledger, now: float) -> None:
        """End leases whose worker is gone."""
        ready, dead = [], []
        for held in lost:
            reason = lost_reason(held.attempts)
            self._note(held.request, now, "lease lost", reason)
            if held.attempts >= self._options.max_attempts:
                dead.append((LOST_KIND, reason, now, held.request))
            else:
                ready.append((now, held.request))
                self._requeue(held.lane, (held.rank, held.request), now)
        self._db.executemany(
            "UPDATE request SET state = 0, due = NULL, token = NULL, at = ? WHERE id = ?", ready
        )
        self._db.executemany(
            "UPDATE request SET state = 4, due = NULL, token = NULL, kind = ?, reason = ?, at = ? WHERE id = ?", dead
        )
        ledger.ready += len(ready)
        ledger.dead += len(dead)
        self._end([(held, True) for held in lost], ledger, now)
