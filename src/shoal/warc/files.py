"""Writes one WARC file, and recovers the file of a dead process.

A file has the ending ``.open`` until it is whole. Then it is renamed, without the records of pages that are not done.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO, NamedTuple

from shoal.ports import LeaseKey
from shoal.sinks.storage import GrowingFile, replace_file, storage_errors, sync_folder
from shoal.warc.records import read_lease

OPEN = ".open"
_MODE = 0o600  # requests have cookies and passwords
_BLOCK = 1 << 16
_KIND = b"WARC-Type: "


class PagePart(NamedTuple):
    """The records of one page in a file."""

    begin: int
    end: int


class WarcFile:
    """A file that is being written. All methods block."""

    def __init__(self, path: str, info: bytes, run_id: str) -> None:
        """``path`` is its final name. ``info`` is its first record."""
        self.path = path
        self._file = GrowingFile(path + OPEN, run_id, mode=_MODE)
        self._file.open(0, fresh=True)
        try:
            self._file.keep(0)
            self._file.append(info)
        except BaseException:
            self._file.close()
            raise
        self._first = self._file.size
        self.dropped: list[PagePart] = []

    @property
    def size(self) -> int:
        return self._file.size

    def append(self, pages: Sequence[bytes], *, durable: bool) -> list[PagePart]:
        """Append the records of pages."""
        begin, parts = self._file.size, []
        for page in pages:
            parts.append(PagePart(begin, begin + len(page)))
            begin += len(page)
        self._file.append(b"".join(pages))
        if durable:
            self._file.sync()
        return parts

    def finish(self) -> None:
        """Give the file its final name. A file without a page is removed."""
        self._file.sync()
        publish(self.path, self._first, self._file.size, self.dropped)
        self._file.close()

    def abandon(self) -> None:
        """Close the file without finishing it, as if the process had died."""
        self._file.close()


def publish(path: str, first: int, size: int, dropped: Sequence[PagePart]) -> None:
    """Turn an open file into a whole one, without the dropped parts. ``first``: where its pages begin."""
    with storage_errors(path):
        if size - sum(part.end - part.begin for part in dropped) <= first:
            os.unlink(path + OPEN)
            return
        if dropped or os.path.getsize(path + OPEN) != size:
            with open(path + OPEN, "rb") as old:
                os.close(replace_file(path, lambda new: _copy(old, new, size, sorted(dropped)), mode=_MODE))
            os.unlink(path + OPEN)
        else:
            os.rename(path + OPEN, path)
        sync_folder(path)


def _copy(old: BinaryIO, new: BinaryIO, size: int, dropped: Sequence[PagePart]) -> None:
    at = 0
    for part in (*dropped, PagePart(size, size)):
        old.seek(at)
        left = part.begin - at
        while left > 0 and (block := old.read(min(left, _BLOCK))):
            new.write(block)
            left -= len(block)
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
        found: BinaryIO | None = None
        with suppress(OSError):
            file = stack.enter_context(open(path + OPEN, "rb"))
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path + OPEN), os.fstat(file.fileno())):
                found = file
        yield found


def read_leftover(file: BinaryIO) -> Leftover:
    """Read an open file up to its last whole page."""
    first, size, info = 0, 0, b""
    pages: list[tuple[PagePart, LeaseKey]] = []
    for end, record in _members(file):
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


def _members(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The complete gzip members of a file: where each ends, and its content, shortened unless it is metadata."""
    at, rest = 0, b""
    while True:
        unpacker, content, used = zlib.decompressobj(zlib.MAX_WBITS + 16), bytearray(), 0
        while not unpacker.eof:
            block = rest or file.read(_BLOCK)
            if not block:
                return
            try:
                found = unpacker.decompress(block)
            except zlib.error:  # torn, or zeros that a file system left after a power cut
                return
            if len(content) < _BLOCK:
                content += found
            used += len(block) - len(unpacker.unused_data)
            rest = unpacker.unused_data
        at += used
        yield at, bytes(content)
