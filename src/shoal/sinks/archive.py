"""Reads an archive: a folder with the WARC files of runs and their indexes.

`ArchiveFolder` finds a page by its request or its URL, and reads its headers and its body, wherever that is. Nothing
in the folder is trusted: what is missing, damaged or swapped is an `ArchiveError`, and never another page.
"""

from __future__ import annotations

import fcntl
import os
import sys
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from shoal.http import Request
from shoal.sinks.archive_index import (
    ARCHIVE_MODE,
    ENDING,
    KEYS,
    REVISIT,
    ArchiveError,
    FileIndex,
    IndexEntry,
    IndexLine,
    digest_key,
)
from shoal.sinks.warc_records import Original, Record, members, parse_head, parse_record, payload_digest, run_of

OPEN = ".open"
_MAX_OPEN = 64
"""Indexes that stay open. Each has up to two files."""
_FILTER_BYTES = 1 << 23
_MAX_RECORD = 1 << 30
_STEP = 1 << 20


class Found(NamedTuple):
    """A page that an index has."""

    file: FileIndex
    line: IndexLine

    @property
    def entry(self) -> IndexEntry:
        return self.line.entry


class StoredPage(Struct, frozen=True, kw_only=True):
    """A page as it was received."""

    entry: IndexEntry
    run: str
    date: str
    """The time of the request, in ISO 8601."""
    status: int
    reason: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    """As it was received: a compressed body is still compressed."""


class RunFiles(Struct, kw_only=True):
    """The files of a run in an archive."""

    run: str
    created: float
    """When the run was created. Runs of different stores may have the same ID."""
    files: list[str]
    """Finished files, without their ending."""
    open_files: list[str]
    """Files that a process writes, or that a dead process left; without their ending."""
    pages: int = 0
    revisits: int = 0
    bytes: int = 0
    """Of all files, with their indexes."""
    first: str = ""
    """The time of the oldest page, in 14 digits."""
    last: str = ""


class ArchiveFolder:
    """An archive that is read. All methods block; one thread at a time may use it."""

    def __init__(self, folder: str, runs: Collection[str] | None = None, *, newest: int | None = None) -> None:
        """``runs``: the IDs of the runs whose pages are found; None: all. Bodies are read wherever they are.
        ``newest``: use only the newest files, with about so many pages.

        ArchiveError if the folder cannot be read. A file that has no index, or a damaged one, is left out: ``faults``
        says so."""
        self.folder = os.path.realpath(folder)
        self.faults: list[ArchiveError] = []
        self._runs = None if runs is None else set(runs)
        self._newest = newest
        self._open: dict[str, FileIndex] = {}
        self._filter: PayloadFilter | None = None
        self._paths: list[str] = []
        self._entries = 0
        self._searched: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for new and removed files."""
        self.faults.clear()
        self._filter = None
        found: list[tuple[str, str, str, int]] = []
        for path in finished_files(self.folder):
            try:
                summary = self._index(path).summary
            except ArchiveError as error:
                self.faults.append(error)
            else:
                found.append((summary.last, path, summary.run, summary.tables))
        found.sort(reverse=True)
        if self._newest is not None:
            pages = accumulate((count for _, _, _, count in found), initial=0)
            found = [file for file, before in zip(found, pages, strict=False) if before < self._newest]
        self._paths = [path for _, path, _, _ in found]
        self._entries = sum(count for _, _, _, count in found)
        runs = self._runs
        self._searched = [path for _, path, run, _ in found if runs is None or run in runs]
        for path in self._open.keys() - set(self._paths):
            del self._open[path]

    def close(self) -> None:
        for index in self._open.values():
            index.close()
        self._open.clear()

    def __enter__(self) -> ArchiveFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _index(self, path: str) -> FileIndex:
        index = self._open.pop(path, None) or FileIndex(path)
        self._open[path] = index  # the last one is the one used last
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]  # it is closed when nothing uses it any more
        return index

    # -- find

    def find(self, request: Request | bytes) -> Found | None:
        """The newest page of a request, or of a fingerprint; None if the archive has none."""
        fingerprint = (request if isinstance(request, bytes) else request.fingerprint()).hex()
        found = (
            Found(index, line) for index in self._indexes(self._searched) for line in index.by_fingerprint(fingerprint)
        )
        return max(found, key=lambda page: page.line.date, default=None)

    def pages_of(self, url: str) -> list[Found]:
        """The pages of a URL, newest first, whatever the method was."""
        found = [Found(index, line) for index in self._indexes(self._searched) for line in index.by_url(url)]
        return sorted(found, key=lambda page: page.line.date, reverse=True)

    def payload(self, digest: str) -> Original | None:
        """A response that has this payload, undamaged; None if there is none."""
        if self._filter is None:
            self._filter = PayloadFilter(self._indexes(self._paths), self._entries)
        key = digest_key(digest)
        for index in self._indexes(self._paths) if self._filter.may_have(key) else ():
            if index.has_digest(key):
                for original in self._candidates(index, digest):
                    with suppress(ArchiveError):
                        record = read_record(original)
                        check_payload(original, body_of(record))
                        date = record.headers.get("warc-date", "")
                        return Original(record.record_id, record.url, date, original.file.filename)
        return None

    def _candidates(self, index: FileIndex, digest: str) -> Iterator[Found]:
        """Responses with a payload, from the file that probably has it to the others. ``index`` has a page with it."""
        near = [index.path]
        with suppress(ArchiveError):
            for line in index.by_digest(digest):
                hint = os.path.join(os.path.dirname(index.path), line.entry.original.removesuffix(ENDING))
                if line.entry.original and hint in self._paths:
                    near.append(hint)
                    break
        for path in dict.fromkeys([*near, *self._paths]):
            with suppress(ArchiveError):
                yield from self._responses(path, digest)

    def _responses(self, path: str, digest: str) -> Iterator[Found]:
        index = self._index(path)
        for line in index.by_digest(digest):
            if line.entry.mime != REVISIT:
                yield Found(index, line)

    def _indexes(self, paths: Iterable[str]) -> Iterator[FileIndex]:
        for path in paths:
            yield self._index(path)

    def indexes(self, paths: Collection[str] | None = None) -> Iterator[FileIndex]:
        """The indexes of files, one after the other: of these, or of all."""
        return self._indexes(self._paths if paths is None else paths)

    # -- read

    def read(self, found: Found) -> StoredPage:
        """Read a page. ArchiveError if its records are missing or damaged, or belong to another page."""
        record = read_record(found)
        line, headers, at = parse_head(record.block)
        body = record.block[at:]
        if found.entry.mime == REVISIT:
            body = self._payload(found)
        else:
            check_payload(found, body)
        words = [*line.split(" ", 2), "", ""]
        return StoredPage(
            entry=found.entry,
            run=found.file.summary.run,
            date=record.headers.get("warc-date", ""),
            status=int(found.entry.status) if found.entry.status.isdigit() else 0,
            reason=words[2],
            headers=headers,
            body=body,
        )

    def _payload(self, found: Found) -> bytes:
        """The payload of a revisit, from the record that has it."""
        reason = "no file has it"
        for original in self._candidates(found.file, found.entry.digest):
            try:
                body = body_of(read_record(original))
                check_payload(original, body)
            except ArchiveError as error:
                reason = str(error)
            else:
                return body
        raise ArchiveError(f"{_place(found)}: the payload of {found.entry.url[:200]} is lost: {reason}")

    def rendered(self, found: Found) -> bytes | None:
        """The page after its scripts have run; None if it was not rendered."""
        if not found.entry.rendered:
            return None
        owner, end = read_record(found).record_id, int(found.entry.offset) + int(found.entry.length)
        with read_errors(found.file.path + ENDING), open(found.file.path + ENDING, "rb") as file:
            for member in members(file, end):
                record = parse_record(member.content)
                if record is None or record.kind in ("response", "revisit"):
                    break
                if record.kind == "conversion" and owner in record.headers.get("warc-refers-to", ""):
                    return _parsed(found, _unpacked(found, _pread(found, member.offset, member.length))).block
        raise ArchiveError(f"{_place(found)}: the rendered page of {found.entry.url} is missing")

    # -- runs

    def runs(self) -> list[RunFiles]:
        """The runs that have files here, newest first. What belongs to no run comes last."""
        found: dict[tuple[str, float], RunFiles] = {}
        for path in self._paths:
            summary = self._index(path).summary
            run = found.setdefault((summary.run, summary.created), _no_files(summary.run, summary.created))
            run.files.append(path)
            run.pages += summary.pages
            run.revisits += summary.revisits
            run.first = min(run.first or summary.first, summary.first)
            run.last = max(run.last, summary.last)
            run.bytes += size_of(path)
        for path in open_files(self.folder):
            key = open_run(path)
            run = found.setdefault(key, _no_files(*key))
            run.open_files.append(path)
            run.bytes += size_of(path)
        return sorted(found.values(), key=lambda run: (bool(run.run), run.created), reverse=True)


class PayloadFilter:
    """Knows of nearly every payload that no file has it. Searching 50 files for a new payload would take longer than
    its page takes."""

    def __init__(self, indexes: Iterable[FileIndex], entries: int) -> None:
        """``entries``: how many pages they have."""
        self._bits = bytearray(min(_FILTER_BYTES, 1 << (4 * entries).bit_length()))
        self._mask = mask = len(self._bits) - 1
        bits = self._bits
        for index in indexes:
            for number in array("Q", index.digest_keys()):
                bits[number >> 3 & mask] |= 1 << (number & 7)

    def may_have(self, key: bytes) -> bool:
        number = int.from_bytes(key, sys.byteorder)
        return bool(self._bits[number >> 3 & self._mask] & 1 << (number & 7))


def _no_files(run: str, created: float) -> RunFiles:
    return RunFiles(run=run, created=created, files=[], open_files=[])


def size_of(path: str) -> int:
    """The bytes of a file with its index. ``path`` is without its ending."""
    size = 0
    for ending in (ENDING, ENDING + OPEN, ".cdxj", KEYS):
        with suppress(OSError):
            size += os.path.getsize(path + ending)
    return size


def finished_files(folder: str) -> list[str]:
    """The WARC files of a folder that are finished, without their ending. ArchiveError if it cannot be read."""
    return _files(folder, ENDING)


def open_files(folder: str) -> list[str]:
    """The WARC files that are being written, or that a dead process left, without their ending."""
    return _files(folder, ENDING + OPEN)


def _files(folder: str, ending: str) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as exc:
        raise ArchiveError(f"cannot read the archive {folder}: {exc.strerror}") from exc
    return [os.path.join(folder, name.removesuffix(ending)) for name in names if name.endswith(ending)]


def open_run(path: str) -> tuple[str, float]:
    """The run of an open file; nothing if its first record is missing."""
    with suppress(OSError), open(path + ENDING + OPEN, "rb") as file:
        for member in members(file):
            record = parse_record(member.content)
            return run_of(record.block) if record is not None and record.kind == "warcinfo" else ("", 0.0)
    return "", 0.0


# -- one prune at a time, and no crawl meanwhile

LOCK = ".lock"


class FolderLock:
    """Keeps an archive from being pruned while crawls write to it: they share the lock, and `prune` has it alone."""

    def __init__(self, folder: str) -> None:
        """OSError if the folder takes no new files."""
        self._descriptor = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, ARCHIVE_MODE)

    def take(self, *, shared: bool) -> bool:
        """Whether it is taken. OSError if the file system has no locks."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


# -- records


def _place(found: Found) -> str:
    return f"{found.file.filename} at {found.entry.offset}"


def read_record(found: Found) -> Record:
    """The record of a page. ArchiveError if it is not the one that the index names."""
    try:
        offset, length = int(found.entry.offset), int(found.entry.length)
    except ValueError:
        raise ArchiveError(f"{_place(found)}: the index names no place for {found.entry.url}") from None
    record = _parsed(found, _unpacked(found, _pread(found, offset, length)))
    entry = found.entry
    if (record.url, record.record_id) != (entry.url, entry.record):
        raise ArchiveError(f"{_place(found)} has another record than the index says: {record.url[:200]}")
    if record.headers.get("warc-payload-digest", "-") != entry.digest:
        raise ArchiveError(f"{_place(found)} has another digest than the index says, for {entry.url[:200]}")
    return record


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Turn an OSError into an ArchiveError."""
    try:
        yield
    except OSError as exc:
        raise ArchiveError(f"cannot read {path}: {exc.strerror or exc}") from exc


def body_of(record: Record) -> bytes:
    """The body of an HTTP message."""
    return record.block[parse_head(record.block)[2] :]


def _pread(found: Found, offset: int, length: int) -> bytes:
    path = found.file.path + ENDING
    with read_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if not 0 <= offset < offset + length <= os.fstat(descriptor).st_size:
                raise ArchiveError(f"{_place(found)} has no record: the file is shorter than its index says")
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)


def _unpacked(found: Found, data: bytes) -> bytes:
    unpacker, parts, size = zlib.decompressobj(zlib.MAX_WBITS + 16), [], 0
    try:
        while not unpacker.eof and data and size <= _MAX_RECORD:
            parts.append(unpacker.decompress(data, _STEP))
            size += len(parts[-1])
            data = unpacker.unconsumed_tail
    except zlib.error as exc:
        raise ArchiveError(f"{_place(found)} has a damaged record: {exc}") from None
    if size > _MAX_RECORD:
        raise ArchiveError(f"{_place(found)} has a record of more than {_MAX_RECORD} bytes")
    if not unpacker.eof:
        raise ArchiveError(f"{_place(found)} has a record without an end")
    return b"".join(parts)


def _parsed(found: Found, content: bytes) -> Record:
    record = parse_record(content)
    if record is None or str(len(record.block)) != record.headers.get("content-length"):
        raise ArchiveError(f"{_place(found)} is no record of a WARC file, or an incomplete one")
    return record


def check_payload(found: Found, body: bytes) -> None:
    """ArchiveError if a payload has another digest than its record says. Digests of other kinds are not checked."""
    if found.entry.digest.startswith("sha1:") and payload_digest(body) != found.entry.digest:
        raise ArchiveError(f"{_place(found)}: the payload of {found.entry.url[:200]} has another digest")
