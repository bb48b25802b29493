"""Items as Arrow tables, which Parquet files consist of. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import SinkError
from shoal.item import as_text
from shoal.suggestions import pip_install

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as exc:
    raise SinkError(f"Parquet output needs pyarrow: {pip_install('parquet')}") from exc

__all__ = ["conform", "make_table", "pa", "pq", "unify"]

_MAX_FIELDS = 100  # a dict with more keys is a mapping rather than a record, and becomes JSON text


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
            known = kinds.get(field.name, pa.null())
            kind = _wider(known, field.type)
            kinds[field.name] = kind if kind is not None and _is_storable(kind) else pa.string()
    return pa.schema([(name, pa.string() if kind == pa.null() else kind) for name, kind in kinds.items()])


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if only text does."""
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
