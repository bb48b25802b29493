"""Outputs in databases: an old writer changes nothing, and a database that was set back is completed."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pymysql
import pytest

from shoal.errors import OutputTakenError, SinkError
from shoal.item import encode_item
from shoal.ports import Frontier, LoggedItem, Sink
from shoal.sinks import open_sink
from shoal.sinks.drainer import Drainer, export, is_retryable
from shoal.sinks.keys import Export
from shoal.sinks.patience import Patience
from tests.acceptance.test_database_sinks import Book, Place, in_memory, is_beyond, log_items, until
from tests.nemesis.proxy import HoldingProxy
from tests.support.databases import MariaServer, PostgresServer, shared


class FilePlace:
    """A SQLite database, with the methods of `Place` that these tests need."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "out.db"

    def spec(self, table: str | None = None, **options: Any) -> str:
        chosen = ({"table": table} if table else {}) | options
        return f"sqlite:///{self.path}?" + "&".join(f"{name}={value}" for name, value in chosen.items())

    async def query(self, statement: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
            database.row_factory = sqlite3.Row
            return [dict(row) for row in database.execute(statement)]


AnyPlace = Place | FilePlace


@pytest.fixture(params=["sqlite", "postgres", "maria"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPlace:
    if request.param == "sqlite":
        return FilePlace(tmp_path)
    return await Place(shared(PostgresServer if request.param == "postgres" else MariaServer)).create()


@pytest.fixture(params=[PostgresServer, MariaServer], ids=["postgres", "maria"])
async def server_place(request: pytest.FixtureRequest) -> Place:
    return await Place(shared(request.param)).create()


@pytest.fixture
async def maria() -> Place:
    return await Place(shared(MariaServer)).create()


def items(first: int, last: int, **fields: Any) -> list[LoggedItem]:
    return [
        LoggedItem(seq, seq.to_bytes(16, "big"), 0, encode_item({"n": seq} | fields)) for seq in range(first, last + 1)
    ]


async def opened(spec: str, state: bytes = b"", epoch: int = 0, run_id: str = "run", mode: Export = "") -> Sink:
    sink = open_sink(spec, run_id=run_id, export=mode)
    assert await sink.open(state, epoch) is None
    return sink


async def written(place: AnyPlace, last: int, *, epoch: int = 1, **options: Any) -> bytes:
    """The state after a process has written these items."""
    sink = await opened(place.spec(**options), epoch=epoch)
    await sink.write(items(1, last))
    state = await sink.flush()
    await sink.close(finished=False)
    return state


async def numbers(place: AnyPlace, table: str = "item", run_id: str = "run") -> list[int]:
    rows = await place.query(f"SELECT n FROM {table} WHERE _run = '{run_id}' ORDER BY _seq, n")
    return [row["n"] for row in rows]


async def outputs(place: AnyPlace) -> list[tuple[Any, ...]]:
    rows = await place.query("SELECT * FROM _shoal_outputs ORDER BY run, output")
    return [tuple(row.values()) for row in rows]


# -- an old writer


async def test_a_writer_that_comes_late(place: AnyPlace) -> None:
    state = await written(place, 3)
    late, successor = await opened(place.spec(), state, 2), await opened(place.spec(), state, 3)
    await successor.write(items(4, 10))
    with pytest.raises(OutputTakenError) as caught:
        await late.write(items(4, 4))
    assert caught.value.epoch == 3
    await late.close(finished=False)
    await successor.write(items(11, 12))
    await successor.close(finished=True)
    assert await numbers(place) == list(range(1, 13))
    assert await outputs(place) == [("run", "", 0, 3, 12, 0)]


def through(place: Place, gate: HoldingProxy) -> str:
    return place.spec().replace(f":{place.server.port}/", f":{gate.port}/")


async def test_a_write_that_the_network_delivers_late(server_place: Place) -> None:
    state = await written(server_place, 3)
    with closing(HoldingProxy(server_place.server.port)) as gate:
        gate.hold(b"SET seq = 5")
        late = await opened(through(server_place, gate), state, 2)
        writing = asyncio.create_task(late.write(items(4, 5)))
        await asyncio.to_thread(gate.held.wait, 20)
        successor = await opened(server_place.spec(), state, 3)
        await successor.write(items(4, 10))
        gate.release()
        with pytest.raises(OutputTakenError):
            await writing
        await late.close(finished=False)
    await successor.write(items(11, 12))
    await successor.close(finished=True)
    assert await numbers(server_place) == list(range(1, 13))


async def test_a_removal_of_stale_rows_that_the_network_delivers_late(server_place: Place) -> None:
    """The first write begins with it."""
    state = await written(server_place, 3)
    with closing(HoldingProxy(server_place.server.port)) as gate:
        gate.hold(b"DELETE FROM")
        late = await opened(through(server_place, gate), state, 2)
        writing = asyncio.create_task(late.write(items(4, 5)))
        await asyncio.to_thread(gate.held.wait, 20)
        successor = open_sink(server_place.spec(), run_id="run")
        taking_over = asyncio.create_task(successor.open(state, 3))
        assert not (await asyncio.wait({taking_over}, timeout=0.5))[0]  # the late writer has locked the row
        gate.release()
        assert await taking_over is None
        with pytest.raises(OutputTakenError):
            await writing
        await late.close(finished=False)
    await successor.write(items(4, 10))
    await successor.close(finished=True)
    assert await numbers(server_place) == list(range(1, 11))


async def test_a_successor_waits_for_a_transaction_and_removes_its_rows(server_place: Place) -> None:
    state = await written(server_place, 3)
    insertion = b"ON CONFLICT (_key)" if server_place.is_postgres else b"ON DUPLICATE KEY"
    with closing(HoldingProxy(server_place.server.port)) as gate:
        gate.hold(insertion)
        late = await opened(through(server_place, gate), state, 2)
        writing = asyncio.create_task(late.write(items(4, 6)))
        await asyncio.to_thread(gate.held.wait, 20)
        successor = open_sink(server_place.spec(), run_id="run")
        taking_over = asyncio.create_task(successor.open(state, 3))
        assert not (await asyncio.wait({taking_over}, timeout=0.5))[0]
        gate.release()
        await writing
        assert await taking_over is None
        await late.close(finished=False)
    assert await numbers(server_place) == list(range(1, 7))
    await successor.write(items(4, 5, x=1))
    await successor.close(finished=True)
    assert await numbers(server_place) == list(range(1, 6))


async def test_a_process_frozen_in_a_transaction_does_not_block_its_successor(server_place: Place) -> None:
    state = await written(server_place, 3)
    frozen: Any = await opened(server_place.spec(timeout=2), state, 2)
    await frozen._connection.run(frozen._begin(4, 0))
    successor = open_sink(server_place.spec(timeout=2), run_id="run")
    async with asyncio.timeout(30):
        while True:
            with suppress(SinkError):
                assert await successor.open(state, 3) is None
                break
    await successor.write(items(4, 5))
    await successor.close(finished=True)
    with pytest.raises(SinkError):
        await frozen.write(items(4, 4))
    await frozen.close(finished=False)
    assert await numbers(server_place) == list(range(1, 6))


async def test_outputs_of_one_database_have_rows_of_their_own(place: AnyPlace) -> None:
    specs = [(place.spec(), "one"), (place.spec("named"), "one"), (place.spec("named"), "two")]
    sinks = [await opened(spec, b"", epoch, run_id) for epoch, (spec, run_id) in enumerate(specs, 1)]
    for number, sink in enumerate(sinks, 1):
        await sink.write(items(1, number))
    for sink in sinks:
        await sink.close(finished=True)
    assert await outputs(place) == [("one", "", 0, 1, 1, 0), ("one", "named", 0, 2, 2, 0), ("two", "named", 0, 3, 3, 0)]


# -- a database that was set back


class Backup:
    """A real dump of a database, and its restoration while other processes use the database."""

    def __init__(self, place: AnyPlace, folder: Path) -> None:
        self._place, self._file, self._count = place, folder / "backup", 0

    def take(self) -> None:
        place = self._place
        if isinstance(place, FilePlace):
            with closing(sqlite3.connect(place.path)) as source, closing(sqlite3.connect(self._file)) as target:
                source.backup(target)
        elif place.is_postgres:
            self._file.write_bytes(
                _program("pg_dump", "--clean", "--if-exists", f"--schema={place.name}", place.server.url)
            )
        else:
            self._file.write_bytes(_program("mariadb-dump", *self._login(place), place.name))

    def restore(self) -> None:
        place = self._place
        if isinstance(place, FilePlace):
            with closing(sqlite3.connect(self._file)) as source, closing(sqlite3.connect(place.path)) as target:
                source.backup(target)
        elif place.is_postgres:
            self._restore_postgres(place)
        else:
            self._restore_maria(place)

    def _restore_postgres(self, place: Place) -> None:
        """In one transaction. A deadlock with the writer may end it."""
        for _ in range(20):
            command = ["psql", "-1", "-v", "ON_ERROR_STOP=1", "-f", str(self._file), place.server.url]
            done = subprocess.run(command, capture_output=True, check=False)
            if not done.returncode:
                return
            assert b"deadlock" in done.stderr, done.stderr

    def _restore_maria(self, place: Place) -> None:
        """Into a database beside it, whose tables then take the place of the others in one step."""
        self._count += 1
        side, trash = f"{place.name}_side{self._count}", f"{place.name}_trash{self._count}"
        for name in (side, trash):
            _program("mariadb", *self._login(place), "-e", f"CREATE DATABASE {name}")
        _program("mariadb", *self._login(place), side, input=self._file.read_bytes())
        moves = []
        for database, to in ((place.name, trash), (side, place.name)):
            tables = _program("mariadb", *self._login(place), "-N", "-e", f"SHOW TABLES FROM {database}").decode()
            moves += [f"{database}.{table} TO {to}.{table}" for table in tables.split()]
        _program("mariadb", *self._login(place), "-e", f"RENAME TABLE {', '.join(moves)}")

    @staticmethod
    def _login(place: Place) -> list[str]:
        return [
            "--no-defaults", "--skip-ssl", "--host=127.0.0.1", f"--port={place.server.port}", "--user=shoal",
            "--password=secret",
        ]  # fmt: skip


def _program(*command: str, input: bytes | None = None) -> bytes:
    done = subprocess.run(command, input=input, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_restored_while_a_drainer_writes(
    place: AnyPlace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backup, frontier = Backup(place, tmp_path), await in_memory()
    sink: Any = open_sink(place.spec(), run_id="run")
    sink.flush_every = 0.01
    drainer = Drainer(frontier, sink, "out", batch=7, poll=0.02)
    await drainer.start()
    running = asyncio.create_task(drainer.run())
    for first in (0, 300):
        await log_items(frontier, range(first, first + 300))
        await until(partial(is_beyond, drainer, first + 300))
        if not first:
            await asyncio.to_thread(backup.take)
    writing = asyncio.create_task(log_slowly(frontier, range(600, 1500)))
    await until(partial(is_beyond, drainer, 610))
    await asyncio.to_thread(backup.restore)
    await writing
    await drainer.finish(True)
    await running
    assert await numbers(place) == list(range(1500))
    assert "was set back: it ends with item 300 of" in caplog.text


async def log_slowly(frontier: Frontier, numbers: range) -> None:
    for first in numbers[::30]:
        await log_items(frontier, range(first, first + 30))
        await asyncio.sleep(0.02)


async def drained(place: AnyPlace, frontier: Frontier) -> None:
    patience = Patience(5, first_pause=0.01)
    drainer = Drainer(frontier, open_sink(place.spec(), run_id="run"), "out", batch=20, patience=patience)
    await drainer.start()
    await drainer.finish(True)


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["complete", "trimmed"])
async def test_restored_after_the_drainer_stopped(place: AnyPlace, tmp_path: Path, is_trimmed: bool) -> None:
    backup, frontier = Backup(place, tmp_path), await in_memory()
    for numbers_ in (range(60), range(60, 120)):
        await log_items(frontier, numbers_)
        await drained(place, frontier)
        if not numbers_.start:
            await asyncio.to_thread(backup.take)
    await asyncio.to_thread(backup.restore)
    assert await numbers(place) == list(range(60))
    if is_trimmed:
        await frontier.trim_items(100)
        with pytest.raises(SinkError, match=r"ends with item 60.*Items 61 to 100 are missing"):
            await drained(place, frontier)
        assert await numbers(place) == list(range(60))
    else:
        await log_items(frontier, range(120, 150))
        await drained(place, frontier)
        assert await numbers(place) == list(range(150))


async def test_a_database_that_is_gone(place: AnyPlace) -> None:
    """All tables are, and so is the record of them."""
    frontier = await in_memory()
    await log_items(frontier, range(60))
    await drained(place, frontier)
    for table in ("item", "_shoal_tables", "_shoal_outputs"):
        await place.query(f"DROP TABLE {table}")
    await log_items(frontier, range(60, 90))
    await drained(place, frontier)
    assert await numbers(place) == list(range(90))


async def test_the_table_of_outputs_is_dropped_while_it_is_open(place: AnyPlace) -> None:
    sink = await opened(place.spec())
    await sink.write(items(1, 3))
    state = await sink.flush()
    await place.query("DROP TABLE _shoal_outputs")
    for step in (partial(sink.write, items(4, 5)), partial(sink.close, finished=True)):
        with pytest.raises(SinkError, match=r"was set back.*_shoal_outputs") as caught:
            await step()
        assert is_retryable(caught.value)
        assert await sink.open(state) == 0
        await sink.write(items(1, 3))
        await place.query("DROP TABLE _shoal_outputs")
    await sink.close(finished=False)


async def test_all_runs_notice_a_table_that_is_gone(place: AnyPlace) -> None:
    sinks = {run_id: await opened(place.spec("named"), run_id=run_id) for run_id in ("one", "two")}
    states = {}
    for run_id, sink in sinks.items():
        await sink.write(items(1, 3))
        states[run_id] = await sink.flush()
    await place.query("DROP TABLE named")
    assert await sinks["one"].open(states["one"]) == 0
    with pytest.raises(SinkError, match="was set back") as caught:
        await sinks["two"].write(items(4, 5))
    assert is_retryable(caught.value)
    assert await sinks["two"].open(states["two"]) == 0
    for run_id, sink in sinks.items():
        await sink.write(items(1, 5))
        await sink.close(finished=True)
        assert await numbers(place, "named", run_id) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", ["removed", "replaced", "moved"])
@pytest.mark.parametrize("at_the_end", [False, True])
async def test_a_file_that_another_program_replaced(tmp_path: Path, how: str, at_the_end: bool) -> None:
    place = FilePlace(tmp_path)
    sink = await opened(place.spec())
    await sink.write(items(1, 3))
    copy = shutil.copy(place.path, tmp_path / "copy.db")
    await sink.write(items(4, 6))
    state = await sink.flush()
    match how:
        case "removed":
            place.path.unlink()
        case "moved":
            place.path.rename(tmp_path / "moved.db")
        case _:
            os.replace(copy, place.path)
    with pytest.raises(SinkError, match="was removed or replaced") as caught:
        await (sink.close(finished=True) if at_the_end else sink.write(items(7, 8)))
    assert is_retryable(caught.value)
    last = await sink.open(state)
    assert last == (3 if how == "replaced" else 0)
    await sink.open(await sink.flush())
    await sink.write(items(last + 1, 8))
    await sink.close(finished=True)
    assert await numbers(place) == list(range(1, 9))


# -- tables of earlier versions


async def of_earlier_version(place: AnyPlace, last: int, **options: Any) -> None:
    """Write rows as versions did that had no ``_shoal_outputs``."""
    await written(place, last, **options)
    await place.query("DROP TABLE _shoal_outputs")


def old_state(seq: int, *key: str) -> bytes:
    return msgspec.msgpack.encode({"seq": seq, "key": list(key)})


@pytest.mark.parametrize("table", [None, "named"])
@pytest.mark.parametrize(("rows", "saved", "last"), [(5, 5, None), (9, 5, None), (3, 5, 3)])
async def test_tables_of_an_earlier_version(
    place: AnyPlace, table: str | None, rows: int, saved: int, last: int | None
) -> None:
    await of_earlier_version(place, rows, table=table)
    sink = open_sink(place.spec(table), run_id="run")
    assert await sink.open(old_state(saved), 7) == last
    assert await numbers(place, table or "item") == list(range(1, rows + 1))
    await sink.write(items((last or saved) + 1, 7, x=1))
    await sink.close(finished=True)
    assert await numbers(place, table or "item") == list(range(1, 8))
    assert await outputs(place) == [("run", table or "", 0, 7, 7, 0)]


async def test_rows_with_a_key_do_not_show_the_position_of_an_earlier_version(place: AnyPlace) -> None:
    """Another run has replaced them."""
    await of_earlier_version(place, 3, key="n")
    await place.query("UPDATE item SET _run = 'other'")
    sink = await opened(place.spec(key="n"), old_state(3, "n"))
    await sink.close(finished=True)
    assert await outputs(place) == [("run", "", 0, 0, 3, 0)]


# -- count


async def test_what_is_counted(place: AnyPlace) -> None:
    count = await open_sink(place.spec(), run_id="run").count(b"")
    assert (count.items, count.position, count.rejected, count.key) == (0, None, 0, ())
    if isinstance(place, FilePlace):
        assert not place.path.exists()
    sink = await opened(place.spec(max_columns=2))
    await sink.write([*items(1, 2), LoggedItem(3, b"\1" * 16, 0, encode_item(Book(title="T"))), *items(4, 4, a=1, b=2)])
    state = await sink.flush()
    count = await open_sink(place.spec(), run_id="run").count(state)
    assert (count.items, count.position, count.rejected, count.key) == (3, 4, 1, ())
    await place.query("DROP TABLE book")
    assert (await sink.count(state)).items == 2
    assert (await open_sink(place.spec(key="n"), run_id="other").count(b"")).key == ("n",)
    await sink.close(finished=False)


async def test_rejected_items_are_counted_up_to_the_position(place: AnyPlace) -> None:
    sink = await opened(place.spec(max_columns=1))
    await sink.write([*items(1, 2), *items(3, 4, a=1)])
    state = await sink.flush()
    for _ in range(2):
        await sink.write(items(5, 6, b=2))
        assert await outputs(place) == [("run", "", 0, 0, 6, 4)]
    await sink.close(finished=False)
    sink = await opened(place.spec(max_columns=1), state)
    await sink.write(items(5, 7))
    await sink.close(finished=True)
    assert await outputs(place) == [("run", "", 0, 0, 7, 2)]


# -- exports


async def test_an_export_into_the_table_that_the_run_writes(place: AnyPlace) -> None:
    frontier = await in_memory()
    await log_items(frontier, range(40))
    sink = await opened(place.spec(), epoch=9)
    await sink.write(await frontier.read_items(0, 30))
    assert await export(frontier, open_sink(place.spec(), run_id="run", export="all"), batch=7) == 40
    await sink.write(await frontier.read_items(30, 5))
    assert await numbers(place) == list(range(40))
    await log_items(frontier, range(40, 60))
    await sink.write(await frontier.read_items(35, 100))
    await sink.close(finished=True)
    assert await numbers(place) == list(range(60))
    assert await outputs(place) == [("run", "", 0, 9, 60, 0)]


@pytest.mark.parametrize("is_named_first", [True, False])
async def test_two_outputs_of_a_run_in_one_table(place: AnyPlace, is_named_first: bool) -> None:
    """One for a type of items, and one for all: each would remove rows of the other when it is opened again."""
    book = LoggedItem(1, b"page".ljust(16), 0, encode_item(Book(n=1)))
    by_type = await opened(place.spec(), epoch=1)
    if not is_named_first:
        await by_type.write([book])
        with pytest.raises(SinkError, match="two outputs of this run write its table 'book'") as raised:
            await opened(place.spec("book"), epoch=2)
    else:
        named = await opened(place.spec("book"), epoch=2)
        await named.write([book])
        with pytest.raises(SinkError, match="two outputs of this run write its table 'book'") as raised:
            await by_type.write([book])
        await named.close(finished=True)
    assert not is_retryable(raised.value)
    await by_type.close(finished=False)
    other = await opened(place.spec("all_books"), epoch=3)
    await other.write([book])
    await other.close(finished=True)
    next_run = await opened(place.spec("book"), epoch=1, run_id="next")
    await next_run.write([book])
    await next_run.close(finished=True)
    assert [row["_run"] for row in await place.query("SELECT _run FROM book ORDER BY _run")] == ["next", "run"]


async def test_a_table_of_a_type_that_is_dropped(place: AnyPlace) -> None:
    """The run has no more items of this type, and only another run is open."""
    frontier = await in_memory()
    await log_items(frontier, range(20))
    await drained(place, frontier)
    other = await opened(place.spec(), epoch=1, run_id="other")
    await other.write(items(1, 2))
    await place.query("DROP TABLE item")
    await drained(place, frontier)
    assert await numbers(place) == list(range(20))
    with pytest.raises(SinkError) as raised:
        await other.close(finished=True)
    assert is_retryable(raised.value)  # the drainer opens it again, and writes all items
    await other.close(finished=False)


async def test_an_export_at_the_same_time_as_the_run(place: AnyPlace) -> None:
    """It reads items that the run has not written yet, and the run writes others that the export has written."""
    frontier = await in_memory()
    await log_items(frontier, range(400))
    sink = await opened(place.spec(), epoch=9)

    async def work() -> None:
        for first in range(0, 400, 10):
            await sink.write(await frontier.read_items(first, 10))
        await sink.close(finished=True)

    exports = [export(frontier, open_sink(place.spec(), run_id="run", export="all"), batch=size) for size in (7, 30)]
    missing = export(frontier, open_sink(place.spec(), run_id="run", export="missing"), batch=13)
    await asyncio.gather(work(), *exports, missing)
    assert await numbers(place) == list(range(400))
    assert sorted(await outputs(place)) == [("run", "", -1, 0, 400, 0), ("run", "", 0, 9, 400, 0)]


async def test_an_export_that_ends_half_way_makes_no_hole(place: AnyPlace) -> None:
    await written(place, 20)
    exporting = await opened(place.spec(), mode="all")
    await exporting.write(items(1, 5))
    assert await numbers(place) == list(range(1, 21))
    await exporting.close(finished=False)
    assert await numbers(place) == list(range(1, 21))


async def test_an_export_removes_rows_of_items_that_are_not_in_the_log(place: AnyPlace) -> None:
    """Those of other runs stay. Those after the last item stay too if the run itself writes the output."""
    await of_earlier_version(place, 20)
    other = await opened(place.spec(), run_id="other")
    await other.write(items(1, 20))
    await other.close(finished=True)
    for mode in ("missing", "all"):
        exporting = await opened(place.spec(), mode=mode)
        await exporting.write([*items(11, 12), LoggedItem(13, b"\1" * 16, 0, encode_item({"n": 99})), *items(14, 15)])
        await exporting.close(finished=True)
        if mode == "missing":
            assert await numbers(place) == [*range(1, 14), 99, *range(14, 21)]
    assert await numbers(place) == [*range(1, 13), 99, 14, 15]
    assert await numbers(place, run_id="other") == list(range(1, 21))
    await written(place, 20)
    exporting = await opened(place.spec(), mode="all")
    await exporting.write(items(1, 10))
    await exporting.close(finished=True)
    assert await numbers(place) == list(range(1, 21))


async def test_an_export_of_missing_items(place: AnyPlace) -> None:
    await written(place, 20)
    await place.query("DELETE FROM item WHERE _seq IN (3, 4, 17)")
    await place.query("UPDATE item SET n = 500 WHERE _seq = 5")
    exporting: Any = await opened(place.spec(), mode="missing")
    for first in (1, 11):
        await exporting.write(items(first, first + 9))
    await exporting.close(finished=True)
    assert exporting.added == 3
    assert await numbers(place) == [*range(1, 5), 500, *range(6, 21)]


async def test_an_export_of_missing_items_never_replaces_rows_of_another_run(place: AnyPlace) -> None:
    def keyed(seq: int, k: str, n: int) -> LoggedItem:
        return LoggedItem(seq, seq.to_bytes(16, "big"), 0, encode_item({"k": k, "n": n}))

    spec = place.spec(key="k")
    for run_id, numbers_ in (("run", {"a": 1, "b": 2, "c": 3}), ("later", {"b": 20})):
        sink = await opened(spec, run_id=run_id)
        await sink.write([keyed(seq, k, n) for seq, (k, n) in enumerate(numbers_.items(), 1)])
        await sink.close(finished=True)
    await place.query("DELETE FROM item WHERE k = 'c'")
    exporting: Any = await opened(spec, mode="missing")
    await exporting.write([keyed(1, "a", 1), keyed(2, "b", 2), keyed(3, "c", 3), keyed(4, "a", 4)])
    await exporting.close(finished=True)
    assert exporting.added == 1
    rows = await place.query("SELECT _run, k, n FROM item ORDER BY k")
    assert [tuple(row.values()) for row in rows] == [("run", "a", 4), ("later", "b", 20), ("run", "c", 3)]


@pytest.mark.parametrize("spec", ["out.jsonl", "out.csv", "out.parquet", "-"])
def test_files_have_no_export_of_missing_items(spec: str) -> None:
    with pytest.raises(SinkError, match=f"can't add missing items to {spec}; write all of them again with -O {spec}"):
        open_sink(spec, run_id="run", export="missing")


# -- rights and engines


async def guest(place: Place, rights: Callable[[str], list[str]]) -> str:
    """The output of a user who has only these rights. ``rights`` gets the name of the user."""
    name = f"guest_{place.name}"
    if place.is_postgres:
        await place.query(f"CREATE ROLE {name} LOGIN")
        for statement in (f"GRANT USAGE ON SCHEMA {place.name} TO {name}", *rights(name)):
            await place.query(statement)
        return place.spec("item").replace("shoal@", f"{name}@")
    user = f"'{name}'@'127.0.0.1'"
    with closing(pymysql.connect(unix_socket=str(place.server.folder / "maria.sock"), user="root")) as root:
        root.select_db(place.name)
        for statement in (f"CREATE USER {user} IDENTIFIED BY 's3cret'", *rights(user)):
            root.query(statement)
    return place.spec("item").replace("shoal:secret@", f"{name}:s3cret@")


async def test_a_user_who_may_not_create_tables(server_place: Place) -> None:
    """The error has the statements for an administrator, and with these the output can be written."""
    await of_earlier_version(server_place, 3, table="item")
    table = f"{server_place.name}.item"
    spec = await guest(server_place, lambda user: [f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {user}"])
    with pytest.raises(SinkError, match="it needs the table _shoal_outputs, and permission was denied") as caught:
        await opened(spec, old_state(3))
    assert not is_retryable(caught.value)
    assert "s3cret" not in str(caught.value)
    create, grant = str(caught.value).splitlines()[1:]
    assert create.startswith("CREATE TABLE")
    if server_place.is_postgres:
        await server_place.query(create)
        await server_place.query(grant)
    else:
        with closing(pymysql.connect(unix_socket=str(server_place.server.folder / "maria.sock"), user="root")) as root:
            root.select_db(server_place.name)
            root.query(create)
            root.query(grant)
    sink = await opened(spec, old_state(3))
    await sink.write(items(4, 6))
    await sink.close(finished=True)
    assert await numbers(server_place) == list(range(1, 7))


@pytest.mark.parametrize("table", ["item", "_shoal_outputs"])
@pytest.mark.parametrize("engine", ["MyISAM", "Aria"])
async def test_tables_without_transactions(maria: Place, table: str, engine: str) -> None:
    await written(maria, 3)
    run = "_run" if table == "item" else "run"
    await maria.query(f"ALTER TABLE {table} MODIFY {run} varchar(100), ENGINE={engine}")  # a key has 1000 bytes at most
    words = rf"the table `{table}` has the engine {engine}, which has no transactions; change it with ALTER TABLE"
    with pytest.raises(SinkError, match=words) as caught:
        await (await opened(maria.spec(), epoch=2)).write(items(1, 3))
    assert not is_retryable(caught.value)
    await maria.query(str(caught.value).partition("change it with ")[2])
    sink = await opened(maria.spec(), epoch=2)
    await sink.write(items(1, 3))
    await sink.close(finished=True)
