"""Only their user can read files that hold secrets or queued requests, whatever the umask."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shoal.config import CacheSettings
from shoal.fetch.layers.cache import Cache
from shoal.frontier import open_store
from shoal.frontier.memory.requests import Spill
from shoal.http import Request, Response
from shoal.http.exchange import Exchange
from shoal.ports import FrontierOptions, Run
from shoal.runs.autoscale import LocalPool
from shoal.sinks.warc import WarcFile
from shoal.sinks.warc_records import Original, PageRecords


@pytest.fixture(autouse=True)
def permissive() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in folder.rglob("*") if file.is_file()}


async def test_the_sqlite_store(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/crawl.db")
    try:
        run = await store.create_run(Run(run_id="a", spider="a", state="running", created_at=0.0, settings={}))
        frontier = await store.frontier(run.run_id, FrontierOptions())
        await frontier.push([Request("http://a.example/", headers={"Authorization": "secret"})])
        names = {"crawl.db", "crawl.db-wal", "crawl.db-shm", "crawl.db.lock"}
        assert modes(tmp_path) == dict.fromkeys(names, "0o600")
    finally:
        await store.close()
    assert modes(tmp_path) == {"crawl.db": "0o600"}


def test_the_spill_of_a_queue_in_memory() -> None:
    before = opened()
    spill = Spill()
    assert spill.add([(1, 0.0, number, os.urandom(4000)) for number in range(5000)])
    found = {name: mode for name, mode in opened().items() if name not in before and "etilqs" in name}
    assert found
    assert set(found.values()) == {"0o600"}
    assert all(name.endswith("(deleted)") for name in found)


def opened() -> dict[str, str]:
    """The files that this process has open, and their modes."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that the folder was read by
            found[os.readlink(f"/proc/self/fd/{number}")] = oct(stat.S_IMODE(os.fstat(int(number)).st_mode))
    return found


async def test_the_cache(tmp_path: Path) -> None:
    async def fetch(request: Request) -> Response:
        return Response(request.url, headers={"Set-Cookie": "secret"}, request=request)

    cache = Cache(CacheSettings(enabled=True, folder=str(tmp_path / "cache")))
    await cache(Request("http://a.example/"), fetch)
    assert list(modes(tmp_path).values()) == ["0o600"]


async def test_the_logs_of_workers(tmp_path: Path) -> None:
    pool = LocalPool(["--help"], tmp_path)
    await pool.scale(1)
    while await pool.current():
        await asyncio.sleep(0.05)
    await pool.close()
    assert list(modes(tmp_path).values()) == ["0o600"]


def page(data: bytes) -> PageRecords:
    url = "http://a.example/"
    made = Exchange(url=url, method="GET", sent=[], status=200, received=[], body=b"", began=1e9, elapsed=0.1)
    response = Original("1", url, "2026-01-01T00:00:00Z")
    return PageRecords(data, len(data), made, [], "sha1:A", response, None, bytes(16))


@pytest.mark.parametrize("drops", [False, True])
def test_warc_files(tmp_path: Path, drops: bool) -> None:
    """Their requests have cookies and passwords."""
    file = WarcFile(str(tmp_path / "a.warc.gz"), b"info", "run")
    first, _ = file.append([page(b"first"), page(b"second")], durable=True)
    assert modes(tmp_path) == {"a.warc.gz.open": "0o600"}
    if drops:  # then it is copied
        file.dropped.append(first)
    file.finish()
    assert modes(tmp_path) == dict.fromkeys(("a.warc.gz", "a.cdxj", "a.keys"), "0o600")
