"""The identity of a file that is an output, and the role that is named after it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from shoal import Spider, crawl
from shoal.errors import SinkError
from shoal.sinks import identity, open_sink, sink_id
from shoal.sinks.drainer import Drainer, host_of, output_name, split_role
from shoal.sinks.identity import output_role
from tests.sinks.test_changed_files import numbers
from tests.sinks.test_drainer import FrontierWithFaults, frontier_in_memory, log_items

FILES = ["out.jsonl", "out.csv", "out.parquet"]
USER = 65534
HOST = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())


@pytest.fixture
async def frontier() -> FrontierWithFaults:
    return await frontier_in_memory()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".shoal")


def identity_of(path: Path) -> str:
    stored: str = json.loads(sidecar(path).read_bytes())["identity"]
    return stored


async def role_of(path: object, frontier: FrontierWithFaults) -> str:
    return await output_role(str(path), frontier, "run")


async def drain(path: Path, frontier: FrontierWithFaults, role: str | None = None, *, finished: bool = False) -> None:
    """Write what the log has, as a process of the run does, from its start to its end."""
    drainer = Drainer(frontier, open_sink(str(path), run_id="run"), role or await role_of(path, frontier))
    await drainer.start()
    await drainer.finish(finished)


# -- names


@pytest.mark.parametrize("name", [*FILES, "out.db"])
async def test_a_file_gets_an_identity_and_keeps_it(frontier: FrontierWithFaults, folder: Path, name: str) -> None:
    path = folder / name
    role = await role_of(path, frontier)
    assert re.fullmatch(f"{re.escape(str(path))}#{HOST}-[0-9a-f]{{8}}", role)
    assert split_role(f"sink:{role}") == (str(path), identity_of(path))
    assert await role_of(path, frontier) == role
    assert await output_role(str(path), await frontier_in_memory(), "another run") == role
    assert os.listdir(folder) == [f"{name}.shoal"]


async def test_outputs_that_are_no_files_have_none(
    frontier: FrontierWithFaults, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for spec in ("-", "postgresql://h/db", "mysql://h/db", "s3://b/out.jsonl", "out.jsonl?identity=path"):
        assert await role_of(spec, frontier) == sink_id(spec)
    (folder / "folder.csv").mkdir()
    assert await role_of(folder / "folder.csv", frontier) == str(folder / "folder.csv")
    assert os.listdir(folder) == ["folder.csv"]


@pytest.mark.parametrize(
    "spec", ["out.jsonl?identity=x", "s3://b/out.jsonl?identity=path", "mysql://h/d?identity=path"]
)
def test_invalid_options(spec: str) -> None:
    with pytest.raises(SinkError, match="invalid option"):
        sink_id(spec)


def test_names_for_people() -> None:
    assert output_name("sink:/out/books.jsonl#web-1.example-8f3ad2c1") == "/out/books.jsonl (web-1.example)"
    for role in ("/out/books.jsonl", "/out/a#b.jsonl", "-", "postgresql://h:5432/db?table=x"):
        assert output_name(f"sink:{role}") == role
        assert host_of(f"sink:{role}") == ""


async def test_tables_of_one_database_have_different_roles(frontier: FrontierWithFaults, folder: Path) -> None:
    path = folder / "out.db"
    one, two, all_tables = [await role_of(f"{path}{table}", frontier) for table in ("?table=a", "?table=b", "")]
    assert {split_role(role)[1] for role in (one, two, all_tables)} == {identity_of(path)}
    for role in (one, two, all_tables):
        assert await frontier.claim(f"sink:{role}", 60) is not None
    moved = folder / "moved.db"
    sidecar(path).rename(sidecar(moved))
    assert [await role_of(f"{moved}{table}", frontier) for table in ("?table=a", "?table=b", "")] == [
        one, two, all_tables,
    ]  # fmt: skip


async def test_a_missing_folder(frontier: FrontierWithFaults, folder: Path) -> None:
    with pytest.raises(SinkError, match=r"the folder \S+ does not exist; create it first"):
        await role_of(folder / "nowhere" / "out.csv", frontier)


# -- moved, copied and removed


@pytest.mark.parametrize("name", FILES)
async def test_output_and_identity_are_moved_together(frontier: FrontierWithFaults, folder: Path, name: str) -> None:
    path = folder / name
    await log_items(frontier, 20)
    role = await role_of(path, frontier)
    await drain(path, frontier)
    moved = folder.with_name("elsewhere")
    folder.rename(moved)
    await log_items(frontier, 10, 21)
    assert await role_of(moved / name, frontier) == role
    await drain(moved / name, frontier, finished=True)
    assert numbers(moved / name) == list(range(1, 31))


async def test_a_copy_of_an_output_is_another_output(
    frontier: FrontierWithFaults, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, copy = folder / "out.jsonl", folder / "copy.jsonl"
    await log_items(frontier, 20)
    await drain(path, frontier)
    role = await role_of(path, frontier)
    for original in (path, sidecar(path)):
        shutil.copy2(original, folder / original.name.replace("out", "copy"))
    copied_role = await role_of(copy, frontier)
    assert split_role(copied_role)[1] != split_role(role)[1]
    assert split_role(copied_role)[1] == identity_of(copy)
    assert await role_of(path, frontier) == role
    assert await role_of(copy, frontier) == copied_role


@pytest.mark.parametrize("content", [b"", b"{", b'{"identity": "", "inode": 1}', b"\xff"])
async def test_a_damaged_sidecar_counts_as_none(frontier: FrontierWithFaults, folder: Path, content: bytes) -> None:
    path = folder / "out.jsonl"
    sidecar(path).write_bytes(content)
    role = await role_of(path, frontier)
    assert split_role(role)[1] == identity_of(path)
    assert await role_of(path, frontier) == role


@pytest.mark.parametrize("name", FILES)
async def test_a_removed_output_begins_with_the_first_item(
    frontier: FrontierWithFaults, folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / name
    await log_items(frontier, 20)
    await drain(path, frontier)
    shutil.rmtree(folder)
    folder.mkdir()
    await log_items(frontier, 10, 21)
    await drain(path, frontier, finished=True)
    assert numbers(path) == list(range(1, 31))
    assert f"run run has written another file at {path} before" in caplog.text


@pytest.mark.parametrize("trimmed", [0, 15])
async def test_a_file_that_was_moved_to_another_file_system_is_written_again(
    frontier: FrontierWithFaults, folder: Path, trimmed: int
) -> None:
    """Then it has another inode, and so has its identity. If the log was trimmed, only the file has the first items."""
    path, moved = folder / "out.jsonl", folder / "moved.jsonl"
    await log_items(frontier, 20)
    await drain(path, frontier)
    await frontier.trim_items(trimmed)
    for original in (path, sidecar(path)):
        shutil.copy2(original, folder / original.name.replace("out", "moved"))
        original.unlink()
    if trimmed:
        with pytest.raises(SinkError, match="items 1 to 15 are no longer in the item log"):
            await role_of(moved, frontier)
    else:
        await drain(moved, frontier, finished=True)
    assert numbers(moved) == list(range(1, 21))


# -- a missing identity


@pytest.mark.parametrize("how", ["missing", "copy"])
@pytest.mark.parametrize("name", FILES)
async def test_without_its_identity_a_file_continues_if_its_content_is_known(
    frontier: FrontierWithFaults, folder: Path, name: str, how: str
) -> None:
    path = folder / name
    await log_items(frontier, 20)
    await drain(path, frontier)
    role = await role_of(path, frontier)
    copied = sidecar(path).read_bytes()
    sidecar(path).unlink()
    if how == "copy":  # restored from a backup, for example
        (folder / "something").write_text("takes the inode")
        sidecar(path).write_bytes(copied)
    await log_items(frontier, 10, 21)
    assert await role_of(path, frontier) == role
    assert identity_of(path) == split_role(role)[1]
    await drain(path, frontier, finished=True)
    assert numbers(path) == list(range(1, 31))


@pytest.mark.parametrize("replaces", ["", "?replace=yes"])
@pytest.mark.parametrize("name", FILES)
async def test_a_file_with_other_content_is_not_begun_again(
    frontier: FrontierWithFaults, folder: Path, name: str, replaces: str
) -> None:
    path = folder / name
    await log_items(frontier, 20)
    await drain(path, frontier)
    sidecar(path).unlink()
    target = next(path.with_name("out.parquet.parts").iterdir()) if name == "out.parquet" else path
    target.write_bytes(target.read_bytes()[:-10])
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(SinkError, match=r"is missing or a copy.* Restore both files, .* or remove \S+ to write all"):
        await role_of(f"{path}{replaces}", frontier)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    shutil.rmtree(folder)  # what the message says
    folder.mkdir()
    await drain(path, frontier, finished=True)
    assert numbers(path) == list(range(1, 21))


async def test_a_file_that_a_live_process_may_be_writing(
    frontier: FrontierWithFaults, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_ROLE_SECONDS", 1)
    path = folder / "out.jsonl"
    await log_items(frontier, 20)
    await drain(path, frontier)
    drainer = Drainer(frontier, open_sink(str(path), run_id="run"), await role_of(path, frontier))
    await drainer.start()
    sidecar(path).unlink()
    with pytest.raises(SinkError, match="A process of the run may be writing it"):
        await role_of(path, frontier)
    await drainer.finish(True)


async def test_the_file_of_another_run_is_left_to_the_rules_of_the_sink(
    frontier: FrontierWithFaults, folder: Path
) -> None:
    """The same path on two machines: on one of them an earlier run has left a file, of a version without identities."""
    path = folder / "out.jsonl"
    await log_items(frontier, 20)
    await drain(path, frontier)
    shutil.rmtree(folder)
    folder.mkdir()
    earlier = open_sink(str(path), run_id="earlier")
    await earlier.open(b"")
    await earlier.write(await frontier.read_items(0, 5))
    await earlier.close(finished=True)
    with pytest.raises(SinkError, match="has the output of run earlier"):
        await drain(path, frontier)
    drainer = Drainer(frontier, open_sink(f"{path}?replace=yes", run_id="run"), await role_of(path, frontier))
    await drainer.start()
    await drainer.finish(True)
    assert numbers(path) == list(range(1, 21))


# -- files of the version without identities


@pytest.mark.parametrize("name", FILES)
async def test_a_file_of_the_earlier_version_continues(frontier: FrontierWithFaults, folder: Path, name: str) -> None:
    path = folder / name
    await log_items(frontier, 20)
    await drain(path, frontier, sink_id(str(path)))
    await log_items(frontier, 10, 21)
    assert await role_of(path, frontier) == str(path)
    moved = folder.with_name("elsewhere")
    folder.rename(moved)
    assert await role_of(moved / name, frontier) == str(path)
    await drain(moved / name, frontier, finished=True)
    assert numbers(moved / name) == list(range(1, 31))


async def test_a_database_of_the_earlier_version_continues(frontier: FrontierWithFaults, folder: Path) -> None:
    path = folder / "out.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE item (n)")
    claim = await frontier.claim(f"sink:{path}?table=x", 60)
    assert claim is not None
    await frontier.advance(claim, msgspec.msgpack.encode((7, b"state")), 60)
    await frontier.relinquish(claim)
    assert await role_of(f"{path}?table=x", frontier) == f"{path}?table=x"
    assert await role_of(path, frontier) == str(path)


async def test_a_changed_file_of_the_earlier_version_is_an_error(frontier: FrontierWithFaults, folder: Path) -> None:
    path = folder / "out.jsonl"
    await log_items(frontier, 20)
    await drain(path, frontier, sink_id(str(path)))
    path.write_text("other content\n")
    with pytest.raises(SinkError, match="has content, and run run has written a file at this path"):
        await role_of(path, frontier)
    assert os.listdir(folder) == ["out.jsonl"]


# -- folders that are not writable


@contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Give up the rights of root meanwhile."""
    before = os.getresuid()
    os.setresuid(user, user, 0)
    try:
        yield
    finally:
        os.setresuid(*before)


@pytest.fixture
def readonly() -> Iterator[Path]:
    """A file that a user may write, in a folder in which only root may create files."""
    if os.geteuid():
        pytest.skip("needs root")
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = Path(name, "out.jsonl")
        path.touch()
        os.chown(path, USER, USER)
        yield path


async def test_the_identity_is_an_attribute_if_the_folder_is_not_writable(
    frontier: FrontierWithFaults, readonly: Path, tmp_path: Path
) -> None:
    await log_items(frontier, 20)
    with acting_as(USER):
        role = await role_of(readonly, frontier)
        assert os.listdir(readonly.parent) == ["out.jsonl"]
        assert await role_of(readonly, frontier) == role
        await drain(readonly, frontier)
        with pytest.raises(SinkError, match="permission denied; change its permissions, or choose another output"):
            await role_of(readonly.with_name("new.jsonl"), frontier)
    assert numbers(readonly) == list(range(1, 21))
    copy = tmp_path / "copy.jsonl"
    shutil.copy2(readonly, copy)
    assert os.getxattr(copy, "user.shoal.identity") == os.getxattr(readonly, "user.shoal.identity")
    assert split_role(await role_of(copy, frontier))[1] != split_role(role)[1]
    assert await role_of(readonly, frontier) == role, "also if the folder is writable now"


async def test_neither_folder_nor_attributes(frontier: FrontierWithFaults, readonly: Path) -> None:
    os.chown(readonly, 0, 0)
    with acting_as(USER):
        with pytest.raises(SinkError, match=r"Make the folder writable, or use \S+out.jsonl\?identity=path"):
            await role_of(readonly, frontier)
        assert await role_of(f"{readonly}?identity=path", frontier) == str(readonly)


# -- several processes and machines


@pytest.mark.parametrize("existing", [None, b'{"identity": "web1-8f3ad2c1", "inode": 1}'], ids=["missing", "copy"])
def test_processes_that_start_together_agree(tmp_path: Path, existing: bytes | None) -> None:
    for turn in range(20):
        path = tmp_path / f"{turn}.jsonl"
        if existing is not None:
            sidecar(path).write_bytes(existing)
        wanted = [f"host-{number:08}" for number in range(8)]
        with ThreadPoolExecutor(8) as threads:
            stored = set(threads.map(identity._store_identity, [str(path)] * 8, wanted))
        assert stored == {identity_of(path)}
        assert sorted(tmp_path.glob(f"{turn}.*")) == [sidecar(path)], "no temporary file is left"


async def test_another_machine_with_the_same_path_is_announced(
    frontier: FrontierWithFaults, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "out.jsonl"
    assert await frontier.claim(f"sink:{path}#web1-8f3ad2c1", 60) is not None
    await role_of(path, frontier)
    assert f"also writes {path} on web1, which is another file: each machine writes a complete copy" in caplog.text


# -- runs


@pytest.mark.parametrize(
    ("store", "names"), [("memory:", {"out.csv"}), ("sqlite:///x.db", {"out.csv", "out.csv.shoal"})]
)
async def test_runs_in_memory_leave_no_identity(
    folder: Path, monkeypatch: pytest.MonkeyPatch, store: str, names: set[str]
) -> None:
    class Nothing(Spider):
        name = "nothing"

        def start(self) -> list[str]:
            return []

    monkeypatch.chdir(folder)
    done = await crawl(Nothing, {"frontier": store}, outputs=["out.csv"])
    assert done.error is None
    assert {name for name in os.listdir(folder) if not name.startswith("x.db")} == names


async def test_a_disk_that_takes_a_part_of_the_identity(
    frontier: FrontierWithFaults, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is almost full writes less than it was asked to, without an error."""
    path, write = folder / "out.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:5])))
    role = await role_of(path, frontier)
    assert split_role(role)[1] == identity_of(path)
    assert await role_of(path, frontier) == role
