"""Which table and column a value goes to, and which type the column needs.

Each type of item has its own table, unless the output names one table for all. `shoal.sinks.keys` decides which row an
item becomes. Rows of other runs stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum, auto
from functools import reduce
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from shoal.errors import ItemError, SinkError
from shoal.item import as_text, decode_item
from shoal.ports import LoggedItem
from shoal.sinks.keys import KEY, SYSTEM_COLUMNS, Reject, TableOptions

_MAX_EXACT = 1 << 53  # integers up to here are exact as floats
_CHUNK = 4 << 20  # bytes of items that go into one statement

_encode_json = msgspec.json.Encoder().encode


class DatabaseServer(msgspec.Struct, frozen=True):
    """A database on a server, and how to log in. ``name`` has no secrets."""

    scheme: str
    host: str
    port: int
    database: str
    user: str | None = None
    password: str | None = None
    schema: str | None = None
    timeout: float = 30.0
    options: dict[str, str] = {}

    @property
    def name(self) -> str:
        host = self.host or "localhost"
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/{self.database}"

    def __repr__(self) -> str:
        return f"Server({self.name})"


class Row(NamedTuple):
    """An item as a row of a table."""

    key: str
    data: dict[str, object]
    item: LoggedItem


def rows_by_table(items: Iterable[LoggedItem], options: TableOptions) -> tuple[dict[str, list[Row]], list[Reject]]:
    """Return the rows of each table, and the items that can't be rows."""
    tables: dict[str, list[Row]] = {}
    rejects: list[Reject] = []
    for item in items:
        name, data = decode_item(item.payload)
        try:
            row = Row(options.row_key(item, data), data, item)
        except ItemError as error:
            rejects.append(Reject(item, str(error)))
        else:
            tables.setdefault(options.table or name.lower(), []).append(row)
    return tables, rejects


def foreign_table(database: str, table: str, option: str) -> SinkError:
    """The error for a table that no sink created. ``option`` is how to choose another."""
    return SinkError(
        f"can't write {database}: Shoal did not create its table {table!r}, or an older version did (the primary key "
        f"{KEY!r} or one of the columns {', '.join(SYSTEM_COLUMNS[1:])} is missing); choose another table with {option}"
    )


# -- types


class Kind(Enum):
    """What a column can hold. Where a Kind may be None, the user chose the type of the column."""

    BOOL = auto()
    INT = auto()
    LONG = auto()
    """64 bits: a float does not hold it exactly."""
    BIG = auto()
    REAL = auto()
    TEXT = auto()
    BYTES = auto()
    JSON = auto()
    TIME = auto()


_KIND_OF_TYPE = {
    bool: Kind.BOOL, float: Kind.REAL, str: Kind.TEXT, bytes: Kind.BYTES, list: Kind.JSON, dict: Kind.JSON,
    datetime: Kind.TIME,
}  # fmt: skip
_WIDER = {
    frozenset({Kind.INT, Kind.LONG}): Kind.LONG,
    frozenset({Kind.INT, Kind.BIG}): Kind.BIG,
    frozenset({Kind.LONG, Kind.BIG}): Kind.BIG,
    frozenset({Kind.INT, Kind.REAL}): Kind.REAL,
}


def kind_of(values: Iterable[object], max_depth: int | None = None) -> Kind | None:
    """The narrowest kind that holds all values; None if all of them are None.

    Lists and dicts nested deeper than ``max_depth`` are text.
    """
    values = list(values)
    types = set(map(type, values))
    kinds = {_KIND_OF_TYPE.get(type_, Kind.TEXT) for type_ in types - {int, type(None)}}
    if int in types:
        kinds.add(_int_kind([value for value in values if type(value) is int]))
    if Kind.JSON in kinds and max_depth is not None and any(_is_deeper(value, max_depth) for value in values):
        kinds.add(Kind.TEXT)
    return reduce(join_kinds, kinds) if kinds else None


def _int_kind(values: Sequence[int]) -> Kind:
    low, high = min(values), max(values)
    if low >= -_MAX_EXACT and high <= _MAX_EXACT:
        return Kind.INT
    return Kind.LONG if high < 1 << 63 else Kind.BIG


def _is_deeper(value: object, levels: int) -> bool:
    if type(value) is dict:
        value = value.values()
    elif type(value) is not list:
        return False
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in value)


def join_kinds(first: Kind, second: Kind) -> Kind:
    """The narrowest kind that holds both without loss."""
    return first if first is second else _WIDER.get(frozenset({first, second}), Kind.TEXT)


def large_integers(table: str, column: str) -> str:
    """The query that tests whether a column has integers that would lose digits as floats."""
    return f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {column} NOT BETWEEN -{_MAX_EXACT} AND {_MAX_EXACT})"


def text_of(value: object) -> str:
    """A value as text. Numbers look as they do when a server converts a column to text."""
    if type(value) is float:
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return as_text(value).removesuffix(".0")
    return as_text(value)


def json_of(value: object) -> str:
    return _encode_json(value).decode()


# -- names


class Naming(msgspec.Struct, frozen=True):
    """Which names a database allows, and which it treats as equal.

    Names with the same ``fold`` are equal. A column can't have a ``reserved`` name (these are folded), a name longer
    than ``limit`` (measured by ``length``), or a ``forbidden`` character.
    """

    fold: Callable[[str], str] = str
    reserved: frozenset[str] = frozenset()
    limit: int | None = None
    length: Callable[[str], int] = len
    forbidden: re.Pattern[str] | None = None

    def fit(self, name: str, *, distinct: bool = False) -> str:
        """The name if it is allowed. Otherwise, or if it must be ``distinct``: cleaned, cut, with a hash at the end."""
        clean = name if self.forbidden is None else self.forbidden.sub("_", name)
        if self.limit is None:
            return name if clean == name and not distinct else f"{clean}_{_hash(name)}"
        if name and clean == name and self.length(name) <= self.limit and not distinct:
            return name
        while self.length(clean) > self.limit - 9:
            clean = clean[:-1]
        return f"{clean}_{_hash(name)}"


def _hash(name: str) -> str:
    return blake2b(name.encode(), digest_size=4).hexdigest()


class Change(NamedTuple):
    """A column to add (``old`` is None), or to widen."""

    column: str
    old: Kind | None
    new: Kind


class Columns:
    """The columns of a table, and which one each field goes to.

    That depends only on the field and the table, so all processes agree.
    """

    def __init__(
        self, naming: Naming, kinds: Mapping[str, Kind | None], types: Mapping[str, str] | None = None
    ) -> None:
        """``types``: as the database names them."""
        self.kinds = dict(kinds)
        self.types = types or {}
        self._naming = naming
        self._chosen: dict[str, str] = {}
        self._taken = {naming.fold(name) for name in (*SYSTEM_COLUMNS, *kinds)} | naming.reserved

    def __contains__(self, column: str) -> bool:
        return column in self.kinds

    def column_for(self, field: str) -> str:
        """The column of a field. The table may not have it yet."""
        column = self._chosen.get(field)
        if column is not None:
            return column
        column = self._naming.fit(field)
        if column in SYSTEM_COLUMNS or (column not in self.kinds and self._naming.fold(column) in self._taken):
            column = self._naming.fit(field, distinct=True)
        self._chosen[field] = column
        self._taken.add(self._naming.fold(column))
        return column

    def room(self, limit: int) -> int:
        """How many columns may still be added, if ``limit`` are allowed for fields."""
        return max(0, limit - sum(name not in SYSTEM_COLUMNS for name in self.kinds))

    def fitting(self, rows: Iterable[Row], limit: int) -> tuple[list[Row], list[Reject]]:
        """Split the rows: those whose fields have a column, or room for one; and the others, rejected."""
        trial, room = Columns(self._naming, self.kinds), self.room(limit)
        added: set[str] = set()
        verdicts: dict[tuple[str, ...], bool] = {}
        fit: list[Row] = []
        rejects: list[Reject] = []
        for row in rows:
            fields = tuple(row.data)
            if fields not in verdicts:
                new = {trial.column_for(field) for field in fields} - self.kinds.keys() - added
                verdicts[fields] = len(added) + len(new) <= room
                if verdicts[fields]:
                    added |= new
            if verdicts[fields]:
                fit.append(row)
            else:
                rejects.append(Reject(row.item, too_many_columns(limit)))
        return fit, rejects

    def maybe_exact(self, kinds: Mapping[str, Kind]) -> list[str]:
        """Columns of 64-bit integers (LONG) that need floats. If their values are small, they can be treated as INT."""
        columns = (self.column_for(field) for field, kind in kinds.items() if kind is Kind.REAL)
        return [column for column in columns if self.kinds.get(column) is Kind.LONG]

    def changes(self, kinds: Mapping[str, Kind], blank: Iterable[str] = ()) -> list[Change]:
        """The changes that fields of these kinds need. ``blank`` fields never had a value."""
        changes: list[Change] = []
        for field, kind in kinds.items():
            column = self.column_for(field)
            old = self.kinds.get(column)
            if column not in self.kinds:
                changes.append(Change(column, None, kind))
            elif old is not None and join_kinds(old, kind) is not old:
                changes.append(Change(column, old, join_kinds(old, kind)))
        for field in blank:
            column = self.column_for(field)
            if column not in self.kinds:
                changes.append(Change(column, None, Kind.TEXT))
        return changes


# -- rows


class Group(NamedTuple):
    """Rows with the same fields, column by column. One statement writes them."""

    fields: tuple[str, ...]
    keys: list[str]
    seqs: list[int]
    columns: list[tuple[object, ...]]


class Batch:
    """The rows of one write for one table. The last row with a key wins."""

    def __init__(
        self, rows: Iterable[Row], *, is_typed: bool = True, max_depth: int | None = None, chunk: int = _CHUNK
    ) -> None:
        """``is_typed``: columns have types, so a field gets its column with its first value."""
        self._is_typed, self._max_depth, self._chunk = is_typed, max_depth, chunk
        self.rejects: list[Reject] = []
        self._set({row.key: row for row in rows}.values())

    def _set(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.groups = _groups(self.rows, self._chunk) if self._is_typed else []
        """The rows by their fields, if columns have types."""
        self.last = max((row.item.seq for row in self.rows), default=0)
        """The highest sequence number."""
        self.kinds: dict[str, Kind] = {}
        """By field, if any row has a value for it."""
        if not self._is_typed:
            for row in self.rows:
                if not row.data.keys() <= self.kinds.keys():
                    self.kinds.update(dict.fromkeys(row.data, Kind.TEXT))
        for group in self.groups:
            for field, values in zip(group.fields, group.columns, strict=True):
                kind = kind_of(values, self._max_depth)
                if kind is not None:
                    self.kinds[field] = join_kinds(self.kinds.get(field, kind), kind)

    def blank(self, columns: Columns) -> list[str]:
        """The fields without a column. No row had a value for them so far."""
        fields = dict.fromkeys(field for group in self.groups for field in group.fields if field not in self.kinds)
        return [field for field in fields if columns.column_for(field) not in columns]

    def reject(self, key: str, reason: str) -> None:
        """Remove a row that can't be written."""
        self.rejects += [Reject(row.item, reason) for row in self.rows if row.key == key]
        self._set([row for row in self.rows if row.key != key])

    def fit(self, columns: Columns, limit: int) -> None:
        """Reject the rows that need more columns than the table may have."""
        rows, rejects = columns.fitting(self.rows, limit)
        if rejects:
            self.rejects += rejects
            self._set(rows)


def halves(group: Group) -> tuple[Group, Group]:
    middle = len(group.keys) // 2
    first, second = (
        Group(group.fields, group.keys[part], group.seqs[part], [values[part] for values in group.columns])
        for part in (slice(middle), slice(middle, None))
    )
    return first, second


def rows_within(
    items: Iterable[LoggedItem], fields: dict[str, None], limit: int, rename: Callable[[str], str] | None = None
) -> tuple[list[dict[str, object]], list[Reject]]:
    """The data of items for an output with columns, and the items that need more than ``limit`` columns.

    Adds new fields to ``fields``.
    """
    rows: list[dict[str, object]] = []
    rejects: list[Reject] = []
    for item in items:
        row = decode_item(item.payload)[1]
        if rename is not None:
            row = {rename(name): value for name, value in row.items()}
        if not row.keys() <= fields.keys():
            if len(row) > limit or len(fields | row) > limit:
                rejects.append(Reject(item, too_many_columns(limit)))
                continue
            fields.update(dict.fromkeys(row))
        rows.append(row)
    return rows, rejects


def too_many_columns(limit: int) -> str:
    return (
        f"its new fields need more than {limit} columns; put fields whose names come from pages into a nested field, "
        "or allow more columns with ?max_columns=N"
    )


def _groups(rows: Iterable[Row], chunk: int) -> list[Group]:
    alike: dict[tuple[str, ...], list[list[Row]]] = {}
    room: dict[tuple[str, ...], int] = {}
    for row in rows:
        fields = tuple(row.data)
        if room.get(fields, 0) <= 0:
            alike.setdefault(fields, []).append([])
            room[fields] = chunk
        alike[fields][-1].append(row)
        room[fields] -= len(row.item.payload)
    return [
        Group(
            fields,
            [row.key for row in part],
            [row.item.seq for row in part],
            list(zip(*(row.data.values() for row in part), strict=True)),
        )
        for fields, parts in alike.items()
        for part in parts
    ]
