"""Every sink keeps the contract."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow.parquet as pq
import pymysql
import pytest

from shoal.ports import Sink
from shoal.sinks import open_sink
from shoal.testing import SinkContract, SinkHarness
from tests.support.databases import MariaServer, PostgresServer, shared
from tests.support.object_storage import AzureServer, ObjectServer, S3Server, use

_spaces = count()
_TOO_WIDE = {f"f{number}": number for number in range(5)}
_SELECT = "SELECT * FROM item ORDER BY _run, _seq"


class FileHarness(SinkHarness):
    """A file in an empty folder."""

    replaces = True

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"out.{self.ending}"

    ending: str

    def make(self, run_id: str = "run", on_reject: Callable[[int], None] | None = None) -> Sink:
        options = ["max_columns=4"] if self.rejected_item is not None else []
        options += ["replace=yes"] if self.replaces else []
        return open_sink(f"{self.path}?{'&'.join(options)}", run_id=run_id, on_reject=on_reject)

    async def save(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.path.parent.rglob("*") if path.is_file()}

    async def restore(self, saved: dict[Path, bytes]) -> None:
        """As a backup tool does it: new files replace those that are there."""
        for path in self.path.parent.rglob("*"):
            if path.is_file() and path not in saved:
                path.unlink()
        for path, content in saved.items():
            path.parent.mkdir(exist_ok=True)
            restored = path.with_name(path.name + ".restored")
            restored.write_bytes(content)
            restored.rename(path)


class JsonLinesHarness(FileHarness):
    ending = "jsonl"
    stops_when_set_back = True

    async def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


class CsvHarness(FileHarness):
    ending = "csv"
    rejected_item = _TOO_WIDE
    stops_when_set_back = True

    async def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file, strict=True))


class ParquetHarness(FileHarness):
    ending = "parquet"
    rejected_item = _TOO_WIDE
    stops_when_set_back = True

    async def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return list(pq.read_table(self.path).to_pylist())


class SQLiteHarness(FileHarness):
    ending = "db"
    replaces = False
    rejected_item = _TOO_WIDE

    async def read(self) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.path)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(_SELECT)]

    async def save(self) -> bytes | None:
        if not self.path.exists():
            return None
        with closing(sqlite3.connect(self.path)) as database:
            return database.serialize()

    async def restore(self, saved: bytes | None) -> None:
        """In place, as ``.restore`` of SQLite's shell does it. Without a copy, the file is removed."""
        if saved is None:
            self.path.unlink()
            return
        with closing(sqlite3.connect(":memory:")) as copy, closing(sqlite3.connect(self.path)) as database:
            copy.deserialize(saved)
            copy.backup(database)


class PostgresHarness(SinkHarness):
    """A schema of its own."""

    replaces = False
    rejected_item = _TOO_WIDE

    def __init__(self, folder: Path) -> None:
        self.url, self.name = shared(PostgresServer).url, f"sinks{next(_spaces)}"
        asyncio.run(self._query(f"CREATE SCHEMA {self.name}"))

    def make(self, run_id: str = "run", on_reject: Callable[[int], None] | None = None) -> Sink:
        return open_sink(f"{self.url}?schema={self.name}&max_columns=4", run_id=run_id, on_reject=on_reject)

    async def read(self) -> list[dict[str, Any]]:
        return await self._query(f"SET search_path = {self.name}", _SELECT)

    async def save(self) -> str:
        saved = f"saved{next(_spaces)}"
        await self._query(f"CREATE SCHEMA {saved}")
        await self._copy(self.name, saved)
        return saved

    async def restore(self, saved: str) -> None:
        await self._copy(saved, self.name)

    async def _copy(self, source: str, target: str) -> None:
        """Replace the tables of a schema, in one transaction."""
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = '{}'"
        old, new = [{row["tablename"] for row in await self._query(tables.format(name))} for name in (target, source)]
        await self._query(
            "BEGIN",
            *(f"DROP TABLE {target}.{table}" for table in old),
            *(f"CREATE TABLE {target}.{table} (LIKE {source}.{table} INCLUDING ALL)" for table in new),
            *(f"INSERT INTO {target}.{table} SELECT * FROM {source}.{table}" for table in new),
            "COMMIT",
        )

    async def close(self) -> None:
        await self._query(f"DROP SCHEMA {self.name} CASCADE")

    async def _query(self, *statements: str) -> list[dict[str, Any]]:
        connection = await asyncpg.connect(self.url)
        try:
            for statement in statements:
                found = await connection.fetch(statement)
            return [dict(row) for row in found]
        finally:
            await connection.close()


class MySQLHarness(SinkHarness):
    """A database of its own."""

    replaces = False
    rejected_item = _TOO_WIDE

    def __init__(self, folder: Path) -> None:
        self.server, self.name = shared(MariaServer), f"sinks{next(_spaces)}"
        self._query(f"CREATE DATABASE {self.name}")

    def make(self, run_id: str = "run", on_reject: Callable[[int], None] | None = None) -> Sink:
        url = self.server.url.removesuffix("/shoal") + f"/{self.name}?max_columns=4"
        return open_sink(url, run_id=run_id, on_reject=on_reject)

    async def read(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._query, _SELECT.replace("item", f"{self.name}.item"))

    async def save(self) -> str:
        return await asyncio.to_thread(self._copy, self.name)

    async def restore(self, saved: str) -> None:
        await asyncio.to_thread(self._swap, saved)

    def _copy(self, source: str) -> str:
        target = f"saved{next(_spaces)}"
        self._query(f"CREATE DATABASE {target}")
        for table in self._tables(source):
            self._query(f"CREATE TABLE {target}.{table} LIKE {source}.{table}")
            self._query(f"INSERT INTO {target}.{table} SELECT * FROM {source}.{table}")
        return target

    def _swap(self, saved: str) -> None:
        """Replace all tables by a copy, in one step."""
        trash, copy = f"trash{next(_spaces)}", self._copy(saved)
        self._query(f"CREATE DATABASE {trash}")
        moves = [f"{self.name}.{table} TO {trash}.{table}" for table in self._tables(self.name)]
        moves += [f"{copy}.{table} TO {self.name}.{table}" for table in self._tables(copy)]
        self._query(f"RENAME TABLE {', '.join(moves)}")

    def _tables(self, database: str) -> list[str]:
        rows = self._query(
            f"SELECT table_name AS name FROM information_schema.tables WHERE table_schema = '{database}'"
        )
        return [row["name"] for row in rows]

    async def close(self) -> None:
        await asyncio.to_thread(self._query, f"DROP DATABASE {self.name}")

    def _query(self, statement: str) -> list[dict[str, Any]]:
        connection = pymysql.connect(
            host="127.0.0.1", port=self.server.port, user="shoal", password="secret", autocommit=True,
            ssl_disabled=True, cursorclass=pymysql.cursors.DictCursor,
        )  # fmt: skip
        with closing(connection), connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())


class ObjectHarness(SinkHarness):
    """A bucket of its own. Parts of a few items make rewinds and crashes interesting."""

    replaces = False
    server: type[ObjectServer]
    ending = "jsonl"
    options = "part_mb=0.0001"

    def __init__(self, folder: Path) -> None:
        self._server, self._patch = shared(self.server), pytest.MonkeyPatch()
        use(self._server, self._patch)
        self.bucket = self._server.bucket()

    def make(self, run_id: str = "run", on_reject: Callable[[int], None] | None = None) -> Sink:
        url = f"{self._server.scheme}://{self.bucket}/some/items.{self.ending}?{self.options}"
        return open_sink(url, run_id=run_id, on_reject=on_reject)

    async def read(self) -> list[dict[str, Any]]:
        parts = await asyncio.to_thread(self._server.parts, self.bucket)
        return [item for content in parts.values() for item in self.items(content)]

    def items(self, content: bytes) -> list[dict[str, Any]]:
        return [json.loads(line) for line in content.splitlines()]

    async def save(self) -> dict[str, bytes]:
        return await asyncio.to_thread(self._server.objects, self.bucket)

    async def restore(self, saved: dict[str, bytes]) -> None:
        await asyncio.to_thread(self._server.restore, self.bucket, saved)

    async def close(self) -> None:
        self._patch.undo()


class S3Harness(ObjectHarness):
    server = S3Server


class AzureHarness(ObjectHarness):
    server = AzureServer


class AzureCsvHarness(ObjectHarness):
    server, ending, options = AzureServer, "csv", "part_mb=0.0001&max_columns=4"
    rejected_item = _TOO_WIDE

    def items(self, content: bytes) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True))


class S3ParquetHarness(ObjectHarness):
    server, ending, options = S3Server, "parquet", "part_mb=0.0001&max_columns=4"
    rejected_item = _TOO_WIDE

    def items(self, content: bytes) -> list[dict[str, Any]]:
        return list(pq.read_table(io.BytesIO(content)).to_pylist())


HARNESSES: dict[str, Callable[[Path], SinkHarness]] = {
    "jsonl": JsonLinesHarness,
    "csv": CsvHarness,
    "parquet": ParquetHarness,
    "sqlite": SQLiteHarness,
    "postgresql": PostgresHarness,
    "mysql": MySQLHarness,
    "s3": S3Harness,
    "azure": AzureHarness,
    "azure-csv": AzureCsvHarness,
    "s3-parquet": S3ParquetHarness,
}


@pytest.fixture(params=list(HARNESSES.values()), ids=list(HARNESSES))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    """Each kind in turn."""
    made: SinkHarness = request.param(tmp_path)
    return made


class TestSink(SinkContract):
    """On the kinds of the ``harness`` fixture."""
