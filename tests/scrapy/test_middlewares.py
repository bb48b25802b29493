"""Downloader and spider middlewares: all hooks, in Scrapy's order."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import scrapy
from shoal.errors import SpiderError
from shoal.scrapy.downloadermiddlewares import RedirectMiddleware, RetryMiddleware
from shoal.scrapy.exceptions import IgnoreRequest
from shoal.scrapy.http import HtmlResponse, Request, Response
from shoal.scrapy.outputs import BaseSpiderMiddleware
from tests.scrapy.crawling import SITE, Answer, Page, crawl, refused

calls: list[str] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


class Pages(scrapy.Spider):
    name = "pages"
    start_urls = [f"{SITE}/page"]

    def start_requests(self) -> Any:
        for url in self.start_urls:
            yield Request(url, self.parse, errback=self.failed)

    def parse(self, response: Any, **named: Any) -> Any:
        yield {"text": response.text, "meta": response.meta.get("mine"), "url": response.url.removeprefix(SITE)}

    def failed(self, failure: Any) -> Any:
        yield {
            "error": type(failure.value).__name__,
            "text": str(failure.value),
            "meta": failure.request.meta.get("mine"),
        }


class Recorder:
    name = ""

    def process_request(self, request: Request, spider: Any) -> None:
        calls.append(f"{self.name} request")

    def process_response(self, request: Request, response: Response, spider: Any) -> Response:
        calls.append(f"{self.name} response {response.status}")
        return response

    def process_exception(self, request: Request, exception: Exception, spider: Any) -> None:
        calls.append(f"{self.name} exception")


class Outer(Recorder):
    name = "outer"


class Inner(Recorder):
    name = "inner"

    async def process_request(self, request: Request) -> None:  # type: ignore[override]  # async, and without a spider
        calls.append("inner request")


BOTH = {"DOWNLOADER_MIDDLEWARES": {Outer: 100, Inner: 650}}


async def test_the_order_of_the_hooks() -> None:
    await crawl(Pages, {"/page": ""}, settings=BOTH)
    assert calls == ["outer request", "inner request", "inner response 200", "outer response 200"]


async def test_who_sees_an_error_that_is_retried() -> None:
    await crawl(Pages, {"/page": refused()}, settings=BOTH)
    once = ["outer request", "inner request", "inner exception"]
    assert calls == [*once, *once, *once, "outer exception"], "retries come at 550"


async def test_who_sees_a_status_that_is_retried() -> None:
    done = await crawl(Pages, {"/page": Answer("", 503)}, settings={**BOTH, "RETRY_TIMES": 1})
    once = ["outer request", "inner request", "inner response 503"]
    assert calls == [*once, *once, "outer response 503"]
    assert [each["error"] for each in done.items] == ["HttpError"]


async def test_who_sees_a_redirect() -> None:
    moved = Answer("", 301, [("Location", "/target")])
    done = await crawl(Pages, {"/page": moved, "/target": "there"}, settings=BOTH)
    assert calls == [
        "outer request", "inner request", "inner response 301", "outer request", "inner request", "inner response 200",
        "outer response 200",
    ]  # fmt: skip
    assert [each["text"] for each in done.items] == ["there"]


async def test_retries_can_be_switched_off() -> None:
    settings = {
        "DOWNLOADER_MIDDLEWARES": {Outer: 100, "scrapy.downloadermiddlewares.retry.RetryMiddleware": None},
    }
    done = await crawl(Pages, {"/page": refused()}, settings=settings)
    assert calls == ["outer request", "outer exception"]
    assert len(done.web.requests) == 1


class Changing:
    def process_request(self, request: Request, spider: Any) -> None:
        request.headers["X-Mine"] = "1"
        request.headers.setdefault("User-Agent", "not used")
        request.meta["proxy"] = "http://proxy.test:1"
        request.meta["mine"] = "seen"

    def process_response(self, request: Request, response: Response, spider: Any) -> Response:
        assert request.meta["mine"] == "seen"
        return response.replace(body=response.body + b" changed")  # type: ignore[no-any-return]


async def test_changes_of_the_request_and_of_the_response() -> None:
    settings = {"DOWNLOADER_MIDDLEWARES": {Changing: 543}, "USER_AGENT": "agent"}
    done = await crawl(Pages, {"/page": "page"}, settings=settings)
    sent = done.web.requests[0]
    assert (sent.headers["X-Mine"], sent.headers["User-Agent"], sent.proxy) == ("1", "agent", "http://proxy.test:1")
    assert done.items == [{"text": "page changed", "meta": "seen", "url": "/page"}]
    gone = await crawl(Pages, {}, settings={"DOWNLOADER_MIDDLEWARES": {Changing: 543}})
    assert gone.items[0]["meta"] == "seen", "an errback sees the changes too"


class OwnRedirects(RedirectMiddleware):
    """A project counts its redirects."""

    def process_response(self, request: Request, response: Response, spider: Any = None) -> Any:
        result = super().process_response(request, response, spider)
        calls.append(type(result).__name__)
        return result


class Secrets(Pages):
    def start_requests(self) -> Any:
        headers = {"X-Api-Key": "secret", "Authorization": "secret", "Accept-Language": "de"}
        yield Request(f"{SITE}/first", self.parse, headers=headers, cookies={"login": "secret"})


async def test_a_redirect_of_the_project_takes_no_secrets_to_another_host() -> None:
    pages: dict[str, Page] = {
        "/first": Answer("", 302, [("Location", "/second")]),
        "/second": Answer("", 302, [("Location", "http://evil.test/page")]),
        "http://evil.test/page": "page",
    }
    done = await crawl(Secrets, pages, settings={"DOWNLOADER_MIDDLEWARES": {OwnRedirects: 600}})
    first, second, third = done.web.requests
    assert "Request" in calls
    assert "secret" in str(first)
    assert "secret" in str(second)
    assert third.url == "http://evil.test/page"
    assert "secret" not in str((third.headers, third.cookies))
    assert third.headers["Accept-Language"] == "de"


async def test_redirects_of_the_project_have_an_end() -> None:
    pages: dict[str, Page] = {f"/page?{n}": Answer("", 302, [("Location", f"/page?{n + 1}")]) for n in range(100)}
    pages["/page"] = Answer("", 302, [("Location", "/page?0")])
    done = await crawl(Pages, pages, settings={"DOWNLOADER_MIDDLEWARES": {OwnRedirects: 600}, "REDIRECT_MAX_TIMES": 5})
    assert len(done.web.requests) == 6


class Short:
    """Answers, replaces or refuses requests."""

    def process_request(self, request: Request, spider: Any) -> Any:
        if request.url.endswith("/cached"):
            return HtmlResponse(request.url, body=b"from a cache", request=request)
        if request.url.endswith("/other"):
            return request.replace(url=f"{SITE}/page")
        if request.url.endswith("/ignored"):
            raise IgnoreRequest("not this one")
        return None


async def test_what_process_request_may_return() -> None:
    spider = type("Own", (Pages,), {"start_urls": [f"{SITE}/{name}" for name in ("cached", "other", "ignored")]})
    done = await crawl(spider, {"/page": "page"}, settings={"DOWNLOADER_MIDDLEWARES": {Short: 543, Outer: 600}})
    assert done.web.paths == ["/page"]
    assert sorted(each["text"] for each in done.items) == ["from a cache", "not this one", "page"]
    assert "outer response 200" in calls, "a response of a middleware passes through all of them"


class Again:
    """Fetches a page that is not good enough once more, with another proxy."""

    def process_response(self, request: Request, response: Response, spider: Any) -> Any:
        if response.status == 403 and not request.meta.get("again"):
            request.meta["again"] = True
            request.dont_filter = True
            return request
        return response

    def process_exception(self, request: Request, exception: Exception, spider: Any) -> Any:
        calls.append(type(exception).__name__)
        return request.replace(url=f"{SITE}/page", dont_filter=True)


async def test_a_request_from_process_response_or_process_exception() -> None:
    answers = iter([Answer("", 403), Answer("good")])
    own = type("Own", (Pages,), {"start_urls": [f"{SITE}/first", f"{SITE}/down"]})
    pages: dict[str, Page] = {"/first": lambda request: next(answers), "/down": refused(), "/page": "page"}
    done = await crawl(own, pages, settings={"DOWNLOADER_MIDDLEWARES": {Again: 600}})
    assert sorted(each["text"] for each in done.items) == ["good", "page"]
    assert sorted(done.web.paths) == ["/down", "/first", "/first", "/page"]
    assert calls == ["DownloadConnectionRefusedError"]


class Patient(RetryMiddleware):
    def process_response(self, request: Request, response: Response, spider: Any = None) -> Any:
        if b"captcha" in response.body:
            return self._retry(request, "captcha", spider) or response
        return super().process_response(request, response, spider)


async def test_a_retry_middleware_of_the_project() -> None:
    answers = iter(["captcha", "captcha", "page"])
    settings = {
        "DOWNLOADER_MIDDLEWARES": {"scrapy.downloadermiddlewares.retry.RetryMiddleware": None, Patient: 550},
    }
    done = await crawl(Pages, {"/page": lambda request: next(answers)}, settings=settings)
    assert [each["text"] for each in done.items] == ["page"]
    assert done.stats["retry/reason_count/captcha"] == 2


class Failing:
    def process_request(self, request: Request, spider: Any) -> None:
        raise ValueError("broken")


class Odd:
    def process_response(self, request: Request, response: Response, spider: Any) -> Any:
        return "text"


@pytest.mark.parametrize(("kind", "error"), [(Failing, "ValueError"), (Odd, "TypeError")])
async def test_a_middleware_that_fails_costs_one_page(kind: type[Any], error: str) -> None:
    done = await crawl(Pages, {"/page": ""}, settings={"DOWNLOADER_MIDDLEWARES": {kind: 543}})
    assert [each["error"] for each in done.items] == [error]
    assert done.crawl.summary is not None
    assert done.crawl.summary.dead_kinds == {"middleware": 1}


async def test_a_login_is_sent_to_its_domain() -> None:
    own = type("Own", (Pages,), {"http_user": "u", "http_pass": "p", "http_auth_domain": "site.test"})
    done = await crawl(own, {"/page": ""})
    assert done.web.requests[0].headers["Authorization"] == "Basic dTpw"


class AroundSpider:
    def process_spider_input(self, response: Response, spider: Any) -> None:
        calls.append("input")

    def process_spider_output(self, response: Response, result: Any, spider: Any) -> Any:
        for each in result:
            yield {**each, "added": True} if isinstance(each, dict) else each

    def process_spider_exception(self, response: Response, exception: Exception, spider: Any) -> Any:
        return [{"handled": type(exception).__name__}]

    def process_start_requests(self, start_requests: Any, spider: Any) -> Any:
        for each in start_requests:
            calls.append("start")
            yield each


class Raising(Pages):
    def parse(self, response: Any, **named: Any) -> Any:
        yield {"text": "before"}
        raise KeyError("x")


async def test_spider_middlewares() -> None:
    settings = {"SPIDER_MIDDLEWARES": {AroundSpider: 543}}
    done = await crawl(Pages, {"/page": "page"}, settings=settings)
    assert [each["added"] for each in done.items] == [True]
    assert calls == ["start", "input"]
    failed = await crawl(Raising, {"/page": ""}, settings=settings)
    assert failed.items == [{"text": "before", "added": True}, {"handled": "KeyError"}]


class Tagging(BaseSpiderMiddleware):
    def get_processed_request(self, request: Request, response: Any) -> Request | None:
        if request.url.endswith("/dropped"):
            return None
        request.headers["X-Tag"] = "start" if response is None else "link"
        return request

    def get_processed_item(self, item: Any, response: Any) -> Any:
        return None if item.get("n") == 1 else {**item, "status": response.status}


class AsyncOutput:
    async def process_spider_output(self, response: Any, result: Any, spider: Any) -> Any:
        async for each in result:
            if isinstance(each, dict):
                each["seen"] = True
            yield each


class Linking(Pages):
    def parse(self, response: Any, **named: Any) -> Any:
        yield {"n": 1}
        yield {"n": 2}
        yield response.follow("/dropped", self.last)
        yield response.follow("/kept", self.last)

    def last(self, response: Any) -> Any:
        yield {"n": 3}


async def test_a_spider_middleware_with_the_base_class() -> None:
    pages: dict[str, Page] = {"/page": "", "/kept": "", "/dropped": ""}
    done = await crawl(Linking, pages, settings={"SPIDER_MIDDLEWARES": {Tagging: 543}})
    assert done.items == [{"n": 2, "status": 200}, {"n": 3, "status": 200}]
    assert done.web.paths == ["/page", "/kept"]
    assert done.web.header("/page", "x-tag") == ["start"]
    assert done.web.header("/kept", "x-tag") == ["link"]


async def test_a_spider_middleware_with_an_asynchronous_output() -> None:
    settings = {"SPIDER_MIDDLEWARES": {Tagging: 543, AsyncOutput: 600}}
    done = await crawl(Linking, {"/page": "", "/kept": ""}, settings=settings)
    assert [each["seen"] for each in done.items] == [True, True]


async def test_an_order_that_is_no_number_is_named() -> None:
    with pytest.raises(SpiderError, match=r"SPIDER_MIDDLEWARES: the order of .*AsyncOutput is '600': write a number"):
        await crawl(Linking, {}, settings={"SPIDER_MIDDLEWARES": {AsyncOutput: "600"}})
