"""Items as a Parquet file, which can only be written whole.

So items first become numbered parts in ``<file>.parts/``, each written whole, and the state is their number: what is
beyond it is deleted on open. At the end of the run the parts are merged, and the result takes the file's place in one
step; until then an earlier file stays as it was. The merged file remembers the run and how many parts are in it, so a
run that goes on after its end adds new parts to it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import msgspec

from shoal.errors import SinkError
from shoal.item import as_text, decode_item
from shoal.ports import LoggedItem
from shoal.sinks.storage import TEMPORARY, changed, in_thread, lock, replace_file, storage_errors, unwritten

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as exc:
    raise SinkError("Parquet output needs pyarrow: pip install 'shoal[parquet]'") from exc

_PART_SIZE = 64 << 20  # bytes of items that make a part, flush or not
_GROUP_ROWS = 50_000
_GROUP_SIZE = 64 << 20
_MOST_FIELDS = 100  # a dict with more different keys than these is a mapping rather than a record: JSON text
_MARK = b"shoal"
_PART = re.compile(r"([0-9a-f]{8})-(\d{6,})\.parquet")


class _Saved(msgspec.Struct):
    """The state, and the mark in a merged file: which run it is, and how many parts were written."""

    run: str
    parts: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Saved).decode


class ParquetSink:
    """See the module. Values that are not of one type in all items become text, nested ones as JSON."""

    flush_every = 10.0
    """Seconds between flushes: each makes a part."""

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)
        self._folder = self._path + ".parts"
        self._lock = -1
        self._saved = _Saved("", 0)
        self._merged = 0
        """How many parts are in the merged file already."""
        self._seq = 0
        self._rows: list[bytes] = []
        self._size = 0

    # -- open

    async def open(self, state: bytes) -> None:
        try:
            saved = _decode(state) if state else _Saved(secrets.token_hex(4), 0)
        except msgspec.MsgspecError as exc:
            raise SinkError(f"the saved position in {self._path} can't be read: {exc}") from exc
        await in_thread(self._open, saved)

    def _open(self, saved: _Saved) -> None:
        self._close()
        if os.path.isdir(self._path):
            raise SinkError(f"can't write {self._path}: it is a folder; give the name of a file in it")
        with storage_errors(self._path):
            with suppress(FileExistsError):
                os.mkdir(self._folder)
            self._lock = os.open(self._folder, os.O_RDONLY)
        try:
            with storage_errors(self._path):
                lock(self._lock, self._path)
                self._merged = self._parts_in_file(saved)
                self._keep_parts(saved)
        except BaseException:
            self._close()
            raise
        self._saved, self._rows, self._size, self._seq = saved, [], 0, 0

    def _parts_in_file(self, saved: _Saved) -> int:
        """How many of the run's parts were merged into the file in its place; 0 when it is of another run."""
        if not os.path.exists(self._path):
            return 0
        try:
            mark = _decode((pq.read_schema(self._path).metadata or {}).get(_MARK, b""))
        except (pa.ArrowException, msgspec.MsgspecError):
            return 0
        if mark.run != saved.run:
            return 0
        if mark.parts > saved.parts:
            raise changed(self._path, "holds more than this run has written")
        return mark.parts

    def _keep_parts(self, saved: _Saved) -> None:
        """Delete every part but those which the file still lacks."""
        wanted = {self._part(saved.run, number) for number in range(self._merged, saved.parts)}
        found = set(self._own_files())
        if missing := wanted - found:
            raise changed(self._folder, f"lacks {len(missing)} of {saved.parts} parts")
        for path in found - wanted:
            os.unlink(path)

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
        rows = [item.payload for item in fresh]
        size = self._size + sum(map(len, rows))
        if size < _PART_SIZE:
            self._rows += rows
            self._size, self._seq = size, fresh[-1].seq
        else:
            await in_thread(self._write_part, self._rows + rows, fresh[-1].seq)

    def _write_part(self, rows: list[bytes], seq: int) -> None:
        with self._errors():
            table = _table([decode_item(row)[1] for row in rows])
            path = self._part(self._saved.run, self._saved.parts)
            os.close(replace_file(path, lambda file: pq.write_table(table, file)))
        self._saved = _Saved(self._saved.run, self._saved.parts + 1)
        self._rows, self._size, self._seq = [], 0, seq

    async def flush(self) -> bytes:
        if self._rows:
            await in_thread(self._write_part, self._rows, self._seq)
        return _encode(self._saved)

    # -- close

    async def close(self, *, finished: bool) -> None:
        await in_thread(self._finish if finished else self._close)

    def _finish(self) -> None:
        try:
            if self._saved.parts > self._merged or not os.path.exists(self._path):
                with self._errors():
                    os.close(replace_file(self._path, self._merge))
            with storage_errors(self._path):
                for path in self._own_files():
                    os.unlink(path)
        finally:
            self._close()

    def _merge(self, file: BinaryIO) -> None:
        sources = [self._path] if self._merged else []
        sources += [self._part(self._saved.run, number) for number in range(self._merged, self._saved.parts)]
        schema = _unify([pq.read_schema(source) for source in sources])
        schema = schema.with_metadata({_MARK: _encode(self._saved)})
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            group: list[pa.Table] = []
            rows = size = 0
            for table in _row_groups(sources):
                group.append(_conform(table, schema))
                rows, size = rows + table.num_rows, size + table.nbytes
                if rows >= _GROUP_ROWS or size >= _GROUP_SIZE:
                    writer.write_table(pa.concat_tables(group))
                    group, rows, size = [], 0, 0
            if group:
                writer.write_table(pa.concat_tables(group))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with storage_errors(self._path):
                yield
        except pa.ArrowException as exc:
            raise SinkError(f"can't write {self._path}: {exc}") from exc

    def _close(self) -> None:
        if self._lock >= 0:
            with suppress(OSError):  # there are parts in it
                os.rmdir(self._folder)
            descriptor, self._lock = self._lock, -1
            os.close(descriptor)


def _row_groups(sources: Sequence[str]) -> Iterator[pa.Table]:
    for source in sources:
        with pq.ParquetFile(source) as file:
            for number in range(file.num_row_groups):
                yield file.read_row_group(number)


# -- items to Arrow


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    fields = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _array([row.get(name) for row in rows]) for name in fields})


def _array(values: list[Any]) -> pa.Array:
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return _text_array(values)
    mixed = array.type == pa.binary() and any(type(value) is str for value in values)
    return array if _is_storable(array.type) and not mixed else _text_array(values)


def _text_array(values: Sequence[Any]) -> pa.Array:
    return pa.array([None if value is None else as_text(value) for value in values], pa.string())


def _is_storable(kind: pa.DataType) -> bool:
    """Parquet has no dict without keys, and one with very many is no record."""
    if pa.types.is_struct(kind):
        return 0 < kind.num_fields <= _MOST_FIELDS and all(_is_storable(field.type) for field in kind)
    return not pa.types.is_list(kind) or _is_storable(kind.value_type)


# -- parts of different schemas


def _unify(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """All fields of all of them. A field of two types becomes the wider one; text if there is none."""
    kinds: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            known = kinds.get(field.name, pa.null())
            kind = _wider(known, field.type)
            kinds[field.name] = kind if kind is not None and _is_storable(kind) else pa.string()
    return pa.schema([(name, pa.string() if kind == pa.null() else kind) for name, kind in kinds.items()])


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if there is none but text."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        inner = _wider(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _wider_struct(one, other)
    return None


def _wider_struct(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    kinds = {field.name: field.type for field in one}
    for field in other:
        kind = _wider(kinds.get(field.name, pa.null()), field.type)
        if kind is None:
            return None
        kinds[field.name] = kind
    return pa.struct(list(kinds.items()))


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    names = set(table.column_names)
    columns = [
        _as_type(table.column(field.name), field.type) if field.name in names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    if pa.types.is_nested(column.type) or kind == pa.string():
        values = column.to_pylist()
        return pa.chunked_array([_text_array(values) if kind == pa.string() else pa.array(values, kind)])
    return column.cast(kind, safe=False)
