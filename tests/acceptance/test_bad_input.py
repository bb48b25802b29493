"""An error of a server, spider, setting or disk affects only one page, has a clear message, and is counted.

The crawls use servers on the loopback that misbehave on purpose. `crawl_beside` checks after each crawl that it ended
by itself, that its counters balance, and that a healthy page gave its item.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal import DropItem, Request, Response, Spider, crawl
from shoal.errors import ConfigError, FetchError, SinkError, StoreError
from tests.acceptance.crawls import QUICK, Pages, crawl_beside, ended
from tests.support import forking
from tests.support.forking import SHOAL
from tests.support.hostile_pages import fill, unclosed
from tests.support.patience import allowance
from tests.support.servers import CHARSETS, HUGE, ODD_HREFS, MisbehavingServer, answer


@pytest.fixture
async def bad() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


# -- servers

FAULTS = [
    # path, kind, what the message says, whether another attempt may help
    ("/hang", "timeout", r"sent nothing for 0\.3 s \(http\.read_timeout\)", True),
    ("/hang-body", "timeout", r"sent nothing for 0\.3 s \(http\.read_timeout\)", True),
    ("/reset", "reset", "closed the connection: Connection reset by peer", True),
    ("/half", "half body", "incomplete.*500 of 1000 bytes", True),
    ("/half-chunked", "half body", "the body is incomplete", True),
    ("/bad-chunk", "protocol", "sent invalid HTTP: Invalid character in chunk size", False),
    ("/bad-length", "protocol", "sent invalid HTTP: .*Content-Length", False),
    ("/endless-headers", "protocol", "sent invalid HTTP: Too many headers", False),
    ("/huge-header", "protocol", r"header that is too long \(http\.max_header_bytes\)", False),
    ("/junk", "protocol", "sent invalid HTTP: Bad status line", False),
    ("/huge", "too large", r"larger than 1000000 bytes \(http\.max_body_bytes", False),
    ("/huge-declared", "too large", r"larger than 1000000 bytes \(http\.max_body_bytes", False),
    ("/brotli-bomb", "too large", r"decompressed body is larger than 1000000 bytes \(http\.max_body_bytes", False),
    ("/zstd-bomb", "too large", r"decompressed body is larger than 1000000 bytes \(http\.max_body_bytes", False),
    ("/bad-gzip", "bad encoding", "not valid gzip", True),
    ("/redirect-loop", "redirects", "more than 10 redirects, from .*/redirect-loop", False),
    ("/redirect/11", "redirects", "more than 10 redirects, from .*/redirect/11", False),
    ("/redirect-bad", "redirects", r"invalid URL: 'http://\[bad'", False),
    ("/redirect-out?to=mailto:a@b.c", "redirects", "only http and https", False),
    ("/status/404", "http 404", "answered 404", False),
    ("/status/503", "http 503", "answered 503", True),
    ("http://no-such-host.invalid/", "dns", "can.t resolve the host no-such-host.invalid", True),
    ("http://127.0.0.1:1/", "connect", "no connection to 127.0.0.1:1: Connection refused", True),
    ("http://x..y/", "request", "can't fetch http://x..y/: .*label empty or too long", False),
]


@pytest.mark.parametrize(("path", "kind", "message", "retryable"), FAULTS)
async def test_a_fault(
    bad: MisbehavingServer, caplog: pytest.LogCaptureFixture, path: str, kind: str, message: str, retryable: bool
) -> None:
    patience = 0.3 if path.startswith("/hang") else 10
    items, summary = await crawl_beside(bad, path, **{"retry.max_attempts": 2, "http.read_timeout": patience})
    attempts = 2 if retryable else 1
    assert items == []
    assert summary.dead_kinds == {kind: 1}
    assert summary.counters.errors == {kind: attempts}
    assert summary.counters.retried == attempts - 1
    assert summary.stats.dead == 1
    assert summary.stats.done == summary.counters.fetched - (kind == "redirects")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert re.search(message, warnings[0])
    assert "\n" not in warnings[0]
    assert len(warnings[0]) < 400
    if kind != "redirects":  # there it is the last hop that is given up
        assert (path if path.startswith("http") else bad.url + path) in warnings[0]


async def test_all_faults_in_one_crawl(bad: MisbehavingServer) -> None:
    leaves = [f"/leaf/{number}" for number in range(30)]
    items, summary = await crawl_beside(bad, *(path for path, *_ in FAULTS), *leaves, **{"http.read_timeout": 1})
    assert {item["h1"] for item in items} == {f"Leaf {number}" for number in range(30)}
    assert summary.dead_kinds == Counter(kind for _, kind, *_ in FAULTS)
    assert summary.elapsed < allowance(10)


async def test_a_page_that_drips_meets_the_total_timeout(bad: MisbehavingServer, caplog: Any) -> None:
    items, summary = await crawl_beside(bad, "/slow-drip", **{"http.total_timeout": 0.4})
    assert items == []
    assert summary.dead_kinds == {"timeout": 1}
    assert "did not send the whole page within 0.4 s (http.total_timeout)" in caplog.text
    assert summary.elapsed < allowance(3)


async def test_a_port_that_hangs_in_the_tls_handshake(bad: MisbehavingServer, caplog: Any) -> None:
    target = bad.url.replace("http://", "https://") + "/"
    _, summary = await crawl_beside(bad, target, **{"http.connect_timeout": 1.0})
    assert summary.dead_kinds == {"timeout": 1}
    assert "within 1 s (http.connect_timeout)" in caplog.text


@pytest.mark.parametrize("path", ["/huge", "/huge-declared", "/endless-headers"])
async def test_what_is_too_large_is_not_downloaded(bad: MisbehavingServer, path: str) -> None:
    await crawl_beside(bad, path)
    assert bad.sent[path] < 20_000_000 < HUGE / 100  # what the limit and the sockets' buffers hold


_MEASURE = """
import json, resource, sys
from shoal import crawl
from tests.acceptance.crawls import QUICK, Pages

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

server, *paths = sys.argv[1:]
limits = {"http.max_body_bytes": 16_000_000, "concurrency": 1}
crawl(Pages, QUICK | limits, arguments={"start_urls": [server + "/leaf/healthy"]})
before = peak()
done = crawl(Pages, QUICK | limits, arguments={"start_urls": [server + path for path in paths]})
print(json.dumps([peak() - before, done.summary.dead_kinds, done.summary.lost]))
"""


async def test_bombs_do_not_fill_the_memory(bad: MisbehavingServer) -> None:
    """10 GB behind 10 MB of gzip, 256 MB behind 300 bytes of Brotli and 8 KB of Zstandard, and 10 GB as they are."""
    paths = ["/gzip-bomb", "/brotli-bomb", "/zstd-bomb", "/huge", "/huge-declared"]
    code, out, err = await python("-c", _MEASURE, bad.url, *paths)
    assert code == 0, err
    megabytes, dead, lost = json.loads(out)
    assert dead == {"too large": 5}
    assert lost == 0
    assert megabytes < 100


@pytest.mark.parametrize("name", CHARSETS)
async def test_a_charset(bad: MisbehavingServer, name: str) -> None:
    class Texts(Pages):
        def handle(self, response: Response) -> Any:
            yield {"h1": response.css("h1::text").get(), "text": response.text}

    items, _ = await crawl_beside(bad, f"/charset/{name}", spider=Texts)
    assert items[0]["h1"] == CHARSETS[name].text
    assert CHARSETS[name].text in items[0]["text"]


async def test_a_page_that_is_too_complex_costs_only_itself(caplog: Any) -> None:
    class Bombs(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            return answer(fill("<p>x", unclosed(500), 246_000)) if name == "bomb" else super()._answer(name, request)

    class Errbacks(Pages):
        def start(self) -> Any:
            for url in self.start_urls:
                yield Request(url, callback=self.parse, errback=self.failed)

        def failed(self, request: Request, error: FetchError) -> Any:
            yield {"url": request.url, "kind": error.kind, "status": error.status}

    async with Bombs() as server:
        items, summary = await crawl_beside(server, "/bomb", spider=Errbacks, **{"retry.max_attempts": 3})
    assert items == [{"url": server.url + "/bomb", "kind": "too complex", "status": 200}]
    assert summary.dead_kinds == {"too complex": 1}
    assert summary.counters.errors == {"too complex": 1}  # it is not tried again
    assert "the page is too complex: parsing its" in caplog.text


async def test_broken_html_is_read_as_far_as_it_goes(bad: MisbehavingServer) -> None:
    class Links(Pages):
        def handle(self, response: Response) -> Any:
            yield {"title": response.css("title::text").get(), "links": response.links()}

    items, summary = await crawl_beside(bad, "/broken-html", "/empty", spider=Links)
    assert {bad.url + "/leaf/0", bad.url + "/leaf/1"} <= {link for item in items for link in item["links"]}
    assert len(items) == 2
    assert summary.stats.done == 3


async def test_an_answer_without_a_body_is_a_page(bad: MisbehavingServer) -> None:
    items, _ = await crawl_beside(bad, "/status/204", "/empty")
    assert [item["h1"] for item in items] == [None, None]


async def test_a_redirect_without_a_target_is_no_page(bad: MisbehavingServer, caplog: Any) -> None:
    items, summary = await crawl_beside(bad, "/redirect-no-location", "/status/304")
    assert items == []
    assert summary.dead_kinds == {"http 302": 1, "http 304": 1}
    assert "answered 302" in caplog.text


async def test_a_redirect_out_of_scope(bad: MisbehavingServer, caplog: Any) -> None:
    async with MisbehavingServer() as other:
        target = f"/redirect-out?to={other.url}/leaf/1"
        items, summary = await crawl_beside(bad, target, **{"scope.allowed_domains": [bad.url.removeprefix("http://")]})
        assert other.requests == []
    assert items == []
    assert summary.dead_kinds == {"scope": 1}
    assert summary.counters.out_of_scope == 1
    assert f"redirects to {other.url}/leaf/1, which is outside the allowed domains" in caplog.text


async def test_a_date_in_retry_after_that_no_calendar_has(bad: MisbehavingServer) -> None:
    for date in ("Mon, 01 Jan 2024 00:00:00 %2B99999999999999", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"):
        _, summary = await crawl_beside(bad, f"/status/503?retry_after={date}")
        assert summary.dead_kinds == {"http 503": 1}


# -- robots.txt


ROBOTS = [
    ("/hang", "timeout", "sent nothing for"),
    ("/status/500", "robots unavailable", "answered 500"),
    ("/huge", "too large", "larger than 1000000 bytes"),
    ("/reset", "reset", "closed the connection"),
    ("/junk", "protocol", "sent invalid HTTP"),
]


@pytest.mark.parametrize(("path", "kind", "message"), ROBOTS)
async def test_a_robots_txt_that_can_not_be_had(
    bad: MisbehavingServer, caplog: Any, path: str, kind: str, message: str
) -> None:
    """Nobody knows what it forbids, so nothing of its host is fetched."""
    async with MisbehavingServer(robots=path) as host:
        patience = 0.3 if path == "/hang" else 10
        settings = {"robots.obey": True, "http.read_timeout": patience}
        _, summary = await crawl_beside(bad, host.url + "/leaf/1", **settings)
        assert {visit.path for visit in host.requests} == {"/robots.txt"}
        assert host.sent[path] < 20_000_000
    assert summary.dead_kinds == {kind: 1}
    assert f"can't fetch robots.txt of {host.url}" in caplog.text
    assert message in caplog.text


async def test_a_robots_txt_that_can_not_be_had_is_asked_for_a_few_times_not_for_each_page(
    bad: MisbehavingServer,
) -> None:
    async with MisbehavingServer(robots="/status/500") as host:
        pages = [f"{host.url}/leaf/{number}" for number in range(50)]
        _, summary = await crawl_beside(bad, *pages, **{"robots.obey": True, "retry.max_attempts": 2})
        assert len(host.requests) <= 10
    assert summary.stats.dead == 50


@pytest.mark.parametrize("path", ["/status/404", "/bad-gzip", "/redirect-bad", "/links/3"])
async def test_a_robots_txt_that_says_nothing_forbids_nothing(bad: MisbehavingServer, path: str) -> None:
    async with MisbehavingServer(robots=path) as host:
        items, summary = await crawl_beside(bad, host.url + "/leaf/1", **{"robots.obey": True})
    if path == "/bad-gzip":  # there is one, and nobody can read it
        assert summary.dead_kinds == {"bad encoding": 1}
    else:
        assert [item["h1"] for item in items] == ["Leaf 1"]


# -- URLs that are none


NO_URLS = ["nonsense", "", "http://", "http://[::g]/", "http://a b/", "ftp://127.0.0.1/", "http://h:99999/"]


async def test_start_urls_that_are_none(bad: MisbehavingServer, caplog: Any) -> None:
    class Plain(Spider):
        def parse(self, response: Response) -> Any:
            yield {"url": response.url, "h1": response.css("h1::text").get()}

    made = crawl(Plain, QUICK, arguments={"start_urls": [*NO_URLS, bad.url + "/leaf/healthy"]})
    items, summary = await ended(made)
    assert summary.state == "finished"
    assert [item["h1"] for item in items] == ["Leaf healthy"]
    assert summary.counters.errors == {"bad url": len(NO_URLS)}
    assert summary.stats.pushed == 1
    assert "invalid URL: 'nonsense' has no scheme; add http:// or https://" in caplog.text


async def test_a_start_url_that_is_a_text_and_no_list(bad: MisbehavingServer) -> None:
    items, _ = await ended(crawl(_Plain, QUICK, arguments={"start_urls": bad.url + "/leaf/healthy"}))
    assert [item["h1"] for item in items] == ["Leaf healthy"]


class _Plain(Spider):
    def parse(self, response: Response) -> Any:
        yield {"h1": response.css("h1::text").get()}


@pytest.mark.parametrize("url", NO_URLS)
async def test_a_callback_that_requests_what_is_no_url(bad: MisbehavingServer, caplog: Any, url: str) -> None:
    class Follows(Pages):
        def handle(self, response: Response) -> Any:
            yield {"lost": "with its page"}
            yield Request(url)

    items, summary = await crawl_beside(bad, "/leaf/1", spider=Follows)
    assert items == []
    assert summary.dead_kinds == {"callback": 1}
    assert "RequestError" in caplog.text
    assert f"{bad.url}/leaf/1" in caplog.text
    assert re.search(rf"{re.escape(__file__)}, line \d+", caplog.text)


async def test_hrefs_that_are_none(bad: MisbehavingServer, caplog: Any) -> None:
    class Follows(Pages):
        def handle(self, response: Response) -> Any:
            yield {"hrefs": len(response.css("a::attr(href)").getall())}
            yield response.follow_all(callback=self.parse)

    items, summary = await crawl_beside(bad, "/odd-links", spider=Follows)
    assert {"hrefs": len(ODD_HREFS) + 1} in items
    assert [item["h1"] for item in items if "h1" in item] == ["Leaf good"]
    assert summary.dead_kinds == {}
    assert caplog.text == ""


# -- spiders


async def test_callbacks_that_raise(bad: MisbehavingServer, caplog: Any) -> None:
    class Raises(Pages):
        def start(self) -> Any:
            yield from super().start()
            for name in ("at_once", "in_a_coroutine", "in_a_generator", "in_an_async_generator", "in_a_library"):
                yield Request(f"{bad.url}/leaf/{name}", callback=name)

        def at_once(self, response: Response) -> Any:
            raise ValueError("at once")

        async def in_a_coroutine(self, response: Response) -> Any:
            await asyncio.sleep(0)
            raise ValueError("in a coroutine")

        def in_a_generator(self, response: Response) -> Any:
            yield {"half": "a page"}
            yield response.follow_all(["/leaf/never"])
            raise ValueError("in a generator")

        async def in_an_async_generator(self, response: Response) -> Any:
            yield {"half": "a page"}
            raise ValueError("in an async generator")

        def in_a_library(self, response: Response) -> Any:
            yield response.json()

    items, summary = await crawl_beside(bad, spider=Raises)
    assert items == []  # nothing of a page whose callback failed: once mended, `retry-failed` gives all of it
    assert summary.dead_kinds == {"callback": 5}
    assert summary.counters.errors == {"callback": 5}
    assert summary.counters.fetched == 6
    assert not any(visit.path == "/leaf/never" for visit in bad.requests)
    messages = [record.getMessage() for record in caplog.records]
    for name in ("at once", "in a coroutine", "in a generator", "in an async generator"):
        assert any(re.search(rf"ValueError in \w+: {name}", message) for message in messages)
    for message in messages:
        assert re.search(rf"callback failed url=\S+/leaf/\w+ .*\({re.escape(__file__)}, line \d+\)", message)


async def test_a_callback_that_cancels_its_own_task(bad: MisbehavingServer, caplog: Any) -> None:
    class Cancels(Pages):
        async def handle(self, response: Response) -> Any:
            if len(bad.requests) > 20:
                raise AssertionError("the page was fetched again and again")
            task = asyncio.ensure_future(asyncio.sleep(10))
            task.cancel()
            await task

    _, summary = await crawl_beside(bad, "/leaf/1", spider=Cancels)
    assert summary.dead_kinds == {"callback": 1}
    assert summary.counters.fetched == 2
    assert "CancelledError" in caplog.text


async def test_a_callback_that_gives_nonsense(bad: MisbehavingServer, caplog: Any) -> None:
    class Nonsense(Pages):
        def handle(self, response: Response) -> Any:
            yield 42
            yield "text"
            yield {"url": response.url, "h1": "whole"}
            yield None
            yield object

    items, summary = await crawl_beside(bad, "/leaf/1", spider=Nonsense)
    assert [item["h1"] for item in items] == ["whole"]
    assert summary.counters.item_errors == 3
    assert summary.counters.items == summary.stats.items == 2
    for found in ("not an int", "not a str", "not a type"):
        assert found in caplog.text
    assert caplog.text.count(f"{bad.url}/leaf/1") == 3


async def test_a_callback_that_returns_one_thing(bad: MisbehavingServer, caplog: Any) -> None:
    class Returns(Pages):
        def handle(self, response: Response) -> Any:
            return "text"

    items, summary = await crawl_beside(bad, "/leaf/1", spider=Returns)
    assert items == []
    assert summary.counters.item_errors == 1
    assert "not a str" in caplog.text


async def test_callbacks_that_do_not_exist(bad: MisbehavingServer, caplog: Any) -> None:
    class Misnamed(Pages):
        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{bad.url}/leaf/start", callback="no_such_method")
            yield Request(f"{bad.url}/leaf/private", callback="__init__")

        def handle(self, response: Response) -> Any:
            yield Request(f"{bad.url}/leaf/never", callback="no_such_method")

    items, summary = await crawl_beside(bad, "/leaf/1", spider=Misnamed)
    assert items == []
    assert summary.dead_kinds == {"callback": 3}
    assert "Misnamed has no method 'no_such_method'" in caplog.text
    assert "Misnamed has no method '__init__'" in caplog.text
    assert not any(visit.path == "/leaf/never" for visit in bad.requests)


async def test_a_request_that_can_not_be_stored(bad: MisbehavingServer, caplog: Any) -> None:
    class Stores(Pages):
        def handle(self, response: Response) -> Any:
            yield Request(f"{bad.url}/leaf/2", meta={"response": object()})

    items, summary = await crawl_beside(bad, "/leaf/1", spider=Stores)
    assert items == []
    assert summary.dead_kinds == {"callback": 1}
    assert re.search("RequestError in handle: meta .* cannot be stored", caplog.text)


async def test_an_errback_that_raises(bad: MisbehavingServer, caplog: Any) -> None:
    class Careless(Pages):
        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{bad.url}/status/404", errback=self.failed)
            yield Request(f"{bad.url}/leaf/1", callback=self.raises, errback="no_such_method")

        def raises(self, response: Response) -> Any:
            raise ValueError("first")

        def failed(self, request: Request, error: Exception) -> Any:
            yield {"never": "stored"}
            raise RuntimeError("second")

    items, summary = await crawl_beside(bad, spider=Careless)
    assert items == []
    assert summary.dead_kinds == {"callback": 2}
    assert summary.counters.errors == {"http 404": 1, "callback": 1, "errback": 2}
    assert re.search(r"errback failed url=\S+/status/404 RuntimeError in \w+: second \(.*, line \d+\)", caplog.text)
    assert "has no method 'no_such_method'" in caplog.text


async def test_a_start_that_raises(bad: MisbehavingServer) -> None:
    """What it gave before is crawled; the crawl has failed all the same, and says where."""

    class Stops(Pages):
        def start(self) -> Any:
            yield from super().start()
            raise LookupError("no more")

    made = crawl(Stops, QUICK, arguments={"start_urls": [bad.url + "/leaf/1", bad.url + "/leaf/healthy"]})
    items, summary = await ended(made)
    assert summary.state == "failed"
    assert re.fullmatch(rf"start\(\) failed: LookupError: no more \({re.escape(__file__)}, line \d+\)", summary.error)
    assert {item["h1"] for item in items} == {"Leaf 1", "Leaf healthy"}


@pytest.mark.parametrize("given", [42, {"url": "x"}])
async def test_a_start_that_gives_nonsense(given: object) -> None:
    class Nonsense(Pages):
        def start(self) -> Any:
            yield given

    _, summary = await ended(crawl(Nonsense, QUICK))
    assert summary.state == "failed"
    assert "must return Request objects or URLs" in summary.error


# -- items


async def test_pipelines_that_raise_drop_and_forget(bad: MisbehavingServer, caplog: Any) -> None:
    def pipeline(item: dict[str, Any], spider: Spider) -> Any:
        match item["h1"]:
            case "Leaf raise":
                raise ValueError("the pipeline's own")
            case "Leaf drop":
                raise DropItem("not wanted")
            case "Leaf forget":
                return None
        return item

    class Piped(Pages):
        pipelines = [pipeline]

    items, summary = await crawl_beside(bad, "/leaf/raise", "/leaf/drop", "/leaf/forget", "/leaf/keep", spider=Piped)
    assert [item["h1"] for item in items] == ["Leaf keep"]
    assert summary.dead_kinds == {"callback": 1}
    assert summary.counters.dropped == 1
    assert summary.counters.item_errors == 1
    assert summary.stats.done == 4
    assert re.search(
        rf"/leaf/raise ValueError in handle: the pipeline's own \({re.escape(__file__)}, line \d+\)", caplog.text
    )
    assert re.search("item not stored.*None", caplog.text)


async def test_items_that_can_not_be_stored_cost_no_others_of_their_page(bad: MisbehavingServer, caplog: Any) -> None:
    endless: dict[str, Any] = {}
    endless["itself"] = endless

    class Odd(Pages):
        def handle(self, response: Response) -> Any:
            yield {"n": 1}
            yield {"n": 2, "price": {"value": object()}}
            yield {"n": 3, "digits": 2**70}
            yield {"n": 4, "text": "\ud800"}
            yield {5: "a key"}
            yield endless
            yield {"n": 7}

    items, summary = await crawl_beside(bad, "/leaf/1", spider=Odd)
    assert items == [{"n": 1}, {"n": 7}]
    assert summary.counters.item_errors == 5
    assert summary.dead_kinds == {}
    for message in ("item field price.value", "item field digits", "item field text", "the key 5", "contains itself"):
        assert message in caplog.text


# -- outputs


async def test_outputs_that_can_not_be_opened(bad: MisbehavingServer, tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "folder.db").mkdir()
    (tmp_path / "device.jsonl").symlink_to("/dev/full")
    (tmp_path / "text.db").write_text("this is no database, and long enough to be sure of it\n" * 100)
    with sqlite3.connect(tmp_path / "corrupt.db") as database:
        database.execute("CREATE TABLE item (_key TEXT PRIMARY KEY NOT NULL)")
    database.close()
    whole = (tmp_path / "corrupt.db").read_bytes()
    (tmp_path / "corrupt.db").write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    wrong = {
        "missing/items.jsonl": "the folder .*/missing does not exist; create it first",
        "missing/items.csv": "the folder .*/missing does not exist; create it first",
        "missing/items.parquet": "the folder .*/missing does not exist; create it first",
        "missing/items.db": "the folder .*/missing does not exist; create it first",
        "folder.jsonl": "it is a folder",
        "folder.db": "it is a folder",
        "device.jsonl": "it is not a regular file",
        "text.db": "it is not a SQLite database",
        "corrupt.db": "database disk image is malformed",
        "items.xml": "unknown type of output: '.*items.xml'",
        "items.json": r"use .*items\.jsonl",
        "items": "unknown type of output",
    }
    for name, message in wrong.items():
        with pytest.raises(SinkError, match=message):
            await crawl(Pages, QUICK, outputs=[str(tmp_path / name)], arguments={"start_urls": [bad.url + "/leaf/1"]})
    assert bad.requests == []  # it is said before anything is fetched
    assert (tmp_path / "text.db").read_text().startswith("this is no database")


async def test_a_database_of_someone_else_is_left_alone(bad: MisbehavingServer, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE item (name TEXT)")
        database.execute("INSERT INTO item VALUES ('theirs')")
    made = crawl(Pages, QUICK, outputs=[str(path)], arguments={"start_urls": [bad.url + "/leaf/1"]})
    summary = (await made).summary
    assert summary is not None
    assert summary.state == "failed"
    assert "Shoal did not create its table 'item'" in summary.error
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT * FROM item").fetchall() == [("theirs",)]


_SPIDER = """
from shoal import Request, Spider

class Leaves(Spider):
    settings = {"download_delay": 0, "robots.obey": False}

    def start(self):
        return [Request(f"{self.url}/leaf/{number}") for number in range(50)]

    def parse(self, response):
        yield {"h1": response.css("h1::text").get(), "padding": "x" * 100}
"""

# The command line, but it does not wait for a disk to have room again.
_IMPATIENT = """
import os
os.environ["SHOAL_ITEMS__PATIENCE"] = "0"
from shoal.cli.main import main
main()
"""


@pytest.mark.parametrize("output", ["items.jsonl", "items.csv"])
async def test_a_file_that_may_not_grow(bad: MisbehavingServer, tmp_path: Path, output: str) -> None:
    (tmp_path / "leaves.py").write_text(_SPIDER)
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n" + _IMPATIENT
    command = ("run", "leaves.py", "-o", output, "-a", f"url={bad.url}")
    code, _, err = await python("-c", limited, *command, cwd=tmp_path)
    assert code == 1
    assert "Traceback" not in err
    assert f"{output}: it has reached the maximum size of a file" in err
    assert not re.search(r"lost +\d", err)
    text = (tmp_path / output).read_text()
    assert len(text) <= 4000
    assert text == "" or text.endswith("\n")  # no half lines


async def test_a_full_disk(bad: MisbehavingServer, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(_SPIDER)
    full = os.open("/dev/full", os.O_WRONLY)
    command = ("run", "leaves.py", "-o", "-", "-a", f"url={bad.url}")
    code, _, err = await python("-c", _IMPATIENT, *command, cwd=tmp_path, stdout=full)
    os.close(full)
    assert code == 1
    assert "Traceback" not in err
    assert "can't write standard output: the disk is full; free some space, then resume the run" in err
    assert not re.search(r"lost +\d", err)


# -- stores


async def test_frontiers_that_can_not_be_opened(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, and long enough to be sure of it\n" * 100)
    (tmp_path / "folder.db").mkdir()
    with sqlite3.connect(tmp_path / "foreign.db") as database:
        database.execute("CREATE TABLE accounts (name TEXT)")
    healthy = tmp_path / "corrupt.db"
    await crawl(Pages, QUICK | {"frontier": f"sqlite:///{healthy}"}, arguments={"start_urls": ["http://127.0.0.1:1/"]})
    whole = healthy.read_bytes()
    healthy.write_bytes(whole[:100] + b"\xff" * (len(whole) - 100))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.db") if path.is_file()}
    for name in ("text", "folder", "foreign", "corrupt", "missing/any"):
        with pytest.raises(StoreError, match=rf"{name}\.db") as caught:
            await crawl(Pages, QUICK | {"frontier": f"sqlite:///{tmp_path}/{name}.db"})
        assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.db") if path.is_file()} == before


def test_a_frontier_of_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match=r'"frontier" must be memory:, sqlite:///file.*not .mongodb://h/x'):
        crawl(Pages, QUICK | {"frontier": "mongodb://h/x"})


# -- the command line

MISTAKES = {
    "no file": (["run", "nothing.py"], "spider file nothing.py does not exist"),
    "syntax": (["run", "syntax.py"], r"syntax.py, line 3: expected ':': class Broken\(Spider\)"),
    "at import": (["run", "divides.py"], "divides.py, line 4: ZeroDivisionError: division by zero"),
    "missing module": (["run", "imports.py"], "imports.py, line 2: ModuleNotFoundError: No module named 'no_such_lib'"),
    "in what it imports": (["run", "deeper.py"], "deeper.py, line 1: ZeroDivisionError: division by zero"),
    "no spider": (["run", "empty.py"], "empty.py: no spider: write a class that inherits from shoal.Spider"),
    "two spiders": (["run", "two.py"], "choose one: two.py:One, two.py:Two"),
    "init": (["run", "init.py"], r"init.py.*Shy.*ValueError: not today.*line 6"),
    "argument": (["run", "init.py", "-a", "colour=red"], "Shy has no argument 'colour'"),
    "argument form": (["run", "good.py", "-a", "colour"], "-a 'colour': write it as key=value"),
    "method as argument": (["run", "good.py", "-a", "parse=x"], "would replace the spider's own parse"),
    "spider's settings": (["run", "settings.py"], 'spider Wrong: unknown key "downlod_delay".*did you mean'),
    "unknown setting": (["run", "good.py", "--set", "htp.proxy=x"], '--set htp.proxy: unknown key "htp.proxy"'),
    "bad value": (["run", "good.py", "--set", "concurrency=many"], '--set concurrency: .*must be an integer'),
    "bad option": (["run", "good.py", "--concurrency", "0"], "--concurrency: .*at least 1, not 0"),
    "no value": (["run", "good.py", "--set", "concurrency"], "--set 'concurrency': write it as key=value"),
    "output": (["run", "good.py", "-o", "items.xml"], "unknown type of output: 'items.xml'; use file.jsonl"),
    "frontier": (["run", "good.py", "--frontier", "mongodb://h/x"], "--frontier: .*must be memory:, sqlite:///file"),
    "url": (["crawl", "http://[bad"], r"invalid URL: 'http://\[bad'"),
    "field": (["crawl", "http://127.0.0.1:1/", "--item", "price=p[["], r"--item .*price=p\[\["),
}  # fmt: skip

FILES = {
    "syntax.py": "from shoal import Spider\n\nclass Broken(Spider)\n    pass\n",
    "divides.py": "from shoal import Spider\n\nclass Divides(Spider):\n    start_urls = [1 / 0]\n",
    "imports.py": "from shoal import Spider\nimport no_such_lib\n",
    "deeper.py": "import library\n",
    "library.py": "def work():\n    return 1 / 0\n\nwork()\n",
    "empty.py": "from shoal import Spider\n",
    "two.py": "from shoal import Spider\nclass One(Spider): ...\nclass Two(Spider): ...\n",
    "init.py": "from shoal import Spider\n\nclass Shy(Spider):\n    def __init__(self):\n"
    "        super().__init__()\n        raise ValueError('not today')\n",
    "good.py": "from shoal import Spider\nclass Good(Spider): ...\n",
    "settings.py": "from shoal import Spider\nclass Wrong(Spider):\n    settings = {'downlod_delay': 1}\n",
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_on_the_command_line(tmp_path: Path, mistake: str) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    arguments, message = MISTAKES[mistake]
    done = await asyncio.to_thread(forking.run, [*SHOAL, *arguments], cwd=tmp_path, capture_output=True)
    assert re.match(f"shoal: .*{message}", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert done.returncode == 2


async def python(*arguments: str, cwd: Path | None = None, stdout: int | None = None) -> tuple[int, str, str]:
    """Exit code and output of a Python process; the servers of the test go on meanwhile."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=cwd, stdout=stdout or asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, (out or b"").decode(), err.decode()
