"""The keys of ``meta`` that have a meaning, and statuses that a spider handles."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import http, scrapy
from shoal.scrapy.conversion import Conversion
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, Answer, Page, crawl, refused

MOVED = Answer("moved", 302, [("Location", "/target")])


class Keyed(scrapy.Spider):
    name = "keyed"
    meta: dict[str, Any] = {}
    path = "/page"

    def start_requests(self) -> Any:
        yield Request(SITE + self.path, self.parse, errback=self.failed, meta=self.meta)

    def parse(self, response: Any, **named: Any) -> Any:
        yield {"status": response.status, "url": response.url.removeprefix(SITE), "text": response.text}

    def failed(self, failure: Any) -> Any:
        yield {"error": type(failure.value).__name__}


def keyed(**meta: Any) -> type[Keyed]:
    return type("Keyed", (Keyed,), {"meta": meta})


async def test_a_redirect_is_followed_and_its_trail_is_known() -> None:
    class Trail(Keyed):
        def parse(self, response: Any, **named: Any) -> Any:
            yield {"urls": response.meta["redirect_urls"], "times": response.meta["redirect_times"], "at": response.url}

    done = await crawl(Trail, {"/page": MOVED, "/target": "here"})
    assert done.items == [{"urls": [f"{SITE}/page"], "times": 1, "at": f"{SITE}/target"}]


async def test_dont_redirect() -> None:
    assert (await crawl(keyed(dont_redirect=True), {"/page": MOVED})).items == [{"error": "HttpError"}]
    handled = keyed(dont_redirect=True, handle_httpstatus_list=[302])
    assert (await crawl(handled, {"/page": MOVED})).items == [{"status": 302, "url": "/page", "text": "moved"}]


@pytest.mark.parametrize(
    ("meta", "status", "expected"),
    [
        ({"handle_httpstatus_list": [404]}, 404, "status"),
        ({"handle_httpstatus_list": [404]}, 403, "error"),
        ({"handle_httpstatus_all": True}, 403, "status"),
        ({"handle_httpstatus_all": True}, 302, "status"),
        ({"handle_httpstatus_list": [302]}, 302, "status"),
        ({"handle_httpstatus_list": []}, 404, "error"),
    ],
)
async def test_statuses_that_a_request_handles(meta: dict[str, Any], status: int, expected: str) -> None:
    page = MOVED if status == 302 else Answer("", status)
    done = await crawl(keyed(**meta), {"/page": page, "/target": ""})
    assert next(iter(done.items[0])) == expected


async def test_statuses_that_the_spider_or_the_settings_handle() -> None:
    own = type("Own", (Keyed,), {"handle_httpstatus_list": [404]})
    assert (await crawl(own, {})).items[0]["status"] == 404
    assert (await crawl(Keyed, {}, settings={"HTTPERROR_ALLOWED_CODES": [404]})).items[0]["status"] == 404
    assert (await crawl(Keyed, {}, settings={"HTTPERROR_ALLOW_ALL": True})).items[0]["status"] == 404


async def test_a_handled_status_is_retried_first_as_in_scrapy() -> None:
    done = await crawl(keyed(handle_httpstatus_list=[503]), {"/page": Answer("busy", 503)})
    assert [each["text"] for each in done.items] == ["busy"]
    assert len(done.web.requests) == 3


@pytest.mark.parametrize(
    ("meta", "settings", "attempts"),
    [
        ({}, {}, 3),
        ({"dont_retry": True}, {}, 1),
        ({"max_retry_times": 1}, {}, 2),
        ({"max_retry_times": 0}, {}, 1),
        ({}, {"RETRY_ENABLED": False}, 1),
        ({}, {"RETRY_TIMES": 4}, 5),
        ({}, {"RETRY_HTTP_CODES": [500]}, 1),
    ],
)
async def test_retries(meta: dict[str, Any], settings: dict[str, Any], attempts: int) -> None:
    done = await crawl(keyed(**meta), {"/page": Answer("", 503)}, settings=settings)
    assert len(done.web.requests) == attempts
    assert done.items == [{"error": "HttpError"}]


async def test_dont_retry_counts_for_errors_of_the_network_too() -> None:
    assert len((await crawl(keyed(dont_retry=True), {"/page": refused()})).web.requests) == 1


@pytest.mark.parametrize(
    ("meta", "proxy", "used"),
    [
        ({"proxy": "http://evil.test:1"}, None, None),
        ({"proxy": "evil.test:1"}, "http://proxy.test:1", "http://proxy.test:1"),
        ({"proxy": "proxy.test:1"}, "http://proxy.test:1", "http://proxy.test:1"),
        ({"proxy": ""}, None, None),
    ],
)
def test_a_proxy_in_the_meta_of_a_stored_request_is_that_of_the_request(
    meta: dict[str, Any], proxy: str | None, used: str | None
) -> None:
    """Who can write to the queue could send the pages of a worker through any server otherwise: the worker checks the
    proxy of the request before its middlewares run."""
    conversion = Conversion(Keyed())
    stored = http.Request(SITE + "/page", meta=meta, proxy=proxy)
    assert conversion.changed(stored, conversion.incoming(stored)).proxy == used


async def test_proxy_and_timeout_reach_the_fetcher() -> None:
    done = await crawl(keyed(proxy="http://proxy.test:8080", download_timeout=7), {"/page": ""})
    assert (done.web.requests[0].proxy, done.web.requests[0].timeout) == ("http://proxy.test:8080", 7)


async def test_a_login_in_the_jar_of_a_session() -> None:
    class Sessions(scrapy.Spider):
        name = "sessions"

        def start_requests(self) -> Any:
            for jar in (1, 2):
                yield Request(f"{SITE}/login?{jar}", self.logged_in, meta={"cookiejar": jar})

        def logged_in(self, response: Any) -> Any:
            jar = response.meta["cookiejar"]
            yield Request(f"{SITE}/orders?{jar}", self.orders, meta={"cookiejar": jar})

        def orders(self, response: Any) -> Any:
            yield {"orders": response.text}

    def login(request: Any) -> Answer:
        return Answer("", headers=[("Set-Cookie", f"session={request.url[-1]}")])

    def orders(request: Any) -> str:
        return str(request.headers.get("Cookie"))

    pages: dict[str, Page] = {"/login?1": login, "/login?2": login, "/orders?1": orders, "/orders?2": orders}
    done = await crawl(Sessions, pages)
    assert sorted(each["orders"] for each in done.items) == ["session=1", "session=2"]


async def test_cookies_of_a_request_stay_in_the_jar_unless_it_says_otherwise() -> None:
    class Own(scrapy.Spider):
        name = "own"

        def start_requests(self) -> Any:
            yield Request(f"{SITE}/1", self.first, cookies={"a": "1"})

        def first(self, response: Any) -> Any:
            yield Request(f"{SITE}/2", self.second)

        def second(self, response: Any) -> Any:
            verbose = [{"name": "b", "value": "2", "path": "/deep"}]
            yield Request(f"{SITE}/3", self.third, cookies=verbose, headers={"Cookie": "ignored=1"})

        def third(self, response: Any) -> Any:
            yield Request(f"{SITE}/deep/4", self.last, meta={"dont_merge_cookies": True}, headers={"Cookie": "own=1"})

        def last(self, response: Any) -> Any:
            yield Request(f"{SITE}/deep/5", lambda response: None)

    pages = dict.fromkeys(("/1", "/2", "/3", "/deep/4", "/deep/5"), "")
    done = await crawl(Own, pages)
    sent = [done.web.header(path, "cookie")[0] for path in pages]
    assert sent == ["a=1", "a=1", "a=1", "own=1", "b=2; a=1"]
    off = await crawl(Own, pages, settings={"COOKIES_ENABLED": False})
    assert [off.web.header(path, "cookie")[0] for path in pages] == [None, None, "ignored=1", "own=1", None]


async def test_depth_and_its_limit() -> None:
    class Deep(scrapy.Spider):
        name = "deep"
        start_urls = [f"{SITE}/0"]

        def parse(self, response: Any, **named: Any) -> Any:
            depth = response.meta["depth"]
            yield {"depth": depth}
            yield Request(f"{SITE}/{depth + 1}")

    pages = {f"/{number}": "" for number in range(9)}
    done = await crawl(Deep, pages, settings={"DEPTH_LIMIT": 2})
    assert [each["depth"] for each in done.items] == [0, 1, 2]


async def test_refreshes_to_new_pages_have_an_end() -> None:
    refresh = '<html><head><meta http-equiv="refresh" content="0; url=/page?{}"></head></html>'
    pages = {"/page": refresh.format(0)} | {f"/page?{number}": refresh.format(number + 1) for number in range(100)}
    done = await crawl(keyed(), pages, settings={"REDIRECT_MAX_TIMES": 5}, config={"http.max_redirects": 5})
    assert len(done.web.requests) == 6


async def test_a_meta_refresh_is_a_redirect() -> None:
    refresh = '<html><head><meta http-equiv="refresh" content="0; url=/target"></head></html>'
    pages = {"/page": refresh, "/target": "here"}
    assert [each["text"] for each in (await crawl(Keyed, pages)).items] == ["here"]
    assert (await crawl(Keyed, pages, settings={"METAREFRESH_ENABLED": False})).items[0]["url"] == "/page"
    assert (await crawl(keyed(dont_redirect=True), pages)).items[0]["url"] == "/page"


async def test_redirects_can_be_switched_off() -> None:
    done = await crawl(Keyed, {"/page": MOVED, "/target": ""}, settings={"REDIRECT_ENABLED": False})
    assert done.items == [{"error": "HttpError"}]


async def test_the_referer_is_the_page_of_the_link() -> None:
    class Linked(scrapy.Spider):
        name = "linked"
        start_urls = [f"{SITE}/page"]

        def parse(self, response: Any, **named: Any) -> Any:
            yield response.follow("/a", lambda response: None)
            yield response.follow("/b", self.leaf)
            yield response.follow("/c", self.leaf, headers={"Referer": "own"})

        def leaf(self, response: Any) -> None:
            pass

    pages = dict.fromkeys(("/page", "/a", "/b", "/c"), "")
    done = await crawl(Linked, pages)
    assert [done.web.header(path, "referer")[0] for path in pages] == [None, f"{SITE}/page", f"{SITE}/page", "own"]
    off = await crawl(Linked, pages, settings={"REFERER_ENABLED": False})
    assert [off.web.header(path, "referer")[0] for path in ("/a", "/b")] == [None, None]
