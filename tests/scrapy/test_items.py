"""Items, loaders, forms, sitemaps and feeds: what the comparison with Scrapy does not show."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shoal.errors import TooComplexError
from shoal.item import decode_item, encode_item
from shoal.scrapy.adapter import start_of
from shoal.scrapy.http import FormRequest, HtmlResponse, Request, Response, TextResponse, XmlResponse
from shoal.scrapy.item import Field, Item, serialized
from shoal.scrapy.selector import Selector
from shoal.scrapy.spiders import InitSpider, SitemapSpider, csv_rows, nodes_named
from tests.scrapy.crawling import SITE, crawl


class Product(Item):
    name = Field()
    price = Field(serializer=str)


def page(text: str) -> HtmlResponse:
    return HtmlResponse("http://example.com/dir/page?x=1", body=text.encode(), encoding="utf-8")


# -- items


def test_items_are_stored_with_their_type() -> None:
    assert decode_item(encode_item(Product(name="x", price=1))) == ("Product", {"name": "x", "price": 1})
    nested = Product(name=[Product(name="inner")], price={"a": Product(price=2)})
    assert decode_item(encode_item(nested))[1] == {"name": [{"name": "inner"}], "price": {"a": {"price": 2}}}


def test_items_can_be_copied_and_pickled() -> None:
    item = Product(name=["x"])
    assert copy.copy(item) is not item
    assert copy.copy(item)["name"] is item["name"]
    assert copy.deepcopy(item)["name"] is not item["name"]
    restored = pickle.loads(pickle.dumps(item))
    assert (type(restored), restored) == (Product, item)


def test_fields_of_several_bases_and_made_at_run_time() -> None:
    class Stock(Item):
        amount = Field()

    class Both(Stock, Product):
        name = Field(own=True)

    made = type("Made", (Item,), {"a": Field(), "b": Field()})
    declared = type("Declared", (Item,), {"fields": {"c": Field()}})
    assert list(Both.fields) == ["name", "price", "amount"]
    assert Both.fields["name"] == {"own": True}
    assert list(made.fields) == ["a", "b"]  # type: ignore[attr-defined]
    assert dict(declared(c=1)) == {"c": 1}  # type: ignore[call-arg]
    assert list(Product.fields) == ["name", "price"]


def test_an_item_that_accepts_any_field() -> None:
    class Flexible(Item):
        def __setitem__(self, name: str, value: Any) -> None:
            if name not in self.fields:
                self.fields[name] = Field()
            super().__setitem__(name, value)

    item = Flexible()
    item["anything"] = 1
    assert dict(item) == {"anything": 1}
    assert "anything" not in Item.fields


def test_an_unknown_field_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"Product does not support field: nmae \(its fields: name, price\)"):
        Product(nmae=1)
    with pytest.raises(AttributeError, match=r"read item\['name'\]"):
        _ = Product().name
    with pytest.raises(AttributeError, match=r"write item\['name'\]"):
        Product().name = 1  # type: ignore[assignment]


def test_serializers_change_only_what_is_stored() -> None:
    item = Product(name=1, price=2)
    assert dict(serialized(item)) == {"name": 1, "price": "2"}
    assert item["price"] == 2
    assert serialized(Product(name=1)) == {"name": 1}
    assert serialized(same := {"price": 2}) is same


def test_item_adapters_know_items_whatever_is_imported_first() -> None:
    program = """
from shoal.scrapy import Field, Item
class Product(Item):
    name = Field(unit="x")
from itemadapter import ItemAdapter
from shoal.scrapy.item import support_item_adapter
assert not ItemAdapter.is_item(Product())
support_item_adapter()
support_item_adapter()
adapter = ItemAdapter(Product(name=1))
assert dict(adapter) == {"name": 1} and adapter.get_field_meta("name") == {"unit": "x"}
assert sum(each.__name__ == "ItemAdapterOfItems" for each in ItemAdapter.ADAPTER_CLASSES) == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- forms


def test_a_form_between_the_parts_of_a_table() -> None:
    text = (
        "<table><form action=/one method=post><tr><td><input name=a value=1></td></tr></form>"
        "<form action=/two><tr><td><input name=b value=2><button name=go value=x></td></tr></form></table>"
    )
    first = FormRequest.from_response(page(text), formdata={"more": 3})
    second = FormRequest.from_response(page(text), formnumber=1)
    assert (first.url, first.method, first.body) == ("http://example.com/one", "POST", b"a=1&more=3")
    assert second.url == "http://example.com/two?b=2&go=x"


def test_a_form_without_an_action_is_sent_to_its_page() -> None:
    request = FormRequest.from_response(page("<form method=post><input name=a></form>"))
    assert (request.url, request.body) == ("http://example.com/dir/page?x=1", b"a=")


def test_numbers_are_text_and_none_is_an_error() -> None:
    assert FormRequest("http://x.test/", formdata={"page": 2}).body == b"page=2"
    with pytest.raises(TypeError, match="a value of formdata is None"):
        FormRequest("http://x.test/", formdata={"page": None})


# -- sitemaps


class Maps(SitemapSpider):
    name = "maps"
    sitemap_urls = ["http://example.com/robots.txt"]

    def parse(self, response: Any, **options: Any) -> Any:
        return None


def urls(spider: SitemapSpider, response: Response) -> list[str]:
    return [request.url for request in spider._parse_sitemap(response)]


def xml(text: str, url: str = "http://example.com/map.xml") -> XmlResponse:
    return XmlResponse(url, body=text.encode(), request=Request(url))


def test_a_damaged_sitemap_yields_what_comes_before(caplog: pytest.LogCaptureFixture) -> None:
    found = urls(Maps(), xml("<urlset><url><loc>http://example.com/1</loc></url><url><loc>http://exam"))
    assert found[0] == "http://example.com/1"
    assert urls(Maps(), xml("<rss><item><link>http://example.com/1</link></item></rss>")) == []
    assert "its format is rss" in caplog.text
    assert urls(Maps(), TextResponse("http://example.com/x.txt", body=b"text", request=Request("http://x.test"))) == []
    assert "it is not a sitemap" in caplog.text


def test_sitemaps_in_robots_may_be_relative() -> None:
    robots = TextResponse("http://example.com/robots.txt", body=b"Sitemap: /a.xml\nsitemap:http://other.test/b.xml")
    assert urls(Maps(), robots) == ["http://example.com/a.xml", "http://other.test/b.xml"]


def teststart_of_a_subclass_wins() -> None:
    class Own(Maps):
        async def start(self) -> AsyncIterator[Any]:
            yield Request("http://example.com/own")

    class Older(Maps):
        def start_requests(self) -> Any:
            yield from super().start_requests()
            yield Request("http://example.com/older")

    async def collect(outputs: Any) -> list[str]:
        return [request.url async for request in outputs]

    import asyncio

    assert asyncio.run(collect(start_of(Own()))) == ["http://example.com/own"]
    assert [request.url for request in start_of(Older())] == [
        "http://example.com/robots.txt", "http://example.com/older",
    ]  # fmt: skip


# -- feeds


def test_nodes_in_a_default_namespace() -> None:
    document = Selector(text='<feed xmlns="urn:a" xmlns:m="urn:m"><entry><m:x>1</m:x></entry></feed>', type="xml")
    (node,) = nodes_named(document, "entry")
    node.register_namespace("own", "urn:m")
    assert node.xpath("own:x/text()").get() == "1"


def test_rows_that_do_not_fit_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(csv_rows("a,b\n1,2\n3\n")) == [{"a": "1", "b": "2"}]
    assert "ignored row 3: it has 1 columns instead of 2" in caplog.text
    assert list(csv_rows(b"")) == []


# -- a request before the others


async def test_a_login_before_the_start_urls() -> None:
    class Own(InitSpider):
        name = "own"
        start_urls = [f"{SITE}/a", f"{SITE}/b"]

        def init_request(self) -> Any:
            return Request(f"{SITE}/login", callback=self.login)

        def login(self, response: Any) -> Any:
            return self.initialized() if response.text == "welcome" else None

        def parse(self, response: Any, **options: Any) -> Any:
            yield {"url": response.url}

    class AtOnce(Own):
        def init_request(self) -> Any:
            return self.initialized()

    pages = {"/login": "welcome", "/a": "a", "/b": "b"}
    assert sorted((await crawl(Own, pages)).web.paths) == ["/a", "/b", "/login"]
    assert (await crawl(Own, pages | {"/login": "no"})).web.paths == ["/login"]
    assert sorted((await crawl(AtOnce, pages)).web.paths) == ["/a", "/b"]


@pytest.mark.parametrize(
    "text",
    [
        "<entry>" * 200 + "x" * 2_000_000 + "</entry>" * 200,
        "<a " + " ".join(f"xmlns:n{number}='u'" for number in range(2000)) + "><entry/></a>",
    ],
)
def test_nodes_of_a_feed_that_would_be_huge_are_refused(text: str) -> None:
    with pytest.raises(TooComplexError):
        list(nodes_named(Selector(text=text, type="xml"), "entry"))
