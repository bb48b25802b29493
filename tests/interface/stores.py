"""A small store of each backend as text, and how to write and read it."""

from __future__ import annotations

import json
import secrets
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import redis

from shoal.frontier import open_store
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Failure,
    Frontier,
    FrontierOptions,
    HostUpdate,
    Lease,
    Run,
    Store,
)
from shoal.testing.steps import page
from tests.support.databases import PostgresServer, RedisServer, shared

RUN = "frozen"
COOKIES = f"run/{RUN}/jar//shop.example"


async def fill(store: Store) -> None:
    """Write requests of all states, items, a role, a fact, documents, cookies, and the settings of a host."""
    await store.create_run(Run(run_id=RUN, spider="books", state="running", created_at=1_790_000_000.0))
    frontier = await store.frontier(RUN, FrontierOptions(concurrency_per_host=100, max_attempts=2))
    await frontier.push([page(number, "shop.example") for number in range(5)])
    leases = (await frontier.lease(3, 600.0)).leases
    cookies = CookieWrite(COOKIES, b"cookies", b"", b"version1")
    await frontier.store_cookies(cookies, [_completion(leases[0])])
    await frontier.fail([Failure(lease=leases[1], kind="dns", reason="no such name")])
    await frontier.release([leases[2]])
    claim = await frontier.claim("sink:books.jsonl", 600.0)
    assert claim is not None
    await frontier.advance(claim, b"cursor", 600.0)
    await frontier.relinquish(Claim(claim.role, claim.token, b"cursor", claim.epoch))
    await frontier.remember("robots shop.example", b"fact", 10 * 365 * 86400.0)
    await store.put_document("schedule/daily", b"document", replaces=b"", version=b"version1")
    await frontier.update_host("shop.example", HostUpdate(delay=0.25))


def _completion(lease: Lease) -> Completion:
    return Completion(lease=lease, items=[b"one", b"two"], children=[page("child", "shop.example")])


async def check(store: Store) -> None:
    """Check what `fill` wrote, and finish the run."""
    (run,) = await store.list_runs()
    assert (run.run_id, run.spider, run.state) == (RUN, "books", "running")
    frontier = await store.frontier(RUN, FrontierOptions(concurrency_per_host=100, max_attempts=2))
    stats = await frontier.stats()
    assert (stats.pushed, stats.ready, stats.done, stats.dead, stats.items) == (6, 4, 1, 1, 2)
    assert stats.balanced
    assert [item.payload for item in await frontier.read_items(0, 10)] == [b"one", b"two"]
    assert await frontier.dead_kinds() == {"dns": 1}
    assert [(role.role, role.cursor) for role in await frontier.roles()] == [("sink:books.jsonl", b"cursor")]
    assert await frontier.recall("robots shop.example") == b"fact"
    documents = await store.list_documents("", limit=10)
    values = {document.key: document.value for document in documents}
    assert (values["schedule/daily"], values[COOKIES]) == (b"document", b"cookies")
    assert (await frontier.host_state("shop.example")).delay == 0.25
    await _finish(frontier)


async def _finish(frontier: Frontier) -> None:
    await frontier.update_host("shop.example", HostUpdate(delay=0.0))
    leased = await frontier.lease(10, 600.0)
    assert leased.cookies == 1
    urls = sorted(lease.request.url.rpartition("/")[2] for lease in leased.leases)
    assert urls == ["2", "3", "4", "child"]
    await frontier.complete([Completion(lease=lease) for lease in leased.leases])
    assert (await frontier.stats()).remaining == 0


class Backend(NamedTuple):
    """How a store becomes text, and text a store."""

    suffix: str
    empty: Callable[[Path], object]
    """A context manager: the URL of an empty place for a store."""
    dump: Callable[[str], str]
    restore: Callable[[str, str], None]


# -- SQLite


@contextmanager
def _file(folder: Path) -> Iterator[str]:
    yield f"sqlite:///{folder / 'store.db'}"


def _path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def _dump_file(url: str) -> str:
    with closing(sqlite3.connect(_path_of(url))) as database:
        pragmas = [f"PRAGMA {name} = {_pragma(database, name)};" for name in ("user_version", "application_id")]
        return "\n".join([*database.iterdump(), *pragmas]) + "\n"


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])


def _restore_file(url: str, text: str) -> None:
    with closing(sqlite3.connect(_path_of(url))) as database:
        database.executescript(text)


# -- Redis


@contextmanager
def _prefix(folder: Path) -> Iterator[str]:
    yield f"{shared(RedisServer).url}?prefix=frozen-{secrets.token_hex(4)}"


def _dump_keys(url: str) -> str:
    address, _, prefix = url.partition("?prefix=")
    with redis.Redis.from_url(address) as client:
        keys = sorted(client.scan_iter(f"*{prefix}*"))
        values = {key.decode("latin-1").replace(prefix, "PREFIX"): client.dump(key).hex() for key in keys}
    return json.dumps(values, indent=1) + "\n"


def _restore_keys(url: str, text: str) -> None:
    address, _, prefix = url.partition("?prefix=")
    with redis.Redis.from_url(address) as client:
        for key, value in json.loads(text).items():
            client.restore(key.replace("PREFIX", prefix).encode("latin-1"), 0, bytes.fromhex(value))


# -- PostgreSQL


@contextmanager
def _database(folder: Path) -> Iterator[str]:
    server, name = shared(PostgresServer), f"frozen_{secrets.token_hex(4)}"
    _psql(server.url, f"CREATE DATABASE {name}")
    try:
        yield f"{server.url.rpartition('/')[0]}/{name}"
    finally:
        _psql(server.url, f"DROP DATABASE {name} WITH (FORCE)")


def _psql(url: str, text: str) -> None:
    command = [PostgresServer.program("psql"), url, "-q", "-v", "ON_ERROR_STOP=1"]
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)


def _dump_tables(url: str) -> str:
    options = ("--schema=shoal", "--no-owner", "--inserts")
    command = [PostgresServer.program("pg_dump"), url, *options]
    text = subprocess.run(command, text=True, check=True, capture_output=True).stdout
    kept = [line for line in text.splitlines() if line and not line.startswith("--")]
    return "\n".join(kept) + "\n"


BACKENDS = {
    "sqlite": Backend("sqlite.sql", _file, _dump_file, _restore_file),
    "redis": Backend("redis.json", _prefix, _dump_keys, _restore_keys),
    "postgresql": Backend("postgresql.sql", _database, _dump_tables, _psql),
}


async def written(backend: Backend, url: str) -> str:
    """A store as text, written by this version."""
    store = await open_store(url)
    try:
        await fill(store)
    finally:
        await store.close()
    return backend.dump(url)
