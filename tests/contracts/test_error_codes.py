"""What the errors of each server mean: whether Shoal waits, tries a few times, or gives up. The servers raise them."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pymysql
import pytest
from kazoo import exceptions as kazoo_exceptions
from obstore.exceptions import GenericError, PermissionDeniedError

from shoal.clients import errors
from shoal.clients.errors import Severity
from shoal.clients.object_urls import parse_place
from shoal.clients.objects import explain as explain_storage
from shoal.clients.postgres import severity as postgres_severity
from shoal.clients.redis import CODES as REDIS_CODES
from shoal.clients.redis import RedisAddress, RedisClient
from shoal.errors import (
    CoordinatorAwayError,
    CoordinatorError,
    FrontierError,
    SinkError,
    StoreAwayError,
    StoreError,
    StoreFullError,
)
from shoal.frontier.postgres import PostgresStore
from shoal.frontier.sqlite import SQLiteStore
from shoal.item import encode_item
from shoal.ports import LoggedItem, Run
from shoal.runs.cluster.zookeeper_session import ZookeeperAddress, ZookeeperSession
from shoal.sinks import open_sink
from shoal.sinks.drainer import is_retryable
from tests.contracts.postgres_steps import ask, schema_of
from tests.support.databases import MariaServer, PostgresServer, RedisServer, ZookeeperServer, shared

AWAY, UNCERTAIN, FINAL = Severity.AWAY, Severity.UNCERTAIN, Severity.FINAL
FRONTIER_ERRORS = {AWAY: StoreAwayError, UNCERTAIN: FrontierError, FINAL: StoreError}
_ITEMS = [LoggedItem(1, b"\0" * 16, 0, encode_item({"n": 1}))]


# -- PostgreSQL

POSTGRES = {
    "08000": AWAY, "08006": AWAY, "08P01": AWAY, "0A000": FINAL, "21000": FINAL, "22001": FINAL, "23514": FINAL,
    "23505": UNCERTAIN, "25006": AWAY, "25P02": UNCERTAIN, "25P03": AWAY, "28000": FINAL, "28P01": FINAL,
    "3D000": FINAL, "40001": AWAY, "40P01": AWAY, "40003": AWAY, "42501": FINAL, "42P01": FINAL, "53000": AWAY,
    "53100": AWAY, "53200": AWAY, "53300": AWAY, "53400": AWAY, "54000": FINAL, "55000": UNCERTAIN, "55006": AWAY,
    "55P03": AWAY, "57014": AWAY, "57P01": AWAY, "57P03": AWAY, "57P05": AWAY, "58000": UNCERTAIN, "58030": AWAY,
    "58P01": UNCERTAIN, "72000": UNCERTAIN, "F0000": UNCERTAIN, "HV000": UNCERTAIN, "P0001": UNCERTAIN,
    "XX000": UNCERTAIN, "XX001": FINAL, "XX002": FINAL, "ZZ999": UNCERTAIN,
}  # fmt: skip
"""Some of them, of all classes. ZZ999 is one that nobody knows."""


def _all_postgres_codes() -> set[str]:
    """All error codes of PostgreSQL, without success, warnings and missing data, which are not errors."""
    classes = [asyncpg.PostgresError]
    for each in classes:
        classes.extend(each.__subclasses__())
    codes = {
        str(each.sqlstate) for each in classes if each.sqlstate and not each.sqlstate.startswith(("00", "01", "02"))
    }
    return {code for code in codes if len(code) == 5}


def test_the_classes_of_postgres() -> None:
    assert {code: postgres_severity(code) for code in POSTGRES} == POSTGRES


async def test_every_error_of_postgres_through_the_frontier() -> None:
    url = f"{shared(PostgresServer).url}?schema=t_error_codes&timeout=20"
    store = await PostgresStore.open(url)
    try:
        client = store._database
        await ask(
            url,
            f"""CREATE FUNCTION "{client._functions}".raise_code(code text) RETURNS integer LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = code; END $$""",
        )
        codes = _all_postgres_codes() | POSTGRES.keys()
        assert len(codes) > 200
        for code in sorted(codes - {"3F000", "40001", "40P01"}):  # the client repeats these calls
            with pytest.raises(FrontierError) as caught:
                await client.call("raise_code", code)
            error = StoreFullError if code == "53100" else FRONTIER_ERRORS[postgres_severity(code)]
            assert type(caught.value) is error, code
            assert "on purpose" in str(caught.value)
        assert await store.get_run("none") is None  # it still works
    finally:
        await store.close()
        await ask(url, f"DROP SCHEMA {schema_of(url)} CASCADE")


def _maria(server: MariaServer) -> Any:
    return pymysql.connect(
        host="127.0.0.1", port=server.port, user="shoal", password="secret", autocommit=True, ssl_disabled=True
    )


async def _written(spec: str) -> SinkError | None:
    """The error of a write; None if there is none."""
    sink = open_sink(spec, run_id="run")
    try:
        await sink.open(b"")
        await sink.write(_ITEMS)
    except SinkError as exc:
        return exc
    finally:
        await sink.close(finished=False)
    return None


async def test_errors_of_postgres_through_an_output() -> None:
    server = shared(PostgresServer)
    spec = f"{server.url}?schema=failing&table=item"
    await ask(server.url, "CREATE SCHEMA failing")
    try:
        sink = open_sink(spec, run_id="first")
        await sink.open(b"")
        await sink.write(_ITEMS)
        await sink.close(finished=True)
        for code in sorted(POSTGRES.keys() - {"23505", "40001", "40P01", "42P01", "42501"}):  # repeated, or explained
            await ask(
                server.url,
                f"""CREATE OR REPLACE FUNCTION failing.fail() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '{code}'; END $$""",
            )
            await ask(
                server.url,
                "CREATE OR REPLACE TRIGGER fail BEFORE INSERT ON failing.item FOR EACH ROW "
                "EXECUTE FUNCTION failing.fail()",
            )
            error = await _written(spec)
            assert error is not None, code
            assert is_retryable(error) is (POSTGRES[code] is not FINAL), f"{code}: {error}"
    finally:
        await ask(server.url, "DROP SCHEMA failing CASCADE")


# -- MySQL and MariaDB

MARIA = {
    1020: True, 1021: True, 1026: True, 1030: True, 1037: True, 1040: True, 1041: True, 1047: True, 1053: True,
    1114: True, 1129: True, 1158: True, 1180: True, 1203: True, 1205: True, 1213: True, 1226: True, 1290: True,
    1297: True, 1317: True, 1792: True, 1836: True, 1874: True, 1927: True, 1969: True, 3024: True, 3101: True,
    1044: False, 1045: False, 1048: False, 1049: False, 1064: False, 1118: False, 1142: False, 1235: False,
    1292: False, 1364: False, 1366: False, 1406: False, 1452: False, 1644: False, 4025: False,
    9999: True,  # one that nobody knows
}  # fmt: skip
"""Error numbers, and whether a retry can help."""


async def test_errors_of_maria_through_an_output() -> None:
    server = shared(MariaServer)
    with closing(_maria(server)) as link:
        link.query("CREATE DATABASE failing")
        spec = server.url.removesuffix("shoal") + "failing?table=item"
        try:
            sink = open_sink(spec, run_id="first")
            await sink.open(b"")
            await sink.write(_ITEMS)
            await sink.close(finished=True)
            for number, retryable in MARIA.items():
                link.query(
                    "CREATE OR REPLACE TRIGGER failing.fail BEFORE INSERT ON failing.item FOR EACH ROW "
                    f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'on purpose'"
                )
                error = await _written(spec)
                assert error is not None, number
                assert is_retryable(error) is retryable, f"{number}: {error}"
        finally:
            link.query("DROP DATABASE failing")


# -- Redis


async def test_every_error_of_redis() -> None:
    client = await RedisClient.open(RedisAddress.parse(shared(RedisServer).url))
    try:
        for code, meaning in REDIS_CODES.items():
            if code == "NOSCRIPT":  # the client handles it
                continue
            details = "3999 127.0.0.1:6381" if code in ("ASK", "MOVED") else "on purpose"
            with pytest.raises(FrontierError) as caught:
                await client._call("EVAL", f"return redis.error_reply('{code} {details}')", 0)
            expected = StoreFullError if code in ("OOM", "MISCONF") else FRONTIER_ERRORS[meaning.severity]
            assert type(caught.value) is expected, code
            assert "{prefix" not in str(caught.value)
        for code, error in (("NEWCODE", FrontierError), ("ERR", StoreError)):
            with pytest.raises(FrontierError) as caught:
                await client._call("EVAL", f"return redis.error_reply('{code} on purpose')", 0)
            assert type(caught.value) is error
            assert "on purpose" in str(caught.value)
    finally:
        await client.close()


async def test_a_waiting_call_when_the_server_becomes_a_replica() -> None:
    """UNBLOCKED: this server wakes up all calls that wait when it may not answer them any more."""
    server = RedisServer()
    try:
        client = await RedisClient.open(RedisAddress.parse(server.url))
        other = await RedisClient.open(RedisAddress.parse(server.url))
        await other._call("SET", f"{client.address.prefix}x", "1")
        waiting = asyncio.ensure_future(client._call("BLPOP", f"{client.address.prefix}list", 8))
        while b"blocked_clients:1" not in _text(await other._call("INFO", "clients")):
            await asyncio.sleep(0.01)
        await other._call("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreAwayError):
            await waiting
        await client.close()
        await other.close()
    finally:
        server.close()


def _text(info: dict[str, Any]) -> bytes:
    return "\n".join(f"{name}:{value}" for name, value in info.items()).encode()


BROKER = """
import sys
import redis
from shoal.http import Request
from shoal.ports import Lease
from shoal.api.celery import messages as broker
from shoal.api.celery.app import app
port = int(sys.argv[1])
app.conf.broker_url = f"redis://127.0.0.1:{port}/0"
leases = [Lease(Request("http://a.example/"), b"x" * 16, 1, 1, "a.example", 0.0)]
client = redis.Redis(port=port)
for before, after in (
    ("PING", "PING"),
    ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    ("CONFIG SET min-replicas-to-write 3", "CONFIG SET min-replicas-to-write 0"),
):
    client.execute_command(*before.split())
    accepted = broker._publish("session", "store", leases)
    client.execute_command(*after.split())
    print(accepted, broker._publish("session", "store", leases))
"""


def test_no_error_of_the_broker_is_final() -> None:
    """A broker that cannot take a task now takes none, and the next one when it can."""
    server = RedisServer()
    try:
        command = [sys.executable, "-c", BROKER, str(server.port)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        server.close()
    assert done.stdout.splitlines() == ["1 1", "0 1", "0 1", "0 1"]
    assert done.stderr.count("the broker does not accept tasks, retrying: ") == 3
    assert done.stderr.count("its address is CELERY_BROKER_URL") == 3


# -- SQLite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "crawl.db"


async def test_a_file_that_another_program_has_locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.frontier.sqlite.file._BUSY_SECONDS", 0.1)
    store = await SQLiteStore.open(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreAwayError, match=r"another program holds a lock on it; nothing was changed"):
            await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
        other.execute("ROLLBACK")
    await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
    await store.close()


async def test_a_file_that_became_read_only(path: Path) -> None:
    store = await SQLiteStore.open(path)
    await store._file.read(lambda: store._file.db.execute("PRAGMA query_only = on"))
    with pytest.raises(FrontierError, match="it is read-only; check the permissions") as caught:
        await store.create_run(Run(run_id="r", spider="s", state="running", created_at=1.0))
    assert type(caught.value) is FrontierError
    await store.close()


@pytest.mark.parametrize(
    ("statement", "code", "severity"),
    [
        ("INSERT INTO t VALUES (1), (1)", "CONSTRAINT", FINAL),
        ("INSERT INTO t VALUES ('x')", "MISMATCH", FINAL),
        ("INSERT INTO t VALUES (zeroblob(2000000000))", "TOOBIG", FINAL),
        ("SELECT nothing FROM t", "ERROR", UNCERTAIN),
    ],
)
def test_errors_of_sqlite(statement: str, code: str, severity: Severity) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        with pytest.raises(sqlite3.Error) as caught:
            database.execute(statement)
    assert caught.value.sqlite_errorname.startswith(f"SQLITE_{code}")  # type: ignore[attr-defined]
    assert errors.meaning(caught.value).severity is severity


@pytest.mark.parametrize(
    ("content", "says"), [(b"no database, but long enough " * 40, "not a SQLite"), (b"SQLite format 3\0" * 90, "")]
)
async def test_an_output_that_is_no_database_is_not_retried(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "items.db").write_bytes(content)
    error = await _written(str(tmp_path / "items.db"))
    assert error is not None
    assert says in str(error)
    assert not is_retryable(error)


# -- ZooKeeper


async def test_errors_of_zookeeper() -> None:
    session = await ZookeeperSession.open(ZookeeperAddress.parse(shared(ZookeeperServer).url), 5.0)
    away = {-1, -4, -7, -12, -13, -14, -112, -118, -119, -122, -125, -127}
    try:
        for code, kind in list(kazoo_exceptions.EXCEPTIONS.items()):
            with pytest.raises(CoordinatorError) as caught:
                async with session.step():
                    raise kind
            assert isinstance(caught.value, CoordinatorAwayError) is (code in away), kind
    finally:
        await session.close()


# -- object storage


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (400, "RequestTimeout", True), (400, "BadDigest", True), (400, "InvalidArgument", False),
        (403, "AccessDenied", False), (403, "RequestTimeTooSkewed", False), (403, "UserRateLimitExceeded", True),
        (404, "NoSuchBucket", False), (408, "", True), (409, "OperationAborted", True), (412, "", True),
        (429, "TooManyRequests", True), (500, "InternalError", True), (501, "NotImplemented", False),
        (503, "SlowDown", True), (507, "XMinioStorageFull", True),
    ],
)  # fmt: skip
def test_errors_of_object_storage(status: int, code: str, retryable: bool) -> None:
    text = f"Generic S3 error: Server returned non-2xx status code: {status} x: <Error><Code>{code}</Code></Error>"
    kind = PermissionDeniedError if status == 403 else GenericError
    place, _ = parse_place("s3://bucket/folder")
    told, can_retry = explain_storage(kind(text), place)
    assert can_retry is retryable, told
