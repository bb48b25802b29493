"""Items as a Parquet file.

Nothing can be appended to a Parquet file. So items are first written to numbered parts in ``<file>.parts/``. The state
is the number of parts, and the first write after ``open`` deletes later ones. When the run is finished, the parts are
merged, and the result replaces the file in one step. Until then an earlier file stays unchanged. The merged file
records the run and its parts, so a run that continues later adds parts to it, and a run whose store was rewound removes
the last ones.

Each flush and the end check that all parts are still there, and the merged file if the run has one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import msgspec

from shoal.errors import OutputChangedError, OutputTakenError, SinkError
from shoal.item import as_text
from shoal.messages import pip_install
from shoal.ports import LoggedItem, OutputCount
from shoal.sinks import storage
from shoal.sinks.keys import Reject, Rejects, TableOptions, read_state
from shoal.sinks.storage import in_thread, stat_of, storage_errors, unwritten
from shoal.sinks.tables import rows_within
from shoal.system import chance

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as exc:
    raise SinkError(f"Parquet output needs pyarrow: {pip_install('parquet')}") from exc

__all__ = ["conform", "make_table", "pa", "pq", "unify"]

_MAX_FIELDS = 100  # a dict with more keys is a mapping rather than a record, and becomes JSON text
_PART_SIZE = 64 << 20  # bytes of items after which a part is written, even without a flush
_GROUP_ROWS = 50_000
_GROUP_SIZE = 64 << 20
_MARK = b"shoal"
_PART = re.compile(r"([0-9a-f]{8})-(\d{6,})\.parquet")


# -- items as Arrow tables, which Parquet files consist of


def make_table(rows: Sequence[dict[str, object]]) -> pa.Table:
    fields = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _array([row.get(name) for row in rows]) for name in fields})


def _array(values: list[object]) -> pa.Array:
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return _text_array(values)
    mixed = array.type == pa.binary() and any(type(value) is str for value in values)
    return array if _is_storable(array.type) and not mixed else _text_array(values)


def _text_array(values: Sequence[object]) -> pa.Array:
    return pa.array([None if value is None else as_text(value) for value in values], pa.string())


def _is_storable(kind: pa.DataType) -> bool:
    """Whether Parquet can store it. A dict without keys is not allowed; one with too many is better stored as text."""
    if pa.types.is_struct(kind):
        return 0 < kind.num_fields <= _MAX_FIELDS and all(_is_storable(field.type) for field in kind)
    return not pa.types.is_list(kind) or _is_storable(kind.value_type)


# -- parts of different schemas


def unify(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """A schema with all fields. A field with two types gets the wider one, or text."""
    kinds: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            earlier = kinds.get(field.name, pa.null())
            kind = _wider(earlier, field.type)
            kinds[field.name] = kind if kind is not None and _is_storable(kind) else pa.string()
    return pa.schema([(name, pa.string() if kind == pa.null() else kind) for name, kind in kinds.items()])


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if only text does."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(first) and pa.types.is_list(second):
        inner = _wider(first.value_type, second.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _wider_struct(first, second)
    return None


def _wider_struct(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    kinds = {field.name: field.type for field in first}
    for field in second:
        kind = _wider(kinds.get(field.name, pa.null()), field.type)
        if kind is None:
            return None
        kinds[field.name] = kind
    return pa.struct(list(kinds.items()))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
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


class _Saved(msgspec.Struct):
    """The state: the prefix of the parts' names, their number, and a checksum of the end of the last one. ``rows``: of
    all parts; None in states of earlier versions."""

    run: str
    parts: int
    run_id: str = ""
    check: bytes = b""
    rows: int | None = None
    rejected: int = 0


class _Mark(msgspec.Struct):
    """Metadata of a merged file: the prefix of its parts' names, and the number of rows up to the end of each part."""

    run: str
    rows: list[int]
    run_id: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Saved).decode
_decode_mark = msgspec.json.Decoder(_Mark).decode


class ParquetSink:
    """See the module. A field with values of different types becomes text; nested values become JSON text."""

    flush_every = 10.0
    """Seconds between flushes, because each writes a part."""

    def __init__(self, path: str, options: TableOptions = TableOptions()) -> None:
        self._options = options
        self._path = os.path.realpath(path)
        self._folder = self._path + ".parts"
        self._lock = -1
        self._epoch = 0
        self._saved = _Saved("", 0)
        self._merged: list[int] = []
        """The number of rows in the merged file up to the end of each part in it."""
        self._merged_status: os.stat_result | None = None
        """The status of the merged file of this run. None: there is none."""
        self._part_sizes: dict[str, int] = {}
        """The size of each part that is not merged yet, by its path."""
        self._is_settled = False
        """Whether parts after the saved state were removed."""
        self._seq = 0
        self._items: list[LoggedItem] = []
        self._size = 0
        self._fields: dict[str, None] = {}
        self._rejects = Rejects(self._path, self._options.on_reject)

    # -- open

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        self._rejects.open()
        await in_thread(self._open, self._load(state), epoch)
        return None

    def _load(self, state: bytes) -> _Saved:
        run_id = self._options.run_id
        saved = read_state(state, _decode, self._path) or _Saved(chance.token_hex(4), 0, run_id, rows=0)
        if saved.run_id != run_id:
            raise self._changed(f"belongs to run {saved.run_id} by its saved position")
        return saved

    def _changed(self, what: str) -> OutputChangedError:
        return storage.changed(self._path, what, self._options.run_id)

    def _open(self, saved: _Saved, epoch: int) -> None:
        self._close()
        if os.path.isdir(self._path):
            raise SinkError(f"can't write {self._path}: it is a folder; give the name of a file")
        if not saved.parts and not self._options.replaces and self._is_taken():
            raise storage.taken(self._path, None)
        with storage_errors(self._path):
            self._lock_folder()
        try:
            with self._errors():
                newest = storage.newest_epoch(self._path, self._options.run_id)
                if 0 < epoch < newest:
                    raise OutputTakenError(self._path, newest)
                storage.fence(self._lock, self._path, self._options.run_id, epoch)
                self._find_parts(saved)
        except BaseException:
            self._close()
            raise
        self._epoch, self._is_settled = epoch, False
        self._items, self._size, self._seq = [], 0, 0

    def _lock_folder(self) -> None:
        while True:
            with suppress(FileExistsError):
                os.mkdir(self._folder)
            with suppress(FileNotFoundError):
                descriptor = os.open(self._folder, os.O_RDONLY)
                try:
                    storage.lock(descriptor, self._path)
                    if storage.is_at(descriptor, self._folder):
                        self._lock, descriptor = descriptor, -1
                        return
                finally:
                    if descriptor >= 0:  # perhaps the last writer removed the folder before it released the lock
                        os.close(descriptor)

    def _find_parts(self, saved: _Saved) -> None:
        """Read which parts are merged, and check the others. Nothing is changed."""
        mark = self._mark(saved.run)
        self._merged = mark.rows[: saved.parts]
        self._merged_status = stat_of(self._path) if mark.run == saved.run else None
        parts = [self._part(saved.run, number) for number in range(len(self._merged), saved.parts)]
        sizes = {path: status.st_size for path in parts if (status := stat_of(path)) is not None}
        if len(sizes) < len(parts):
            raise self._changed(f"or its folder {self._folder} lacks {len(parts) - len(sizes)} of {saved.parts} parts")
        if parts and storage.checksum(_tail(parts[-1])) != saved.check:
            raise self._changed(f"has different content in its part {parts[-1]}")
        rows, fields = self._merged[-1] if self._merged else 0, dict[str, None]()
        for source in [*([self._path] if self._merged else []), *parts]:
            try:
                metadata = pq.read_metadata(source)
            except pa.ArrowException as exc:
                raise self._changed(f"has a damaged part {source} ({exc})") from None
            fields |= dict.fromkeys(metadata.schema.to_arrow_schema().names)
            rows += metadata.num_rows if source != self._path else 0
        if saved.rows not in (None, rows):
            raise self._changed(f"has {rows} rows, but had {saved.rows}")
        self._saved = msgspec.structs.replace(saved, rows=rows)
        self._part_sizes, self._fields = sizes, fields

    def _is_taken(self) -> bool:
        """Whether another run wrote the file, or parts of it."""
        with suppress(FileNotFoundError):
            if os.path.getsize(self._path) and storage.owner_of(self._path) != self._options.run_id:
                return True
        with suppress(FileNotFoundError):
            return any(True for _ in self._own_files()) and storage.owner_of(self._folder) != self._options.run_id
        return False

    def _settle(self) -> None:
        """Remove what was written after the saved state, as the only writer."""
        if self._is_settled:
            return
        storage.set_owner(self._lock, self._options.run_id)
        if len(self._mark(self._saved.run).rows) > self._saved.parts:
            self._replace_merged()
        for path in self._own_files():
            if path not in self._part_sizes:
                os.unlink(path)
        self._is_settled = True

    def _replace_merged(self) -> None:
        descriptor = storage.replace_file(self._path, self._merge)
        storage.set_owner(descriptor, self._options.run_id)
        storage.fence(descriptor, self._path, self._options.run_id, self._epoch)
        self._merged_status = os.fstat(descriptor)
        os.close(descriptor)

    def _mark(self, run: str) -> _Mark:
        """The metadata of the existing file; empty if it has other parts."""
        mark = self._read_mark()
        return mark if mark.run == run else _Mark("", [])

    def _read_mark(self) -> _Mark:
        try:
            return _decode_mark((pq.read_schema(self._path).metadata or {}).get(_MARK, b""))
        except (FileNotFoundError, pa.ArrowException, msgspec.MsgspecError):
            return _Mark("", [])

    def _own_files(self) -> Iterator[str]:
        for name in os.listdir(self._folder):
            if _PART.fullmatch(name.removesuffix(storage.TEMPORARY)):
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
        fields, saved = dict.fromkeys(self._fields), msgspec.structs.replace(self._saved)
        before = saved.rows or 0
        rows, rejects = rows_within(items, fields, self._options.max_columns)
        if rows:
            with self._errors():
                self._check()
                self._settle()
                table = make_table(rows)
                path = self._part(saved.run, saved.parts)
                os.close(storage.replace_file(path, lambda file: pq.write_table(table, file)))
                self._part_sizes[path] = os.path.getsize(path)
                saved.parts, saved.rows = saved.parts + 1, before + table.num_rows
                saved.check = storage.checksum(_tail(path))
        saved.rejected += len(items) - (saved.rows or 0) + before
        self._saved = saved
        self._items, self._size, self._seq, self._fields = [], 0, items[-1].seq, fields
        return rejects

    async def flush(self) -> bytes:
        if self._items:
            self._rejects.add(await in_thread(self._write_part, self._items))
        await in_thread(self._check)
        self._rejects.flush()
        return _encode(self._saved)

    def _check(self) -> None:
        """OutputChangedError if a part or the merged file is not as this process left it."""
        with storage_errors(self._path):
            if self._part_sizes and not storage.is_at(self._lock, self._folder):
                raise self._changed(f"lacks its folder {self._folder}, which was removed, moved or replaced")
            for path, size in self._part_sizes.items():
                status = stat_of(path)
                if status is None or status.st_size != size:
                    state = "no longer exists" if status is None else f"has {status.st_size} bytes, but had {size}"
                    raise self._changed(f"is incomplete, because its part {path} {state}")
            if self._merged_status is not None and self._merged:
                status, before = stat_of(self._path), self._merged_status
                if status is None or not os.path.samestat(status, before) or status.st_size != before.st_size:
                    raise self._changed("was removed, replaced or changed while it was written")

    # -- close

    async def close(self, *, finished: bool) -> None:
        if finished:
            self._rejects.finish()
        await in_thread(self._finish if finished else self._close)

    def _finish(self) -> None:
        try:
            with self._errors():
                self._check()
                self._settle()
                if self._part_sizes or self._merged_status is None or stat_of(self._path) is None:
                    self._replace_merged()
                rows = pq.read_metadata(self._path).num_rows
                if rows != self._saved.rows:
                    raise self._changed(f"has {rows} rows, but had {self._saved.rows}")
                for path in self._own_files():
                    os.unlink(path)
        finally:
            self._close()

    def _merge(self, file: BinaryIO) -> None:
        parts, rows_through = list(self._part_sizes), list(self._merged)
        sources = [self._path, *parts] if self._merged else parts
        for source in parts:
            rows_through.append((rows_through or [0])[-1] + pq.read_metadata(source).num_rows)
        schema = unify([pq.read_schema(source) for source in sources])
        schema = schema.with_metadata({_MARK: _encode(_Mark(self._saved.run, rows_through, self._options.run_id))})
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
        rows_left = self._merged[-1] if self._merged else 0
        for source in sources:
            for table in _row_groups(source):
                if source == self._path:
                    table, rows_left = table.slice(0, rows_left), rows_left - min(rows_left, table.num_rows)
                yield table

    # -- count

    async def count(self, state: bytes) -> OutputCount:
        saved = self._load(state)
        rows = None
        while rows is None:
            rows = await in_thread(self._count, saved)
        return OutputCount(items=rows, rejected=saved.rejected)

    def _count(self, saved: _Saved) -> int | None:
        """The rows in the merged file and in parts. None if a writer merged the parts meanwhile."""
        with self._errors():
            mark = self._read_mark()
            run, run_id = saved.run, self._options.run_id
            merged = len(mark.rows) if mark.run == run else 0
            is_own = merged or (saved.parts and run_id and mark.run_id == run_id)  # an export has other parts
            rows = pq.read_metadata(self._path).num_rows if is_own else 0
            if is_own and not merged:
                return rows
            try:
                names = os.listdir(self._folder)
            except FileNotFoundError:
                return rows
            for name in names:
                part = _PART.fullmatch(name)
                if part is not None and part[1] == run and int(part[2]) >= merged:
                    try:
                        rows += pq.read_metadata(os.path.join(self._folder, name)).num_rows
                    except FileNotFoundError:
                        return None
        return rows

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
        file.seek(max(0, os.path.getsize(path) - storage.BLOCK))
        return file.read()
