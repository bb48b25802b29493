"""A frontier file whose owner is a process of its own survives the faults of a server."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import StoreError
from shoal.frontier import open_store, share_store
from shoal.frontier.local import wire
from shoal.frontier.local.places import TIMEOUT
from shoal.frontier.local.server import start_owner
from shoal.frontier.local.store import OwnerConnection
from shoal.http import Request
from shoal.ports import FrontierOptions, Store
from shoal.testing import ServerFaultContract, ServerFaultHarness
from shoal.testing.steps import TTL, page, push


def _is_alive(pid: int) -> bool:
    """A zombie is not: if another test made this process a subreaper, nobody may wait for it. But while it has other
    threads, its files and sockets stay open."""
    try:
        state, *facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state not in "ZX" or int(facts[16]) > 1


class LocalFaults(ServerFaultHarness):
    """The owner of one file. It is started by hand, so that a killed one stays away."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._path = start_owner(str(file))

    @property
    def _pid(self) -> int:
        return int(Path(f"{self._file}.lock").read_text().splitlines()[0])

    async def open_store(self, timeout: float | None = None) -> Store:
        return await open_store(f"local:{self._path}?timeout={timeout or TIMEOUT}")

    def kill(self) -> None:
        pid = self._pid
        os.kill(pid, signal.SIGKILL)
        while _is_alive(pid):
            time.sleep(0.01)

    def restart(self) -> None:
        assert start_owner(str(self._file)) == self._path

    @contextmanager
    def frozen(self) -> Iterator[None]:
        os.kill(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    async def mark_as_newer(self) -> None:
        self.kill()
        with sqlite3.connect(self._file) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()

    async def damage(self, request: Request) -> None:
        with sqlite3.connect(self._file) as db:
            db.execute("UPDATE request SET payload = ? WHERE fingerprint = ?", (b"\xc1", request.fingerprint()))
        db.close()


class TestLocalFaults(ServerFaultContract):
    """Some faults are those of a file: the store says so, and what to do."""

    @pytest.fixture
    def faults(self, tmp_path: Path) -> ServerFaultHarness:
        self.file = tmp_path / "crawl.db"
        return LocalFaults(self.file)

    async def test_a_newer_format_is_refused(self, faults: ServerFaultHarness) -> None:
        frontier = await faults.open_run()
        await push(frontier, 1)
        await faults.mark_as_newer()
        with pytest.raises(StoreError, match="newer Shoal"):
            await share_store(f"sqlite:///{self.file}")

    async def test_an_unreadable_record_costs_only_itself(self, faults: ServerFaultHarness) -> None:
        """A file with such a record is damaged. Nothing is leased from it."""
        frontier = await faults.open_run()
        await push(frontier, 1, 2)
        await faults.damage(page(1))
        with pytest.raises(StoreError, match="damaged"):
            await frontier.lease(1, TTL)


async def test_an_owner_that_ends_before_it_answers_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has been idle for long enough at this moment."""
    greeting, greet = asyncio.Event(), OwnerConnection._greet

    async def note(self: OwnerConnection, link: Any) -> wire.Welcome:
        greeting.set()
        return await greet(self, link)

    monkeypatch.setattr(OwnerConnection, "_greet", note)
    faults = LocalFaults(tmp_path / "crawl.db")
    os.kill(faults._pid, signal.SIGSTOP)
    joining = asyncio.create_task(share_store(f"sqlite:///{tmp_path}/crawl.db"))
    await greeting.wait()
    faults.kill()
    store = await joining
    assert await store.list_runs() == []
    await store.close()


async def test_leases_of_a_process_that_ended_are_free_at_once(tmp_path: Path) -> None:
    """A worker process leases everything and is killed."""
    url = f"sqlite:///{tmp_path}/crawl.db"
    store = await share_store(url)
    script = f"""
import asyncio
from shoal.frontier import share_store
from shoal.http import Request
from shoal.ports import FrontierOptions, Run

async def main():
    store = await share_store({url!r})
    await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0.0))
    frontier = await store.frontier("run", FrontierOptions())
    await frontier.push([Request("http://a.example/")])
    assert (await frontier.lease(1, 300)).leases and await frontier.claim("seed", 300)
    print("leased", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"leased\n"
    frontier = await store.frontier("run", FrontierOptions())
    assert not (await frontier.lease(1, TTL)).leases
    assert await frontier.claim("seed", TTL) is None
    process.kill()
    await process.wait()
    until = time.monotonic() + 20
    while not (leases := (await frontier.lease(1, TTL)).leases):
        assert time.monotonic() < until
    assert leases[0].attempt == 2
    assert await frontier.claim("seed", TTL) is not None
    await store.close()
