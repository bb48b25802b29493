"""Values of ``meta`` and ``cb_kwargs`` as data that every frontier can store, and back.

Text, numbers, bytes, lists and dicts with text keys stay as they are. Tuples, sets, dates, Decimals, UUIDs, other dicts
and items (Item, dataclass, attrs) become a dict with a marker, and come back as the same type. Nothing else can be
stored. A class is looked up among the modules that are loaded; no module is imported for a stored name.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict
from uuid import UUID

from shoal.errors import RequestError
from shoal.scrapy.headers import Source

if TYPE_CHECKING:
    from shoal.selector import Selector

# Types that several modules of this package share.


Function: TypeAlias = Callable[..., object]
"""A function of the project: a callback, an errback, a receiver of a signal."""
Values: TypeAlias = dict[str, Any]
"""Values by name that a project stores and reads, such as ``meta``. As in Scrapy, their types are the project's own."""
Given: TypeAlias = Mapping[str, Any]
"""The same, where they are only read."""
Cookies: TypeAlias = dict[Any, Any] | list[dict[str, Any]]
"""Cookies of a request: by name, or one dict for each with ``name``, ``value``, ``domain`` and ``path``."""


class HasUrl(Protocol):
    """A request, a response or a link."""

    @property
    def url(self) -> str: ...


Followed: TypeAlias = "str | HasUrl | Selector"
"""What a response can follow: a URL, a Link, or a selected element or attribute."""


class RequestOptions(TypedDict, total=False):
    """The arguments of a Request after its URL and callback, by name."""

    method: str
    headers: Source
    body: bytes | str | None
    cookies: Cookies | None
    meta: Given | None
    encoding: str
    priority: int
    dont_filter: bool
    errback: Function | str | None
    flags: list[str] | None
    cb_kwargs: Given | None


MARK = "$scrapy"
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_COLLECTIONS = (dict, tuple, set, frozenset)
_MAX_DEPTH = 100


class NotStorableError(RequestError):
    """A value cannot be stored. ``path`` names it, such as ``meta['loader']``."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(f"{path} is a {type(value).__name__}")
        self.path = path
        self.value = value


def is_scalar(value: object) -> bool:
    """Whether the value is immutable and is stored as it is."""
    return -(2**63) <= value < 2**64 if type(value) is int else type(value) in _SCALARS


def encode(value: object, path: str, depth: int = 0) -> object:
    """Return the value as plain data. NotStorableError names the part that cannot be stored."""
    kind = type(value)
    if kind in _SCALARS:
        return value if is_scalar(value) else {MARK: "int", "v": str(value)}
    if depth > _MAX_DEPTH:
        raise NotStorableError(path, value)
    if type(value) is list:
        return [encode(member, f"{path}[{index}]", depth + 1) for index, member in enumerate(value)]
    if type(value) is dict and MARK not in value and all(type(key) is str for key in value):
        return {key: encode(member, f"{path}[{key!r}]", depth + 1) for key, member in value.items()}
    if isinstance(value, _COLLECTIONS) and kind in _COLLECTIONS:
        members = value.items() if isinstance(value, dict) else value
        return {MARK: kind.__name__, "v": [encode(member, f"{path}[...]", depth + 1) for member in members]}
    if kind in _AS_TEXT:
        return {MARK: kind.__name__, "v": _AS_TEXT[kind][0](value)}
    fields = item_fields(value)
    if fields is None:
        raise NotStorableError(path, value)
    where = f"{kind.__module__}:{kind.__qualname__}"
    encoded = {name: encode(member, f"{path}[{name!r}]", depth + 1) for name, member in fields.items()}
    return {MARK: "item", "class": where, "v": encoded}


def decode(value: object) -> Any:
    """Return the value that ``encode`` has encoded."""
    if type(value) is list:
        return [decode(member) for member in value]
    if type(value) is not dict:
        return value
    mark = value.get(MARK)
    if mark is None:
        return {key: decode(member) for key, member in value.items()}
    stored = value["v"]
    if mark == "int":
        return int(stored)
    if mark == "dict":
        return dict(map(decode, stored))
    if mark in _CONTAINERS:
        return _CONTAINERS[mark](map(decode, stored))
    if mark == "item":
        return _make_item(value["class"], {name: decode(member) for name, member in stored.items()})
    return _FROM_TEXT[mark](stored)


_CONTAINERS: dict[str, Callable[[Iterable[object]], object]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_AS_TEXT: dict[type, tuple[Callable[[Any], str], Callable[[str], object]]] = {
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda span: str(span // timedelta(microseconds=1)), lambda text: timedelta(microseconds=int(text))),
    Decimal: (str, Decimal),
    UUID: (str, UUID),
}
_FROM_TEXT = {kind.__name__: read for kind, (_, read) in _AS_TEXT.items()}


def item_fields(value: object) -> Given | None:
    """The fields of an Item, a dataclass or an attrs object; None for anything else."""
    kind = type(value)
    if isinstance(value, Mapping) and hasattr(kind, "fields"):
        return value
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    if hasattr(kind, "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in kind.__attrs_attrs__}
    return None


def fields_of(item: object) -> Given:
    """The fields of an item of any kind; empty for anything else."""
    return item if isinstance(item, Mapping) else item_fields(item) or {}


def _make_item(where: str, fields: dict[str, object]) -> object:
    module, _, name = where.partition(":")
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    is_item = isinstance(kind, type) and (
        hasattr(kind, "__dataclass_fields__")
        or hasattr(kind, "__attrs_attrs__")
        or (issubclass(kind, Mapping) and hasattr(kind, "fields"))
    )
    if not is_item:
        raise RequestError(f"cannot read a stored item: the spider has no item class {where}")
    if issubclass(kind, Mapping):
        return kind(**fields)
    item = object.__new__(kind)  # a constructor may take other arguments than the fields
    for name, value in fields.items():
        object.__setattr__(item, name, value)
    return item
