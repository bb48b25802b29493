"""What becomes of one page: its callback, its links, redirects, failures and errbacks."""

from __future__ import annotations

import asyncio
import signal
from bdb import BdbQuit
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config import Config, ScopeSettings
from shoal.crawling.callbacks import Callbacks
from shoal.crawling.files import Chain, FileChains, WantedFile
from shoal.crawling.page import PageHandler, ParsedPage, ReleasedLease, Settlement
from shoal.crawling.run_queue import make_run_queue
from shoal.crawling.stats import Counters
from shoal.errors import DropItem, FetchError, PartialOutputError, SpiderError, TooComplexError
from shoal.fetch.layers import Postponed, Replaced, current_attempt
from shoal.http import Duplicates, File, Request, Response
from shoal.http.files import FILE_CALLBACK
from shoal.item import decode_item, encode_item
from shoal.ports import Failure
from shoal.spider import Spider
from shoal.urls.normalize import Scope
from tests.support.fakes import CONFIG, SITE, Web, memory_frontier
from tests.support.loops import event_loop_policy

__all__ = ["event_loop_policy"]

TIMEOUT = FetchError("no answer", kind="timeout", retryable=True)
NOT_FOUND = FetchError("the server answered 404", kind="http 404", retryable=False, status=404)


class Books(Spider):
    name = "books"

    def parse(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}
        yield response.follow_all()

    def failed(self, request: Request, error: Exception) -> Iterator[object]:
        yield {"failed": str(error)}
        yield Request(SITE + "instead")

    def broken(self, response: Response) -> Iterator[object]:
        yield {"url": response.url}
        raise ValueError("no price")

    def broken_errback(self, request: Request, error: Exception) -> None:
        raise ValueError("no idea")

    def deep(self, response: Response) -> None:
        raise TooComplexError("too many elements")

    async def waits(self, response: Response) -> None:
        await asyncio.Event().wait()

    async def waits_for_a_cancelled_task(self, response: Response) -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task


class Site:
    """Handles one request with a web, and keeps the counters."""

    def __init__(
        self, page: str | Response | Exception, spider: Spider | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        self.counters = Counters()
        self.web = Web({"page": page})
        self._spider = spider or Books()
        self._config: Config = CONFIG.with_settings(settings or {})

    async def handle(self, attempt: int = 1, **options: Any) -> Settlement:
        frontier = await memory_frontier()
        request = Request(SITE + "page", **options)
        await frontier.push([request])
        (lease,) = (await frontier.lease(1, 60)).leases
        queue = make_run_queue(self._spider, self._config, frontier, shared=False)
        handler = PageHandler(self._spider, self._config, queue, self.web.fetch, self.counters)
        return await handler.handle(msgspec.structs.replace(lease, attempt=attempt))


async def parsed(site: Site, **options: Any) -> ParsedPage:
    settlement = await site.handle(**options)
    assert isinstance(settlement, ParsedPage)
    return settlement


async def failed(site: Site, **options: Any) -> Failure:
    settlement = await site.handle(**options)
    assert isinstance(settlement, Failure)
    return settlement


def urls(requests: Any) -> list[str]:
    return [request.url.removeprefix(SITE) for request in requests]


# -- pages


async def test_items_and_links_become_a_completion() -> None:
    site = Site("<a href=/a>a</a><a href=/b>b</a><a href=/a>again</a><a href=http://other.com/>out</a>")
    site._spider.allowed_domains = ["ex.com"]
    page = await parsed(site)
    assert [decode_item(item)[1] for item in page.completion.items] == [{"url": SITE + "page"}]
    assert urls(page.completion.children) == ["a", "b"]
    assert {child.depth for child in page.completion.children} == {1}
    assert page.completion.status == 200
    assert page.completion.contacted
    assert (site.counters.fetched, site.counters.out_of_scope) == (1, 1)
    assert sum(site.counters.latency.counts) == 1


async def test_a_cached_page_did_not_contact_its_host() -> None:
    site = Site(Response(SITE + "page", from_cache=True))
    assert not (await parsed(site)).completion.contacted
    assert site.counters.from_cache == 1
    assert sum(site.counters.latency.counts) == 0


async def test_what_was_odd_about_an_answer_is_noted() -> None:
    odd = Response(SITE + "page", body=b"<a href=/a>a</a><a href=/b>b</a>", flags=("odd HTTP: x", "truncated gzip"))
    assert (await parsed(Site(odd))).completion.note == "odd HTTP: x; truncated gzip"
    note = (await parsed(Site(odd, settings={"scope.max_links": 1}))).completion.note
    assert note.startswith("odd HTTP: x; truncated gzip; 1 links were left out")


async def test_links_beyond_the_limit_are_counted_and_noted() -> None:
    links = "".join(f"<a href=/{number}>x</a>" for number in range(5))
    site = Site(links, settings={"scope.max_links": 2})
    page = await parsed(site)
    assert urls(page.completion.children) == ["0", "1"]
    assert "3 links were left out" in page.completion.note
    assert site.counters.left_out == 3


async def test_a_page_that_was_not_fetched_is_released() -> None:
    for contacted in (True, False):
        site = Site(Postponed("robots.txt first", contacted=contacted))
        settlement = await site.handle()
        assert isinstance(settlement, ReleasedLease)
        assert settlement.contacted is contacted
        assert site.counters.fetched == 0


async def test_a_layer_may_want_another_request_instead() -> None:
    other = Request(SITE + "other", dont_filter=True)
    page = await parsed(Site(Replaced(other, contacted=True)))
    assert (list(page.completion.children), page.completion.redirected) == ([other], True)
    assert page.completion.note == f"replaced by GET {SITE}other"


async def test_partial_output_is_kept_and_the_page_is_dead() -> None:
    class Partial(Books):
        async def parse(self, response: Response) -> list[object]:  # type: ignore[override]
            try:
                raise KeyError("price")
            except KeyError as exc:
                raise PartialOutputError([{"a": 1}, Request(SITE + "child")]) from exc

    failure = await failed(Site("", Partial()))
    assert (failure.kind, failure.retry_in) == ("callback", None)
    assert failure.reason.startswith("KeyError in parse: 'price'")
    assert [decode_item(item)[1] for item in failure.items] == [{"a": 1}]
    assert urls(failure.children) == ["child"]


async def test_who_quits_a_debugger_stops_the_crawl_and_the_page_is_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Debugged(Books):
        def parse(self, response: Response) -> Iterator[object]:
            raise BdbQuit
            yield

    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    site = Site("", Debugged())
    assert isinstance(await site.handle(), ReleasedLease)
    assert raised == [signal.SIGINT]
    assert not site.counters.errors


class PartialFiles(Books):
    """Fails after an item with a file, an item that names a saved page, and a link."""

    async def parse(self, response: Response) -> list[object]:  # type: ignore[override]
        saved = response.save()
        outputs = [File("a.pdf", item={"a": 1}), {"saved": saved["path"]}, Request(SITE + "child")]
        raise PartialOutputError(outputs) from KeyError("price")


async def test_partial_output_has_its_files(tmp_path: Path) -> None:
    page = '<base href="/docs/"><a href="/child">x</a>'
    failure = await failed(Site(page, PartialFiles(), {"files.store": str(tmp_path)}))
    assert urls(failure.children) == ["child", "docs/a.pdf"]
    (item,) = failure.items
    assert (tmp_path / decode_item(item)[1]["saved"]).read_text() == page


async def test_a_page_whose_file_cannot_be_stored_is_released(tmp_path: Path) -> None:
    """Also if its callback failed after some output: that is kept later."""
    (tmp_path / "file").write_text("not a folder")
    settlement = await Site("", PartialFiles(), {"files.store": str(tmp_path / "file")}).handle()
    assert isinstance(settlement, ReleasedLease)
    assert settlement.contacted


async def test_partial_output_obeys_the_page(tmp_path: Path) -> None:
    page = '<meta name="robots" content="noindex, nofollow">'
    settings = {"files.store": str(tmp_path), "robots.noindex": True, "robots.nofollow": True}
    failure = await failed(Site(page, PartialFiles(), settings))
    assert (list(failure.items), list(failure.children)) == ([], [])


async def test_a_layer_knows_the_attempt() -> None:
    seen: list[int] = []

    class Counting(Web):
        async def fetch(self, request: Request) -> Response:
            seen.append(current_attempt.get())
            return await super().fetch(request)

    site = Site("")
    site.web = Counting({"page": ""})
    await site.handle(attempt=1)
    await site.handle(attempt=3)
    assert seen == [1, 3]


async def test_a_pipeline_of_scrapy_names_what_to_rename() -> None:
    class Clean:
        def process_item(self, item: object, spider: Spider) -> object:
            return item

    class Shop(Books):
        pipelines = [Clean]  # type: ignore[list-item]

    with pytest.raises(SpiderError, match="Clean is not callable: rename process_item to __call__"):
        Callbacks(Shop(), Counters(), FileChains(Config(), Scope(ScopeSettings()), Shop().stats))


async def test_links_that_a_callback_left_out_are_counted() -> None:
    files = FileChains(Config(), Scope(ScopeSettings()), Spider().stats)
    found = await Callbacks(Spider(), Counters(), files).take(
        [Duplicates(2), {"a": 1}, Duplicates(3)], Request("http://x.test/")
    )
    assert (found.duplicates, len(found.items), found.links) == (5, 1, [])


async def test_pipelines_may_drop_items() -> None:
    def drop(item: Any, spider: Spider) -> Any:
        raise DropItem("too cheap")

    class Choosy(Books):
        pipelines = (drop,)

    site = Site("<a href=/a>a</a>", Choosy())
    page = await parsed(site)
    assert list(page.completion.items) == []
    assert urls(page.completion.children) == ["a"]
    assert site.counters.dropped == 1


# -- redirects


def redirect(location: str, status: int = 302) -> Response:
    return Response(SITE + "page", status=status, headers={"Location": location})


async def test_a_redirect_is_done_and_its_target_is_a_child() -> None:
    site = Site(redirect("/new"))
    page = await parsed(site, meta={"n": 1}, priority=3)
    (child,) = page.completion.children
    assert (child.url, child.redirects, child.meta, child.priority) == (SITE + "new", [SITE + "page"], {"n": 1}, 3)
    assert list(page.completion.items) == []
    assert site.counters.redirected == 1


async def test_a_redirect_whose_status_the_spider_handles_goes_to_the_callback() -> None:
    site = Site(redirect("/new"))
    site._spider.handle_statuses = [302]
    page = await parsed(site)
    assert len(page.completion.items) == 1
    assert site.counters.redirected == 0


@pytest.mark.parametrize(("status", "method", "body"), [(303, "GET", b""), (302, "GET", b""), (307, "POST", b"x")])
async def test_only_some_redirects_keep_the_method_and_the_body(status: int, method: str, body: bytes) -> None:
    page = await parsed(
        Site(redirect("/new", status)), method="POST", body=b"x", headers={"Content-Type": "text/plain"}
    )
    (child,) = page.completion.children
    assert (child.method, child.body) == (method, body)
    assert ("Content-Type" in child.headers) is bool(body)


async def test_another_host_gets_no_secrets() -> None:
    secret = {"X-Api-Key": "k", "Accept": "text/html"}
    page = await parsed(Site(redirect("http://other.com/")), headers=secret, cookies={"session": "s"})
    (child,) = page.completion.children
    assert (dict(child.headers), child.cookies) == ({"Accept": "text/html"}, {})
    page = await parsed(Site(redirect("/same")), headers=secret, cookies={"session": "s"})
    (child,) = page.completion.children
    assert (dict(child.headers), child.cookies) == (secret, {"session": "s"})


async def test_a_page_may_redirect_to_itself_once_it_has_set_a_cookie() -> None:
    (child,) = (await parsed(Site(redirect("/page")))).completion.children
    assert child.dont_filter


@pytest.mark.parametrize(
    ("location", "settings", "kind"),
    [
        ("http://[bad/", {}, "redirects"),
        ("http://other.com/", {"scope.allowed_domains": ["ex.com"]}, "scope"),
        ("/new", {"http.max_redirects": 0}, "redirects"),
    ],
)
async def test_redirects_that_are_not_followed(location: str, settings: dict[str, Any], kind: str) -> None:
    failure = await failed(Site(redirect(location), settings=settings))
    assert (failure.kind, failure.retry_in, list(failure.children)) == (kind, None, [])


# -- failures


async def test_a_failure_that_may_pass_is_tried_again_without_the_errback() -> None:
    site = Site(TIMEOUT)
    failure = await failed(site, errback="failed")
    assert failure.retry_in is not None
    assert (failure.kind, list(failure.items), list(failure.children)) == ("timeout", [], [])
    assert (site.counters.retried, site.counters.errors["timeout"]) == (1, 1)


async def test_the_server_says_how_long_to_wait() -> None:
    error = FetchError("busy", kind="http 503", retryable=True, retry_after=timedelta(seconds=77))
    assert (await failed(Site(error))).retry_in == 77


@pytest.mark.parametrize(("error", "attempt"), [(NOT_FOUND, 1), (TIMEOUT, 4)])
async def test_a_request_that_dies_goes_to_its_errback(error: FetchError, attempt: int) -> None:
    failure = await failed(Site(error), attempt=attempt, errback="failed")
    assert failure.retry_in is None
    assert [decode_item(item)[1] for item in failure.items] == [{"failed": str(error)}]
    assert urls(failure.children) == ["instead"]


async def test_an_errback_that_fails_counts_as_a_failed_callback() -> None:
    site = Site(NOT_FOUND)
    failure = await failed(site, errback="broken_errback")
    assert (failure.kind, failure.status, list(failure.items)) == ("callback", 404, [])
    assert failure.reason.endswith("; the page had failed: the server answered 404")
    assert site.counters.errors["errback"] == 1


async def test_a_callback_that_fails_stores_nothing_and_says_where() -> None:
    site = Site("")
    failure = await failed(site, callback="broken")
    assert (failure.kind, failure.retry_in, failure.status, list(failure.items)) == ("callback", None, 200, [])
    assert "ValueError in broken: no price" in failure.reason
    assert "test_page.py" in failure.reason
    assert site.counters.errors["callback"] == 1


async def test_a_callback_that_fails_goes_to_the_errback() -> None:
    failure = await failed(Site(""), callback="broken", errback="failed")
    (item,) = (decode_item(item)[1] for item in failure.items)
    assert "no price" in item["failed"]


async def test_a_page_that_is_too_complex_keeps_its_status() -> None:
    failure = await failed(Site(""), callback="deep")
    assert (failure.kind, failure.status, failure.retry_in) == ("too complex", 200, None)


async def test_a_callback_whose_own_task_was_cancelled_failed() -> None:
    failure = await failed(Site(""), callback="waits_for_a_cancelled_task")
    assert failure.kind == "callback"
    assert "CancelledError" in failure.reason


async def test_a_cancellation_of_the_page_comes_through() -> None:
    site = Site("")
    task = asyncio.create_task(site.handle(callback="waits"))
    while not site.counters.fetched:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_bug_in_a_layer_costs_one_request() -> None:
    site = Site(RuntimeError("a bug"))
    failure = await failed(site)
    assert (failure.kind, failure.reason) == ("internal error", "RuntimeError: a bug")
    assert site.counters.errors["internal error"] == 1


async def test_a_header_of_a_file_does_not_drop_its_item(tmp_path: Path) -> None:
    """The item is from the page, which allowed it."""
    settings = {"files.store": str(tmp_path), "robots.noindex": True}
    chain = Chain(encode_item({"n": 1}), [WantedFile("files", SITE + "page"), WantedFile("files", SITE + "second")])
    response = Response(SITE + "page", body=b"%PDF-1", headers={"X-Robots-Tag": "noindex"})
    carried = msgspec.to_builtins(chain, builtin_types=(bytes,))
    page = await parsed(Site(response, settings=settings), callback=FILE_CALLBACK, cb_kwargs=carried)
    assert urls(page.completion.children) == ["second"]


async def test_partial_output_of_an_errback_is_kept() -> None:
    class Partial(Books):
        def failed(self, request: Request, error: Exception) -> Iterator[object]:
            raise PartialOutputError([{"a": 1}, Request(SITE + "instead")]) from KeyError("price")

    site = Site(NOT_FOUND, Partial())
    failure = await failed(site, errback="failed")
    assert [decode_item(item)[1] for item in failure.items] == [{"a": 1}]
    assert urls(failure.children) == ["instead"]
    assert site.counters.errors["errback"] == 1
