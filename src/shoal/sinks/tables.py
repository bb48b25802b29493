"""What the sinks with tables share: which table and column a value goes to, and of which type a column must be.

A table is made for each type of item, or one for all if its name is given. `shoal.sinks.keys` says which row an item
becomes. Rows of other runs stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum, auto
from functools import reduce
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from shoal.errors import ItemError, SinkError
from shoal.item import as_text, decode_item
from shoal.ports import LoggedItem
from shoal.sinks.keys import KEY, OWN, TableOptions
from shoal.sinks.rejects import Reject

ATTEMPTS = 10
"""How often a write begins anew because another process changed the table, or locked it in another order."""
REWRITE = 20
"""How many times longer than anything else a change of a column's type may take: a server writes the table anew."""
_EXACT = 1 << 53  # integers up to here are exact as floats
_CHUNK = 4 << 20  # bytes of items that go into one statement

_encode_json = msgspec.json.Encoder().encode


class Server(msgspec.Struct, frozen=True):
    """A database on a server, and how to get in. ``name`` is what may be shown of it."""

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
    """An item on its way into a table."""

    key: str
    data: dict[str, Any]
    item: LoggedItem


def rows_by_table(items: Iterable[LoggedItem], options: TableOptions) -> tuple[dict[str, list[Row]], list[Reject]]:
    """The rows of each table, and the items that can't be rows."""
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


def not_ours(where: str, table: str, way_out: str) -> SinkError:
    """The error for a table that a sink did not make."""
    return SinkError(
        f"can't write {where}: its table {table!r} was not made by Shoal, or by an older version (it lacks the primary "
        f"key {KEY!r} or one of the columns {', '.join(OWN[1:])}); choose another table with {way_out}"
    )


# -- types


class Kind(Enum):
    """What a column can hold, from the values that were seen. None stands for a type that the user chose."""

    BOOL = auto()
    INT = auto()
    LONG = auto()
    """64 bits, which a float does not hold exactly."""
    BIG = auto()
    REAL = auto()
    TEXT = auto()
    BYTES = auto()
    JSON = auto()
    TIME = auto()


_OF_TYPE = {
    bool: Kind.BOOL, float: Kind.REAL, str: Kind.TEXT, bytes: Kind.BYTES, list: Kind.JSON, dict: Kind.JSON,
    datetime: Kind.TIME,
}  # fmt: skip
_WIDER = {
    frozenset({Kind.INT, Kind.LONG}): Kind.LONG,
    frozenset({Kind.INT, Kind.BIG}): Kind.BIG,
    frozenset({Kind.LONG, Kind.BIG}): Kind.BIG,
    frozenset({Kind.INT, Kind.REAL}): Kind.REAL,
}


def kind_of(values: Iterable[Any], deepest: int | None = None) -> Kind | None:
    """The narrowest kind that holds all values; None if there are none but None.

    ``deepest``: lists and dicts that are nested deeper than this are text.
    """
    values = list(values)
    types = set(map(type, values))
    kinds = {_OF_TYPE.get(each, Kind.TEXT) for each in types - {int, type(None)}}
    if int in types:
        kinds.add(_int_kind([value for value in values if type(value) is int]))
    if Kind.JSON in kinds and deepest is not None and any(_is_deeper(value, deepest) for value in values):
        kinds.add(Kind.TEXT)
    return reduce(joined, kinds) if kinds else None


def _int_kind(values: Sequence[int]) -> Kind:
    low, high = min(values), max(values)
    if low >= -_EXACT and high <= _EXACT:
        return Kind.INT
    return Kind.LONG if high < 1 << 63 else Kind.BIG


def _is_deeper(value: Any, levels: int) -> bool:
    if type(value) is dict:
        value = value.values()
    elif type(value) is not list:
        return False
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in value)


def joined(one: Kind, other: Kind) -> Kind:
    """The narrowest kind that holds both without loss."""
    return one if one is other else _WIDER.get(frozenset({one, other}), Kind.TEXT)


def beyond_exact(column: str) -> str:
    """The condition for integers that would lose digits as floats."""
    return f"{column} NOT BETWEEN -{_EXACT} AND {_EXACT}"


def text_of(value: Any) -> str:
    """A value in a column of text; a number as the servers write it when they turn it into text."""
    if type(value) is float:
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return as_text(value).removesuffix(".0")
    return as_text(value)


def json_of(value: Any) -> str:
    return _encode_json(value).decode()


# -- names


class Naming(msgspec.Struct, frozen=True):
    """Which names a database allows, and which of them it does not tell apart.

    Two names with the same ``fold`` are one to it; ``reserved`` are those, folded, that no column can have. None is
    longer than ``limit`` by its ``length``, and none has a character that is ``forbidden``.
    """

    fold: Callable[[str], str] = str
    reserved: frozenset[str] = frozenset()
    limit: int | None = None
    length: Callable[[str], int] = len
    forbidden: re.Pattern[str] | None = None

    def fit(self, name: str, *, distinct: bool = False) -> str:
        """The name if it can be one. Otherwise, or to be ``distinct``, it is cleaned, cut, and followed by a hash."""
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
    """A column to add (``old`` is None), or to make wider."""

    column: str
    old: Kind | None
    new: Kind


class Columns:
    """The columns that a table has, and which of them each field goes to.

    That depends on nothing but the field and the table, so all processes agree.
    """

    def __init__(self, naming: Naming, kinds: Mapping[str, Kind | None]) -> None:
        self.kinds = dict(kinds)
        self._naming = naming
        self._homes: dict[str, str] = {}
        self._taken = {naming.fold(name) for name in (*OWN, *kinds)} | naming.reserved

    def __contains__(self, column: str) -> bool:
        return column in self.kinds

    def home(self, field: str) -> str:
        """The column of a field, which may not be there yet."""
        home = self._homes.get(field)
        if home is not None:
            return home
        home = self._naming.fit(field)
        if home in OWN or (home not in self.kinds and self._naming.fold(home) in self._taken):
            home = self._naming.fit(field, distinct=True)
        self._homes[field] = home
        self._taken.add(self._naming.fold(home))
        return home

    def room(self, limit: int) -> int:
        """How many columns may be added if the table may have so many for fields."""
        return max(0, limit - sum(name not in OWN for name in self.kinds))

    def fitting(self, rows: Iterable[Row], limit: int) -> tuple[list[Row], list[Reject]]:
        """The rows for whose fields there are columns, or room for them; and the others."""
        trial, room = Columns(self._naming, self.kinds), self.room(limit)
        added: set[str] = set()
        verdicts: dict[tuple[str, ...], bool] = {}
        fit: list[Row] = []
        rejects: list[Reject] = []
        for row in rows:
            fields = tuple(row.data)
            if fields not in verdicts:
                new = {home for field in fields if (home := trial.home(field)) not in self.kinds and home not in added}
                verdicts[fields] = len(added) + len(new) <= room
                if verdicts[fields]:
                    added |= new
            if verdicts[fields]:
                fit.append(row)
            else:
                rejects.append(Reject(row.item, too_many_columns(limit)))
        return fit, rejects

    def doubtful(self, kinds: Mapping[str, Kind]) -> list[str]:
        """Columns of 64 bits that floats are to go into: LONG, unless their values turn out to be small."""
        homes = (self.home(field) for field, kind in kinds.items() if kind is Kind.REAL)
        return [home for home in homes if self.kinds.get(home) is Kind.LONG]

    def changes(self, kinds: Mapping[str, Kind], blank: Iterable[str] = ()) -> list[Change]:
        """What fields of these kinds need. ``blank`` fields had no value at all, and will have none."""
        found: list[Change] = []
        for field, kind in kinds.items():
            column = self.home(field)
            old = self.kinds.get(column)
            if column not in self.kinds:
                found.append(Change(column, None, kind))
            elif old is not None and joined(old, kind) is not old:
                found.append(Change(column, old, joined(old, kind)))
        for field in blank:
            column = self.home(field)
            if column not in self.kinds:
                found.append(Change(column, None, Kind.TEXT))
        return found


# -- rows


class Group(NamedTuple):
    """Rows with the same fields, by columns: what one statement writes."""

    fields: tuple[str, ...]
    keys: list[str]
    seqs: list[int]
    columns: list[tuple[Any, ...]]


class Batch:
    """The rows of one write for one table. Of those with one key, the last one counts."""

    def __init__(self, rows: Iterable[Row], *, deepest: int | None = None, chunk: int = _CHUNK) -> None:
        self._deepest, self._chunk = deepest, chunk
        self.rejects: list[Reject] = []
        self._set({row.key: row for row in rows}.values())

    def _set(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self.groups = _groups(self._rows, self._chunk)
        self.last = max((row.item.seq for row in self._rows), default=0)
        """The greatest number of an item."""
        self.kinds: dict[str, Kind] = {}
        """Of each field that has a value in some row; of which kind the others are remains to be seen."""
        for group in self.groups:
            for field, values in zip(group.fields, group.columns, strict=True):
                kind = kind_of(values, self._deepest)
                if kind is not None:
                    self.kinds[field] = joined(self.kinds.get(field, kind), kind)

    def reject(self, key: str, reason: str) -> None:
        """Leave out a row that can't be written."""
        self.rejects += [Reject(row.item, reason) for row in self._rows if row.key == key]
        self._set([row for row in self._rows if row.key != key])

    def fit(self, columns: Columns, limit: int) -> None:
        """Drop the rows that need more columns than the table may have. They become ``rejects``."""
        rows, rejects = columns.fitting(self._rows, limit)
        if rejects:
            self.rejects += rejects
            self._set(rows)


def halves(group: Group) -> tuple[Group, Group]:
    middle = len(group.keys) // 2
    one, other = (
        Group(group.fields, group.keys[part], group.seqs[part], [values[part] for values in group.columns])
        for part in (slice(middle), slice(middle, None))
    )
    return one, other


def too_many_columns(limit: int) -> str:
    return (
        f"it has new fields, and an output may have {limit} columns; put fields whose names come from pages into a "
        "nested one, or allow more with ?max_columns=N"
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
