"""What can be an item, how it is encoded, and the message for an item that cannot be stored."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ItemError
from shoal.http import Response
from shoal.item import ItemTypes, as_text, decode_item, encode_item, is_item
from tests.support.names import steady


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Book:
    title: str
    price: float
    tags: list[str] = field(default_factory=list)


class Author(msgspec.Struct):
    name: str
    born: int | None = None


class Point(msgspec.Struct, array_like=True):
    x: int
    y: int


class Shop(pydantic.BaseModel):
    name: str
    url: pydantic.HttpUrl
    opened: date | None = None


class Blob(pydantic.BaseModel):
    data: bytes


@attrs.define
class Review:
    text: str
    stars: int


class Text(str):
    pass


class Number(float):
    pass


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"title": "A", "price": 1.5, "n": 3, "ok": True, "none": None}, None),
        ({}, ("item", {})),
        ({"a": {"b": [1, {"c": "d"}]}}, None),
        (OrderedDict(a=1), ("item", {"a": 1})),
        (defaultdict(int, a=1), ("item", {"a": 1})),
        (MappingProxyType({"a": 1}), ("item", {"a": 1})),
        (UserDict(a=1), ("item", {"a": 1})),
        (Book("A", 1.0, ["x"]), ("Book", {"title": "A", "price": 1.0, "tags": ["x"]})),
        (Author("B"), ("Author", {"name": "B", "born": None})),
        (Point(1, 2), ("Point", {"x": 1, "y": 2})),
        (Review("fine", 4), ("Review", {"text": "fine", "stars": 4})),
        (
            Shop(name="S", url=pydantic.HttpUrl("https://example.com/a"), opened=date(2020, 1, 2)),
            ("Shop", {"name": "S", "url": "https://example.com/a", "opened": "2020-01-02"}),
        ),
        (Blob(data=b"\xff\x00"), ("Blob", {"data": b"\xff\x00"})),
        ({"book": Book("A", 1.0), "shop": {"of": Author("B", 1900)}}, None),
        ({"s": Text("x"), "f": Number(1.5)}, ("item", {"s": "x", "f": 1.5})),
        ({"text": "Zürich 東京 🐟\n"}, None),
        ({"big": 2**64 - 1, "small": -(2**63)}, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_items_of_every_kind(item: Any, expected: tuple[str, dict[str, Any]] | None) -> None:
    assert is_item(item)
    decoded = decode_item(encode_item(item))
    if expected is None and "book" in item:
        assert decoded[1]["book"]["title"] == "A"
        assert decoded[1]["shop"]["of"] == {"name": "B", "born": 1900}
    else:
        assert decoded == (expected or ("item", item))


def test_values_as_msgspec_writes_them() -> None:
    key = UUID(int=7)
    item = {
        "decimal": Decimal("9.99"),
        "date": date(2024, 2, 29),
        "naive": datetime(2024, 2, 29, 12),
        "aware": datetime(2024, 2, 29, 12, tzinfo=UTC),
        "uuid": key,
        "set": {1},
        "tuple": (1, 2),
        "enum": Colour.RED,
        "bytes": b"\x00",
        "enum_key": {Colour.RED: 1, key: 2},
    }
    assert decode_item(encode_item(item))[1] == {
        "decimal": "9.99",
        "date": "2024-02-29",
        "naive": "2024-02-29T12:00:00",
        "aware": datetime(2024, 2, 29, 12, tzinfo=UTC),
        "uuid": str(key),
        "set": [1],
        "tuple": [1, 2],
        "enum": "red",
        "bytes": b"\x00",
        "enum_key": {"red": 1, str(key): 2},
    }


_recursive: dict[str, Any] = {"a": {"b": []}}
_recursive["a"]["b"].append(_recursive)
_deep: dict[str, Any] = {}
for _ in range(5000):
    _deep = {"a": _deep}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"title": "A", "make": lambda: 1}, ["make", "function"]),
        ({"tags": ["a", {"x": object()}]}, ["tags[1].x", "object"]),
        ({"where": Book("A", 1.0, [object()])}, ["where.tags[0]", "object"]),  # type: ignore[list-item]
        (Author(name=object()), ["name", "object"]),  # type: ignore[arg-type]
        (Review(text="x", stars=open), ["stars", "builtin_function_or_method"]),  # type: ignore[arg-type]
        ({"n": {"id": 2**64}}, ["n.id", "64 bits"]),
        ({"n": -(2**63) - 1}, ["n", "64 bits"]),
        ({1: "a"}, ["key 1", "an int"]),
        ({"prices": {"a": {None: 1}}}, ["prices.a", "key None"]),
        ({"prices": [{(1, 2): 1}]}, ["prices[0]", "key (1, 2)", "a tuple"]),
        ({"prices": {b"x": 1}}, ["prices", "b'x'", "bytes"]),
        (_recursive, ["a.b[0]", "contains itself"]),
        (_deep, ["too deep"]),
        ({"text": "half \ud83d"}, ["text", "surrogate"]),
        ({"it": (x for x in "ab")}, ["it", "generator"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named(item: Any, words: list[str]) -> None:
    with pytest.raises(ItemError) as caught:
        encode_item(item)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("thing", ["text", 3, None, [{"a": 1}], ("a",), Book, object(), b"x"], ids=steady)
def test_not_an_item(thing: object) -> None:
    assert not is_item(thing)
    with pytest.raises(
        ItemError, match=f"an item must be a dict.* not (an? )?{type(thing).__name__.removesuffix('Type')}"
    ):
        encode_item(thing)


def test_a_root_model_without_fields_is_no_item() -> None:
    with pytest.raises(ItemError):
        encode_item(pydantic.RootModel[list[int]]([1]))


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda name: "\0" not in name), _values, max_size=5))
def test_round_trip(item: dict[str, Any]) -> None:
    assert decode_item(encode_item(item)) == ("item", item)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode(["item", 1])]
)
def test_not_a_payload(payload: bytes) -> None:
    with pytest.raises(ItemError, match="not an encoded item"):
        decode_item(payload)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('a"b', 'a"b'),
        (1, "1"),
        (True, "true"),
        ([1, "x"], '[1,"x"]'),
        ({"a": None}, '{"a":null}'),
        (b"\x00\x01", "AAE="),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00Z"),
    ],
)
def test_as_text(value: Any, text: str) -> None:
    assert as_text(value) == text


def test_imports_neither_pydantic_nor_attrs() -> None:
    unwanted = ["pydantic", "attr", "attrs", "pyarrow"]
    code = f"import sys, shoal.item, shoal.sinks.drainer; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_msgpack_extension_is_refused() -> None:
    with pytest.raises(ItemError):
        encode_item({"x": [msgspec.msgpack.Ext(1, b"")]})
    with pytest.raises(ItemError):
        encode_item({"x": msgspec.msgpack.Ext(1, b"")})


@dataclass(frozen=True, slots=True)
class Priced:
    """Its values are worked on when it is made, so they must not be worked on again."""

    price: Decimal
    seen: datetime
    tags: frozenset[str]
    book: Book | None = None
    note: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "note", self.note + 1)


class Renamed(msgspec.Struct, rename="camel", tag=True):
    full_name: str
    born: date | None = None


class Rows(msgspec.Struct, array_like=True):
    first: int
    second: str


class Aliased(pydantic.BaseModel):
    price: float = pydantic.Field(0.0, alias="p")
    when: date | None = None


@attrs.frozen
class Frozen:
    at: UUID
    of: dict[str, int]


class Own(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "item",
    [
        Priced(Decimal("1.50"), datetime(2026, 1, 2, tzinfo=UTC), frozenset("ab"), Book("Tides", 2.0, ["x"])),
        Book(None, "free"),  # type: ignore[arg-type]
        Renamed("A B", date(2026, 1, 2)),
        Rows(1, "two"),
        Aliased(p=3.5, when=date(2026, 1, 2)),
        Frozen(UUID(int=5), {"a": 1}),
        Own(a=1),
        {"plain": [1, 2]},
    ],
    ids=lambda item: type(item).__name__,
)
def test_an_item_comes_back_as_its_own_type(item: Any) -> None:
    types = ItemTypes(type)
    if type(item) is not dict:
        types.see(type(item))
    restored = types.restore(encode_item(item))
    assert type(restored) is type(item)
    assert restored == item


def test_an_item_whose_class_is_unknown_or_ambiguous_or_too_small_is_a_dict() -> None:
    unknown = ItemTypes(type)
    assert unknown.restore(encode_item(Book("Tides", 1.0))) == {"title": "Tides", "price": 1.0, "tags": []}
    ambiguous = ItemTypes(type)
    ambiguous.see(Rows)
    ambiguous.see(type("Rows", (Book,), {}))
    assert ambiguous.restore(encode_item(Rows(1, "two"))) == {"first": 1, "second": "two"}
    small = ItemTypes(type)
    small.see(Frozen)
    with_files = msgspec.msgpack.encode(("Frozen", {"at": "x", "of": {}, "files": ["a.pdf"]}))
    assert small.restore(with_files) == {"at": "x", "of": {}, "files": ["a.pdf"]}


def test_the_module_of_the_spider_has_the_classes_of_items_that_another_process_made() -> None:
    class Spiderlike:
        pass

    assert ItemTypes(Spiderlike).restore(encode_item(Frozen(UUID(int=5), {}))) == Frozen(UUID(int=5), {})


def test_a_selector_in_an_item_names_what_is_missing() -> None:
    chosen = Response("http://a.example/", body=b"<h1>Tides</h1>").css("h1")
    with pytest.raises(ItemError, match=r"field title is a SelectorList.*\.get\(\) or \.getall\(\)"):
        encode_item({"title": chosen})
