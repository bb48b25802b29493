"""Outputs under attack: what is in them, and copies of them."""

from __future__ import annotations

import csv
import io
import json
import secrets
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pyarrow.parquet as pq
import pymysql

from tests.nemesis.judge import Item
from tests.nemesis.proxy import HoldingProxy
from tests.support.databases import MariaServer, PostgresServer, shared
from tests.support.object_storage import AzureServer


class Destination(ABC):
    """One empty output, for one run. Everything but ``spec`` goes around the proxy."""

    marks: ClassVar[tuple[bytes, ...]] = ()
    """What the proxy can hold back."""
    stops_when_set_back: ClassVar[bool] = False
    """Whether an output that was set back stops the run."""
    proxy: HoldingProxy | None = None

    @property
    @abstractmethod
    def spec(self) -> str:
        """For ``-o``."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Credentials."""
        return {}

    @abstractmethod
    def items(self) -> list[Item]: ...

    @abstractmethod
    def save(self) -> Any:
        """A copy of everything in the output."""

    @abstractmethod
    def set_back(self, saved: Any) -> None:
        """Put a copy back, as a restore of a backup does."""

    def close(self) -> None:
        if self.proxy is not None:
            self.proxy.close()


def _items(rows: Iterable[Mapping[str, Any]]) -> list[Item]:
    return [Item(str(row["page"]), int(row["record"]), int(row["visit"])) for row in rows]


class FileDestination(Destination):
    """A file."""

    stops_when_set_back = True
    ending: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"items.{self.ending}"

    @property
    def spec(self) -> str:
        return str(self._path)

    def _files(self) -> list[Path]:
        parts = self._path.with_name(self._path.name + ".parts")
        return [path for path in (self._path, *(sorted(parts.iterdir()) if parts.is_dir() else ())) if path.is_file()]

    def save(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self._files()}

    def set_back(self, saved: dict[Path, bytes]) -> None:
        for path in set(self._files()) - saved.keys():
            path.unlink(missing_ok=True)
        for path, content in saved.items():
            restored = path.with_name(".restored")
            with suppress(FileNotFoundError):  # the folder of parts may be gone
                restored.write_bytes(content)
                restored.rename(path)

    def items(self) -> list[Item]:
        return self._read() if self._path.exists() else []

    @abstractmethod
    def _read(self) -> list[Item]: ...


class JsonLines(FileDestination):
    ending = "jsonl"

    def _read(self) -> list[Item]:
        return _items(json.loads(line) for line in self._path.read_text().splitlines())


class Csv(FileDestination):
    ending = "csv"

    def _read(self) -> list[Item]:
        with self._path.open(newline="") as file:
            return _items(csv.DictReader(file, strict=True))


class Parquet(FileDestination):
    ending = "parquet"

    def _read(self) -> list[Item]:
        return _items(pq.read_table(self._path).to_pylist())


class SQLite(FileDestination):
    ending = "db"
    stops_when_set_back = False

    def _read(self) -> list[Item]:
        with closing(sqlite3.connect(self._path)) as database:
            database.row_factory = sqlite3.Row
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name = 'item'")]
            return _items(dict(row) for row in database.execute("SELECT * FROM item")) if tables else []

    def save(self) -> Any:
        with closing(sqlite3.connect(self._path, timeout=30)) as database, closing(sqlite3.connect(":memory:")) as copy:
            database.backup(copy)
            return copy.serialize() if copy.execute("SELECT 1 FROM sqlite_master").fetchone() else b""

    def set_back(self, saved: Any) -> None:
        """Through SQLite's own backup, which waits for the transactions of others."""
        with closing(sqlite3.connect(":memory:")) as copy, closing(sqlite3.connect(self._path, timeout=30)) as database:
            if saved:
                copy.deserialize(saved)
            copy.backup(database)


class Postgres(Destination):
    """A database of its own, with the dumps of pg_dump."""

    marks = (b"INSERT INTO", b"COMMIT", b"BEGIN")

    def __init__(self, folder: Path) -> None:
        self._server = shared(PostgresServer)
        self._name = f"outputs_{secrets.token_hex(4)}"
        self.proxy = HoldingProxy(self._server.port)
        self._run("psql", "-d", "postgres", "-c", f"CREATE DATABASE {self._name}")

    @property
    def spec(self) -> str:
        assert self.proxy is not None
        return f"postgresql://shoal@127.0.0.1:{self.proxy.port}/{self._name}"

    def _run(self, program: str, *arguments: str, text: str | None = None) -> str:
        place = ["-h", "127.0.0.1", "-p", str(self._server.port), "-U", "shoal"]
        command = [self._server.program(program), *place, *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

    def items(self) -> list[Item]:
        tables = self._run("psql", "-d", self._name, "-At", "-c", "SELECT tablename FROM pg_tables")
        if "item" not in tables.splitlines():
            return []
        rows = self._run("psql", "-d", self._name, "--csv", "-c", "SELECT page, record, visit FROM item")
        return _items(csv.DictReader(io.StringIO(rows)))

    def save(self) -> Any:
        return self._run("pg_dump", "--clean", "--if-exists", "-d", self._name)

    def set_back(self, saved: Any) -> None:
        clean = "DROP SCHEMA public CASCADE; CREATE SCHEMA public;"
        self._run("psql", "-d", self._name, "-q", "-1", "-v", "ON_ERROR_STOP=1", text=clean + saved)


class MySQL(Destination):
    """A database of its own. A copy is put back by renaming tables, which is one step."""

    marks = (b"INSERT INTO", b"COMMIT", b"BEGIN", b"UPDATE ")

    def __init__(self, folder: Path) -> None:
        self._server = shared(MariaServer)
        self._name = f"outputs_{secrets.token_hex(4)}"
        self.proxy = HoldingProxy(self._server.port)
        self._query(f"CREATE DATABASE {self._name}")

    @property
    def spec(self) -> str:
        assert self.proxy is not None
        return f"mysql://shoal:secret@127.0.0.1:{self.proxy.port}/{self._name}"

    def _query(self, *statements: str) -> list[dict[str, Any]]:
        connection = pymysql.connect(
            host="127.0.0.1", port=self._server.port, user="shoal", password="secret", autocommit=True,
            ssl_disabled=True, cursorclass=pymysql.cursors.DictCursor,
        )  # fmt: skip
        with closing(connection), connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def _tables(self, database: str) -> list[str]:
        return [next(iter(row.values())) for row in self._query(f"SHOW TABLES FROM {database}")]

    def items(self) -> list[Item]:
        if "item" not in self._tables(self._name):
            return []
        return _items(self._query(f"SELECT page, record, visit FROM {self._name}.item"))

    def save(self) -> Any:
        copy = f"{self._name}_{secrets.token_hex(3)}"
        tables = self._tables(self._name)
        self._query(f"CREATE DATABASE {copy}")
        if tables:
            locks = ", ".join(f"{self._name}.{table} READ" for table in tables)
            made = [f"CREATE TABLE {copy}.{table} LIKE {self._name}.{table}" for table in tables]
            filled = [f"INSERT INTO {copy}.{table} SELECT * FROM {self._name}.{table}" for table in tables]
            writes = ", ".join(f"{copy}.{table} WRITE" for table in tables)
            self._query(*made, f"LOCK TABLES {locks}, {writes}", *filled, "UNLOCK TABLES")
        return copy

    def set_back(self, saved: Any) -> None:
        rest = f"{self._name}_{secrets.token_hex(3)}"
        away = [f"{self._name}.{table} TO {rest}.{table}" for table in self._tables(self._name)]
        back = [f"{saved}.{table} TO {self._name}.{table}" for table in self._tables(saved)]
        if away or back:
            self._query(f"CREATE DATABASE {rest}", f"RENAME TABLE {', '.join(away + back)}")


class Azure(Destination):
    """A container of its own, with small parts."""

    marks = (b"PUT /", b"DELETE /")

    def __init__(self, folder: Path) -> None:
        self._server = shared(AzureServer)
        self._bucket = self._server.bucket()
        self.proxy = HoldingProxy(self._server.port)

    @property
    def spec(self) -> str:
        return f"az://{self._bucket}/items.jsonl?part_mb=0.002&part_seconds=1"

    @property
    def environment(self) -> Mapping[str, str]:
        assert self.proxy is not None
        place = self._server.endpoint.replace(f":{self._server.port}", f":{self.proxy.port}")
        return {**self._server.variables, "AZURE_STORAGE_ENDPOINT": place}

    def items(self) -> list[Item]:
        """Those of the manifest. A part that arrives after the end of the run is not in it."""
        objects = {path.rpartition("/")[2]: data for path, data in self._server.objects(self._bucket).items()}
        manifest = json.loads(objects.get("_manifest-jsonl.json", b'{"parts": []}'))
        parts = [objects[part["name"]] for part in manifest["parts"] if part["name"] in objects]
        return _items(json.loads(line) for data in parts for line in data.splitlines())

    def save(self) -> Any:
        return self._server.objects(self._bucket)

    def set_back(self, saved: Any) -> None:
        store = self._server.store(self._bucket)
        for path in self._server.objects(self._bucket).keys() - saved.keys():
            with suppress(FileNotFoundError):
                obstore.delete(store, path)
        for path, data in saved.items():
            obstore.put(store, path, data)


DESTINATIONS: dict[str, type[Destination]] = {
    "jsonl": JsonLines,
    "csv": Csv,
    "parquet": Parquet,
    "sqlite": SQLite,
    "postgresql": Postgres,
    "mysql": MySQL,
    "azure": Azure,
}
