"""Stores the pages of one process in WARC files, so that each page that is done has its records exactly once.

The records of a page are in the file, durably, before the frontier learns that the page is done. If the page does not
become done, its records are left out when the file gets its final name. If the process dies, another one asks the
frontier which of the pages in the file are done.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from typing import BinaryIO, NamedTuple

from msgspec import structs

from shoal import __version__
from shoal.config import WarcSettings
from shoal.errors import FrontierError, SinkError
from shoal.http.exchange import Exchange
from shoal.ports import Inspection, Lease, LeaseKey, LeaseOutcome, Run
from shoal.sinks.archive import LOCK, OPEN, ArchiveFolder, FolderLock
from shoal.sinks.archive_index import (
    ARCHIVE_MODE,
    ENDING,
    ArchiveError,
    IndexBuilder,
    page_line,
    rebuild_index,
    write_index,
)
from shoal.sinks.storage import GrowingFile, in_thread, is_at, replace_file, storage_errors, sync_folder
from shoal.sinks.warc_records import (
    Original,
    PagePart,
    PageRecords,
    first_record,
    members,
    page_records,
    read_lease,
    run_of,
)
from shoal.system import chance

log = logging.getLogger("shoal.warc")

_MAX_ORIGINALS = 100_000
"""Payloads that are remembered, so that the same payload is stored once."""
_MAX_SEARCHED = 2_000_000
"""Pages of the archive, the newest ones, among which a payload is looked for. A filter needs up to 8 MB for them."""
_PAUSE = 0.5
_QUESTIONS = 1000
"""How many leases one call asks the frontier about."""
_UNSAFE = re.compile(r"[^\w.-]")
_BLOCK = 1 << 16
_KIND = b"WARC-Type: "


class WarcArchive:
    """The archive of a process: `archive` of a `Participation`. Call ``open`` first, ``close`` last."""

    def __init__(
        self, settings: WarcSettings, run: Run, frontier: Inspection, *, durable: bool, user_agent: str
    ) -> None:
        """``durable``: the frontier survives a crash of the machine, so the records must too."""
        assert settings.folder is not None
        self._folder = os.path.realpath(settings.folder)
        self._max_bytes = settings.max_file_bytes
        self._run_id = run.run_id
        self._prefix = _UNSAFE.sub("_", run.run_id) + "-"
        self._frontier = frontier
        self._durable = durable
        # Runs of different stores may have the same id: the time of its creation tells them apart.
        mark = f"{run.run_id} {run.created_at:.3f}"
        self._about = {
            "software": f"Shoal/{__version__}",
            "format": "WARC File Format 1.1",
            "conformsTo": "http://iipc.github.io/warc-specifications/specifications/warc-format/warc-1.1/",
            "isPartOf": run.run_id,
            "http-header-user-agent": user_agent,
            "shoalRun": mark,
        }
        self._mark = f"shoalRun: {mark}\r\n".encode()
        self._process = chance.token_hex(4)
        self._number = 0
        self._file: WarcFile | None = None
        self._unsettled: dict[LeaseKey, tuple[PagePart, str, Original]] = {}
        """Pages in the file that may or may not be done: the frontier has not answered yet."""
        self._originals: dict[str, Original] = {}
        self._archive: ArchiveFolder | None = None
        """What earlier runs and other processes have stored."""
        self._lock: FolderLock | None = None

    async def open(self) -> None:
        """SinkError if it cannot write to the folder."""
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as exc:
            raise SinkError(f"can't create the folder {self._folder} (warc.folder): {exc.strerror}") from exc
        try:
            await self._take_lock()
            await self._recover()
            await in_thread(self._look_around)
        except BaseException:
            self._let_go()
            raise

    async def _take_lock(self) -> None:
        """Wait until nobody prunes the archive, and keep others from doing that."""
        with storage_errors(os.path.join(self._folder, LOCK)):
            self._lock = FolderLock(self._folder)
        try:
            is_first = True
            while not self._lock.take(shared=True):
                if is_first:
                    log.warning("waiting: the archive %s is being pruned", self._folder)
                is_first = False
                await asyncio.sleep(_PAUSE)
        except OSError as exc:
            log.warning("%s has no locks (%s): do not prune the archive during a crawl", self._folder, exc.strerror)

    def _look_around(self) -> None:
        """Find the files that are finished now."""
        try:
            if self._archive is None:
                self._archive = ArchiveFolder(self._folder, newest=_MAX_SEARCHED)
            else:
                self._archive.refresh()
        except ArchiveError as error:
            log.warning("%s", error)
            return
        for fault in self._archive.faults:
            log.warning("%s", fault)

    def _original(self, digest: str) -> Original | None:
        """A stored response with this payload: of this process, or in the files of others."""
        original = self._originals.get(digest)
        if original is None and self._archive is not None:
            original = self._archive.payload(digest)
            if original is not None:
                self._remember(digest, original)
        if original is not None and self._file is not None and original.filename == self._file.name:
            return structs.replace(original, filename="")
        return original

    def _remember(self, digest: str, original: Original) -> None:
        self._originals[digest] = original
        if len(self._originals) > _MAX_ORIGINALS:
            del self._originals[next(iter(self._originals))]

    # -- pages

    async def store(self, pages: Sequence[tuple[Lease, Exchange]]) -> None:
        """Store pages that are about to be done. SinkError if they cannot be written; then they must not become
        done."""
        if not pages:
            return
        if self._file is not None and self._file.size >= self._max_bytes:
            await self._end_file()
        await in_thread(self._store, pages)

    def _store(self, pages: Sequence[tuple[Lease, Exchange]]) -> None:
        keys = [LeaseKey(lease.fingerprint, lease.token) for lease, _ in pages]
        if self._file is None:
            self._file = self._new_file()
        records = [
            page_records(exchange, lease.request, key, self._original)
            for key, (lease, exchange) in zip(keys, pages, strict=True)
        ]
        parts = self._file.append(records, durable=self._durable)
        for key, part, page in zip(keys, parts, records, strict=True):
            original = page.original or page.response
            if not original.filename:
                original = structs.replace(original, filename=self._file.name)
            self._unsettled[key] = part, page.digest, original

    def _new_file(self) -> WarcFile:
        self._number += 1
        now = time.strftime("%Y%m%d%H%M%S", time.gmtime())
        name = f"{self._prefix}{now}-{self._number:05d}-{self._process}{ENDING}"
        return WarcFile(os.path.join(self._folder, name), first_record(name, self._about), self._run_id)

    def settled(self, leases: Sequence[Lease], done: Sequence[bool]) -> None:
        """Record the answer of the frontier. The records of pages that are not done are left out of the file later."""
        for lease, is_done in zip(leases, done, strict=True):
            self._settle(LeaseKey(lease.fingerprint, lease.token), "done" if is_done else "lost")

    def _settle(self, key: LeaseKey, outcome: LeaseOutcome) -> None:
        if outcome == "leased" or key not in self._unsettled:
            return
        part, digest, original = self._unsettled.pop(key)
        if outcome == "lost":
            assert self._file is not None
            self._file.dropped.append(part)
        elif digest not in self._originals:
            self._remember(digest, original)

    # -- files

    async def _end_file(self) -> None:
        """Give the file its final name, unless the frontier has not answered for all of its pages."""
        assert self._file is not None
        if self._unsettled:
            keys = list(self._unsettled)
            for key, outcome in zip(keys, await self._outcomes(keys), strict=True):
                self._settle(key, outcome)
        if not self._unsettled:
            await in_thread(self._file.finish)
            self._file = None
            await in_thread(self._look_around)

    async def close(self) -> None:
        """Finish the file of this process, and those that dead processes of the run left in the folder."""
        try:
            await self._finish_files()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._archive is not None:
            self._archive.close()
        if self._lock is not None:
            self._lock.close()
        self._archive = self._lock = None

    async def _finish_files(self) -> None:
        try:
            if self._file is not None:
                await self._end_file()
            await self._recover()
        except (FrontierError, SinkError) as exc:
            log.warning("cannot finish all WARC files in %s: %s", self._folder, exc)
        if self._file is not None:
            log.warning("%s keeps the ending %s until a process of the run uses the folder", self._file.path, OPEN)
            self._file.abandon()

    async def _recover(self) -> None:
        """Finish the files of dead processes of this run."""
        ending = ENDING + OPEN
        for name in sorted(os.listdir(self._folder)):
            if name.startswith(self._prefix) and name.endswith(ending):
                path = os.path.join(self._folder, name.removesuffix(OPEN))
                if self._file is None or self._file.path != path:
                    await self._recover_file(path)

    async def _recover_file(self, path: str) -> None:
        with left_by_dead(path) as file:
            if file is None:
                return
            leftover = await in_thread(read_leftover, file)
            if leftover.first and self._mark not in leftover.info:
                return
            outcomes = await self._outcomes([lease for _, lease in leftover.pages])
            if "leased" in outcomes:  # a completion may still be on its way to the store
                return
            lost = [part for (part, _), outcome in zip(leftover.pages, outcomes, strict=True) if outcome == "lost"]
            await in_thread(publish, path, leftover.first, leftover.size, lost)
            log.info("finished %s, which another process left: %d pages", path, len(leftover.pages) - len(lost))

    async def _outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        outcomes: list[LeaseOutcome] = []
        for begin in range(0, len(leases), _QUESTIONS):
            outcomes += await self._frontier.lease_outcomes(leases[begin : begin + _QUESTIONS])
        return outcomes


# -- files
#
# A file has the ending ``.open`` until it is whole. Then it is renamed, without the records of pages that are not
# done.


class WarcFile:
    """A file that is being written. All methods block."""

    def __init__(self, path: str, info: bytes, run_id: str) -> None:
        """``path`` is its final name. ``info`` is its first record."""
        self.path = path
        self.name = os.path.basename(path)
        self._file = GrowingFile(path + OPEN, run_id, mode=ARCHIVE_MODE)
        self._file.open(0, fresh=True)
        try:
            self._file.keep(0)
            self._file.append(info)
        except BaseException:
            self._file.close()
            raise
        self._first = self._file.size
        self._run = next((run_of(member.content) for member in members(BytesIO(info))), ("", 0.0))
        self._index = IndexBuilder(os.path.dirname(self.path))
        self.dropped: list[PagePart] = []

    @property
    def size(self) -> int:
        return self._file.size

    def append(self, pages: Sequence[PageRecords], *, durable: bool) -> list[PagePart]:
        """Append the records of pages."""
        lines = [page_line(page, self.name) for page in pages]
        begin, parts = self._file.size, []
        for page in pages:
            parts.append(PagePart(begin, begin + len(page.data)))
            begin += len(page.data)
        self._file.append(b"".join([page.data for page in pages]))
        if durable:
            self._file.sync()
        for line, page, part in zip(lines, pages, parts, strict=True):
            self._index.add(line, part.begin, page.length)
        return parts

    def finish(self) -> None:
        """Give the file its final name. A file without a page is removed."""
        self._file.sync()
        publish(self.path, self._first, self._file.size, self.dropped, None if self._index.is_broken else self)
        self._file.close()
        self._index.close()

    def write_index(self, size: int) -> None:
        """Write the index of the file, which will have this size."""
        write_index(self.path.removesuffix(ENDING), self._index.lines(self.dropped), self._run, size)

    def abandon(self) -> None:
        """Close the file without finishing it, as if the process had died."""
        self._file.close()
        self._index.close()


def publish(path: str, first: int, size: int, dropped: Sequence[PagePart], writer: WarcFile | None = None) -> None:
    """Turn an open file into a whole one, without the dropped parts. ``first``: where its pages begin. ``writer``: the
    file if it knows its index, which is otherwise made from the records.

    The index comes first: a file that has its final name has an index, whenever the process dies."""
    with storage_errors(path):
        kept = size - sum(part.end - part.begin for part in dropped)
        if kept <= first:
            os.unlink(path + OPEN)
            return
        if writer is not None:
            writer.write_index(kept)
        else:
            rebuild_index(path.removesuffix(ENDING), path + OPEN, size=size, dropped=dropped)
        if dropped or os.path.getsize(path + OPEN) != size:
            with open(path + OPEN, "rb") as old:
                os.close(replace_file(path, lambda new: _copy(old, new, size, sorted(dropped)), mode=ARCHIVE_MODE))
            os.unlink(path + OPEN)
        else:
            os.rename(path + OPEN, path)
        sync_folder(path)


def _copy(old: BinaryIO, new: BinaryIO, size: int, dropped: Sequence[PagePart]) -> None:
    at = 0
    for part in (*dropped, PagePart(size, size)):
        old.seek(at)
        bytes_left = part.begin - at
        while bytes_left > 0 and (block := old.read(min(bytes_left, _BLOCK))):
            new.write(block)
            bytes_left -= len(block)
        at = part.end


class Leftover(NamedTuple):
    """What a dead process left in an open file."""

    first: int
    """Where the pages begin. 0 if even the first record is missing."""
    size: int
    """Where the last whole page ends. The rest was being written when the process died."""
    pages: list[tuple[PagePart, LeaseKey]]
    info: bytes
    """The first record."""


@contextmanager
def left_by_dead(path: str) -> Iterator[BinaryIO | None]:
    """Lock and return the open file of this name; None if its process is alive, or another process has finished it.
    Without locks a dead process cannot be detected, so on such a file system the result is always None."""
    with ExitStack() as stack:
        locked: BinaryIO | None = None
        with suppress(OSError):
            file = stack.enter_context(open(path + OPEN, "rb"))
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(file.fileno(), path + OPEN):
                locked = file
        yield locked


def read_leftover(file: BinaryIO) -> Leftover:
    """Read an open file up to its last whole page."""
    first, size, info = 0, 0, b""
    pages: list[tuple[PagePart, LeaseKey]] = []
    for at, length, record in members(file):
        end = at + length
        kind = _kind_of(record)
        if kind == b"warcinfo" and not first:
            first, size, info = end, end, record
        elif kind == b"metadata" and (lease := read_lease(record)) is not None:
            pages.append((PagePart(size, end), lease))
            size = end
    return Leftover(first, size, pages, info)


def _kind_of(record: bytes) -> bytes:
    begin = record.find(_KIND)
    return record[begin + len(_KIND) : record.find(b"\r\n", begin)] if begin >= 0 else b""
