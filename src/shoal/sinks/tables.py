"""What the sinks with tables share: which table and column a value goes to, and of which type a column must be.

A table is made for each type of item, or one for all if its name is given. ``_key`` is its primary key, and a row that
is written again is updated, so nothing needs to be undone after a crash. Rows of earlier runs stay.
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

from shoal.errors import SinkError
from shoal.item import as_text, decode_item
from shoal.ports import LoggedItem

KEY = "_key"
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
    """An item on its way into a table. ``size`` is about how many bytes it has."""

    key: str
    data: dict[str, Any]
    size: int


def rows_by_table(items: Iterable[LoggedItem], table: str | None, prefix: str) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    for item in items:
        name, data = decode_item(item.payload)
        tables.setdefault(table or name.lower(), []).append(Row(prefix + item.key, data, len(item.payload)))
    return tables


def not_ours(where: str, table: str, way_out: str) -> SinkError:
    """The error for a table that a sink did not make."""
    return SinkError(
        f"can't write {where}: its table {table!r} was not made by Shoal (it has no primary key {KEY!r}); "
        f"choose another table with {way_out}"
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
        if self.limit is None:
            return name if not distinct else f"{name}_{_hash(name)}"
        clean = name if self.forbidden is None else self.forbidden.sub("_", name)
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
        self._taken = {naming.fold(name) for name in (KEY, *kinds)} | naming.reserved

    def __contains__(self, column: str) -> bool:
        return column in self.kinds

    def home(self, field: str) -> str:
        """The column of a field, which may not be there yet."""
        home = self._homes.get(field)
        if home is not None:
            return home
        home = self._naming.fit(field)
        if home == KEY or (home not in self.kinds and self._naming.fold(home) in self._taken):
            home = self._naming.fit(field, distinct=True)
        self._homes[field] = home
        self._taken.add(self._naming.fold(home))
        return home

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
    columns: list[tuple[Any, ...]]


class Batch:
    """The rows of one write for one table. Of those with one key, the last one counts."""

    def __init__(self, rows: Iterable[Row], *, deepest: int | None = None, chunk: int = _CHUNK) -> None:
        self.groups = _groups({row.key: row for row in rows}.values(), chunk)
        self.kinds: dict[str, Kind] = {}
        """Of each field that has a value in some row; of which kind the others are remains to be seen."""
        for group in self.groups:
            for field, values in zip(group.fields, group.columns, strict=True):
                kind = kind_of(values, deepest)
                if kind is not None:
                    self.kinds[field] = joined(self.kinds.get(field, kind), kind)


def _groups(rows: Iterable[Row], chunk: int) -> list[Group]:
    alike: dict[tuple[str, ...], list[list[Row]]] = {}
    room: dict[tuple[str, ...], int] = {}
    for row in rows:
        fields = tuple(row.data)
        if room.get(fields, 0) <= 0:
            alike.setdefault(fields, []).append([])
            room[fields] = chunk
        alike[fields][-1].append(row)
        room[fields] -= row.size
    return [
        Group(fields, [row.key for row in part], list(zip(*(row.data.values() for row in part), strict=True)))
        for fields, parts in alike.items()
        for part in parts
    ]
