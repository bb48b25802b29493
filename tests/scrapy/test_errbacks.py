"""Errbacks receive a Failure: which errors, with which attributes, and when."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy import exceptions
from shoal.scrapy.exceptions import HttpError, IgnoreRequest
from shoal.scrapy.failure import Failure
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, Answer, crawl, refused, timed_out, unknown_host


class Failing(scrapy.Spider):
    name = "failing"

    def start_requests(self) -> Any:
        yield Request(f"{SITE}/page", self.parse, errback=self.failed, meta={"m": [1]}, cb_kwargs={"k": 1})

    def parse(self, response: Any, **named: Any) -> Any:
        yield {"got": response.status}

    def failed(self, failure: Any) -> Any:
        request = failure.request
        yield {
            "error": type(failure.value).__name__, "text": failure.getErrorMessage(), "url": request.url,
            "meta": request.meta["m"], "k": request.cb_kwargs["k"],
            "status": failure.value.response.status if failure.check(HttpError) else None,
            "body": failure.value.response.text if failure.check(HttpError) else None,
        }  # fmt: skip


async def test_a_status_that_is_not_handled() -> None:
    done = await crawl(Failing, {"/page": Answer("gone", 410)})
    assert done.items == [
        {"error": "HttpError", "text": "Ignoring non-200 response", "url": f"{SITE}/page", "meta": [1], "k": 1,
         "status": 410, "body": "gone"}
    ]  # fmt: skip


async def test_a_status_that_is_retried_first() -> None:
    done = await crawl(Failing, {"/page": Answer("busy", 503)})
    assert [(each["status"], each["body"]) for each in done.items] == [(503, "busy")]
    assert len(done.web.requests) == 3, "one attempt, and RETRY_TIMES more"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused(), exceptions.ConnectionRefusedError),
        (timed_out(), exceptions.TimeoutError),
        (unknown_host(), exceptions.DNSLookupError),
    ],
)
async def test_errors_of_the_network(error: Exception, expected: type[Exception]) -> None:
    class Checking(Failing):
        def failed(self, failure: Any) -> Any:
            yield {"checked": failure.check(HttpError, expected) is expected, "name": failure.type.__name__}

    done = await crawl(Checking, {"/page": error}, settings={"RETRY_TIMES": 1})
    assert [each["checked"] for each in done.items] == [True]
    assert len(done.web.requests) == 2


async def test_an_errback_may_return_requests_and_be_async() -> None:
    class Again(Failing):
        async def failed(self, failure: Any) -> Any:
            yield Request(f"{SITE}/other", self.parse)

    assert (await crawl(Again, {"/page": Answer("", 404), "/other": ""})).items == [{"got": 200}]


async def test_a_lambda_as_errback() -> None:
    class Live(Failing):
        def start_requests(self) -> Any:
            yield Request(f"{SITE}/page", errback=lambda failure: {"status": failure.value.response.status})

    assert (await crawl(Live, {"/page": Answer("", 404)})).items == [{"status": 404}]


async def test_an_error_of_the_callback_does_not_go_to_the_errback() -> None:
    class Broken(Failing):
        def parse(self, response: Any, **named: Any) -> Any:
            raise ValueError("broken")

    done = await crawl(Broken, {"/page": ""})
    assert done.items == []
    assert done.stats["spider_exceptions/ValueError"] == 1


def test_a_failure_checks_and_traps() -> None:
    failure = Failure(HttpError(None, "x"))  # type: ignore[arg-type]
    assert failure.check(IgnoreRequest) is IgnoreRequest, "HttpError is one of them"
    assert failure.check(ValueError, "shoal.scrapy.exceptions.HttpError") == "shoal.scrapy.exceptions.HttpError"
    assert failure.check(ValueError) is None
    assert failure.trap(HttpError) is HttpError
    with pytest.raises(HttpError):
        failure.trap(ValueError)
    assert "HttpError" in failure.getTraceback()


def test_the_errors_have_the_names_of_twisted_and_of_newer_versions() -> None:
    assert issubclass(exceptions.DownloadConnectionRefusedError, exceptions.ConnectionRefusedError)
    assert issubclass(exceptions.CannotResolveHostError, exceptions.DNSLookupError)
    assert issubclass(exceptions.DownloadConnectTimeoutError, exceptions.TCPTimedOutError)
    assert issubclass(exceptions.DownloadConnectTimeoutError, exceptions.DownloadTimeoutError)
