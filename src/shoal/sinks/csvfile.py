"""Items as a CSV file. See `shoal.sinks.files` for how a file is reopened."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TypeAlias

from shoal.item import as_text
from shoal.ports import LoggedItem
from shoal.sinks.files import LARGE, GrowingFileSink, Saved
from shoal.sinks.keys import TableOptions
from shoal.sinks.storage import BLOCK, in_thread, storage_errors, unwritten
from shoal.sinks.tables import rows_within

Escape: TypeAlias = Callable[[str], str]

_INVISIBLE = r"[\s\0-\x20\u200b-\u200f\u2060\ufeff]*+"
_FORMULA = re.compile(rf"'*+(?:[\t\r]|{_INVISIBLE}[=+\-@＝＋－＠])")  # noqa: RUF001  Excel also runs the wide ones
"""What a spreadsheet may run: OWASP's list, also behind characters that a spreadsheet drops, such as a BOM."""
_NUMBER = re.compile(
    rf"{_INVISIBLE}(?:[+-] ?(?:\d++(?:[.,'\u2019 \u00a0\u202f]\d++)*+[.,]?|[.,]\d++)(?:[eE][+-]?\d++)?\s?%?|-++)\s*+",
    re.ASCII,
)
"""A number with a sign, as people write it: digits and separators calculate nothing. Or a dash for "no value"."""


class CsvSink(GrowingFileSink):
    r"""A header and a line for each item, in UTF-8, each ended by ``\n``.

    Nested values are JSON text, None is empty. A new field becomes the last column: the file is rewritten with one more
    comma in each row. So the offset of an earlier flush can be computed in the wider file, and a crash between the two
    does no harm.

    Unless the options allow formulas, text that a spreadsheet runs as a formula gets a ``'`` in front. Numbers stay.
    """

    def __init__(self, path: str, options: TableOptions = TableOptions()) -> None:
        super().__init__(path, options)
        self._max_columns = options.max_columns
        self._escape = None if options.formulas else escape_formula
        self._fields: list[str] = []
        """The header: the names as they are in the file."""
        self._rows = 0
        self._rejected = 0
        """Items that are not in the file, although the run has written up to here."""

    # -- open

    def _locate(self, saved: Saved) -> tuple[int, bytes]:
        self._fields, self._rows, self._rejected = [], saved.rows, saved.rejected
        if not saved.rows:
            return 0, b""
        fields = self._fields = self._read_header()
        if fields[: len(saved.fields)] != saved.fields:
            raise self._file.changed("has a different header")
        commas = (len(fields) - len(saved.fields)) * saved.rows
        offset = saved.offset + len(encode_header(fields)) - len(encode_header(saved.fields)) + commas
        if self._file.size < offset:
            raise self._file.changed(f"has {self._file.size} bytes, but had {offset}")
        tail = self._file.tail(offset) if fields == saved.fields else self._narrow_tail(saved.fields, fields, offset)
        return offset, tail

    def _read_header(self) -> list[str]:
        try:
            with storage_errors(self._file.path), self._file.reader() as file:
                return next(csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline="")), [])
        except (UnicodeDecodeError, csv.Error):
            raise self._file.changed("has a different header") from None

    def _narrow_tail(self, saved: Sequence[str], fields: Sequence[str], offset: int) -> bytes:
        """The last block before an offset, as it was before the file got more columns."""
        padding = b"," * (len(fields) - len(saved))
        tail = encode_header(saved)
        with storage_errors(self._file.path), self._file.reader() as file:
            position = file.seek(len(encode_header(fields)))
            for line, is_row_end in _row_ends(file):
                position += len(line)
                if position > offset:
                    break
                if is_row_end:
                    line = line[:-1].removesuffix(padding) + b"\n"
                tail = (tail + line)[-BLOCK:]
        return tail

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        items = unwritten(items, self._seq)
        if not items:
            return
        columns = dict.fromkeys(self._fields)
        rows, rejects = rows_within(items, columns, self._max_columns, self._escape)
        fields = list(columns)
        if rows and fields:  # without any field there is no header to write
            lines = encode_rows(rows, fields, self._escape)
            if len(lines) < LARGE and (not self._rows or len(fields) == len(self._fields)):
                self._append(fields, lines, len(rows), items[-1].seq)
            else:
                await in_thread(self._append, fields, lines, len(rows), items[-1].seq)
        else:
            self._rejected += len(rows)
        self._seq = items[-1].seq
        self._rejected += len(rejects)
        self._rejects.add(rejects)

    def _append(self, fields: list[str], lines: bytes, count: int, seq: int) -> None:
        if not self._rows:
            lines = encode_header(fields) + lines
        elif len(fields) > len(self._fields):
            self._widen(fields)
        self._file.append(lines)
        self._fields = fields
        self._rows += count
        self._seq = seq  # here, because the caller may be cancelled while the thread works

    def _widen(self, fields: list[str]) -> None:
        padding = b"," * (len(fields) - len(self._fields))

        def rewrite(old: BinaryIO, new: BinaryIO) -> None:
            old.seek(len(encode_header(self._fields)))
            new.write(encode_header(fields))
            for line, is_row_end in _row_ends(old):
                new.write(line[:-1] + padding + b"\n" if is_row_end else line)

        self._file.replace(rewrite)
        self._fields = fields

    def _saved(self, check: bytes) -> Saved:
        fields = self._fields if self._rows else []
        return Saved(self._file.run_id, self._file.size, check, self._rows, fields, self._rejected)

    def _count_items(self, file: BinaryIO) -> int:
        """The rows of a file, without its header."""
        return max(0, sum(is_row_end for _, is_row_end in _row_ends(file)) - 1)


# -- cells

_NATIVE_TYPES = frozenset({str, int, float, type(None)})


def encode_rows(rows: Iterable[dict[str, object]], fields: Sequence[str], escape: Escape | None) -> bytes:
    """Rows as CSV, without a header."""
    return _lines(_cells(row, fields, escape) for row in rows)


def encode_header(fields: Sequence[str]) -> bytes:
    return _lines([fields])


def _cells(row: dict[str, object], fields: Iterable[str], escape: Escape | None) -> list[object]:
    values = map(row.get, fields)
    cells = [value if type(value) in _NATIVE_TYPES else as_text(value) for value in values]
    return cells if escape is None else [escape(cell) if type(cell) is str else cell for cell in cells]


def escape_formula(text: str) -> str:
    """Text that no spreadsheet runs as a formula: with a ``'`` in front if it needs one. Different texts, such as the
    names of columns, stay different."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def _row_ends(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yield each line, and whether a row ends with it. A line break within quotes does not end a row."""
    quotes = 0
    while line := file.readline():
        quotes += line.count(b'"')
        yield line, quotes % 2 == 0


def _lines(rows: Iterable[Sequence[object]]) -> bytes:
    r"""Rows as CSV. The writer keeps its default ``\r\n``, because then it quotes values that contain either."""
    lines = _Lines()
    csv.writer(lines).writerows(rows)
    return "".join([line[:-2] + "\n" for line in lines]).encode()


class _Lines(list[str]):
    """The target of `csv.writer`, which writes each row with one call."""

    write = list.append
