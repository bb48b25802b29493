"""Outputs that grow at their end: JSON lines, CSV, and standard output.

A file is opened at the offset that its last flush returned and cut back to it, so a torn line, or items whose flush
was never heard of, are gone. A fresh run replaces what was in the file. One process at a time can write to a file.
"""

from __future__ import annotations

import csv
import os
import select
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from shoal.errors import SinkError
from shoal.item import as_text, decode_item
from shoal.ports import LoggedItem
from shoal.sinks.storage import (
    GrowingFile,
    changed,
    in_thread,
    storage_errors,
    unwritten,
)

_LARGE = 1 << 20  # a longer write goes to a thread
_PATIENCE = 100  # milliseconds that a thread waits for the reader of standard output
_encode_lines = msgspec.json.Encoder().encode_lines


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
