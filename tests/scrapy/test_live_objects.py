"""Objects in ``meta`` and ``cb_kwargs``: live with the frontier in memory, encoded or refused with others."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from shoal import scrapy
from shoal.scrapy.conversion import LiveObjects, LiveParts
from shoal.scrapy.http import Request
from shoal.scrapy.item import Field, Item
from shoal.scrapy.values import NotStorableError, decode, encode
from tests.scrapy.crawling import SITE, crawl


class Book(Item):
    title = Field()
    price = Field()


@dataclass
class Place:
    name: str
    point: tuple[int, int]


class Opaque:
    """Something that cannot be stored."""


async def test_objects_stay_the_same_in_memory() -> None:
    opaque, seen = Opaque(), []

    class Own(scrapy.Spider):
        name = "own"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any, **named: Any) -> Any:
            shared = {"parts": [], "left": 2}
            for number in (1, 2):
                meta = {"opaque": opaque, "shared": shared}
                yield Request(f"{SITE}/{number}", self.part, meta=meta, cb_kwargs={"item": Book(title="T")})

        def part(self, response: Any, item: Book) -> Any:
            shared = response.meta["shared"]
            seen.append(response.meta["opaque"] is opaque)
            shared["parts"].append(response.text)
            shared["left"] -= 1
            if not shared["left"]:
                item["price"] = sorted(shared["parts"])
                yield item

    done = await crawl(Own, {"/": "", "/1": "one", "/2": "two"})
    assert done.items == [{"title": "T", "price": ["one", "two"]}]
    assert seen == [True, True]


class Passing(scrapy.Spider):
    name = "passing"
    start_urls = [f"{SITE}/"]

    def parse(self, response: Any, **named: Any) -> Any:
        meta = {"pair": (1, "a"), "set": {1}, "when": date(2020, 1, 2), "price": Decimal("1.50"), "keys": {1: "x"}}
        yield Request(
            f"{SITE}/1", self.part, meta=meta, cb_kwargs={"book": Book(title="T"), "place": Place("p", (1, 2))}
        )
        yield Request(f"{SITE}/2", self.part, meta={"opaque": Opaque()})
        yield Request(f"{SITE}/3", lambda response: None)
        yield {"kept": True}

    def part(self, response: Any, book: Book, place: Place) -> Any:
        meta = response.meta
        yield {
            "types": [type(meta[key]).__name__ for key in ("pair", "set", "when", "price", "keys")],
            "book": type(book).__name__, "title": book["title"], "point": type(place.point).__name__,
            "keys": meta["keys"][1],
        }  # fmt: skip


async def test_values_come_back_as_the_same_types_from_another_frontier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = await crawl(Passing, {"/": "", "/1": ""}, config={"frontier": f"sqlite:///{tmp_path / 'run.db'}"})
    assert done.items == [
        {"kept": True},
        {
            "types": ["tuple", "set", "date", "Decimal", "dict"],
            "book": "Book",
            "title": "T",
            "point": "tuple",
            "keys": "x",
        },
    ]
    refused = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    assert len(refused) == 2
    assert "meta['opaque'] is a Opaque, which this frontier cannot store (callback part; " in refused[0]
    assert "test_live_objects.py, line 7" in refused[0], "the line of the yield"
    assert "callback is a function" in refused[1]


def test_live_objects_are_freed_after_their_requests() -> None:
    live = LiveObjects()
    for number in range(1500):
        live.handled(live.add(LiveParts(None, None, {"n": number}, None), b"%d" % number))
    assert len(live) == 1000
    first = live.add(LiveParts(None, None, {}, None), b"x")
    assert live.add(LiveParts(None, None, {}, None), b"x") == first, "a duplicate has no entry of its own"
    assert live.add(LiveParts(None, None, {}, None), None) != first


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**80, -1.5, "text", b"bytes", [1, [2]], {"a": {"b": 1}}, (1, (2, 3)), {1, 2}, frozenset({"a"}),
        {1: "a", (2, 3): "b"}, {"$scrapy": "tuple", "v": []}, datetime(2020, 1, 2, 3, 4, tzinfo=UTC), date(2020, 1, 2),
        timedelta(days=1, microseconds=5), Decimal("0.10"), Book(title="T", price=(1, 2)), Place("p", (1, 2)),
        [Book(title="T")],
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    import msgspec

    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(encode(value, "meta")))
    found = decode(stored)
    assert found == value
    assert type(found) is type(value)


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(NotStorableError, match=r"meta\['a'\]\[1\]\['b'\] is a Opaque"):
        encode({"a": [0, {"b": Opaque()}]}, "meta")


def test_a_stored_class_must_be_an_item_that_is_loaded() -> None:
    for where in ("os:system", "missing.module:Book", "tests.scrapy.test_live_objects:Opaque"):
        with pytest.raises(ValueError, match="the spider has no item class"):
            decode({"$scrapy": "item", "class": where, "v": {}})


@dataclass(frozen=True)
class Odd:
    """What dataclasses can have: a constant, a value for the constructor alone, and a field that it does not take."""

    kinds: ClassVar[tuple[str, ...]] = ("a",)
    name: str
    given: InitVar[int] = 0
    total: int = field(init=False, default=0)

    def __post_init__(self, given: int) -> None:
        object.__setattr__(self, "total", given + 1)


@attrs.define
class Private:
    _secret: str
    seen: int = attrs.field(init=False, default=0)


def test_items_come_back_whatever_their_constructor_takes() -> None:
    odd = decode(encode({"item": Odd("x", 4)}, "meta"))["item"]
    assert (odd, odd.total) == (Odd("x", 4), 5)
    private = Private("s")
    private.seen = 3
    assert decode(encode(private, "meta")) == private
