"""Items as a Parquet file.

Nothing can be appended to a Parquet file. So items are first written to numbered parts in ``<file>.parts/``. The state
is the number of parts, and ``open`` deletes later ones. When the run is finished, the parts are merged, and the result
replaces the file in one step. Until then an earlier file stays unchanged. The merged file records the run and its
parts, so a run that continues later adds parts to it, and a run whose store was rewound removes the last ones.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec

from shoal.errors import SinkError
from shoal.ports import LoggedItem
from shoal.sinks.arrow import conform, make_table, pa, pq, unify
from shoal.sinks.keys import TableOptions
from shoal.sinks.rejects import Reject, Rejects
from shoal.sinks.storage import (
    BLOCK,
    TEMPORARY,
    changed,
    checksum,
    in_thread,
    lock,
    owner_of,
    replace_file,
    set_owner,
    storage_errors,
    taken,
    unwritten,
)
from shoal.sinks.tables import rows_within

_PART_SIZE = 64 << 20  # bytes of items after which a part is written, even without a flush
_GROUP_ROWS = 50_000
_GROUP_SIZE = 64 << 20
_MARK = b"shoal"
_PART = re.compile(r"([0-9a-f]{8})-(\d{6,})\.parquet")


class _Saved(msgspec.Struct):
    """The state: the prefix of the parts' names, their number, and a checksum of the end of the last one."""

    run: str
    parts: int
    run_id: str = ""
    check: bytes = b""


class _Mark(msgspec.Struct):
    """Metadata of a merged file: the prefix of its parts' names, and the number of rows up to the end of each part."""

    run: str
    rows: list[int]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Saved).decode
_decode_mark = msgspec.json.Decoder(_Mark).decode


class ParquetSink:
    """See the module. A field with values of different types becomes text; nested values become JSON text."""

    flush_every = 10.0
    """Seconds between flushes, because each writes a part."""

    def __init__(self, path: str, options: TableOptions | None = None) -> None:
        self._options = options or TableOptions()
        self._path = os.path.realpath(path)
        self._folder = self._path + ".parts"
        self._lock = -1
        self._saved = _Saved("", 0)
        self._merged: list[int] = []
        """The number of rows in the merged file up to the end of each part in it."""
        self._is_own = False
        """Whether the file is a merged one of this run."""
        self._seq = 0
        self._items: list[LoggedItem] = []
        self._size = 0
        self._fields: dict[str, None] = {}
        self._rejects = Rejects(self._path, self._options.on_reject)

    # -- open

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self._rejects.open()
        run_id = self._options.run_id
        try:
            saved = _decode(state) if state else _Saved(secrets.token_hex(4), 0, run_id)
        except msgspec.MsgspecError as exc:
            raise SinkError(f"can't read the saved position in {self._path}: {exc}") from exc
        if saved.run_id != run_id:
            raise self._changed(f"belongs to run {saved.run_id} by its saved position")
        await in_thread(self._open, saved)

    def _changed(self, what: str) -> SinkError:
        return changed(self._path, what, self._options.run_id)

    def _open(self, saved: _Saved) -> None:
        self._close()
        if os.path.isdir(self._path):
            raise SinkError(f"can't write {self._path}: it is a folder; give the name of a file")
        if not saved.parts and not self._options.replaces and self._is_taken():
            raise taken(self._path, None)
        with storage_errors(self._path):
            with suppress(FileExistsError):
                os.mkdir(self._folder)
            self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            with self._errors():
                lock(self._lock, self._path)
                set_owner(self._lock, self._options.run_id)
                mark = self._mark(saved)
                self._saved, self._merged, self._is_own = saved, mark.rows[: saved.parts], mark.run == saved.run
                self._keep_parts(saved)
                if len(mark.rows) > saved.parts:
                    self._replace_merged()
                names = (name for source in self._sources(saved) for name in pq.read_schema(source).names)
                self._fields = dict.fromkeys(names)
        except BaseException:
            self._close()
            raise
        self._items, self._size, self._seq = [], 0, 0

    def _is_taken(self) -> bool:
        """Whether another run wrote the file, or parts of it."""
        with suppress(FileNotFoundError):
            if os.path.getsize(self._path) and owner_of(self._path) != self._options.run_id:
                return True
        with suppress(FileNotFoundError):
            return any(True for _ in self._own_files()) and owner_of(self._folder) != self._options.run_id
        return False

    def _replace_merged(self) -> None:
        descriptor = replace_file(self._path, self._merge)
        set_owner(descriptor, self._options.run_id)
        os.close(descriptor)

    def _mark(self, saved: _Saved) -> _Mark:
        """The metadata of the existing file; empty if another run wrote it."""
        try:
            mark = _decode_mark((pq.read_schema(self._path).metadata or {}).get(_MARK, b""))
        except (FileNotFoundError, pa.ArrowException, msgspec.MsgspecError):
            return _Mark("", [])
        return mark if mark.run == saved.run else _Mark("", [])

    def _keep_parts(self, saved: _Saved) -> None:
        """Delete all parts except those that are not merged yet."""
        wanted = [self._part(saved.run, number) for number in range(len(self._merged), saved.parts)]
        found = set(self._own_files())
        if missing := set(wanted) - found:
            raise self._changed(f"or its folder {self._folder} lacks {len(missing)} of {saved.parts} parts")
        if wanted and checksum(_tail(wanted[-1])) != saved.check:
            raise self._changed(f"has different content in its part {wanted[-1]}")
        for path in found - set(wanted):
            os.unlink(path)

    def _sources(self, saved: _Saved) -> list[str]:
        """The files that contain the output."""
        first = len(self._merged)
        return [
            *([self._path] if first else []),
            *(self._part(saved.run, number) for number in range(first, saved.parts)),
        ]

    def _own_files(self) -> Iterator[str]:
        for name in os.listdir(self._folder):
            if _PART.fullmatch(name.removesuffix(TEMPORARY)):
                yield os.path.join(self._folder, name)

    def _part(self, run: str, number: int) -> str:
        return os.path.join(self._folder, f"{run}-{number:06}.parquet")

    # -- write

    async def write(self, items: Sequence[LoggedItem]) -> None:
        fresh = unwritten(items, self._seq)
        if not fresh:
            return
        size = self._size + sum(len(item.payload) for item in fresh)
        if size < _PART_SIZE:
            self._items += fresh
            self._size, self._seq = size, fresh[-1].seq
        else:
            self._rejects.add(await in_thread(self._write_part, [*self._items, *fresh]))

    def _write_part(self, items: list[LoggedItem]) -> list[Reject]:
        fields = dict.fromkeys(self._fields)
        rows, rejects = rows_within(items, fields, self._options.max_columns)
        if rows:
            with self._errors():
                table = make_table(rows)
                path = self._part(self._saved.run, self._saved.parts)
                os.close(replace_file(path, lambda file: pq.write_table(table, file)))
                check = checksum(_tail(path))
            self._saved = _Saved(self._saved.run, self._saved.parts + 1, self._options.run_id, check)
        self._items, self._size, self._seq, self._fields = [], 0, items[-1].seq, fields
        return rejects

    async def flush(self) -> bytes:
        if self._items:
            self._rejects.add(await in_thread(self._write_part, self._items))
        self._rejects.flush()
        return _encode(self._saved)

    # -- close

    async def close(self, *, finished: bool) -> None:
        if finished:
            self._rejects.finish()
        await in_thread(self._finish if finished else self._close)

    def _finish(self) -> None:
        try:
            if self._saved.parts > len(self._merged) or not (self._is_own and os.path.exists(self._path)):
                with self._errors():
                    self._replace_merged()
            with storage_errors(self._path):
                for path in self._own_files():
                    os.unlink(path)
        finally:
            self._close()

    def _merge(self, file: BinaryIO) -> None:
        sources, rows_through = self._sources(self._saved), list(self._merged)
        for source in sources[bool(self._merged) :]:
            rows_through.append((rows_through or [0])[-1] + pq.read_metadata(source).num_rows)
        schema = unify([pq.read_schema(source) for source in sources])
        schema = schema.with_metadata({_MARK: _encode(_Mark(self._saved.run, rows_through))})
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            group: list[pa.Table] = []
            rows = size = 0
            for table in self._tables(sources):
                group.append(conform(table, schema))
                rows, size = rows + table.num_rows, size + table.nbytes
                if rows >= _GROUP_ROWS or size >= _GROUP_SIZE:
                    writer.write_table(pa.concat_tables(group))
                    group, rows, size = [], 0, 0
            if group:
                writer.write_table(pa.concat_tables(group))

    def _tables(self, sources: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the row groups of all sources, without the rows of the merged file that a rewind removed."""
        left = self._merged[-1] if self._merged else 0
        for source in sources:
            for table in _row_groups(source):
                if source == self._path:
                    table, left = table.slice(0, left), left - min(left, table.num_rows)
                yield table

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with storage_errors(self._path):
                yield
        except pa.ArrowException as exc:
            raise SinkError(f"can't write {self._path}: {exc}") from exc

    def _close(self) -> None:
        if self._lock >= 0:
            with suppress(OSError):  # it is not empty
                os.rmdir(self._folder)
            descriptor, self._lock = self._lock, -1
            os.close(descriptor)


def _row_groups(source: str) -> Iterator[pa.Table]:
    with pq.ParquetFile(source) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def _tail(path: str) -> bytes:
    """The last block of a part."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - BLOCK))
        return file.read()
