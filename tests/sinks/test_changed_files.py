"""Files of outputs that another program changes: during a run, before its end, and while it is stopped."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from shoal.errors import OutputChangedError, OutputTakenError, SinkError
from shoal.item import encode_item
from shoal.ports import LoggedItem, Sink
from shoal.sinks import open_sink
from shoal.testing.sinks import logged

KINDS = ["out.jsonl", "out.csv", "out.parquet"]
MOMENTS = ["between two flushes", "before the end", "while stopped"]


def items(first: int, last: int) -> list[LoggedItem]:
    return logged(range(first, last + 1), first)


def numbers(path: Path) -> list[int]:
    match path.suffix:
        case ".jsonl":
            return [json.loads(line)["n"] for line in path.read_text().splitlines()]
        case ".csv":
            with path.open(newline="") as file:
                return [int(row["n"]) for row in csv.DictReader(file, strict=True)]
        case _:
            return [row["n"] for row in pq.read_table(path).to_pylist()]


async def opened(path: Path, state: bytes = b"", *, epoch: int = 0) -> Sink:
    sink = open_sink(str(path), run_id="run")
    assert await sink.open(state, epoch) is None
    return sink


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def move_and_replace(path: Path) -> None:
    move(path)
    shutil.copy(path.with_name("moved"), path)


def replace(path: Path) -> None:
    """As an editor or a backup tool does it, with less content."""
    path.with_name("new").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    path.with_name("new").rename(path)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"a line of another program\n")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * (path.stat().st_size + 1000))


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


CHANGES: list[Callable[[Path], None]] = [
    Path.unlink, move, move_and_replace, replace, empty, halve, append, rewrite, remove_folder,
]  # fmt: skip


async def write_around(path: Path, change: Callable[[Path], None], moment: str) -> None:
    """Write ten items, with a change after the first five."""
    sink = await opened(path)
    await sink.write(items(1, 5))
    state = await sink.flush()
    if moment == "while stopped":
        await sink.close(finished=False)
    change(next(path.with_name("out.parquet.parts").iterdir()) if path.suffix == ".parquet" else path)
    try:
        if moment == "while stopped":
            sink = await opened(path, state)
        if moment != "before the end":
            await sink.write(items(6, 10))
            await sink.flush()
        await sink.close(finished=True)
    finally:
        await sink.close(finished=False)


def is_mended(name: str, change: Callable[[Path], None], moment: str) -> bool:
    """Whether the output is complete after this change, without an error."""
    if name == "out.parquet":
        return change is move_and_replace
    return change is Path.unlink if moment != "while stopped" else change in (append, move_and_replace)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", KINDS)
async def test_a_change_is_mended_or_an_error(
    folder: Path, name: str, change: Callable[[Path], None], moment: str
) -> None:
    path = folder / name
    last = 5 if moment == "before the end" else 10
    if is_mended(name, change, moment):
        await write_around(path, change, moment)
        assert numbers(path) == list(range(1, last + 1))
        return
    with pytest.raises(SinkError) as raised:
        await write_around(path, change, moment)
    if change is remove_folder and name != "out.parquet":
        assert raised.match(r"the folder \S+ does not exist; create it first")
        assert isinstance(raised.value.__cause__, FileNotFoundError), "a retry may help"
    else:
        assert isinstance(raised.value, OutputChangedError)
        assert raised.value.__cause__ is None, "a retry can't help"
        assert raised.match(r"Restore the file, choose another output, or .*`shoal export run -O FILE`")


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
@pytest.mark.parametrize("change", [move, replace, empty, halve, rewrite], ids=lambda change: change.__name__)
async def test_after_the_error_the_next_start_is_an_error_too(
    folder: Path, name: str, change: Callable[[Path], None]
) -> None:
    path = folder / name
    sink = await opened(path)
    await sink.write(items(1, 50))
    state = await sink.flush()
    change(path)
    await sink.write(items(51, 100))
    with pytest.raises(OutputChangedError):
        await sink.flush()
    await sink.close(finished=False)
    if path.exists():
        assert b"\0" not in path.read_bytes()
    with pytest.raises(OutputChangedError):
        await opened(path, state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move, r"was moved to \S+/moved: it changed"),
        (move_and_replace, r"was moved to \S+/moved and replaced: it changed"),
        (replace, "was replaced by another file: it changed"),
        (empty, "has 0 bytes, but had "),
    ],
)
async def test_the_error_says_what_happened(folder: Path, change: Callable[[Path], None], words: str) -> None:
    with pytest.raises(OutputChangedError, match=words):
        await write_around(folder / "out.jsonl", change, "before the end")


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
async def test_a_removed_file_is_restored_with_its_mode_and_its_lock(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / name
    sink = await opened(path, epoch=3)
    await sink.write(items(1, 5))
    path.chmod(0o640)
    path.unlink()
    state = await sink.flush()
    assert numbers(path) == [1, 2, 3, 4, 5]
    assert path.stat().st_mode & 0o777 == 0o640
    assert "was removed while it was written; restoring it" in caplog.text
    with pytest.raises(SinkError, match="another crawl is writing"):
        await opened(path, state)
    path.unlink()
    await sink.close(finished=False)
    assert numbers(path) == [1, 2, 3, 4, 5], "restored by an unfinished close, too"
    with pytest.raises(OutputTakenError):
        await opened(path, state, epoch=2)
    await (await opened(path, state, epoch=3)).close(finished=True)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
async def test_a_file_that_is_removed_before_the_first_write_after_a_start(folder: Path, name: str) -> None:
    path = folder / name
    sink = await opened(path)
    await sink.write(items(1, 5))
    state = await sink.flush()
    await sink.write(items(6, 10))
    await sink.close(finished=False)
    sink = await opened(path, state)
    path.unlink()
    await sink.close(finished=False)
    await (await opened(path, state)).close(finished=True)
    assert numbers(path) == [1, 2, 3, 4, 5]


async def test_a_csv_that_was_replaced_is_not_widened(folder: Path) -> None:
    path = folder / "out.csv"
    sink = await opened(path)
    await sink.write(items(1, 5))
    move(path)
    path.write_text("of another program\n")
    with pytest.raises(OutputChangedError, match="was moved to"):
        await sink.write([wider_item(6)])
    await sink.close(finished=False)
    assert path.read_text() == "of another program\n"
    assert path.with_name("moved").read_text().count("\n") == 6, "unchanged"


def wider_item(number: int) -> LoggedItem:
    """An item with a field that the others don't have."""
    return LoggedItem(number, number.to_bytes(16, "big"), 0, encode_item({"n": number, "text": "x", "more": 1}))


async def test_a_widened_csv_is_checked_and_restored(folder: Path) -> None:
    path = folder / "out.csv"
    sink = await opened(path, epoch=2)
    await sink.write(items(1, 5))
    await sink.flush()
    await sink.write([wider_item(6)])
    await sink.flush()
    path.unlink()
    await sink.write([wider_item(7)])
    state = await sink.flush()
    await sink.close(finished=False)
    assert numbers(path) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(OutputTakenError):
        await opened(path, state, epoch=1)


async def test_the_file_of_an_earlier_run_that_is_moved_away_keeps_its_content(folder: Path) -> None:
    """The new run has opened it, and is about to replace it."""
    path = folder / "out.jsonl"
    path.write_text("earlier\n")
    sink = open_sink(f"{path}?replace=yes", run_id="run")
    await sink.open(b"")
    move(path)
    with pytest.raises(OutputChangedError, match="was moved to"):
        await sink.write(items(1, 5))
    await sink.close(finished=False)
    assert path.with_name("moved").read_text() == "earlier\n"


# -- Parquet


async def test_a_merged_parquet_file_that_disappears_is_an_error(folder: Path) -> None:
    path = folder / "out.parquet"
    sink = await opened(path)
    await sink.write(items(1, 5))
    state = await sink.flush()
    await sink.close(finished=True)
    sink = await opened(path, state)
    await sink.write(items(6, 7))
    path.unlink()
    with pytest.raises(OutputChangedError, match="was removed, replaced or changed"):
        await sink.flush()
    with pytest.raises(OutputChangedError, match="was removed, replaced or changed"):
        await sink.close(finished=True)
    with pytest.raises(OutputChangedError, match="lacks 1 of 1 parts"):
        await opened(path, state)


async def test_an_earlier_part_that_changed_while_the_run_was_stopped(folder: Path) -> None:
    path = folder / "out.parquet"
    sink = await opened(path)
    for first in (1, 4, 7):
        await sink.write(items(first, first + 2))
        state = await sink.flush()
    await sink.close(finished=False)
    parts = sorted(path.with_name("out.parquet.parts").iterdir())
    parts[0].write_bytes(parts[0].read_bytes()[:-20])
    with pytest.raises(OutputChangedError, match="has a damaged part"):
        await opened(path, state)
    pq.write_table(pq.read_table(parts[1]).slice(0, 1), parts[0])
    with pytest.raises(OutputChangedError, match="has 7 rows, but had 9"):
        await opened(path, state)


# -- a writer that comes late


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("name", KINDS)
async def test_a_writer_that_opens_the_file_after_its_successor_closed_it(
    folder: Path, name: str, finished: bool
) -> None:
    path = folder / name
    sink = await opened(path, epoch=1)
    await sink.write(items(1, 5))
    before = await sink.flush()
    await sink.close(finished=False)
    sink = await opened(path, before, epoch=3)
    await sink.write(items(6, 10))
    state = await sink.flush()
    await sink.close(finished=finished)
    with pytest.raises(OutputTakenError) as raised:
        await opened(path, before, epoch=2)
    assert raised.value.epoch == 3
    sink = await opened(path, state, epoch=4)
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 11))


@pytest.mark.parametrize("name", KINDS)
async def test_opening_changes_nothing(folder: Path, name: str) -> None:
    """Only a write does: a process that was frozen before it opened the file may have lost its role."""
    path = folder / name
    sink = await opened(path)
    await sink.write(items(1, 5))
    before = await sink.flush()
    await sink.write(items(6, 10))
    state = await sink.flush()
    await sink.close(finished=False)
    await (await opened(path, before)).close(finished=False)
    await (await opened(path, state)).close(finished=True)
    assert numbers(path) == list(range(1, 11))


async def test_a_file_system_without_locks_is_reported_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        await (await opened(folder / "out.jsonl")).close(finished=False)
    assert caplog.text.count("make sure that only one process writes it") == 1


# -- count


@pytest.mark.parametrize("name", KINDS)
async def test_a_file_that_is_gone_or_of_another_run_has_no_items_of_this_one(folder: Path, name: str) -> None:
    path = folder / name
    sink = await opened(path)
    await sink.write(items(1, 5))
    state = await sink.flush()
    await sink.close(finished=True)
    assert (await open_sink(str(path), run_id="run").count(state)).items == 5
    assert (await open_sink(str(path), run_id="run").count(b"")).items == 0
    other = open_sink(f"{path}?replace=yes", run_id="other")
    await other.open(b"")
    await other.write(items(1, 3))
    await other.flush()
    await other.close(finished=True)
    assert (await open_sink(str(path), run_id="run").count(state)).items == 0
    path.unlink()
    assert (await open_sink(str(path), run_id="run").count(state)).items == 0


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
async def test_rejected_items_are_counted_across_processes(folder: Path, name: str) -> None:
    path, state = folder / name, b""
    for first in (1, 4):
        sink = open_sink(f"{path}?max_columns=2", run_id="run")
        await sink.open(state)
        await sink.write([*items(first, first + 1), wider_item(first + 2)])
        state = await sink.flush()
        await sink.close(finished=False)
    count = await open_sink(str(path), run_id="run").count(state)
    assert (count.items, count.rejected) == (4, 2)


async def test_rows_with_line_breaks_are_counted_once(folder: Path) -> None:
    path = folder / "out.csv"
    sink = await opened(path)
    await sink.write([LoggedItem(1, b"1" * 16, 0, encode_item({"text": "two\nlines"}))])
    state = await sink.flush()
    await sink.close(finished=True)
    assert (await open_sink(str(path), run_id="run").count(state)).items == 1


async def test_standard_output_cannot_be_counted() -> None:
    assert (await open_sink("-").count(b"")).items is None


@pytest.mark.parametrize("name", KINDS)
async def test_a_state_of_the_earlier_version(folder: Path, name: str) -> None:
    path = folder / name
    sink = await opened(path)
    await sink.write(items(1, 5))
    state: Any = await sink.flush()
    await sink.close(finished=False)
    codec: Any = msgspec.json if name == "out.parquet" else msgspec.msgpack
    fields = {key: value for key, value in codec.decode(state).items() if key != "rejected"}
    if name == "out.parquet":
        del fields["rows"]
    sink = await opened(path, codec.encode(fields))
    await sink.write(items(6, 8))
    await sink.flush()
    await sink.close(finished=True)
    assert numbers(path) == list(range(1, 9))
