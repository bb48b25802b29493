"""A store with runs in every state, copies of it with one thing missing, and a driver that finishes what is left."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from uuid import uuid4

import asyncpg
import msgspec
import redis.asyncio

from shoal.errors import RunError
from shoal.frontier.postgres import PostgresStore
from shoal.frontier.redis import RedisStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    Failure,
    Fault,
    Frontier,
    FrontierOptions,
    Heartbeat,
    Holder,
    HostUpdate,
    Lease,
    Run,
    Store,
)
from shoal.testing import FakeClock
from shoal.testing.steps import TTL, complete, finish_seeding, lease_one, page
from tests.support.databases import PostgresServer, RedisServer, shared

_DELAY = 300.0
_STEP = 400.0
_MOST_STEPS = 12
OPTIONS = FrontierOptions(max_attempts=5, concurrency_per_host=2)
SMALL = FrontierOptions(max_attempts=5, max_queue_size=3, overflow="refuse")
_OUTPUT = "output"


class Expected(NamedTuple):
    """What a run must have in the end, as an observer outside the store knows it."""

    options: FrontierOptions
    done: dict[str, int]
    """URLs that were completed already, and how many items each had."""
    dead: set[str]
    rest: set[str]
    """URLs that are still to be completed."""
    start: list[Request]
    """What its seeder pushes."""
    delivered: int = 0
    """Items that the output has."""


# -- runs in every state


@contextmanager
def small_chunks() -> Iterator[None]:
    """Pages of a few dozen links are large."""
    modules = [each for name, each in sys.modules.items() if name.startswith("shoal.frontier.")]
    values = {"CHUNK": 10, "MAX_LINKS": 20}
    patches = [
        patch.object(each, name, value)
        for each in modules
        for name, value in values.items()
        if isinstance(getattr(each, name, None), int)
    ]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


async def fill(store: Store) -> dict[str, Expected]:
    """Create runs with requests in every state: ready in all kinds of queues, waiting, leased by named and unnamed
    workers, sent, done, dead, refused, staged; with items, roles, hosts that wait and hosts that are full."""
    for run_id in ("run", "other", "small", "ended"):
        await store.create_run(Run(run_id=run_id, spider="s", state="running", created_at=1.0))
    await store.put_document("note/1", b"value", replaces=b"", version=b"version1")
    frontier = await store.frontier("run", OPTIONS)
    await frontier.remember("robots/a.example", b"rules", 10 * TTL)
    await frontier.update_host("*", HostUpdate(concurrency=2))
    expected = {"run": await _fill_run(store, frontier)}
    other = await store.frontier("other", OPTIONS)
    pages = [page(f"other{number}", host=host) for number in range(2) for host in ("a.example", "c.example")]
    await other.push(pages)
    await finish_seeding(other)
    await other.lease(1, TTL)
    expected["other"] = Expected(OPTIONS, {}, set(), {each.url for each in pages}, pages)
    expected["small"] = await _fill_small(await store.frontier("small", SMALL))
    ended = await store.frontier("ended", OPTIONS)
    await ended.push([page("last")])
    await finish_seeding(ended)
    await complete(ended, await lease_one(ended), items=[b"x"])
    await store.transition("ended", "finished")
    expected["ended"] = Expected(OPTIONS, {page("last").url: 1}, set(), set(), [page("last")])
    return expected


async def _fill_run(store: Store, frontier: Frontier) -> Expected:
    done, dead = dict[str, int](), set[str]()
    pages: list[Request] = []

    async def push(host: str, *names: object, **options: Any) -> None:
        some = [page(name, host=host, **options) for name in names]
        pages.extend(some)
        await frontier.push(some)

    async def finish(lease: Lease, items: int) -> None:
        done[lease.request.url] = items
        await complete(frontier, lease, items=[_item(lease.request.url, number) for number in range(items)])

    seed = await frontier.claim("seed", TTL)
    assert seed is not None
    pages.extend(page(number) for number in range(30))
    await frontier.push(pages, seed=seed, cursor=b"1")
    await push("a.example", *(f"late{number}" for number in range(4)), priority=-1)
    await push("b.example", "waits", "fails", priority=9)
    waits, fails = (await frontier.lease(2, TTL)).leases
    await frontier.fail([Failure(lease=waits, kind="timeout", reason="slow", retry_in=500.0)])
    await frontier.fail([Failure(lease=fails, kind="http 500", reason="broken")])
    dead.add(fails.request.url)
    worker = await store.frontier("run", OPTIONS, Holder("worker1", 1))
    await worker.beat(Heartbeat(worker="worker1", epoch=1, session=10 * TTL, machine="m", pid=1))
    await worker.claim("named", TTL)
    await push("c.example", *range(4), priority=8)
    await worker.lease(2, TTL)  # its host is full
    await push("d.example", *range(3), priority=7)
    await frontier.update_host("d.example", HostUpdate(delay=_DELAY))
    await finish(await lease_one(frontier), 2)  # its host waits
    await push("f.example", "sent", priority=7)
    await lease_one(frontier, counts_attempt=False)
    await push("e.example", "large", priority=6)
    large = await lease_one(frontier)
    links = [page(number, host=f"l{number % 3}.example") for number in range(300)]
    await _complete_large(frontier, large, links)
    done[large.request.url] = 0
    for items in (3, 1):
        await finish(await lease_one(frontier), items)
    await frontier.relinquish(_at(seed, b"1"), finished=True)
    output = await frontier.claim(_OUTPUT, 1.0)
    assert output is not None
    last = (await frontier.read_items(0, 3))[-1]
    assert await frontier.advance(output, b"3", 1.0, last=last)
    await frontier.trim_items(2)
    await frontier.fence("gone", 3)
    every = {each.url for each in (*pages, *links)}
    return Expected(OPTIONS, done, dead, every - done.keys() - dead, [page(number) for number in range(30)], 3)


async def _complete_large(frontier: Frontier, lease: Lease, links: Sequence[Request]) -> None:
    """Complete a page, and leave links of it that are not in the queue yet."""
    ending = asyncio.create_task(frontier.complete([Completion(lease=lease, children=links)]))
    done = (await frontier.stats()).done
    while (await frontier.stats()).done == done and not ending.done():
        await asyncio.sleep(0)
    ending.cancel()
    with suppress(asyncio.CancelledError):
        await ending
    assert (await frontier.stats()).incoming


async def _fill_small(frontier: Frontier) -> Expected:
    start, links = page("start", host="s.example"), [page(number, host="s.example") for number in range(6)]
    await frontier.push([start])
    await finish_seeding(frontier)
    await complete(frontier, await lease_one(frontier), children=links)
    assert (await frontier.stats()).dead == 3
    rest = {each.url for each in links[:3]}
    return Expected(SMALL, {start.url: 0}, {each.url for each in links[3:]}, rest, [start])


def _item(url: str, number: int) -> bytes:
    return f"{url} {number}".encode()


# -- finishing what is left


async def finish_all(store: Store, expected: Mapping[str, Expected], clock: FakeClock, again: int = 0) -> None:
    """Finish all runs, as workers do. AssertionError if a page is missing or done twice, or an item is missing, or a
    run does not end. ``again``: how many pages may be fetched although they were done or dead."""
    for run_id, wanted in expected.items():
        frontier = await store.frontier(run_id, wanted.options)
        await _seed_again(frontier, wanted.start)
        fetched = await _fetch_rest(frontier, clock)
        twice = [url for url, count in fetched.items() if count > 1]
        assert not twice, f"{run_id}: fetched twice: {twice}"
        ended = fetched.keys() & (wanted.done.keys() | wanted.dead)
        assert len(ended) <= again, f"{run_id}: fetched although they had ended: {ended}"
        assert fetched.keys() - ended == wanted.rest, f"{run_id}: {fetched.keys() ^ wanted.rest} differ"
        dead = {each.url async for each in frontier.dead()}
        assert dead == wanted.dead - ended, f"{run_id}: {dead ^ wanted.dead} differ"
        await _check_items(frontier, run_id, wanted)


async def _seed_again(frontier: Frontier, start: Sequence[Request]) -> None:
    """Seed a run whose seed role is lost, as a worker does."""
    if (await frontier.stats()).seeding:
        claim = await frontier.claim("seed", TTL)
        if claim is not None:
            await frontier.push(start, seed=claim, cursor=b"1")
            await frontier.relinquish(_at(claim, b"1"), finished=True)


def _at(claim: Claim, cursor: bytes) -> Claim:
    return msgspec.structs.replace(claim, cursor=cursor)


async def _fetch_rest(frontier: Frontier, clock: FakeClock) -> Counter[str]:
    fetched = Counter[str]()
    for _ in range(_MOST_STEPS):
        while leases := (await frontier.lease(1000, TTL)).leases:
            await complete(frontier, *leases, items=[b"i"])
            fetched.update(lease.request.url for lease in leases)
        if (await frontier.stats()).finished:
            return fetched
        clock.advance(_STEP)
    raise AssertionError(f"the run does not end: {await frontier.stats()}")


async def _check_items(frontier: Frontier, run_id: str, wanted: Expected) -> None:
    claim = await frontier.claim(_OUTPUT, TTL)
    assert claim is not None
    after = int(claim.cursor or 0)
    read = [item.seq for item in await frontier.read_items(after, 1_000_000)]
    count = sum(wanted.done.values()) + len(wanted.rest)
    missing = set(range(1, count + 1)) - set(read) - set(range(1, wanted.delivered + 1))
    assert not missing, f"{run_id}: items {missing} are missing"


# -- copies with one thing missing


class Piece(NamedTuple):
    """Something that can be deleted."""

    kind: str
    """What others of its kind have in common."""
    name: str
    delete: Any


class Crafted(NamedTuple):
    """A value that another program wrote."""

    kind: str
    name: str
    replacement: Any


class DamagedStore(ABC):
    """Makes copies of a filled store, each with one piece missing."""

    expected: Mapping[str, Expected]

    def __init__(self) -> None:
        self.clock = FakeClock(0.0)

    @abstractmethod
    async def pieces(self) -> list[Piece]:
        """Everything that can be deleted."""

    @abstractmethod
    async def delete(self, piece: Piece) -> None:
        """Restore the filled store, without this piece."""

    @abstractmethod
    async def open(self, *, readonly: bool = False) -> Store: ...

    @abstractmethod
    async def delete_item(self, number: int) -> None:
        """Delete an item of the only run from its log."""

    @asynccontextmanager
    async def opened(self, *, readonly: bool = False) -> AsyncIterator[Store]:
        store = await self.open(readonly=readonly)
        try:
            yield store
        finally:
            await store.close()

    async def fill(self) -> None:
        with small_chunks():
            async with self.opened() as store:
                self.expected = await fill(store)
                await self.record_rewind(await store.frontier("run"))

    async def record_rewind(self, frontier: Any) -> None:  # noqa: B027
        """Record a rewind of the store, if this store can be rewound."""


class DamagedRedis(DamagedStore):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._prefix = uuid4().hex[:8]
        self._url = shared(RedisServer).url
        self._dumps: dict[bytes, tuple[int, bytes]] = {}

    async def open(self, *, readonly: bool = False) -> Store:
        return await RedisStore.open(f"{self._url}?prefix={self._prefix}", offset=lambda: self.clock.now)

    async def record_rewind(self, frontier: Any) -> None:
        await frontier._run("recover", "", 0)

    async def fill(self) -> None:
        await super().fill()
        async with redis.asyncio.from_url(self._url) as client:
            for key in await client.keys(f"{{{self._prefix}}}:*"):
                self._dumps[key] = (max(0, await client.pttl(key)), await client.dump(key))

    async def delete_item(self, number: int) -> None:
        async with redis.asyncio.from_url(self._url) as client:
            assert await client.xdel(f"{{{self._prefix}}}:run:1:items", f"{number}-0") == 1

    def _kind(self, key: bytes) -> str:
        name = key.partition(b"}:")[2]
        parts = name.split(b":")
        return (parts[2] if parts[0] == b"run" and len(parts) > 2 else parts[0]).decode()

    async def pieces(self) -> list[Piece]:
        found = []
        async with redis.asyncio.from_url(self._url) as client:
            for key in sorted(self._dumps):
                kind, shown = self._kind(key), key.decode(errors="backslashreplace").partition("}:")[2]
                found.append(Piece(kind, shown, ("DEL", key)))
                for word, *member in await self._members(client, key):
                    field = member[-1] if word == b"XDEL" else member[0]
                    # A run's own record has fields that all mean something else.
                    own = f"{kind} {field!r}" if kind in ("run", "store", "kinds", "role", "claim") else f"{kind} entry"
                    found.append(Piece(own, f"{shown} {field!r}", (word, key, *member)))
        return found

    async def _members(self, client: Any, key: bytes) -> list[tuple[bytes, ...]]:
        kind = await client.type(key)
        if kind == b"hash":
            return [(b"HDEL", field) for field in sorted(await client.hkeys(key))]
        if kind == b"zset":
            return [(b"ZREM", member) for member in await client.zrange(key, 0, -1)]
        if kind == b"list":
            return [(b"LREM", b"1", member) for member in await client.lrange(key, 0, -1)]
        if kind == b"stream":
            return [(b"XDEL", number) for number, _ in await client.xrange(key)]
        return []

    async def delete(self, piece: Piece) -> None:
        async with redis.asyncio.from_url(self._url) as client:
            await self._restore(client)
            assert await client.execute_command(*piece.delete) == 1, piece

    async def _restore(self, client: Any) -> None:
        self.clock.now = 0.0
        async with client.pipeline(transaction=False) as batch:
            for key in await client.keys(f"{{{self._prefix}}}:*"):
                batch.delete(key)
            for key, (ttl, dump) in self._dumps.items():
                batch.restore(key, ttl, dump)
            await batch.execute()

    async def nest(self, before: bytes, after: bytes) -> None:
        """Replace a part of the stored requests of the only run."""
        async with redis.asyncio.from_url(self._url) as client:
            key = f"{{{self._prefix}}}:run:1:req"
            for field, record in (await client.hgetall(key)).items():
                await client.hset(key, field, record.replace(before, after))

    async def values(self, crafted: Sequence[Any]) -> list[Crafted]:
        """Each kind of value, replaced by each of the crafted bytes."""
        firsts = {piece.kind: piece for piece in reversed(await self.pieces())}
        return [
            Crafted(piece.kind, piece.name, (*piece.delete, value))
            for piece in firsts.values()
            for value in crafted
            if isinstance(value, bytes)
        ]

    async def craft(self, crafted: Crafted) -> bool:
        word, key, *member, value = crafted.replacement
        async with redis.asyncio.from_url(self._url) as client:
            await self._restore(client)
            kind = await client.type(key)
            if word == "DEL":  # then a key of another type has its name
                await client.delete(key)
                await (client.hset(key, b"x", value) if kind == b"string" else client.set(key, value))
            elif word == b"HDEL":
                await client.hset(key, member[0], value)
            elif word == b"ZREM":
                score = await client.zscore(key, member[0])
                await client.zrem(key, member[0])
                await client.zadd(key, {value: score})
            elif word == b"LREM":
                await client.lset(key, 0, value)
            else:  # an entry of a stream cannot be changed: all of them are written again
                entries: list[Any] = await client.xrange(key)
                await client.delete(key)
                for number, fields in entries:
                    await client.xadd(key, dict.fromkeys(fields, value) if number == member[0] else fields, id=number)
        return True


_GROUPED = frozenset({"state", "place", "role", "finished", "id", "component"})
"""Columns whose values tell kinds of rows apart; ``id`` only in tables that number few rows by themselves."""
_FEW = frozenset({"clock_state", "poll_state"})


def _row_kind(table: str, row: Mapping[str, Any]) -> str:
    parts = [f"{name}={value}" for name, value in row.items() if name in _GROUPED and (name != "id" or table in _FEW)]
    if table == "host":
        parts = ["*"] if row["name"] == "*" else []
    if table == "document":
        parts = []
    return " ".join([table, *parts])


class DamagedSQLite(DamagedStore):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.clock = FakeClock()
        self._start = self.clock.now
        self._path, self._copy = folder / "filled.db", folder / "copy.db"

    async def delete_item(self, number: int) -> None:
        with closing(sqlite3.connect(self._path)) as db:
            assert db.execute("DELETE FROM item WHERE id = (1 << 40) + ?", (number,)).rowcount == 1
            db.commit()

    async def open(self, *, readonly: bool = False) -> Store:
        path = self._copy if self._copy.exists() else self._path
        return await SQLiteStore.open(path, readonly=readonly, clock=self.clock)

    async def fill(self) -> None:
        with patch("shoal.frontier.sqlite.run_file._MAX_IN_MEMORY", 20):  # most fingerprints move to the index
            await super().fill()

    async def pieces(self) -> list[Piece]:
        found = []
        with sqlite3.connect(self._path) as db:
            db.row_factory = sqlite3.Row
            tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
            for (table,) in tables.fetchall():
                key = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[5]]
                for row in db.execute(f"SELECT * FROM {table}").fetchall():
                    where = " AND ".join(f"{name} = ?" for name in key)
                    values = tuple(row[name] for name in key)
                    found.append(Piece(_row_kind(table, dict(row)), f"{table} {values}", (table, where, values)))
        db.close()
        return found

    async def delete(self, piece: Piece) -> None:
        self.clock.now = self._start
        for suffix in ("-wal", "-shm", ""):
            Path(f"{self._copy}{suffix}").unlink(missing_ok=True)
        shutil.copyfile(self._path, self._copy)
        table, where, values = piece.delete
        db = sqlite3.connect(self._copy)
        assert db.execute(f"DELETE FROM {table} WHERE {where}", values).rowcount == 1
        db.commit()
        db.close()


_PYTHON_TYPES = {
    "bytea": bytes, "text": str, "double precision": float, "bigint": int, "integer": int, "smallint": int,
}  # fmt: skip


class DamagedPostgres(DamagedStore):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.schema = f"damaged_{uuid4().hex[:8]}"
        self._url = shared(PostgresServer).url
        self._tables: list[str] = []

    async def open(self, *, readonly: bool = False) -> Store:
        return await PostgresStore.open(f"{self._url}?schema={self.schema}", offset=lambda: self.clock.now)

    async def delete_item(self, number: int) -> None:
        async with self.linked() as link:
            assert await link.execute(f"DELETE FROM {self.schema}.item WHERE seq = $1", number) == "DELETE 1"

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[Any]:
        link = await asyncpg.connect(self._url)
        try:
            yield link
        finally:
            await link.close()

    async def record_rewind(self, frontier: Any) -> None:
        await frontier._database.call("record_rewind", frontier._run, 0.0, None, [], [], [])

    async def fill(self) -> None:
        await super().fill()
        async with self.linked() as link:
            rows = await link.fetch(
                "SELECT table_name FROM information_schema.tables"
                " WHERE table_schema = $1 AND table_type = 'BASE TABLE'",
                self.schema,
            )
            self._tables = sorted(row[0] for row in rows)
            await link.execute(f"CREATE SCHEMA {self.schema}_copy")
            for table in self._tables:
                await link.execute(f"CREATE TABLE {self.schema}_copy.{table} AS TABLE {self.schema}.{table}")

    async def pieces(self) -> list[Piece]:
        found = []
        async with self.linked() as link:
            for table in self._tables:
                columns = await link.fetch(
                    "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid"
                    " AND a.attnum = ANY(i.indkey) WHERE i.indrelid = $1::regclass AND i.indisprimary",
                    f"{self.schema}.{table}",
                )
                key = [row[0] for row in columns]
                where = " AND ".join(f"{name} = ${place}" for place, name in enumerate(key, 1))
                for row in await link.fetch(f"SELECT * FROM {self.schema}_copy.{table} ORDER BY {', '.join(key)}"):
                    values = tuple(row[name] for name in key)
                    found.append(Piece(_row_kind(table, dict(row)), f"{table} {values}", (table, where, values)))
        return found

    async def delete(self, piece: Piece) -> None:
        self.clock.now = 0.0
        target, where, values = piece.delete
        async with self.linked() as link, link.transaction():
            for table in self._tables:
                await link.execute(f"DELETE FROM {self.schema}.{table}")
                await link.execute(
                    f"INSERT INTO {self.schema}.{table} OVERRIDING SYSTEM VALUE"
                    f" SELECT * FROM {self.schema}_copy.{table}"
                )
            assert await link.execute(f"DELETE FROM {self.schema}.{target} WHERE {where}", *values) == "DELETE 1"

    async def nest(self, before: bytes, after: bytes) -> None:
        """Replace a part of the stored requests."""
        async with self.linked() as link:
            for row in await link.fetch(f"SELECT id, payload FROM {self.schema}.request"):
                change = f"UPDATE {self.schema}.request SET payload = $1 WHERE id = $2"
                await link.execute(change, row["payload"].replace(before, after), row["id"])

    async def values(self, crafted: Sequence[Any]) -> list[Crafted]:
        """Each column of each kind of row, replaced by each of the crafted values that its type can have. Of runs, it
        is the row of ``run``."""
        firsts = {piece.kind: piece for piece in reversed(await self.pieces())}
        found: list[Crafted] = []
        async with self.linked() as link:
            number = await link.fetchval(f"SELECT id FROM {self.schema}.run WHERE run_id = 'run'")
            firsts |= {each.kind: each for each in await self.pieces() if each.delete[::2] == ("run", (number,))}
            columns = await link.fetch(
                "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = $1",
                self.schema,
            )
        for piece in firsts.values():
            for table, column, kind in columns:
                if table == piece.delete[0] and kind in _PYTHON_TYPES:
                    found += [
                        Crafted(f"{piece.kind} {column}", piece.name, (*piece.delete, column, value))
                        for value in crafted
                        if type(value) is _PYTHON_TYPES[kind]
                    ]
        return found

    async def craft(self, crafted: Crafted) -> bool:
        """Whether the database takes the value."""
        self.clock.now = 0.0
        target, where, values, column, value = crafted.replacement
        async with self.linked() as link:
            try:
                async with link.transaction():
                    for table in self._tables:
                        await link.execute(f"DELETE FROM {self.schema}.{table}")
                        await link.execute(
                            f"INSERT INTO {self.schema}.{table} OVERRIDING SYSTEM VALUE"
                            f" SELECT * FROM {self.schema}_copy.{table}"
                        )
                    change = f"UPDATE {self.schema}.{target} SET {column} = ${len(values) + 1} WHERE {where}"
                    assert await link.execute(change, *values, value) == "UPDATE 1"
            except (asyncpg.PostgresError, asyncpg.DataError):
                return False
        return True


async def audit_all(store: Store, expected: Mapping[str, Expected]) -> list[Fault]:
    """The faults that an audit of each run finds."""
    found = []
    for run_id, wanted in expected.items():
        if await store.get_run(run_id) is None:
            raise RunError(f"there is no run {run_id}")
        counted = await (await store.frontier(run_id, wanted.options)).audit()
        found += counted.faults
        assert counted.balanced == (not counted.faults), counted
    return found


async def repair_all(store: Store, expected: Mapping[str, Expected]) -> list[str]:
    """Repair each run. Returns what was lost."""
    return [
        lost
        for run_id, wanted in expected.items()
        for lost in await (await store.frontier(run_id, wanted.options)).repair()
    ]
