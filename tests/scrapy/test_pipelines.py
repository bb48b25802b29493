"""Item pipelines, items of all kinds, and feeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal import scrapy
from shoal.errors import SpiderError
from shoal.item import decode_item
from shoal.scrapy.exceptions import DropItem, NotConfigured
from shoal.scrapy.item import Field, Item
from shoal.scrapy.loader import ItemLoader
from tests.scrapy.crawling import SITE, crawl

HERE = f"{__name__}."


class Book(Item):
    title = Field()
    price = Field()


@dataclass
class Plain:
    title: str


class Books(scrapy.Spider):
    name = "books"
    start_urls = [f"{SITE}/"]
    items: list[Any] = []

    def parse(self, response: Any, **named: Any) -> Any:
        yield from self.items


def books(*items: Any) -> type[Books]:
    return type("Books", (Books,), {"items": list(items)})


calls: list[str] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


class Upper:
    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    @classmethod
    def from_crawler(cls, crawler: Any) -> Upper:
        calls.append("from_crawler")
        return cls(crawler.settings["SUFFIX"])

    def open_spider(self, spider: Any) -> None:
        calls.append(f"open {spider.name}")

    def process_item(self, item: Any, spider: Any) -> Any:
        item["title"] = item["title"].upper() + self.suffix
        return item

    def close_spider(self, spider: Any) -> None:
        calls.append("close upper")


class Async:
    @classmethod
    def from_settings(cls, settings: Any) -> Async:
        calls.append("from_settings")
        return cls()

    async def open_spider(self) -> None:
        calls.append("open async")

    async def process_item(self, item: Any) -> Any:
        item["async"] = True
        return item

    async def close_spider(self) -> None:
        calls.append("close async")


class Choosy:
    def process_item(self, item: Any, spider: Any) -> Any:
        if item["title"] == "drop":
            raise DropItem("not wanted")
        if item["title"] == "fail":
            raise KeyError("price")
        return None if item["title"] == "nothing" else item


class Unconfigured:
    def __init__(self) -> None:
        raise NotConfigured("no database")


class Broken:
    def __init__(self) -> None:
        raise ValueError("no server")


async def test_pipelines_run_in_their_order_and_are_opened_and_closed() -> None:
    settings = {
        "SUFFIX": "!",
        "ITEM_PIPELINES": {HERE + "Async": 300, HERE + "Upper": 100, HERE + "Unconfigured": 5, HERE + "Broken": None},
    }
    done = await crawl(books({"title": "a"}), {"/": ""}, settings=settings)
    assert done.items == [{"title": "A!", "async": True}]
    assert calls == [
        "from_crawler", "from_settings", "open books", "open async", "close async", "close upper",
    ]  # fmt: skip


async def test_what_drops_an_item() -> None:
    wanted = [{"title": each} for each in ("drop", "keep", "nothing", "fail", "last")]
    done = await crawl(books(*wanted), {"/": ""}, settings={"ITEM_PIPELINES": {Choosy: 1}})
    assert [each["title"] for each in done.items] == ["keep", "last"]
    summary = done.crawl.summary
    assert summary is not None
    assert dict(summary.counters.drop_reasons) == {"not wanted": 1, f"{HERE}Choosy.process_item returned nothing": 1}
    assert summary.counters.item_errors == 1, "an error of a pipeline costs one item"
    assert summary.stats.dead == 0


async def test_a_pipeline_that_cannot_be_created_ends_the_run() -> None:
    with pytest.raises(SpiderError, match=r"ITEM_PIPELINES: cannot create .*Broken: ValueError: no server"):
        await crawl(books(), {}, settings={"ITEM_PIPELINES": {HERE + "Broken": 1}})
    with pytest.raises(SpiderError, match="No module named 'missing'"):
        await crawl(books(), {}, settings={"ITEM_PIPELINES": {"missing.Pipeline": 1}})


async def test_items_of_all_kinds_keep_their_type() -> None:
    item = Book(title="Item")
    item["price"] = 3
    with pytest.raises(KeyError, match="does not support field"):
        item["other"] = 1
    done = await crawl(books(item, Plain("dataclass"), {"title": "dict"}), {"/": ""})
    assert done.items == [item, Plain("dataclass"), {"title": "dict"}]
    assert [type(each) for each in done.items] == [Book, Plain, dict]


async def test_the_type_of_an_item_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    from shoal.sinks import files

    class Names(files.CollectSink):
        async def write(self, items: Any) -> None:
            names.extend(decode_item(each.payload)[0] for each in items)

    monkeypatch.setattr("shoal.runs.crawl.CollectSink", Names)
    await crawl(books(Book(title="x"), Plain("y"), {"title": "z"}), {"/": ""})
    assert names == ["Book", "Plain", "item"]


async def test_an_item_loader_with_processors() -> None:
    from itemloaders.processors import Join, MapCompose, TakeFirst

    class Loader(ItemLoader):
        default_output_processor = TakeFirst()
        price_in = MapCompose(str.strip, float)
        title_out = Join(" ")

    class Loading(Books):
        def parse(self, response: Any, **named: Any) -> Any:
            loader = Loader(item=Book(), response=response)
            loader.add_css("title", "h1::text")
            loader.add_xpath("title", "//h2/text()")
            loader.add_value("price", [" 12.5 ", "3"])
            yield loader.load_item()

    done = await crawl(Loading, {"/": "<h1>A</h1><h2>B</h2>"})
    assert done.items == [{"title": "A B", "price": 12.5}]


async def test_feeds_are_outputs(tmp_path: Path) -> None:
    feeds = {
        str(tmp_path / "out" / "%(name)s.jsonl"): {"format": "jsonlines"},
        f"file://{tmp_path}/items.csv": {"format": "csv", "overwrite": True},
        tmp_path / "array.json": {"format": "json"},
    }
    settings = {"FEEDS": feeds, "FEED_EXPORT_FIELDS": ["price", "title"]}
    done = await crawl(books({"title": "a", "price": 1, "other": 2}, {"title": "=b"}), {"/": ""}, settings=settings)
    assert (tmp_path / "out" / "books.jsonl").read_text() == '{"price":1,"title":"a"}\n{"title":"=b"}\n'
    assert (tmp_path / "items.csv").read_text() == "price,title\n1,a\n,=b\n"  # as Scrapy
    assert (tmp_path / "array.jsonl").exists()
    assert any("array.json is written as JSON Lines" in note for note in done.adapter.translated.warnings)


async def test_fields_may_be_renamed_for_the_output() -> None:
    settings = {"FEED_EXPORT_FIELDS": {"title": "Titel"}}
    assert (await crawl(books({"title": "a", "n": 1}), {"/": ""}, settings=settings)).items == [{"Titel": "a"}]
