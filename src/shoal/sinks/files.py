"""Outputs that grow at their end: JSON lines, CSV, and standard output.

A file is opened at the offset that its last flush returned and cut back to it, so a torn line, or items whose flush
was never heard of, are gone. A fresh run replaces what was in the file. One process at a time can write to a file.
"""

from __future__ import annotations

import asyncio
import csv
import errno
import fcntl
import os
import select
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import msgspec

from shoal.errors import SinkError
from shoal.item import as_text, decode_item
from shoal.ports import LoggedItem

T = TypeVar("T")

TEMPORARY = ".shoal-tmp"
_LARGE = 1 << 20  # a longer write goes to a thread
_PATIENCE = 100  # milliseconds that a thread waits for the reader of standard output
_encode_lines = msgspec.json.Encoder().encode_lines


# -- what every sink with a path needs


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Blocking work in a thread. If the caller is cancelled, it still waits: no one may touch the file meanwhile."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.exception()  # whoever comes next will meet it again
        raise


def unwritten(items: Sequence[LoggedItem], seq: int) -> Sequence[LoggedItem]:
    """The items behind ``seq``: a write that is repeated changes nothing."""
    return items if items and items[0].seq > seq else [item for item in items if item.seq > seq]


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """OSError as a SinkError that names the path and says what to do."""
    try:
        yield
    except OSError as exc:
        raise SinkError(_advice(path, exc)) from exc


def _advice(path: str, exc: OSError) -> str:
    folder = os.path.dirname(path) or "."
    match exc.errno:
        case errno.ENOENT:
            return f"can't write {path}: the folder {folder} does not exist; create it first"
        case errno.EISDIR:
            return f"can't write {path}: it is a folder; give the name of a file in it"
        case errno.ENOTDIR:
            return f"can't write {path}: {folder} is not a folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"can't write {path}: no permission; change its permissions, or choose another place"
        case errno.ENOSPC | errno.EDQUOT:
            return f"can't write {path}: the disk is full; free some space, then go on"
        case errno.EFBIG:
            return f"can't write {path}: it has reached the largest size that is allowed for a file"
        case errno.EPIPE:
            return f"can't write {path}: its reader has gone"
        case _:
            return f"can't write {path}: {exc.strerror or exc}"


def changed(path: str, what: str) -> SinkError:
    """The error for an output that is not as the run left it."""
    return SinkError(
        f"{path} {what}: it was changed or deleted since this run wrote it; "
        "put it back as it was, choose another output, or start a new run"
    )


def lock(descriptor: int, path: str) -> None:
    """Keep other processes away for as long as the descriptor is open."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SinkError(f"{path} is being written by another crawl; choose another output") from None
    except OSError as exc:
        if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # a file system without locks
            raise


def sync_folder(path: str) -> None:
    """Make the entry of a file in its folder durable, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: str, write: Callable[[BinaryIO], None]) -> int:
    """Write a file whole, durably, and put it in the place of ``path`` in one step. Its locked descriptor."""
    temporary = path + TEMPORARY
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        lock(descriptor, path)
        with open(descriptor, "wb", closefd=False) as file:
            write(file)
        os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path)
    return descriptor


class GrowingFile:
    """A file that is only appended to, and can be cut back. All of it blocks."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self.size = 0
        self._descriptor = -1
        self._torn = False
        self._synced = -1

    def open(self, size: int) -> None:
        """Open a file that must have at least this size; one of size 0 may be missing."""
        self.close()
        with storage_errors(self.path):
            try:
                descriptor = os.open(self.path, os.O_RDWR | (0 if size else os.O_CREAT), 0o666)
            except FileNotFoundError:
                if size and os.path.isdir(os.path.dirname(self.path)):
                    raise changed(self.path, "is gone") from None
                raise
            try:
                lock(descriptor, self.path)
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise SinkError(f"can't write {self.path}: it is not a regular file")
                if found.st_size < size:
                    raise changed(self.path, f"has {found.st_size} bytes, and had {size}")
                with suppress(FileNotFoundError):
                    os.unlink(self.path + TEMPORARY)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor, self.size, self._torn, self._synced = descriptor, found.st_size, False, -1
        if not size:
            sync_folder(self.path)

    def cut(self, size: int) -> None:
        with storage_errors(self.path):
            os.ftruncate(self._descriptor, size)
        self.size = size

    def append(self, data: bytes) -> None:
        """All of it, or, as far as the next append and flush can see, nothing."""
        self._mend()
        self._torn = True
        with storage_errors(self.path):
            view, offset = memoryview(data), self.size
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written
        self.size, self._torn = offset, False

    def _mend(self) -> None:
        if self._torn:
            self.cut(self.size)
            self._torn = False

    def replace(self, write: Callable[[BinaryIO, BinaryIO], None]) -> None:
        """Rewrite it in one step: ``write`` gets the old content and the new file."""
        self._mend()
        with storage_errors(self.path), open(self.path, "rb") as old:
            descriptor = replace_file(self.path, lambda new: write(old, new))
        with suppress(OSError):  # a file system without permissions
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
        os.close(self._descriptor)
        self._descriptor, self.size = descriptor, os.fstat(descriptor).st_size

    def sync(self) -> None:
        self._mend()
        if self._synced != self.size:
            with storage_errors(self.path):
                os.fsync(self._descriptor)
            self._synced = self.size

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with storage_errors(self.path):
                os.close(descriptor)


class _Saved(msgspec.Struct):
    """The state of a file at a flush."""

    offset: int = 0
    rows: int = 0
    fields: list[str] = []


_encode_saved = msgspec.msgpack.Encoder().encode
_decode_saved = msgspec.msgpack.Decoder(_Saved).decode


def _saved(path: str, state: bytes) -> _Saved:
    try:
        return _decode_saved(state) if state else _Saved()
    except msgspec.MsgspecError as exc:
        raise SinkError(f"the saved position in {path} can't be read: {exc}") from exc


# -- JSON lines


class JsonLinesSink:
    """One JSON object a line, UTF-8. Bytes become base64; NaN and infinities become null."""

    def __init__(self, path: str) -> None:
        self._file = GrowingFile(path)
        self._seq = 0

    async def open(self, state: bytes) -> None:
        offset = _saved(self._file.path, state).offset
        await in_thread(self._open, offset)

    def _open(self, offset: int) -> None:
        self._file.open(offset)
        self._file.cut(offset)
        self._seq = 0

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = unwritten(items, self._seq)
        if not items:
            return
        lines = _encode_lines([decode_item(item.payload)[1] for item in items])
        if len(lines) < _LARGE:
            self._append(lines, items[-1].seq)
        else:
            await in_thread(self._append, lines, items[-1].seq)

    def _append(self, lines: bytes, seq: int) -> None:
        self._file.append(lines)
        self._seq = seq

    async def flush(self) -> bytes:
        await in_thread(self._file.sync)
        return _encode_saved(_Saved(self._file.size))

    async def close(self, *, finished: bool) -> None:
        self._file.close()


class StreamSink:
    """JSON lines to standard output: what is out is out, nothing can be cut back.

    Items go out once for each process; after a crash, those behind the last saved cursor go out again.
    """

    def __init__(self, descriptor: int = 1) -> None:
        self._descriptor = descriptor
        self._seq = 0
        self._unsent = bytearray()

    async def open(self, state: bytes) -> None:
        """What was sent stays sent, also when it is opened again after an error."""

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = unwritten(items, self._seq)
        if items:
            self._unsent += _encode_lines([decode_item(item.payload)[1] for item in items])
            self._seq = items[-1].seq
        while self._unsent:  # a reader that pauses must not stop the crawl, nor its end
            await in_thread(self._send)

    def _send(self) -> None:
        """Send what its reader takes without a pause. The rest is the first to be sent next time."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        with storage_errors("standard output"):
            while self._unsent and poll.poll(_PATIENCE):
                with suppress(BlockingIOError):
                    del self._unsent[: os.write(self._descriptor, self._unsent[: select.PIPE_BUF])]

    async def flush(self) -> bytes:
        await self.write(())
        return b""

    async def close(self, *, finished: bool) -> None:
        """Standard output is not ours to close."""


# -- CSV


class CsvSink:
    r"""A header and a line for each item, UTF-8, ended by ``\n``.

    Nested values are JSON text, None is empty. A field that was not seen before is added as the last column: the file
    is then rewritten with one more comma in each row. So wherever a flush had been in the narrow file, that place can
    be calculated in the wide one, and no crash between the two does harm.
    """

    def __init__(self, path: str) -> None:
        self._file = GrowingFile(path)
        self._fields: list[str] = []
        self._rows = 0
        self._seq = 0

    async def open(self, state: bytes) -> None:
        await in_thread(self._open, _saved(self._file.path, state))

    def _open(self, saved: _Saved) -> None:
        self._file.open(saved.offset)
        try:
            fields, offset = self._find_place(saved) if saved.rows else ([], 0)
            self._file.cut(offset)
        except BaseException:
            self._file.close()
            raise
        self._fields, self._rows, self._seq = fields, saved.rows, 0

    def _find_place(self, saved: _Saved) -> tuple[list[str], int]:
        """The header that the file has now, and where what was saved ends in it."""
        path, fields = self._file.path, self._read_header()
        if fields[: len(saved.fields)] != saved.fields:
            raise changed(path, "has another header")
        commas = (len(fields) - len(saved.fields)) * saved.rows
        offset = saved.offset + len(_lines([fields])) - len(_lines([saved.fields])) + commas
        if self._file.size < offset:
            raise changed(path, f"has {self._file.size} bytes, and had {offset}")
        return fields, offset

    def _read_header(self) -> list[str]:
        path = self._file.path
        try:
            with storage_errors(path), open(path, encoding="utf-8", newline="") as file:
                return next(csv.reader(file), [])
        except (UnicodeDecodeError, csv.Error):
            raise changed(path, "has another header") from None

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = unwritten(items, self._seq)
        if not items:
            return
        rows = [decode_item(item.payload)[1] for item in items]
        known = set(self._fields)
        added = list(
            dict.fromkeys(name for row in rows if not row.keys() <= known for name in row if name not in known)
        )
        fields = self._fields + added
        if not fields:  # empty items, and nothing to put into a row
            return
        lines = _lines(_cells(row, fields) for row in rows)
        if len(lines) < _LARGE and not (added and self._rows):
            self._append(fields, lines, len(rows), items[-1].seq)
        else:
            await in_thread(self._append, fields, lines, len(rows), items[-1].seq)

    def _append(self, fields: list[str], lines: bytes, count: int, seq: int) -> None:
        if not self._rows:
            lines = _lines([fields]) + lines
        elif len(fields) > len(self._fields):
            self._widen(fields)
        self._file.append(lines)
        self._fields = fields
        self._rows += count
        self._seq = seq

    def _widen(self, fields: list[str]) -> None:
        padding = b"," * (len(fields) - len(self._fields))

        def rewrite(old: BinaryIO, new: BinaryIO) -> None:
            old.seek(len(_lines([self._fields])))
            new.write(_lines([fields]))
            quotes = 0
            for line in old:
                quotes += line.count(b'"')
                new.write(line if quotes % 2 else line[:-1] + padding + b"\n")

        self._file.replace(rewrite)
        self._fields = fields

    async def flush(self) -> bytes:
        await in_thread(self._file.sync)
        return _encode_saved(_Saved(self._file.size, self._rows, self._fields))

    async def close(self, *, finished: bool) -> None:
        self._file.close()


_AS_IT_IS = frozenset({str, int, float, type(None)})


def _cells(row: dict[str, Any], fields: Iterable[str]) -> list[Any]:
    values = map(row.get, fields)
    return [value if type(value) in _AS_IT_IS else as_text(value) for value in values]


def _lines(rows: Iterable[Sequence[Any]]) -> bytes:
    r"""Rows as CSV. The writer is left at its ``\r\n``, which makes it quote either of them within a value."""
    lines = _Lines()
    csv.writer(lines).writerows(rows)
    return "".join([line[:-2] + "\n" for line in lines]).encode()


class _Lines(list[str]):
    """What `csv.writer` writes to: it writes each row with one call."""

    write = list.append
