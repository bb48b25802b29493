"""Requests: their arguments in Scrapy's order, options, headers with bytes, meta and cb_kwargs."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy.http import Headers, JsonRequest, Request
from tests.scrapy.crawling import SITE, crawl


async def test_a_request_with_a_callback() -> None:
    class Books(scrapy.Spider):
        name = "books"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any) -> Any:
            yield scrapy.Request(response.urljoin("/book"), callback=self.parse_book)

        def parse_book(self, response: Any) -> Any:
            yield {"url": response.url}

    done = await crawl(Books, {"/": "home", "/book": "a book"})
    assert done.items == [{"url": f"{SITE}/book"}]
    assert done.web.paths == ["/", "/book"]


def test_the_positional_order_is_url_callback_method() -> None:
    def callback(response: Any) -> None:
        pass

    request = Request(SITE, callback, "POST", {"A": "b"}, "body", {"c": "d"}, {"m": 1}, "latin-1", 5, True)
    assert (request.url, request.callback, request.method, request.body) == (SITE, callback, "POST", b"body")
    assert (request.headers["a"], request.cookies, request.meta) == (b"b", {"c": "d"}, {"m": 1})
    assert (request.encoding, request.priority, request.dont_filter) == ("latin-1", 5, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "/page"}, "Missing scheme"),
        ({"url": 3}, "must be str"),
        ({"url": SITE, "callback": 3}, "callback must be a callable"),
        ({"url": SITE, "priority": "high"}, "priority not an integer"),
    ],
)
def test_a_wrong_argument_is_an_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Request(**arguments)


def test_a_url_is_quoted() -> None:
    assert Request(f"{SITE}/a b?q=ü").url == f"{SITE}/a%20b?q=%C3%BC"


def test_replace_and_copy_keep_everything_else() -> None:
    first = Request(SITE, method="PUT", headers={"A": "b"}, meta={"m": [1]}, cb_kwargs={"k": 1}, flags=["f"])
    second = first.replace(url=f"{SITE}/other", dont_filter=True)
    assert (second.url, second.method, second.headers, second.meta) == (
        f"{SITE}/other",
        "PUT",
        first.headers,
        first.meta,
    )
    assert (second.cb_kwargs, second.flags, second.dont_filter, first.dont_filter) == ({"k": 1}, ["f"], True, False)
    assert first.copy().meta["m"] is first.meta["m"], "a shallow copy, as in Scrapy"


def test_a_json_request_has_a_body_and_is_a_post() -> None:
    request = JsonRequest(SITE, data={"b": 1, "a": [2]})
    assert (request.method, request.body) == ("POST", b'{"a": [2], "b": 1}')
    assert request.headers["Content-Type"] == b"application/json"
    assert JsonRequest(SITE, data={}, method="PUT").method == "PUT"
    assert request.replace(data=[1]).body == b"[1]"


def test_a_request_from_a_curl_command() -> None:
    command = f"curl '{SITE}/x' -H 'X-A: 1' -H 'Cookie: s=2' --data-raw 'q=3' --compressed"
    request = Request.from_curl(command)
    assert (request.url, request.method, request.body) == (f"{SITE}/x", "POST", b"q=3")
    assert (request.headers["x-a"], request.cookies) == (b"1", {"s": "2"})


def test_header_values_are_bytes() -> None:
    headers = Headers({"content-type": "text/html", "Set-Cookie": ["a=1", "b=2"]})
    assert headers["Content-Type"] == headers.get("CONTENT-TYPE") == b"text/html"
    assert (headers.getlist("set-cookie"), headers["set-cookie"]) == ([b"a=1", b"b=2"], b"b=2")
    assert (b"Set-Cookie" in headers, "missing" in headers, headers.get("missing")) == (True, False, None)
    headers.appendlist("X", 1)
    assert headers.to_unicode_dict() == {"Content-Type": "text/html", "Set-Cookie": "a=1,b=2", "X": "1"}
    headers.setdefault("x", "2")
    assert headers["x"] == b"1"


async def test_all_options_of_a_request_arrive() -> None:
    class Options(scrapy.Spider):
        name = "options"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any) -> Any:
            yield Request(
                f"{SITE}/form", self.done, "POST", {"X-One": "1"}, b"a=b", {"c": 1}, {"n": 2}, cb_kwargs={"k": "v"},
                priority=3, flags=["own"],
            )  # fmt: skip

        def done(self, response: Any, k: str) -> Any:
            request = response.request
            yield {
                "k": k, "n": response.meta["n"], "flags": request.flags, "priority": request.priority,
                "method": request.method, "body": request.body.decode(), "header": request.headers["x-one"].decode(),
            }  # fmt: skip

    done = await crawl(Options, {"/": "", "/form": ""})
    assert done.items == [
        {"k": "v", "n": 2, "flags": ["own"], "priority": 3, "method": "POST", "body": "a=b", "header": "1"}
    ]
    sent = done.web.requests[1]
    assert (sent.method, sent.body, sent.headers["X-One"], sent.headers["Cookie"]) == ("POST", b"a=b", "1", "c=1")


async def test_dont_filter_fetches_a_page_again() -> None:
    class Again(scrapy.Spider):
        name = "again"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any) -> Any:
            for dont_filter in (False, False, True):
                yield Request(f"{SITE}/page", self.page, dont_filter=dont_filter)

        def page(self, response: Any) -> Any:
            yield {"url": response.url}

    done = await crawl(Again, {"/": "", "/page": ""})
    assert done.web.paths.count("/page") == len(done.items) == 2


async def test_meta_is_passed_on_with_the_response() -> None:
    class Chain(scrapy.Spider):
        name = "chain"
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any) -> Any:
            yield Request(f"{SITE}/1", self.one, meta={"title": "T", "tags": ["a"]})

        def one(self, response: Any) -> Any:
            yield Request(f"{SITE}/2", self.two, meta=response.meta)

        def two(self, response: Any) -> Any:
            yield {"title": response.meta["title"], "tags": response.meta["tags"], "depth": response.meta["depth"]}

    done = await crawl(Chain, {"/": "", "/1": "", "/2": ""})
    assert done.items == [{"title": "T", "tags": ["a"], "depth": 2}]
