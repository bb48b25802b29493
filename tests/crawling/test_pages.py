"""The spider of `shoal crawl`, which needs no code."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.config import ScopeSettings
from shoal.errors import RequestError, SpiderError, TooComplexError
from shoal.http import LinkBatch, Response
from shoal.runs.command_spiders import PageSpider, page_spider, parse_fields
from shoal.urls.normalize import Scope

URL = "http://ex.com/"
PAGE = """<html><head><title> A shop </title></head><body><nav><a href=/x>X</a></nav>
<article><h1>Tea <em>and</em> cups</h1><p class=price> 3 </p><p class=price>4</p><a href=/y#f>Y</a><p class=none> </p>
<p>A long text about tea and cups, which is what this page is about, and nothing else at all.</p></article></body>"""


def parsed(html: str | bytes, content_type: str = "text/html", **options: Any) -> list[Any]:
    body = html.encode() if isinstance(html, str) else html
    spider = page_spider(URL, **{"same_site": True, "fields": {}, "markdown": False, **options})
    return list(spider.parse(Response(URL, headers={"Content-Type": content_type}, body=body)))


def test_a_page_is_an_item_and_its_links_are_followed() -> None:
    item, links = parsed(PAGE)
    assert (item["url"], item["title"]) == (URL, "A shop")
    assert "A long text about tea" in item["text"]
    assert "<p" not in item["text"]
    assert isinstance(links, LinkBatch)
    assert [request.url for request in links] == ["http://ex.com/x", "http://ex.com/y"]


def test_markdown() -> None:
    item, _ = parsed(PAGE, markdown=True)
    assert "# Tea *and* cups" in item["text"]
    assert item["title"] == "A shop"


def test_fields() -> None:
    fields = {
        "name": "h1", "prices": "p.price", "first": "p.price::text", "link": "article a::attr(href)", "both": "h1, nav",
        "empty": "p.none", "missing": "b",
    }  # fmt: skip
    item, _ = parsed(PAGE, fields=fields)
    assert item == {
        "url": URL, "name": "Tea and cups", "prices": ["3", "4"], "first": ["3", "4"], "link": "/y#f",
        "both": ["X", "Tea and cups"], "empty": None, "missing": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content_type", "is_page"),
    [
        ("text/html; charset=utf-8", True),
        ("TEXT/HTML", True),
        ("application/xhtml+xml", True),
        ("text/plain", True),
        ("image/png", False),
        ("application/pdf", False),
        ("application/json", False),
        ("", False),
    ],
)
def test_only_pages_are_items(content_type: str, is_page: bool) -> None:
    assert bool(parsed(PAGE, content_type)) is is_page


def test_without_a_content_type_it_is_a_page() -> None:
    assert len(list(PageSpider().parse(Response(URL, body=b"<p>x")))) == 2


@pytest.mark.parametrize("body", [b"", b"\0" * 1000, b"\xff\xfe", b"<", b"<title>", bytes(range(256))])
def test_any_body(body: bytes) -> None:
    item, _ = parsed(body)
    assert item["url"] == URL
    assert isinstance(item["text"], str)


@pytest.mark.parametrize("html", [b"<div>" * 200_000, b"<p>x" * 100_000, b"<table><tr><td>x" * 20_000, b"x " * 10**6])
def test_monstrous_pages(html: bytes) -> None:
    started = time.process_time()
    parsed(html)
    parsed(html, markdown=True)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("url", "start", "name"),
    [
        ("ex.com", "http://ex.com/", "ex.com"),
        ("  ex.com/a ", "http://ex.com/a", "ex.com/a"),
        ("localhost:8000/x", "http://localhost:8000/x", "localhost:8000/x"),
        ("HTTPS://WWW.EX.com/", "https://www.ex.com/", "www.ex.com"),
        ("ex.com/?u=http://other/", "http://ex.com/?u=http://other/", "ex.com/?u=http://other"),
        ("[::1]:81", "http://[::1]:81/", "[::1]:81"),
        ("bücher.de", "http://xn--bcher-kva.de/", "xn--bcher-kva.de"),
    ],
)
def test_where_to_start(url: str, start: str, name: str) -> None:
    spider = page_spider(url, same_site=True, fields={}, markdown=False)
    assert spider.start_urls == [start]
    assert spider.spider_name() == name
    assert Scope(ScopeSettings(), spider.allowed_domains).refuses(start) is None


@pytest.mark.parametrize("url", ["", "ftp://ex.com/", "mailto:a", "http://", "a b"])
def test_nowhere_to_start(url: str) -> None:
    with pytest.raises(RequestError):
        page_spider(url, same_site=True, fields={}, markdown=False)


@pytest.mark.parametrize("port", ["", ":81"])
def test_the_site(port: str) -> None:
    spider = page_spider(f"www.ex.com{port}", same_site=True, fields={}, markdown=False)
    scope = Scope(ScopeSettings(), spider.allowed_domains)
    for host in ("ex.com", "www.ex.com", "shop.ex.com"):
        assert scope.refuses(f"http://{host}{port}/") is None
    assert scope.refuses("http://other.com/")
    assert page_spider("ex.com", same_site=False, fields={}, markdown=False).allowed_domains == ()


def test_parse_fields() -> None:
    assert parse_fields([]) == {}
    assert parse_fields(["a=p.price", " b = a[href='x=y']::attr(href) "]) == {
        "a": "p.price",
        "b": "a[href='x=y']::attr(href)",
    }


@pytest.mark.parametrize("definition", ["", "a", "=p", "a=", " = ", "a= "])
def test_what_is_no_field(definition: str) -> None:
    with pytest.raises(SpiderError, match='write it as "name=css query"'):
        parse_fields(["a=p", definition])


def test_a_query_is_checked_before_the_crawl() -> None:
    with pytest.raises(SpiderError, match=r"--item 'a=p\[': bad CSS query 'p\['"):
        parse_fields(["a=p["])


def test_fields_of_elements_in_elements_have_a_length_together() -> None:
    spider = page_spider("http://x.example/", same_site=True, fields={"a": "div"}, markdown=False)
    body = b"<div>" * 400 + b"w" * 100_000
    with pytest.raises(TooComplexError, match="its fields have more than 1048576 characters"):
        list(spider.parse(Response("http://x.example/", body=body)))
