"""A frontier file under several names: hard links, mounts, symbolic links, relative paths."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shoal.errors import StoreBusyError, StoreError
from shoal.frontier import join_store, open_store, share_store
from shoal.frontier.sqlite import SQLiteStore
from shoal.frontier.sqlite.file_lock import name_in_use
from shoal.ports import Run

HOLD = """
import asyncio, os, sys
from shoal.frontier.sqlite import SQLiteStore
from shoal.ports import Run

async def main():
    store = await SQLiteStore.open(sys.argv[1])
    await store.create_run(Run(run_id=sys.argv[2], spider="s", state="running", created_at=1.0))
    print("open", flush=True)
    sys.stdin.read()
    await store.close()

asyncio.run(main())
"""
TRY = """
import asyncio, sys
from shoal.errors import ShoalError
from shoal.frontier.sqlite import SQLiteStore

async def main():
    try:
        store = await SQLiteStore.open(sys.argv[1])
        await store.close()
        print("opened")
    except ShoalError as error:
        print(type(error).__name__, error)

asyncio.run(main())
"""
Rename = Callable[[Path], Path]


def run_of(name: str) -> Run:
    return Run(run_id=name, spider="s", state="running", created_at=1.0)


class Holder:
    """A process that works on a file. It has made a run."""

    def __init__(self, path: Path, run_id: str = "first") -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", HOLD, path, run_id], stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "open\n"

    def close(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "crawl.db"


@pytest.fixture
def mounts() -> Iterator[list[Path]]:
    """What is unmounted after the test."""
    mounted: list[Path] = []
    yield mounted
    for each in mounted:
        subprocess.run(["umount", "-l", each], check=True)


def bind(source: Path, target: Path, mounts: list[Path]) -> None:
    done = subprocess.run(["mount", "--bind", source, target], capture_output=True, check=False)
    if done.returncode:
        reason = f"nothing can be mounted: {done.stderr.decode().strip()}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    mounts.append(target)


@pytest.fixture(params=["hard link", "symbolic link", "mounted file", "mounted folder", "relative"])
def rename(
    request: pytest.FixtureRequest, tmp_path: Path, mounts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> Rename:
    """Gives the file another name."""
    other = tmp_path / "elsewhere" / "other.db"
    other.parent.mkdir()

    def give(path: Path) -> Path:
        match request.param:
            case "hard link":
                other.hardlink_to(path)
            case "symbolic link":
                other.symlink_to(path)
            case "mounted file":
                other.touch()
                bind(path, other, mounts)
            case "mounted folder":
                bind(path.parent, other.parent, mounts)
                return other.with_name(path.name)
            case _:
                monkeypatch.chdir(tmp_path)
                return Path("data/../data") / path.name
        return other

    return give


async def test_a_second_process_is_refused_whatever_name_it_uses(path: Path, rename: Rename) -> None:
    holder = Holder(path)
    other = rename(path)
    with pytest.raises(StoreBusyError, match=rf"pid {holder.process.pid}"):
        await SQLiteStore.open(other)
    looking = await open_store(f"sqlite:///{other}", readonly=True)
    assert [run.run_id for run in await looking.list_runs()] == ["first"]  # it is still in the log
    await looking.close()
    holder.close()
    store = await SQLiteStore.open(other)
    await store.create_run(run_of("second"))
    await store.close()
    store = await SQLiteStore.open(path)
    assert [run.run_id for run in await store.list_runs()] == ["second", "first"]
    await store.close()


async def test_a_second_process_joins_the_owner_whatever_name_it_uses(path: Path, rename: Rename) -> None:
    owner = await share_store(f"sqlite:///{path}")
    await owner.create_run(run_of("first"))
    other = rename(path)
    for join in (share_store, join_store):
        joined = await join(f"sqlite:///{other}")
        assert [run.run_id for run in await joined.list_runs()] == ["first"]
        await joined.close()
    await owner.close()


async def test_the_log_of_a_killed_process_is_found_whatever_name_is_used(path: Path, rename: Rename) -> None:
    Holder(path).kill()
    assert path.with_name("crawl.db-wal").stat().st_size
    other = rename(path)
    looking = await open_store(f"sqlite:///{other}", readonly=True)
    assert [run.run_id for run in await looking.list_runs()] == ["first"]
    await looking.close()
    store = await SQLiteStore.open(other)
    assert [run.run_id for run in await store.list_runs()] == ["first"]
    await store.close()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_two_names_in_one_process(path: Path) -> None:
    store = await SQLiteStore.open(path)
    await store.create_run(run_of("first"))
    other = path.with_name("other.db")
    other.hardlink_to(path)
    with pytest.raises(StoreBusyError):
        await SQLiteStore.open(other)
    await store.create_run(run_of("second"))
    await store.close()
    store = await SQLiteStore.open(other)
    assert name_in_use(path) == str(other)
    await store.close()
    assert name_in_use(path) == str(path)


def test_another_container_that_does_not_see_the_first_name(path: Path, tmp_path: Path) -> None:
    """It has the file under a name of its own, and an empty folder where the first one is."""
    holder = Holder(path)
    other, empty = tmp_path / "other.db", tmp_path / "empty"
    other.touch()
    empty.mkdir()
    script = (
        f"mount --bind {path} {other} && mount --bind {empty} {path.parent} && exec {sys.executable} -c '{TRY}' {other}"
    )
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"no other container: {done.stderr}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    assert done.stdout.startswith("StoreBusyError another process works on"), done.stdout
    assert "under another name" in done.stdout
    holder.kill()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the log with its last changes is not here" in done.stdout
    done = subprocess.run([sys.executable, "-c", TRY, path], capture_output=True, text=True, check=True)
    assert done.stdout == "opened\n"


async def test_a_file_that_was_moved_without_its_log(path: Path) -> None:
    Holder(path).kill()
    moved = path.with_name("moved.db")
    path.rename(moved)
    with pytest.raises(
        StoreError, match=r"moved\.db was .*crawl\.db before, .* move .*crawl\.db-wal to .*moved\.db-wal"
    ):
        await SQLiteStore.open(moved)
    path.with_name("crawl.db-wal").rename(path.with_name("moved.db-wal"))
    store = await SQLiteStore.open(moved)
    assert [run.run_id for run in await store.list_runs()] == ["first"]
    await store.close()


async def test_a_copy_is_another_file(path: Path) -> None:
    store = await SQLiteStore.open(path)
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    other = await SQLiteStore.open(copy)
    await other.create_run(run_of("other"))
    assert await store.list_runs() == []
    await other.close()
    await store.close()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_removed_or_replaced_while_it_is_open(path: Path, replaced: bool) -> None:
    store = await SQLiteStore.open(path)
    await store.create_run(run_of("first"))
    path.rename(path.with_name("away.db"))
    if replaced:
        path.touch()
    store._file._check_at = 0.0
    with pytest.raises(StoreError, match="was removed or replaced while this process worked on it"):
        await store.create_run(run_of("second"))
    await store.close()
