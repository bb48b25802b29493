"""Responses: selectors, text, JSON, headers, links, and the classes for kinds of content."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy.exceptions import NotSupported
from shoal.scrapy.http import HtmlResponse, Request, Response, TextResponse, XmlResponse
from shoal.scrapy.response import response_class
from shoal.scrapy.selector import Selector, SelectorList
from tests.scrapy.crawling import SITE, Answer, crawl

PAGE = """<html><head><title>Shop</title><base href="/en/"></head><body>
<h1 class="t">A &amp; B</h1><p id="p">Price: <b>12</b> EUR</p>
<a href="one">One</a> <a class="next" href="/two?x=1">Two</a> <a>none</a> <link href="/style.css"></body></html>"""


def page(**options: Any) -> HtmlResponse:
    return HtmlResponse(f"{SITE}/dir/page", body=PAGE, encoding="utf-8", **options)


def test_selectors_have_get_and_extract() -> None:
    response = page()
    assert response.css("h1::text").get() == response.xpath("//h1/text()").extract_first() == "A & B"
    assert response.xpath("//a/@href").extract() == response.css("a::attr(href)").getall() == ["one", "/two?x=1"]
    assert response.css("i::text").get(default="-") == response.xpath("//i").extract_first(default="-") == "-"
    assert response.css("#p").re_first(r"\d+") == response.xpath("//p").re(r"\d+")[0] == "12"
    assert response.css("a.next").attrib["href"] == "/two?x=1"
    assert response.css('a:contains("Two")::text').get() == "Two"
    assert [each.xpath("./text()").get() for each in response.css("a")] == ["One", "Two", "none"]


def test_a_selector_of_a_text_or_a_response() -> None:
    assert Selector(text="<i>x</i>").css("i::text").get() == "x"
    assert (
        Selector(response=page()).css("title::text").get() == Selector(page()).xpath("//title/text()").get() == "Shop"
    )
    assert isinstance(page().css("a")[0], Selector)
    assert isinstance(page().css("a"), SelectorList)


def test_the_basics() -> None:
    request = Request(f"{SITE}/dir/page", meta={"m": 1}, cb_kwargs={"k": 2})
    response = page(status=201, headers={"X-A": "1"}, request=request, flags=["f"])
    assert (response.url, response.status, response.headers["x-a"]) == (f"{SITE}/dir/page", 201, b"1")
    assert (response.meta, response.cb_kwargs, response.flags) == ({"m": 1}, {"k": 2}, ["f"])
    assert response.text == PAGE
    assert response.body == PAGE.encode()
    assert (response.encoding, response.selector.css("h1::text").get()) == ("utf-8", "A & B")
    assert response.urljoin("x") == f"{SITE}/en/x", "a page's base counts"
    with pytest.raises(AttributeError, match="not tied to any request"):
        _ = page().meta


def test_replace_makes_another_response() -> None:
    response = page(request=Request(SITE)).replace(body=b"<h1>new</h1>", status=404)
    assert (response.css("h1::text").get(), response.status, response.url) == ("new", 404, f"{SITE}/dir/page")
    assert isinstance(response.request, Request)


def test_json_and_text() -> None:
    response = TextResponse(SITE, body='{"a": ["ü"]}', encoding="utf-8")
    assert response.json() == {"a": ["ü"]}
    assert response.json() is response.json(), "the result is cached"
    assert response.jmespath("a[0]").get() == "ü"
    latin = TextResponse(SITE, body="ü".encode("latin-1"), headers={"Content-Type": "text/plain; charset=latin-1"})
    assert latin.text == "ü"
    with pytest.raises(TypeError, match="no encoding"):
        TextResponse(SITE, body="text")


def test_a_binary_response_has_no_text() -> None:
    response = Response(SITE, body=b"\x00\x01")
    with pytest.raises(AttributeError, match="isn't text"):
        _ = response.text
    with pytest.raises(NotSupported):
        response.css("a")


@pytest.mark.parametrize(
    ("content_type", "url", "body", "expected"),
    [
        ("text/html; charset=x", "", b"", HtmlResponse),
        ("application/rss+xml", "", b"", XmlResponse),
        ("text/plain", "", b"", TextResponse),
        ("image/png", "", b"", Response),
        ("", f"{SITE}/a.xml", b"", XmlResponse),
        ("", f"{SITE}/a", b"<!DOCTYPE html><p>", HtmlResponse),
        ("", f"{SITE}/a", b"\x00\x01", Response),
        ("application/octet-stream", f"{SITE}/a", b"plain", TextResponse),
    ],
)
def test_the_class_of_a_response(content_type: str, url: str, body: bytes, expected: type[Response]) -> None:
    assert response_class(content_type, url, body) is expected


def test_follow_takes_urls_elements_and_attributes() -> None:
    response = page()
    first = response.css("a")[0]
    assert response.follow("x").url == f"{SITE}/en/x"
    assert response.follow(first).url == response.follow(response.css("a::attr(href)")[0]).url == f"{SITE}/en/one"
    assert response.follow(first, page, method="POST", meta={"m": 1}).meta == {"m": 1}
    with pytest.raises(ValueError, match="no href"):
        response.follow(response.css("h1")[0])
    with pytest.raises(ValueError, match="SelectorList"):
        response.follow(response.css("a"))
    with pytest.raises(ValueError, match="None"):
        response.follow(None)


def test_follow_all_takes_a_query_or_links() -> None:
    response = page()
    expected = [f"{SITE}/en/one", f"{SITE}/two?x=1"]
    assert [each.url for each in response.follow_all(css="a")] == expected
    assert [each.url for each in response.follow_all(xpath="//a/@href")] == expected
    assert [each.url for each in response.follow_all(response.css("a"))] == expected
    assert [each.url for each in response.follow_all(["one", "/two?x=1"])] == expected
    with pytest.raises(ValueError, match="exactly one"):
        response.follow_all()


async def test_pages_of_the_web_have_all_of_it() -> None:
    class Kinds(scrapy.Spider):
        name = "kinds"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any) -> Any:
            yield {
                "kind": type(response).__name__, "title": response.css("title::text").get(), "status": response.status,
                "header": response.headers.get("X-Own").decode(), "cookies": response.headers.getlist("Set-Cookie"),
                "latency": response.meta["download_latency"], "slot": response.meta["download_slot"],
            }  # fmt: skip
            yield from response.follow_all(css="a, link", callback=self.other)

        def other(self, response: Any) -> Any:
            yield {"kind": type(response).__name__, "path": response.url.removeprefix(SITE)}

    pages = {
        "/": Answer(PAGE, headers=[("X-Own", "1"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]),
        "/en/one": Answer('{"a": 1}', kind="application/json"),
        "/two?x=1": Answer("<a/>", kind="application/xml"),
        "/style.css": Answer(b"\x00", kind="image/png"),
    }
    done = await crawl(Kinds, pages)
    assert done.items[0] == {
        "kind": "HtmlResponse", "title": "Shop", "status": 200, "header": "1", "cookies": [b"a=1", b"b=2"],
        "latency": 0.25, "slot": "site.test",
    }  # fmt: skip
    assert sorted((each["path"], each["kind"]) for each in done.items[1:]) == [
        ("/en/one", "JsonResponse"), ("/style.css", "Response"), ("/two?x=1", "XmlResponse"),
    ]  # fmt: skip
