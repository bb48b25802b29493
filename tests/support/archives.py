"""Archives in a folder, written by processes that a test controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal import Request
from shoal.config import WarcSettings
from shoal.http.exchange import Exchange
from shoal.ports import Completion, Frontier, Lease, Run
from shoal.sinks.warc import WarcArchive

RUN = Run(run_id="run", spider="pages", state="running", created_at=1.5)


class Archive:
    """An archive in a folder, with a run in memory."""

    def __init__(self, folder: Path, frontier: Frontier) -> None:
        self.folder = folder
        self.frontier = frontier

    async def open(self, run: Run = RUN, **settings: Any) -> WarcArchive:
        chosen = WarcSettings(folder=str(self.folder), **settings)
        archive = WarcArchive(chosen, run, self.frontier, durable=True, user_agent="shoal-test")
        await archive.open()
        return archive

    async def lease(self, *urls: str) -> list[Lease]:
        await self.frontier.push([Request(url) for url in urls])
        return (await self.frontier.lease(len(urls), 60.0)).leases

    async def complete(self, archive: WarcArchive, *leases: Lease) -> None:
        results = await self.frontier.complete([Completion(lease=lease) for lease in leases])
        archive.settled(leases, [pushed is not None for pushed in results])


def exchange(url: str, body: bytes = b"", **fields: Any) -> Exchange:
    received = [(b"Content-Type", b"text/html")]
    return Exchange(
        url=url, method="GET", sent=[(b"Host", b"a.example")], status=200, reason="OK", received=received,
        body=body or url.encode(), began=1e9, elapsed=0.25, **fields,
    )  # fmt: skip


async def store(warc: Archive, archive: WarcArchive, *urls: str, body: bytes = b"") -> list[Lease]:
    leases = await warc.lease(*urls)
    await archive.store([(lease, exchange(lease.request.url, body)) for lease in leases])
    return leases


def die(archive: WarcArchive) -> Path:
    """Leave everything as a killed process does. Returns its open file."""
    assert archive._file is not None
    archive._file.abandon()
    if archive._lock is not None:
        archive._lock.close()
        archive._lock = None
    return Path(archive._file.path + ".open")
