"""Each sink: what it writes, what it undoes when it is opened again, and its error messages."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import Spider, crawl
from shoal.errors import ItemError, SinkError
from shoal.item import encode_item
from shoal.messages import pip_install
from shoal.ports import LoggedItem, Sink
from shoal.sinks import open_sink, sink_id
from shoal.sinks.csvfile import CsvSink, escape_formula
from shoal.sinks.files import CollectSink, Recent, StreamSink
from shoal.sinks.parquet import ParquetSink
from tests.support import forking

KINDS = ["out.jsonl", "out.csv", "out.parquet", "out.db"]


class Book(dict[str, Any]):
    """An item with a class of its own."""


def logged(items: Iterable[Any], start: int = 1) -> list[LoggedItem]:
    return [
        LoggedItem(seq, (seq // 3).to_bytes(16, "big"), seq % 3, encode_item(item))
        for seq, item in enumerate(items, start)
    ]


def rows(count: int, start: int = 1) -> list[LoggedItem]:
    return logged(({"n": number, "text": f"item {number}"} for number in range(start, start + count)), start)


def read(path: Path) -> list[dict[str, Any]]:
    """What is in an output, whatever its kind."""
    match path.suffix:
        case ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
        case ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file, strict=True))
        case ".parquet":
            return list(pq.read_table(path).to_pylist())
        case _:
            return query(path, "SELECT * FROM item ORDER BY rowid")


def query(path: Path, statement: str) -> list[dict[str, Any]]:
    database = sqlite3.connect(path)
    database.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in database.execute(statement)]
    finally:
        database.close()


def numbers(path: Path) -> list[int]:
    return [int(row["n"]) for row in read(path)]


async def opened(spec: object, state: bytes = b"") -> Sink:
    sink = open_sink(str(spec))
    await sink.open(state)
    return sink


# -- every sink


@pytest.mark.parametrize("name", KINDS)
async def test_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    sink = await opened(path)
    await sink.write(rows(5))
    await sink.write(rows(5, 6))
    await sink.write([])
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 11))
    assert read(path)[9]["text"] == "item 10"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", KINDS)
async def test_what_was_written_after_the_flush_is_undone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    sink = await opened(path)
    await sink.write(rows(5))
    state = await sink.flush()
    await sink.write(rows(7, 6))
    await sink.close(finished=False)

    sink = await opened(path, state)
    await sink.write(rows(3, 6))
    await sink.write(rows(3, 9))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 12))


@pytest.mark.parametrize("name", KINDS)
async def test_a_flush_that_was_never_heard_of(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    sink = await opened(path)
    await sink.write(rows(5))
    state = await sink.flush()
    for start in (6, 8):
        await sink.write(rows(2, start))
        await sink.flush()
    await sink.close(finished=False)

    sink = await opened(path, state)
    await sink.write(rows(5, 6))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 11))


@pytest.mark.parametrize("name", KINDS)
async def test_a_repeated_write_changes_nothing(tmp_path: Path, name: str) -> None:
    sink = await opened(tmp_path / name)
    await sink.write(rows(5))
    await sink.write(rows(5))
    await sink.write(rows(5, 3))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(tmp_path / name) == list(range(1, 8))


@pytest.mark.parametrize("name", KINDS)
async def test_goes_on_after_the_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    state = b""
    for start in (1, 4, 7):
        sink = await opened(path, state)
        await sink.write(rows(3, start))
        state = await sink.flush()
        await sink.close(finished=True)
    sink = await opened(path, state)
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 10))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
async def test_a_fresh_run_replaces_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for start in (1, 100):
        sink = await opened(path)
        await sink.write(rows(3, start))
        await sink.flush()
        await sink.close(finished=True)
    assert numbers(path) == [100, 101, 102]


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
async def test_a_fresh_run_that_fails_before_its_first_item_leaves_the_file_as_it_was(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    sink = await opened(path)
    await sink.write(rows(3))
    await sink.flush()
    await sink.close(finished=True)
    for finished, left in ((False, [1, 2, 3]), (True, [])):
        sink = await opened(path)
        await sink.close(finished=finished)
        assert numbers(path) == left


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///crawl.db"])
async def test_the_file_of_another_run_stays_if_start_fails(
    tmp_path: Path, name: str, frontier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Spider):
        name = "broken"

        def start(self) -> list[str]:
            raise ValueError("no list of URLs")

    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    sink = await opened(path)
    await sink.write(rows(3))
    await sink.flush()
    await sink.close(finished=True)
    done = await crawl(Broken, {"frontier": frontier}, outputs=[f"{path}?replace=yes"])
    assert "no list of URLs" in str(done.error)
    assert numbers(path) == [1, 2, 3]


@pytest.mark.parametrize("name", KINDS)
async def test_no_items_at_all(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    sink = await opened(path)
    state = await sink.flush()
    await sink.close(finished=True)
    assert path.exists()
    sink = await opened(path, state)
    await sink.write(rows(2))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == [1, 2]


@pytest.mark.parametrize("name", KINDS)
async def test_text_of_all_kinds(tmp_path: Path, name: str) -> None:
    values = ["Zürich 東京 🐟", 'say "hi", then\nleave', "a\rb", "\r\n", "", " space ", "a,b;c\td", "'", "\u2028"]
    sink = await opened(f"{tmp_path / name}{'?formulas=keep' * (name == 'out.csv')}")
    await sink.write(logged({"n": 1, "text": value} for value in values))
    await sink.flush()
    await sink.close(finished=True)
    if name == "out.jsonl":
        lines = (tmp_path / name).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        assert [json.loads(line)["text"] for line in lines] == values
        assert "Zürich 東京 🐟" in lines[0]
    else:
        assert [row["text"] for row in read(tmp_path / name)] == values


@pytest.mark.parametrize("name", KINDS)
async def test_several_megabytes_at_once(tmp_path: Path, name: str) -> None:
    sink = await opened(tmp_path / name)
    await sink.write(logged({"n": number, "text": "x" * 20_000} for number in range(200)))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(tmp_path / name) == list(range(200))


async def test_several_sinks_at_once(tmp_path: Path) -> None:
    sinks = [await opened(tmp_path / name) for name in KINDS]
    for start in range(1, 100, 10):
        await asyncio.gather(*(sink.write(rows(10, start)) for sink in sinks))
        await asyncio.gather(*(sink.flush() for sink in sinks))
    await asyncio.gather(*(sink.close(finished=True) for sink in sinks))
    for name in KINDS:
        assert numbers(tmp_path / name) == list(range(1, 101))


# -- killed in the middle, again and again

_ROWS = """
from shoal.item import encode_item
from shoal.ports import LoggedItem

def row(number):
    item = {"n": number, "text": 'a "quoted"\\nline'} | ({f"field{number}": number} if number % 100 == 0 else {})
    return LoggedItem(number, number.to_bytes(16, "big"), 0, encode_item(item))

def rows(count, start=1):
    return [row(number) for number in range(start, start + count)]
"""
"""For programs of their own: one row in a hundred has a field that no one had before."""

_WRITER = f"""
import asyncio, os, sys
from shoal.sinks import open_sink
{_ROWS}

async def main(path, saved, total):
    seq, state = 0, b""
    if os.path.exists(saved):
        head, _, state = open(saved, "rb").read().partition(b" ")
        seq = int(head)
    sink = open_sink(path)
    await sink.open(state)
    print("open", flush=True)
    while seq < total:
        for _ in range(3):
            await sink.write(rows(7, seq + 1))
            seq += 7
        state = await sink.flush()
        with open(saved + ".tmp", "wb") as file:
            file.write(b"%d " % seq + state)
        os.rename(saved + ".tmp", saved)
        await asyncio.sleep(0.002)
    await sink.close(finished=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.parametrize("name", KINDS)
def test_killed_again_and_again(tmp_path: Path, name: str) -> None:
    path, saved, total = tmp_path / name, tmp_path / "cursor", 2100
    command = [sys.executable, "-c", _WRITER, str(path), str(saved), str(total)]
    kills = 0
    for moment in (0.003, 0.02, 0.05, 0.08, 0.11, 0.15, 60.0):
        with forking.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "open\n", process.stderr.read()
            try:
                process.wait(moment)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
                continue
            assert process.returncode == 0, process.stderr.read()
            break
    assert kills >= 3
    written = read(path)
    assert [int(row["n"]) for row in written] == list(range(1, total + 1))
    assert int(written[1999]["field2000"]) == 2000
    assert not written[0]["field2000"] if name != "out.jsonl" else "field2000" not in written[0]


# -- trouble with the path


@pytest.mark.parametrize("name", KINDS)
async def test_missing_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(SinkError, match=r"nowhere/out.* folder .*nowhere does not exist; create it"):
        await opened(tmp_path / "nowhere" / name)


@pytest.mark.parametrize("name", KINDS)
async def test_path_is_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(SinkError, match=f"{name}: it is a folder; give the name of a file"):
        await opened(tmp_path / name)


@pytest.mark.parametrize("name", KINDS)
async def test_a_file_where_the_folder_should_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="file is not a folder"):
        await opened(tmp_path / "file" / name)


@pytest.mark.parametrize("name", KINDS)
async def test_no_permission(forbidden: Path, name: str) -> None:
    with pytest.raises(SinkError, match="permission denied; change its permissions, or choose another output"):
        await opened(forbidden / name)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
async def test_a_device_is_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(SinkError, match="not a regular file"):
        await opened(tmp_path / name)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
async def test_only_one_writer(tmp_path: Path, name: str) -> None:
    sink = await opened(tmp_path / name)
    with pytest.raises(SinkError, match="another crawl is writing"):
        await opened(tmp_path / name)
    await sink.close(finished=False)
    await (await opened(tmp_path / name)).close(finished=False)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
@pytest.mark.parametrize("how", ["shorter", "gone"])
async def test_a_file_that_was_changed(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / name
    sink = await opened(path)
    await sink.write(rows(5))
    state = await sink.flush()
    await sink.close(finished=False)
    if how == "gone":
        path.unlink()
    else:
        os.truncate(path, 30)
    words = "has 30 bytes, but had" if how == "shorter" else "no longer exists"
    with pytest.raises(SinkError, match=f"{words}.*Restore the file, choose another output, or .*`shoal export RUN"):
        await opened(path, state)
    assert path.exists() == (how == "shorter")


async def test_a_symlink_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "out.csv"
    link.symlink_to(tmp_path / "there" / "real.csv")
    sink = await opened(link)
    await sink.write(logged([{"a": 1}]))
    await sink.write(logged([{"b": 1}], 2))
    await sink.close(finished=True)
    assert link.is_symlink()
    assert (tmp_path / "there" / "real.csv").read_text() == "a,b\n1,\n,1\n"


_LIMITED = f"""
import asyncio, resource, sys
from shoal.errors import SinkError
from shoal.sinks import open_sink
{_ROWS}

async def main(path):
    sink = open_sink(path)
    await sink.open(b"")
    await sink.write(rows(10))
    await sink.flush()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), limit[1]))
    try:
        await sink.write(rows(400, 11))
        await sink.flush()
    except SinkError as error:
        print(error)
    if len(sys.argv) > 3:
        await sink.close(finished=False)
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    await sink.write(rows(400, 11))
    await sink.flush()
    await sink.close(finished=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("name", KINDS)
def test_no_room_and_then_room(tmp_path: Path, name: str) -> None:
    limit = 1024 if name == "out.parquet" else 16384 if name == "out.db" else 5000
    done = forking.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / name), str(limit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"can't write {tmp_path / name}: " in done.stdout
    assert numbers(tmp_path / name) == list(range(1, 411))


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_no_room_and_given_up(tmp_path: Path, name: str) -> None:
    """What is left is whole."""
    forking.run([sys.executable, "-c", _LIMITED, str(tmp_path / name), "5000", "stop"], check=True)
    assert numbers(tmp_path / name) == list(range(1, 11))


# -- JSON lines and standard output


async def test_a_torn_last_line_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sink = await opened(path)
    await sink.write(rows(5))
    state = await sink.flush()
    await sink.close(finished=False)
    with path.open("ab") as file:
        file.write(b'{"n": 6, "te')
    sink = await opened(path, state)
    await sink.write(rows(2, 6))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 8))


async def test_cancelled_in_the_middle_of_a_large_write(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    items = logged({"n": number, "text": "x" * 50_000} for number in range(1, 201))
    sink = await opened(path)
    task = asyncio.create_task(sink.write(items))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await sink.write(items)
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 201))


async def test_a_state_that_is_none(tmp_path: Path) -> None:
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        with pytest.raises(SinkError, match="saved position"):
            await opened(tmp_path / name, b"\xc1")


_PRINTER = f"""
import asyncio
from shoal.errors import SinkError
from shoal.sinks import open_sink
{_ROWS}

async def main():
    sink = open_sink("-")
    await sink.open(b"")
    for start in range(1, 20001, 500):
        await sink.write(rows(500, start))
    await sink.flush()
    await sink.close(finished=True)

try:
    asyncio.run(main())
except SinkError as error:
    raise SystemExit(str(error))
"""


def test_standard_output() -> None:
    done = subprocess.run([sys.executable, "-c", _PRINTER], capture_output=True, check=True)
    assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == list(range(1, 20001))


def test_standard_output_on_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", _PRINTER], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.stderr == b"can't write standard output: the disk is full; free some space, then resume the run\n"


def test_a_reader_that_leaves() -> None:
    with subprocess.Popen([sys.executable, "-c", _PRINTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["n"] == 1
        process.stdout.close()
        assert process.stderr.read() == b"can't write standard output: the reader closed the pipe\n"


async def test_a_reader_that_pauses_does_not_hold_up_the_end() -> None:
    reader, writer = os.pipe()
    try:
        sink = StreamSink(writer)
        await sink.open(b"")
        task = asyncio.create_task(sink.write(rows(10_000)))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        received = bytearray()
        flushed = asyncio.create_task(sink.flush())
        while not flushed.done():
            received += await asyncio.to_thread(os.read, reader, 65536)
            await asyncio.sleep(0.001)
        os.set_blocking(reader, False)
        while received.count(b"\n") < 10_000:
            received += os.read(reader, 65536)
        assert [json.loads(line)["n"] for line in received.splitlines()] == list(range(1, 10_001))
    finally:
        os.close(reader)
        os.close(writer)


# -- CSV


async def test_csv_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    sink = await opened(path)
    await sink.write(logged([{"a": 1, "b": None, "c": [1, {"x": "é"}], "d": True, "e": 1.5, "f": b"\x00"}]))
    await sink.close(finished=True)
    assert path.read_bytes() == 'a,b,c,d,e,f\n1,,"[1,{""x"":""é""}]",true,1.5,AA==\n'.encode()


async def test_a_wider_csv(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.touch(mode=0o600)
    sink = await opened(path)
    await sink.write(logged([{"a": "1\n2", "b": '"'}]))
    await sink.write(logged([{"b": 3, "c,d": 4}, {"a": 5, "e": 6}], 2))
    await sink.flush()
    await sink.close(finished=True)
    assert read(path) == [
        {"a": "1\n2", "b": '"', "c,d": "", "e": ""},
        {"a": "", "b": "3", "c,d": "4", "e": ""},
        {"a": "5", "b": "", "c,d": "", "e": "6"},
    ]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("flushes", [0, 1, 2, 3])
async def test_a_csv_that_was_widened_before_the_crash(tmp_path: Path, flushes: int) -> None:
    """However long ago its state was saved, its place in the wider file is found."""
    path = tmp_path / "out.csv"
    batches = [
        logged([{"a": None}, {"a": 'x"\n,'}]),
        logged([{"a": 1, "b\n": 2}], 3),
        logged([{"a": 1, "c": "\r\n"}, {"d": "d"}], 4),
        logged([{"e": 1}], 6),
    ]
    sink = await opened(path)
    states = [b""]
    for batch in batches:
        await sink.write(batch)
        states.append(await sink.flush())
    await sink.close(finished=False)
    whole = read(path)
    with path.open("ab") as file:
        file.write(b'1,"torn')

    sink = await opened(path, states[flushes])
    for batch in batches[flushes:]:
        await sink.write(batch)
    await sink.flush()
    await sink.close(finished=True)
    assert read(path) == whole
    assert len(whole) == 6


_names = st.sampled_from(["a", "b", "", "c\n", 'd"', "e,", "é", "\r", "=f", "'=f"])
_texts = st.none() | st.integers(-9, 9) | st.text(alphabet="a\",\r\né =-'", max_size=4)
_batches = st.lists(st.lists(st.dictionaries(_names, _texts, min_size=1), min_size=1, max_size=4), max_size=6)


@settings(deadline=None, max_examples=60)
@given(batches=_batches, data=st.data())
def test_any_csv_after_any_crash(batches: list[list[dict[str, Any]]], data: st.DataObject) -> None:
    """Whatever was in the items, and to whichever flush it goes back, each item is there once."""

    async def crawl(path: Path) -> None:
        sink, number, states = await opened(path), 0, {0: (b"", 1)}
        crashes = data.draw(st.integers(0, 3))
        seq = 1
        while number < len(batches):
            await sink.write(logged(batches[number], seq))
            number, seq = number + 1, seq + len(batches[number])
            if data.draw(st.booleans()):
                states[number] = (await sink.flush(), seq)
            if crashes and data.draw(st.booleans()):
                crashes -= 1
                await sink.close(finished=False)
                number = data.draw(st.sampled_from(sorted(states)))
                state, seq = states[number]
                states = {known: saved for known, saved in states.items() if known <= number}
                sink = await opened(path, state)
        await sink.close(finished=True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.csv"
        asyncio.run(crawl(path))
        expected = [item for batch in batches for item in batch]
        written = read(path)
        assert len(written) == len(expected)
        for row, item in zip(written, expected, strict=True):
            assert {name: value for name, value in row.items() if value} == {
                escape_formula(name): escape_formula(value) if isinstance(value, str) else str(value)
                for name, value in item.items()
                if value not in (None, "")
            }


async def test_a_csv_with_another_header(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    sink = await opened(path)
    await sink.write(rows(5))
    state = await sink.flush()
    await sink.close(finished=False)
    for text in ("x" + path.read_text()[1:], ""):
        path.write_text(text)
        with pytest.raises(SinkError, match=r"changed since this run wrote it\. Restore the file"):
            await opened(path, state)
        assert path.read_text() == text
    path.write_bytes(b"\xff" * 500)
    with pytest.raises(SinkError, match="a different header"):
        await opened(path, state)


async def test_no_room_for_the_wider_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.csv"
    sink = CsvSink(str(path))
    await sink.open(b"")
    await sink.write(rows(3))
    (tmp_path / "out.csv.shoal-tmp").symlink_to("/dev/full")
    with pytest.raises(SinkError, match="the disk is full"):
        await sink.write(logged([{"new": 1}], 4))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.csv"]
    await sink.write(logged([{"new": 1}], 4))
    await sink.close(finished=True)
    assert [row["new"] for row in read(path)] == ["", "", "", "1"]


async def test_empty_items_make_no_row(tmp_path: Path) -> None:
    sink = await opened(tmp_path / "out.csv")
    await sink.write(logged([{}, {}]))
    await sink.write(logged([{"a": 1}, {}], 3))
    await sink.close(finished=True)
    assert (tmp_path / "out.csv").read_text() == 'a\n1\n""\n'


# -- Parquet


async def write_parts(path: Path, *parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sink = await opened(path)
    seq = 1
    for part in parts:
        await sink.write(logged(part, seq))
        await sink.flush()
        seq += len(part)
    await sink.close(finished=True)
    return read(path)


async def test_parts_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    written = await write_parts(
        path,
        [{"id": 1, "price": 1, "size": None, "tags": [], "at": {"x": 1}, "odd": 1, "none": None}],
        [{"id": 2, "price": 2.5, "size": "L", "tags": ["a"], "at": {"y": "b"}, "odd": "one", "new": True}],
        [{"id": 3, "tags": None, "at": {"x": 2.5}, "odd": [1, 2]}],
    )
    nothing = dict.fromkeys(("price", "size", "tags", "none", "new"))
    assert written == [
        {**nothing, "id": 1, "price": 1.0, "tags": [], "at": {"x": 1.0, "y": None}, "odd": "1"},
        {
            **nothing,
            "id": 2,
            "price": 2.5,
            "size": "L",
            "tags": ["a"],
            "at": {"x": None, "y": "b"},
            "odd": "one",
            "new": True,
        },
        {**nothing, "id": 3, "at": {"x": 2.5, "y": None}, "odd": "[1,2]"},
    ]
    schema = pq.read_schema(path)
    assert schema.field("id").type == pa.int64()
    assert schema.field("price").type == pa.float64()
    assert schema.field("none").type == pa.string()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2.5], [1.0, 2.5]),
        ([1, "a"], ["1", "a"]),
        ([True, 1], ["true", "1"]),
        ([{"a": 1}, {"a": "x"}], ['{"a":1}', '{"a":"x"}']),
        ([{"a": 1}, [1]], ['{"a":1}', "[1]"]),
        ([{}, {}], ["{}", "{}"]),
        ([[{}], []], ["[{}]", "[]"]),
        ([2**63, 1], [str(2**63), "1"]),
        (["a", b"a"], ["a", "YQ=="]),
        ([{"a": [1]}, {"a": []}], None),
        ([{"a": {}}, {"a": {"b": 1}}], [{"a": {"b": None}}, {"a": {"b": 1}}]),
        ([{str(n): n} for n in range(101)], [f'{{"{n}":{n}}}' for n in range(101)]),
        ([[1, 2], None, [2.5]], None),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("together", [True, False])
async def test_mixed_values(tmp_path: Path, values: list[Any], expected: list[Any] | None, together: bool) -> None:
    items = [{"n": number, "v": value} for number, value in enumerate(values)]
    parts = [items] if together else [[item] for item in items]
    written = [row["v"] for row in await write_parts(tmp_path / "out.parquet", *parts)]
    if not together and values == [{"a": {}}, {"a": {"b": 1}}]:
        expected = ['{"a":{}}', '{"a":{"b":1}}']
    assert written == (values if expected is None else expected)


async def test_many_items_without_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sinks.parquet._PART_SIZE", 1000)
    path = tmp_path / "out.parquet"
    sink = await opened(path)
    await sink.write(rows(10))
    state = await sink.flush()
    for start in range(11, 300, 10):
        await sink.write(rows(10, start))
    assert len(list((tmp_path / "out.parquet.parts").iterdir())) > 3
    await sink.close(finished=False)
    sink = await opened(path, state)
    await sink.write(rows(10, 11))
    await sink.flush()
    assert len(list((tmp_path / "out.parquet.parts").iterdir())) == 2
    for start in range(21, 300, 10):
        await sink.write(rows(10, start))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 301))
    assert pq.ParquetFile(path).num_row_groups == 1


async def test_the_old_parquet_file_stays_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    await write_parts(path, [{"n": 1}])
    sink = await opened(path)
    await sink.write(rows(2, 5))
    await sink.flush()
    await sink.close(finished=False)
    assert numbers(path) == [1]


async def test_parts_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    sink = await opened(path)
    for start in (1, 2, 3):
        await sink.write(rows(1, start))
        state = await sink.flush()
    await sink.close(finished=False)
    next((tmp_path / "out.parquet.parts").iterdir()).unlink()
    with pytest.raises(SinkError, match=r"lacks 1 of 3 parts: it changed since this run wrote it"):
        await opened(path, state)


async def test_killed_between_merging_and_deleting_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.parquet"
    sink = await opened(path)
    for start in (1, 2, 3):
        await sink.write(rows(1, start))
        state = await sink.flush()
    with monkeypatch.context() as patch:
        patch.setattr(ParquetSink, "_own_files", lambda self: iter(()))
        await sink.close(finished=True)
    assert len(list((tmp_path / "out.parquet.parts").iterdir())) == 3
    sink = await opened(path, state)
    await sink.write(rows(1, 4))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == [1, 2, 3, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.parquet"]


async def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out.parquet.parts"
    folder.mkdir()
    (folder / "notes.parquet").write_text("mine")
    await write_parts(tmp_path / "out.parquet", [{"n": 1}])
    assert [entry.name for entry in folder.iterdir()] == ["notes.parquet"]


def test_parquet_without_pyarrow() -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from shoal.sinks import open_sink; open_sink('a.parquet')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(f"SinkError: Parquet output needs pyarrow: {pip_install('parquet')}")


# -- SQLite


async def test_tables_by_type(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    sink = await opened(path)
    await sink.write(logged([{"a": 1, "b": [1]}, Book(title="T"), {"a": "x", "c": {"d": None}}]))
    await sink.close(finished=True)
    assert query(path, "SELECT a, b, c FROM item ORDER BY rowid") == [
        {"a": 1, "b": "[1]", "c": None},
        {"a": "x", "b": None, "c": '{"d":null}'},
    ]
    assert query(path, "SELECT title, _key FROM book") == [{"title": "T", "_key": f"{0:032x}-2"}]


async def test_one_table_for_all(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    spec = f'sqlite:///{path}?table=my%20"table"'
    sink = await opened(spec)
    await sink.write(logged([{"a": 2**63, "b": True, "c": b"x", "d": 1.5}, Book(title="T"), {}]))
    await sink.close(finished=True)
    found = query(path, 'SELECT a, b, c, d, title FROM "my ""table""" ORDER BY rowid')
    assert found[0] == {"a": str(2**63), "b": 1, "c": b"x", "d": 1.5, "title": None}
    assert found[1]["title"] == "T"
    assert len(found) == 3


async def test_the_next_run_updates_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    for price in (1, 2):
        sink = await opened(path)
        await sink.write(logged([{"price": price}]))
        await sink.close(finished=True)
    assert query(path, "SELECT price FROM item") == [{"price": 2}]
    sink = open_sink(str(path), run_id="run2")
    await sink.open(b"")
    await sink.write(logged([{"price": 3}]))
    await sink.close(finished=True)
    assert query(path, "SELECT price FROM item ORDER BY price") == [{"price": 2}, {"price": 3}]


async def test_names_that_sqlite_does_not_tell_apart(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    item = {
        "title": 1,
        "Title": 2,
        "TITLE": 3,
        "_key": 4,
        "Title_2": 5,
        'a"b': 6,
        "select": 7,
        "": 8,
        "_run": 9,
        "_SEQ": 10,
    }
    for _ in range(2):
        sink = await opened(path)
        await sink.write(logged([item]))
        await sink.write(logged([item], 2))
        await sink.close(finished=True)
    for row in query(path, "SELECT * FROM item"):
        found = [value for name, value in row.items() if name not in ("_key", "_run", "_seq")]
        assert sorted(found) == list(range(1, 11))


async def test_a_table_of_someone_else(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE item (a)")
    database.execute("CREATE TABLE keyed (_key TEXT)")
    database.execute("CREATE VIEW seen AS SELECT a AS _key FROM item")
    database.commit()
    database.close()
    sink = await opened(path)
    with pytest.raises(SinkError, match="Shoal did not create its table 'item'"):
        await sink.write(logged([{"a": 1}]))
    await sink.close(finished=False)
    for table in ("item", "keyed", "seen"):
        with pytest.raises(SinkError, match=f"Shoal did not create its table '{table}'"):
            await opened(f"sqlite:///{path}?table={table}")
    assert query(path, "SELECT * FROM item") == []


async def test_columns_of_a_failed_write_are_added_again(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    sink: Any = await opened(path)
    await sink.write(logged([{"a": 1}]))
    many = {f"f{number}": 1 for number in range(20)}
    sink._connection._database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 10)
    with pytest.raises(SinkError, match="too many columns"):
        await sink.write(logged([{"b": 1}, many], 2))
    assert len(query(path, "SELECT * FROM item")) == 1
    await sink.write(logged([{"b": 1}], 2))
    await sink.close(finished=True)
    assert len(query(path, "SELECT b FROM item")) == 2


async def test_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "out.db").write_text("this is no database, but long enough to look like one" * 20)
    with pytest.raises(SinkError, match="not a SQLite database"):
        await opened(tmp_path / "out.db")


async def test_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.sinks.sqlite._BUSY_TIMEOUT", 0.05)
    path = tmp_path / "out.db"
    sink = await opened(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SinkError, match="another process locked it"):
        await sink.write(rows(2))
    other.execute("ROLLBACK")
    other.close()
    await sink.write(rows(2))
    await sink.close(finished=True)
    assert numbers(path) == [1, 2]


# -- collecting


async def test_into_a_list() -> None:
    found: list[dict[str, Any]] = []
    sink = CollectSink(found)
    await sink.open(b"")
    await sink.write(rows(2))
    await sink.write(rows(3))
    assert [item["n"] for item in found] == [1, 2, 3]


async def test_into_a_queue_that_is_full() -> None:
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(2)
    sink = CollectSink(queue)
    await sink.open(b"")
    task = asyncio.create_task(sink.write(rows(5)))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    task = asyncio.create_task(sink.write(rows(5)))
    taken = [await queue.get() for _ in range(5)]
    await task
    assert [item["n"] for item in taken if item] == [1, 2, 3, 4, 5]


async def test_no_one_reads_the_queue_any_more() -> None:
    sink = CollectSink(asyncio.Queue(1))
    task = asyncio.create_task(sink.write(rows(5)))
    await asyncio.sleep(0.01)
    assert not task.done()
    sink.leave()
    await asyncio.wait_for(task, 1)
    await sink.write(rows(5, 6))


# -- names


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("a.jsonl", "JsonLinesSink"),
        ("a.ndjson", "JsonLinesSink"),
        ("a.b/c.JSONLINES", "JsonLinesSink"),
        ("a.csv", "CsvSink"),
        ("a.parquet", "ParquetSink"),
        ("a.db", "TableSink"),
        ("a.sqlite", "TableSink"),
        ("sqlite:///a.any?table=b", "TableSink"),
        ("-", "StreamSink"),
        ("postgresql://host/db", "TableSink"),
        ("postgres://user@host:1/db?table=b", "TableSink"),
        ("mysql://host/db", "TableSink"),
        ("mariadb://host/db?table=b", "TableSink"),
    ],
)
def test_chosen_by_name(spec: str, kind: str) -> None:
    assert type(open_sink(spec)).__name__ == kind


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("a.json", "use a.jsonl"),
        ("a.txt", r"unknown type .*file.jsonl, file.csv, file.parquet, file.db, sqlite:///.* standard output"),
        ("jsonl", "unknown type"),
        ("", "unknown type"),
        ("kafka://x", "unknown output kafka://; use file.jsonl"),
        ("sqlite://a.db", "has no file name"),
        ("sqlite:///", "has no file name"),
        ("sqlite:///?table=a", "has no file name"),
        ("sqlite:///a.db?tables=a", r"\?table=name"),
        ("sqlite:///a.db?table=", r"\?table=name"),
    ],
)
def test_no_such_output(spec: str, words: str) -> None:
    with pytest.raises(SinkError, match=words):
        open_sink(spec)
    with pytest.raises(SinkError, match=words):
        sink_id(spec)


def test_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sink_id("a.jsonl") == sink_id("./a.jsonl") == sink_id(f"{tmp_path}/a.jsonl") == f"{tmp_path}/a.jsonl"
    assert sink_id("sqlite:///a.db") == sink_id("a.db") == sink_id(f"sqlite:///{tmp_path}/a.db")
    assert sink_id("sqlite:///a.db?table=x") != sink_id("a.db")
    assert sink_id("-") == "-"


# -- a file that is not the one that the run wrote

FILES = ["out.jsonl", "out.csv", "out.parquet"]


async def run_opened(spec: object, run_id: str, state: bytes = b"", on_reject: Any = None) -> Sink:
    sink = open_sink(str(spec), run_id=run_id, on_reject=on_reject)
    await sink.open(state)
    return sink


async def half_written(path: Path, *, finished: bool = False) -> bytes:
    """Run "one" has written 5 items and flushed them."""
    sink = await run_opened(path, "one")
    await sink.write(rows(5))
    state = await sink.flush()
    await sink.close(finished=finished)
    return state


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("same", [True, False], ids=["same-items", "other-items"])
async def test_a_file_that_another_run_has_replaced(tmp_path: Path, name: str, finished: bool, same: bool) -> None:
    path = tmp_path / name
    state = await half_written(path, finished=finished)
    other = await run_opened(f"{path}?replace=yes", "two")
    await other.write(rows(9) if same else rows(9, 100))
    await other.flush()
    await other.close(finished=True)
    before = everything(tmp_path)
    with pytest.raises(SinkError, match=r"changed since run one wrote it\. Restore .*`shoal export one -O FILE`"):
        await run_opened(path, "one", state)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("finished", [True, False])
async def test_a_new_run_does_not_replace_the_file_of_another(tmp_path: Path, name: str, finished: bool) -> None:
    path = tmp_path / name
    state = await half_written(path, finished=finished)
    before = everything(tmp_path)
    with pytest.raises(SinkError, match=rf"Use -O \S*{name} to replace it"):
        await run_opened(path, "two")
    assert everything(tmp_path) == before
    again = await run_opened(path, "one", state)  # the run itself continues
    await again.close(finished=False)
    fresh = await run_opened(path, "one")  # and may begin again, as after a crash before its first flush
    await fresh.close(finished=False)
    other = await run_opened(f"{path}?replace=yes", "two")
    await other.write(rows(2))
    await other.flush()
    await other.close(finished=True)
    assert numbers(path) == [1, 2]


@pytest.mark.parametrize("name", FILES)
async def test_a_file_of_the_user_is_not_replaced_and_an_empty_one_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("mine\n")
    with pytest.raises(SinkError, match="exists and is not empty"):
        await run_opened(path, "one")
    assert path.read_text() == "mine\n"
    path.write_text("")
    await (await run_opened(path, "one")).close(finished=False)


@pytest.mark.parametrize("name", FILES)
async def test_a_finished_file_that_was_moved_away(tmp_path: Path, name: str) -> None:
    """The run continues later, for instance after `shoal retry-failed`."""
    path = tmp_path / name
    state = await half_written(path, finished=True)
    path.rename(tmp_path / "kept")
    with pytest.raises(SinkError, match=r"(no longer exists|lacks 1 of 1 parts).*Restore the file"):
        await run_opened(path, "one", state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    (tmp_path / "kept").rename(path)
    sink = await run_opened(path, "one", state)
    await sink.write(rows(2, 6))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 8))


@pytest.mark.parametrize("name", FILES)
async def test_a_copy_is_as_good(tmp_path: Path, name: str) -> None:
    """One that was restored from a backup has another inode, and may lack extended attributes."""
    state = await half_written(tmp_path / name)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file, content in everything(tmp_path).items():
        (copy / file).parent.mkdir(exist_ok=True)
        (copy / file).write_bytes(content)
    sink = await run_opened(copy / name, "one", state)
    await sink.write(rows(2, 6))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(copy / name) == list(range(1, 8))


@pytest.mark.parametrize("name", FILES)
async def test_other_bytes_before_the_offset(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    state = await half_written(path)
    file = next((tmp_path / "out.parquet.parts").iterdir()) if name == "out.parquet" else path
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(bytes(content) + b"more")
    with pytest.raises(SinkError, match=r"has different content .*: it changed since run one wrote it"):
        await run_opened(path, "one", state)
    assert file.read_bytes() == content + b"more"


@pytest.mark.parametrize("name", FILES)
async def test_a_state_of_another_run(tmp_path: Path, name: str) -> None:
    state = await half_written(tmp_path / name)
    before = everything(tmp_path)
    with pytest.raises(SinkError, match="belongs to run one"):
        await run_opened(tmp_path / name, "two", state)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("finished", [True, False])
async def test_a_rewound_store_opens_a_file_at_an_older_offset(tmp_path: Path, name: str, finished: bool) -> None:
    path = tmp_path / name
    sink = await run_opened(path, "one")
    states = []
    for start in range(1, 50, 10):
        await sink.write(rows(10, start))
        states.append(await sink.flush())
    await sink.close(finished=finished)
    sink = await run_opened(path, "one", states[2])
    await sink.write(logged(({"n": number + 1000} for number in range(31, 41)), 31))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == [*range(1, 31), *range(1031, 1041)]


async def test_rewound_twice_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    sink = await run_opened(path, "one")
    states = [await sink.flush()]
    for start in (1, 2, 3):
        await sink.write(rows(1, start))
        states.append(await sink.flush())
    await sink.close(finished=True)
    sink = await run_opened(path, "one", states[1])
    await sink.write(rows(1, 20))
    state = await sink.flush()
    await sink.close(finished=False)  # killed before the end
    sink = await run_opened(path, "one", state)
    await sink.close(finished=True)
    assert numbers(path) == [1, 20]
    await (await run_opened(path, "one", states[0])).close(finished=True)
    assert read(path) == []


async def test_a_wider_csv_with_other_bytes(tmp_path: Path) -> None:
    """Its last block is calculated back to what it was before it became wider."""
    path = tmp_path / "out.csv"
    sink = await run_opened(path, "one")
    await sink.write(logged({"a": f"line\n{number}", "b": '"'} for number in range(1, 2001)))
    state = await sink.flush()
    await sink.write(logged([{"c": 1, "d": 2}], 2001))
    await sink.close(finished=False)
    good = path.read_bytes()
    await (await run_opened(path, "one", state)).close(finished=True)
    assert path.read_bytes() == good.removesuffix(b",,1,2\n")
    path.write_bytes(good.replace(b"1999", b"1998"))
    with pytest.raises(SinkError, match="has different content before offset"):
        await run_opened(path, "one", state)
    assert path.read_bytes() == good.replace(b"1999", b"1998")


# -- rows of a run in SQLite


async def test_two_runs_in_one_database(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    for run_id in ("one", "two"):
        sink = await run_opened(path, run_id)
        await sink.write(rows(3))
        await sink.close(finished=True)
    assert [(row["_run"], row["_seq"], row["n"]) for row in read(path)] == [
        (run_id, number, number) for run_id in ("one", "two") for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("table", [None, "named"])
async def test_rows_behind_the_cursor_are_deleted(tmp_path: Path, table: str | None) -> None:
    path = tmp_path / "out.db"
    spec = str(path) if table is None else f"sqlite:///{path}?table={table}"
    other = await run_opened(spec, "other")
    await other.write(rows(50))
    await other.close(finished=True)
    sink = await run_opened(spec, "one")
    await sink.write(rows(30))
    state = await sink.flush()
    await sink.write([*rows(19, 31), *logged([Book(n=50)], 50)])
    await sink.close(finished=False)
    sink = await run_opened(spec, "one", state)
    await sink.write(logged(({"n": number + 1000} for number in range(31, 41)), 31))
    await sink.close(finished=True)
    found = query(path, f"SELECT _run, n FROM {table or 'item'} ORDER BY _seq")
    assert [row["n"] for row in found if row["_run"] == "one"] == [*range(1, 31), *range(1031, 1041)]
    assert [row["n"] for row in found if row["_run"] == "other"] == list(range(1, 51))
    if table is None:
        assert query(path, "SELECT * FROM book") == []


async def test_a_rewound_run_that_has_no_more_items(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    sink = await run_opened(path, "one")
    await sink.write(rows(30))
    state = await sink.flush()
    await sink.write(rows(20, 31))
    await sink.close(finished=False)
    await (await run_opened(path, "one", state)).close(finished=False)
    assert len(numbers(path)) == 50  # whoever opens it late, without a role, deletes nothing
    await (await run_opened(path, "one", state)).close(finished=True)
    assert numbers(path) == list(range(1, 31))


async def test_rewound_to_before_the_first_flush(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    for count in (10, 3):
        sink = await run_opened(path, "one")
        await sink.write(rows(count))
        await sink.close(finished=False)
    assert numbers(path) == [1, 2, 3]
    await (await run_opened(path, "one")).close(finished=True)
    assert numbers(path) == [1, 2, 3]  # a log without items may have been trimmed


async def test_a_key_of_the_users(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rejected = tmp_path / "out.db", list[int]()
    spec = f"{path}?key=sku"
    for run_id, price in (("one", 1), ("two", 2)):
        sink = await run_opened(spec, run_id, on_reject=rejected.append)
        await sink.write(logged([{"sku": "a", "price": 0}, {"sku": "a", "price": price}, {"price": 9}, {"sku": None}]))
        await sink.write(logged([{"sku": "b", "only": run_id}] if run_id == "one" else [{"sku": "b"}], 5))
        await sink.close(finished=True)
    assert query(path, "SELECT _run, sku, price, only FROM item ORDER BY sku") == [
        {"_run": "two", "sku": "a", "price": 2, "only": None},
        {"_run": "two", "sku": "b", "price": None, "only": None},
    ]
    assert sum(rejected) == 4
    assert "its field 'sku' has no value" in caplog.text


async def test_rows_with_a_key_stay_until_they_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.db"
    sink = await run_opened(f"{path}?key=k", "one")
    await sink.write(logged([{"k": "a", "n": 1}]))
    state = await sink.flush()
    await sink.write(logged([{"k": "b", "n": 2}, {"k": "a", "n": 3}], 2))
    await sink.close(finished=False)
    sink = await run_opened(f"{path}?key=k", "one", state)
    await sink.write(logged([{"k": "b", "n": 20}], 2))
    await sink.close(finished=True)
    assert query(path, "SELECT k, n FROM item ORDER BY k") == [{"k": "a", "n": 3}, {"k": "b", "n": 20}]
    with pytest.raises(SinkError, match=r"with \?key=k, but now it has no \?key="):
        await run_opened(path, "one", state)


# -- what strangers can put into items


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.db"])
async def test_fields_without_end(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path, rejected = tmp_path / name, list[int]()
    spec = f"{path}?max_columns=20"
    sink = await run_opened(spec, "one", on_reject=rejected.append)
    await sink.write(logged([{"n": 0, **{f"a{number}": 1 for number in range(5000)}}, {"n": 1}]))
    await sink.write(logged([{"n": number, f"b{number}": number} for number in range(2, 15)], 3))
    state = await sink.flush()
    await sink.close(finished=False)
    sink = await run_opened(spec, "one", state, rejected.append)
    await sink.write(logged([{"n": number, f"b{number}": number} for number in range(15, 40)], 16))
    await sink.write(logged([{"n": 40}], 41))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == [*range(1, 21), 40]
    assert len(read(path)[0].keys() - {"_key", "_run", "_seq"}) == 20
    assert sum(rejected) == 1 + 19
    assert "need more than 20 columns; put fields whose names come from pages into a nested field" in caplog.text


async def test_many_rejects_are_counted_and_not_all_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rejected: list[int] = []
    sink = await run_opened(f"{tmp_path}/out.db?key=k", "one", on_reject=rejected.append)
    for start in range(1, 1000, 100):
        await sink.write(rows(100, start))
    await sink.close(finished=True)
    assert sum(rejected) == 1000
    assert len(caplog.records) == 22
    assert "1000 items were not written" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("name", ["out.csv?max_columns=1", "out.parquet?max_columns=1", "out.db?key=k"])
async def test_an_item_that_is_written_again_is_counted_once(tmp_path: Path, name: str) -> None:
    rejected: list[int] = []
    sink = await run_opened(tmp_path / name, "one", on_reject=rejected.append)
    state = await sink.flush()
    for _ in range(3):
        await sink.write(rows(5))
        await sink.close(finished=False)
        await sink.open(state)
    await sink.write(rows(5))
    await sink.flush()
    await sink.close(finished=True)
    assert rejected == [5]


def test_nul_in_the_name_of_a_field() -> None:
    with pytest.raises(ItemError, match=r"the name of field 'a\\x00b' contains a NUL, .*; rename it"):
        encode_item({"n": 1, "a\0b": 2})
    with pytest.raises(ItemError, match="contains a NUL"):
        encode_item(Book({"n": [1], "\0": 2}))
    encode_item({"n": 0, "text": "\0", "nested": {"\0": 1}})


@pytest.mark.parametrize("name", KINDS)
async def test_nul_in_an_item_that_was_not_checked(tmp_path: Path, name: str) -> None:
    """Whoever wrote it into the log: it breaks no output."""
    payload = msgspec.msgpack.encode(("item", {"n": 1, "a\0b": "c\0d"}))
    sink = await opened(tmp_path / name)
    await sink.write([LoggedItem(1, bytes(16), 0, payload), *rows(1, 2)])
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(tmp_path / name) == [1, 2]
    assert "c\0d" in read(tmp_path / name)[0].values()


FORMULAS = [
    "=1+1", "+A1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\tx", "\rx", "'=1", "''-1",
    " =1", "\ufeff=1", "\u200b=1", "\0=1", "\xa0@a", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20a",
    "-5\n=1", "+49-30-123", "+49 (30) 123", "- item", "-'5", "+1e", "-1 000 x",
]  # fmt: skip
NO_FORMULAS = [
    "-5", "+3.2", "1e5", "-1e-5", "-.5", "-1,234.50", "-1.234,50", "- 5", "-5'000", "-1\u202f000", "-5 %", "+49 30 123",
    "+4930123", "-", "--", "", "a=1", "'a", "\u22125", " a", "\n a", '{"a":"=1"}', "1-2",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
def test_text_that_a_spreadsheet_runs_is_escaped(text: str) -> None:
    assert escape_formula(text) == f"'{text}"


@pytest.mark.parametrize("text", NO_FORMULAS)
def test_other_text_and_numbers_stay(text: str) -> None:
    assert escape_formula(text) == text


@given(st.text("'=+-@ \t\n51.,e%a\ufeff"), st.text("'=+-@ \t\n51.,e%a\ufeff"))
def test_escaped_texts_differ_as_the_texts_do(one: str, other: str) -> None:
    assert (escape_formula(one) == escape_formula(other)) == (one == other)


async def test_formulas(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    items = [{"n": -1, "r": -1.5, "=name": text, "'=name": 1, "j": [text]} for text in FORMULAS]
    sink = await run_opened(str(path), "one")
    await sink.write(logged(items[:3]))
    state = await sink.flush()
    await sink.close(finished=False)
    sink = await run_opened(f"{path}?formulas=escape", "one", state)  # the default
    await sink.write(logged(items[3:], 4))
    await sink.close(finished=True)
    assert [list(row.values()) for row in read(path)] == [
        ["-1", "-1.5", f"'{text}", "1", msgspec.json.encode([text]).decode()] for text in FORMULAS
    ]
    assert list(read(path)[0]) == ["n", "r", "'=name", "''=name", "j"]
    assert sink_id(f"{path}?formulas=keep") == sink_id(str(path))
    sink = await run_opened(f"{path}?replace=yes&formulas=keep", "two")
    await sink.write(logged(items))
    await sink.close(finished=True)
    assert [row["=name"] for row in read(path)] == FORMULAS


# -- what can't be taken back


async def test_a_list_after_the_store_was_rewound() -> None:
    found: list[dict[str, Any]] = []
    sink = CollectSink(found)
    await sink.open(b"")
    await sink.write(rows(30))
    state = await sink.flush()
    await sink.write(rows(20, 31))
    await sink.open(state)
    assert len(found) == 30
    changed = logged(({"n": number + 1000} for number in range(31, 41)), 31)
    await sink.write(changed)
    assert [item["n"] for item in found] == [*range(1, 31), *range(1031, 1041)]


async def test_a_list_that_the_program_has_emptied() -> None:
    found: list[dict[str, Any]] = []
    sink = CollectSink(found)
    await sink.open(b"")
    await sink.write(rows(3))
    state = await sink.flush()
    await sink.write(rows(3, 4))
    found.clear()
    await sink.open(state)
    await sink.write(rows(5, 4))
    assert [item["n"] for item in found] == [7, 8]


def moved(items: list[LoggedItem], seq: int) -> list[LoggedItem]:
    """The same items under other numbers: their pages were crawled again, in another order."""
    return [LoggedItem(seq + step, item.fingerprint, item.index, item.payload) for step, item in enumerate(items)]


async def test_a_queue_after_the_store_was_rewound() -> None:
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1000)
    sink = CollectSink(queue)
    await sink.open(b"")
    await sink.write(rows(30))
    state = await sink.flush()
    await sink.write(rows(20, 31))
    await sink.open(state)
    await sink.write(moved(rows(15, 41) + rows(10, 31), 31))
    taken = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [item["n"] for item in taken if item] == list(range(1, 56))


async def test_standard_output_after_the_store_was_rewound() -> None:
    reader, writer = os.pipe()
    try:
        sink = StreamSink(writer)
        await sink.open(b"")
        await sink.write(rows(50))
        await sink.open(b"")
        await sink.write(moved(rows(15, 41) + rows(10, 31), 31))
        lines = os.read(reader, 65536).splitlines()
        assert [json.loads(line)["n"] for line in lines] == list(range(1, 56))
    finally:
        os.close(reader)
        os.close(writer)


def test_recent_is_bounded() -> None:
    recent = Recent(3)
    items = rows(5)
    for item in items:
        recent.add(item)
    assert [item in recent for item in items] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "spec",
    [
        "a.jsonl?key=b", "a.csv?formulas=no", "a.csv?key=b", "a.parquet?formulas=keep", "a.db?key=",
        "a.db?key=a,,b",
        "a.db?max_columns=0", "a.db?max_columns=many", "sqlite:///a.db?table=a%00b",
    ],
)  # fmt: skip
def test_options_that_an_output_does_not_have(spec: str) -> None:
    with pytest.raises(SinkError, match="invalid option after the file name; allowed: "):
        open_sink(spec)


def test_a_question_mark_in_the_name_of_a_file(tmp_path: Path) -> None:
    assert sink_id(f"{tmp_path}/what?.csv") == f"{tmp_path}/what?.csv"
    assert sink_id(f"{tmp_path}/what?.csv?formulas=keep") == f"{tmp_path}/what?.csv"
