"""Reads an archive: a folder with the WARC files of runs and their indexes.

`ArchiveFolder` finds a page by its request or its URL, and reads its headers and its body, wherever that is. Nothing
in the folder is trusted: what is missing, damaged or swapped is an `ArchiveError`, and never another page.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from msgspec import Struct

from shoal.http import Request
from shoal.sinks.archive_index import (
    ENDING,
    KEYS,
    REVISIT,
    ArchiveError,
    FileIndex,
    IndexEntry,
    IndexLine,
)
from shoal.sinks.warc_records import Record, members, parse_head, parse_record, payload_digest, run_of

OPEN = ".open"
_MAX_OPEN = 128
"""Indexes that are open at the same time. Each has up to two files."""
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

    def __init__(self, folder: str, runs: Collection[str] | None = None) -> None:
        """``runs``: the IDs of the runs whose pages are found; None: all. Bodies are read wherever they are.

        ArchiveError if the folder cannot be read. A file that has no index, or a damaged one, is left out: ``faults``
        says so."""
        self.folder = os.path.realpath(folder)
        self.faults: list[ArchiveError] = []
        self._runs = None if runs is None else set(runs)
        self._open: dict[str, FileIndex] = {}
        self._paths: list[str] = []
        self._searched: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """Look for new and removed files."""
        self.faults.clear()
        found: list[tuple[str, str, str]] = []
        for path in finished_files(self.folder):
            try:
                summary = self._index(path).summary
            except ArchiveError as error:
                self.faults.append(error)
            else:
                found.append((summary.last, path, summary.run))
        found.sort(reverse=True)
        self._paths = [path for _, path, _ in found]
        runs = self._runs
        self._searched = [path for _, path, run in found if runs is None or run in runs]
        for path in self._open.keys() - set(self._paths):
            self._open.pop(path).close()

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
            self._open.pop(next(iter(self._open))).close()
        return index

    # -- find

    def find(self, request: Request | bytes) -> Found | None:
        """The newest page of a request, or of a fingerprint; None if the archive has none."""
        fingerprint = (request if isinstance(request, bytes) else request.fingerprint()).hex()
        found = (
            Found(index, line) for index in self._indexes(self._searched) for line in index.by_fingerprint(fingerprint)
        )
        return max(found, key=lambda each: each.line.date, default=None)

    def pages_of(self, url: str) -> list[Found]:
        """The pages of a URL, newest first, whatever the method was."""
        found = [Found(index, line) for index in self._indexes(self._searched) for line in index.by_url(url)]
        return sorted(found, key=lambda each: each.line.date, reverse=True)

    def originals(self, digest: str) -> Iterator[Found]:
        """The responses that have this payload."""
        for index in self._indexes(self._paths):
            for line in index.by_digest(digest):
                if line.entry.mime != REVISIT:
                    yield Found(index, line)

    def _indexes(self, paths: list[str]) -> Iterator[FileIndex]:
        for path in paths:
            yield self._index(path)

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
        for original in self._candidates(found):
            try:
                record = read_record(original)
                body = record.block[parse_head(record.block)[2] :]
                check_payload(original, body)
            except ArchiveError as error:
                reason = str(error)
            else:
                return body
        raise ArchiveError(f"{_place(found)}: the payload of {found.entry.url} is lost: {reason}")

    def _candidates(self, found: Found) -> Iterator[Found]:
        """Responses with the payload of a revisit; the one that it names first."""
        hint = os.path.join(os.path.dirname(found.file.path), found.entry.original.removesuffix(ENDING))
        near = hint if found.entry.original and hint in self._paths else found.file.path
        with suppress(ArchiveError):
            for line in self._index(near).by_digest(found.entry.digest):
                if line.entry.mime != REVISIT:
                    yield Found(self._index(near), line)
        yield from self.originals(found.entry.digest)

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
            run.bytes += _size_of(path)
        for path in open_files(self.folder):
            key = open_run(path)
            run = found.setdefault(key, _no_files(*key))
            run.open_files.append(path)
            run.bytes += _size_of(path)
        return sorted(found.values(), key=lambda run: (bool(run.run), run.created), reverse=True)


def _no_files(run: str, created: float) -> RunFiles:
    return RunFiles(run=run, created=created, files=[], open_files=[])


def _size_of(path: str) -> int:
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
