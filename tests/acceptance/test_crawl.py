"""Crawls of a real server on loopback, started from code: kinds of spiders, and the promises of the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pyarrow.parquet
import pydantic
import pytest

from shoal import Crawl, DropItem, Request, Response, Spider, crawl
from shoal.errors import RunError, SinkError, SpiderError
from tests.support.loops import only_uvloop as event_loop_policy
from tests.support.servers import MisbehavingServer, SiteServer

__all__ = ["event_loop_policy"]

FAST: dict[str, Any] = {"download_delay": 0, "retry": {"base_delay": 0.01}}


class Pages(Spider):
    """Every page of a SiteServer."""

    name = "pages"

    def parse(self, response: Response) -> Any:
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")


def settings(**more: Any) -> dict[str, Any]:
    return {**FAST, **more}


async def test_every_page_is_fetched_once_and_gives_its_item_once() -> None:
    async with SiteServer(pages=300) as site:
        done = await crawl(Pages, settings(), arguments={"start_urls": [site.url]})
        assert Counter(item["url"] for item in done.items) == Counter(site.url + path for path in site.paths)
        pages = {path: count for path, count in site.hits.items() if path != "/robots.txt"}
        assert pages == dict.fromkeys(site.paths, 1)
    assert done.summary is not None
    assert done.summary.state == "finished"
    assert done.summary.lost == 0
    assert done.summary.stats.done == 301


def test_without_an_event_loop_crawl_runs_to_the_end_and_can_run_again() -> None:
    """Twice in one program, each on a loop of its own."""

    class Nowhere(Spider):
        start_urls = ["http://127.0.0.1:9/"]

    for _ in range(2):
        done = crawl(Nowhere, settings(retry={"max_attempts": 1}))
        assert done.summary is not None
        assert done.summary.dead_kinds == {"connect": 1}


async def test_many_crawls_at_once_in_one_loop() -> None:
    async with SiteServer(pages=30) as site:
        crawls = [crawl(Pages, settings(), arguments={"start_urls": [site.url]}) for _ in range(3)]
        for done in await asyncio.gather(*crawls):
            assert len(done.items) == 31


async def test_a_crawl_runs_once() -> None:
    async with SiteServer(pages=1) as site:
        made = crawl(Pages, settings(), arguments={"start_urls": [site.url]})
        await made
        with pytest.raises(RunError, match="has already run"):
            await made


async def test_items_as_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    async with SiteServer(pages=50) as site:
        seen = [item async for item in crawl(Pages, settings(), arguments={"start_urls": [site.url]})]
    assert len({item["url"] for item in seen}) == 51
    assert "stopping" not in caplog.text


async def test_leaving_the_stream_early_ends_the_crawl() -> None:
    async with SiteServer(pages=500, latency=0.01) as site:
        made = crawl(Pages, settings(), arguments={"start_urls": [site.url]})
        items = aiter(made)
        await anext(items)
        await items.aclose()
        assert made.summary is not None
        assert made.summary.state == "stopped"
        assert sum(site.hits.values()) < 500


async def test_every_kind_of_callback() -> None:
    class Kinds(Spider):
        def start(self) -> Any:
            for name in ("generator", "async_generator", "function", "coroutine", "single", "nothing"):
                yield Request(f"{self.url}/leaf/{name}", callback=getattr(self, name))

        def generator(self, response: Response) -> Any:
            yield {"kind": "generator"}

        async def async_generator(self, response: Response) -> Any:
            await asyncio.sleep(0)
            yield {"kind": "async_generator"}

        def function(self, response: Response) -> Any:
            return [{"kind": "function"}]

        async def coroutine(self, response: Response) -> Any:
            return [{"kind": "coroutine"}]

        def single(self, response: Response) -> Any:
            return {"kind": "single"}

        def nothing(self, response: Response) -> None:
            return None

        url = ""

    class AsyncStart(Kinds):
        async def start(self) -> Any:  # type: ignore[override]
            yield Request(f"{self.url}/leaf/1", callback=self.single)

    async with MisbehavingServer() as server:
        done = await crawl(Kinds, settings(), arguments={"url": server.url})
        assert sorted(item["kind"] for item in done.items) == [
            "async_generator",
            "coroutine",
            "function",
            "generator",
            "single",
        ]
        assert len((await crawl(AsyncStart, settings(), arguments={"url": server.url})).items) == 1


@dataclasses.dataclass
class DataclassItem:
    name: str


class StructItem(msgspec.Struct):
    name: str


class PydanticItem(pydantic.BaseModel):
    name: str


@attrs.define
class AttrsItem:
    name: str


async def test_every_kind_of_item_through_pipelines() -> None:
    def no_attrs(item: Any, spider: Spider) -> Any:
        if isinstance(item, AttrsItem):
            raise DropItem("not wanted")
        return item

    class Upper:
        async def __call__(self, item: Any, spider: Spider) -> Any:
            if isinstance(item, dict):
                item["name"] = item["name"].upper()
            return item

    class Items(Spider):
        pipelines = [no_attrs, Upper]

        def parse(self, response: Response) -> Any:
            yield {"name": "dict"}
            yield DataclassItem("dataclass")
            yield StructItem("struct")
            yield PydanticItem(name="pydantic")
            yield AttrsItem("attrs")

    async with SiteServer(pages=1) as site:
        done = await crawl(Items, settings(), arguments={"start_urls": [site.url]})
    assert done.items == [
        {"name": "DICT"}, DataclassItem("dataclass"), StructItem("struct"), PydanticItem(name="pydantic")
    ]  # fmt: skip
    assert done.summary is not None
    assert done.summary.counters.dropped == 1


async def test_a_stream_and_a_resumed_crawl_give_the_types_of_the_spider(tmp_path: Path) -> None:
    """The second crawl yields nothing itself: the class of the items is only in the module of the spider."""

    class Typed(Spider):
        def parse(self, response: Response) -> Any:
            yield DataclassItem("page")

    config = settings(frontier=f"sqlite:///{tmp_path}/typed.db")
    async with SiteServer(pages=1) as site:
        arguments = {"start_urls": [site.url]}
        assert [item async for item in crawl(Typed, settings(), arguments=arguments)] == [DataclassItem("page")]
        first = await crawl(Typed, config, arguments=arguments)
        again = await crawl(Typed, config, arguments=arguments)
    assert first.items == again.items == [DataclassItem("page")]


async def test_what_a_crawl_that_was_not_awaited_has_is_refused() -> None:
    class Named(Spider):
        start_urls = ["http://127.0.0.1:9/"]

    made = crawl(Named, settings())
    for name in ("items", "summary"):
        with pytest.raises(RunError, match=r"has not run.*write: done = await crawl\(\.\.\.\)"):
            getattr(made, name)
    assert "await crawl" in repr(made)
    with pytest.warns(RuntimeWarning, match=r"crawl\(Named\): this crawl has not run"):
        made = None  # type: ignore[assignment]
    done = await crawl(Named, settings(retry={"max_attempts": 1}))
    assert done.items == []


async def test_items_that_are_elsewhere_are_not_an_empty_list(tmp_path: Path) -> None:
    async with SiteServer(pages=1) as site:
        start = {"start_urls": [site.url]}
        done = await crawl(Pages, settings(), arguments=start, outputs=[f"{tmp_path}/pages.jsonl"])
        with pytest.raises(RunError, match=r"keeps no items in memory; they go to .*pages\.jsonl"):
            _ = done.items
        stream = crawl(Pages, settings(), arguments=start)
        assert len([item async for item in stream]) == 2
        with pytest.raises(RunError, match="`async for`"):
            _ = stream.items


@pytest.mark.parametrize("wrong", ["shop.py", Path("shop.py"), dict, None])
def test_a_crawl_of_something_else_than_a_spider_says_what_it_needs(wrong: Any) -> None:
    with pytest.raises(SpiderError, match=r"needs a class that inherits from shoal\.Spider, not "):
        crawl(wrong)


async def test_requests_that_are_created_and_never_yielded_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """In callbacks of every kind. Those that are yielded sometimes, later or in another form are not reported."""

    class Forgetful(Spider):
        later: list[Request] = []

        def parse(self, response: Response) -> Any:
            response.follow_all("a", self.sometimes)  # forgotten
            Request(response.urljoin("/2"))  # forgotten
            yield Request(response.url, self.coroutine, dont_filter=True)
            yield Request(response.url, self.stream, dont_filter=True)
            for request in response.follow_all("a", self.sometimes):
                yield request.replace(priority=1)
            self.later.append(response.follow("/?later", self.last))
            yield from self.later
            return response.follow("/3")  # forgotten

        async def coroutine(self, response: Response) -> Any:
            links = response.follow_all("a")  # forgotten
            await asyncio.sleep(0)
            return [{"links": len(links)}]

        async def stream(self, response: Response) -> Any:
            await asyncio.sleep(0)
            form = Response(response.url, body=b"<form action=/4><input name=q></form>").form()
            form.submit(self.last)  # forgotten
            yield {"forms": 1}

        def sometimes(self, response: Response) -> Any:
            last = response.follow("/?sometimes", self.last, dont_filter=True)
            if response.url.endswith("/1"):
                yield last

        def last(self, response: Response) -> None:
            self.later.append(response.follow("/?kept"))

    async with SiteServer(pages=5) as site:
        await crawl(Forgetful, settings(), arguments={"start_urls": [site.url]})
    lines = Path(__file__).read_text().splitlines()
    forgotten = [f"line {number}:" for number, line in enumerate(lines, 1) if line.endswith("# forgotten")]
    reports = [record.getMessage() for record in caplog.records if "never yielded" in record.getMessage()]
    assert len(forgotten) == 5
    assert [line for line in forgotten if any(line in report for report in reports)] == forgotten
    assert len(reports) == 5


async def test_an_item_that_a_generator_returns_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Returning(Spider):
        def parse(self, response: Response) -> Any:
            if response.meta:
                return {"lost": response.url}
            yield Request(response.url, meta={"item": True}, dont_filter=True)
            yield Request(response.url, self.whole, dont_filter=True)
            return None

        def whole(self, response: Response) -> Any:
            return [{"kept": response.url}]

    async with SiteServer(pages=1) as site:
        done = await crawl(Returning, settings(), arguments={"start_urls": [site.url]})
    assert [list(item) for item in done.items] == [["kept"]]
    (report,) = [record.getMessage() for record in caplog.records if "instead of `return`" in record.getMessage()]
    assert "parse has a `yield`, so what it returned on 1 call is lost" in report


async def test_errback_hears_of_a_death_and_may_go_on() -> None:
    class Careful(Spider):
        url = ""

        def start(self) -> Any:
            yield Request(f"{self.url}/status/404", errback=self.failed)

        def failed(self, request: Request, error: Exception) -> Any:
            yield {"failed": request.url, "why": str(error)}
            yield Request(f"{self.url}/empty", callback=self.second)

        def second(self, response: Response) -> Any:
            yield {"second": response.status}

    async with MisbehavingServer() as server:
        done = await crawl(Careful, settings(), arguments={"url": server.url})
    assert [set(item) for item in done.items] == [{"failed", "why"}, {"second"}]
    assert done.summary is not None
    assert done.summary.dead_kinds == {"http 404": 1}


async def test_redirects_are_followed_with_their_chain() -> None:
    class Chain(Spider):
        def parse(self, response: Response) -> Any:
            yield {"url": response.url, "redirects": response.redirects}

    async with MisbehavingServer() as server:
        done = await crawl(Chain, settings(), arguments={"start_urls": [server.url + "/redirect/3"]})
    assert len(done.items) == 1
    assert done.items[0]["redirects"][0] == server.url + "/redirect/3"
    assert len(done.items[0]["redirects"]) == 3


async def test_the_page_limit_is_exact() -> None:
    async with SiteServer(pages=200) as site:
        done = await crawl(Pages, settings(scope={"max_pages": 20}), arguments={"start_urls": [site.url]})
        assert sum(count for path, count in site.hits.items() if path != "/robots.txt") == 20
    assert done.summary is not None
    assert done.summary.state == "limit"
    assert len(done.items) == 20


async def test_depth_limit() -> None:
    async with SiteServer(pages=200, links=3) as site:
        done = await crawl(Pages, settings(scope={"max_depth": 1}), arguments={"start_urls": [site.url]})
    assert done.summary is not None
    assert done.summary.state == "finished"
    assert 1 < len(done.items) < 10


async def test_a_delay_is_kept_from_the_end_of_one_fetch_to_the_next_robots_txt_included() -> None:
    async with SiteServer(pages=10, latency=0.02, robots="User-agent: *\nDisallow:\n") as site:
        await crawl(Pages, settings(download_delay=0.05), arguments={"start_urls": [site.url]})
        visits = sorted(site.log, key=lambda visit: visit.start)
        assert len(visits) == 12
        for before, after in zip(visits, visits[1:], strict=False):
            assert before.end is not None
            assert after.start - before.end >= 0.05


async def test_a_crawl_delay_of_robots_txt_is_kept() -> None:
    async with SiteServer(pages=5, robots="User-agent: *\nCrawl-delay: 0.1\n") as site:
        await crawl(Pages, settings(), arguments={"start_urls": [site.url]})
        starts = sorted(visit.start for visit in site.log)
        assert min(after - before for before, after in zip(starts, starts[1:], strict=False)) >= 0.1


async def test_concurrency_per_host_is_a_limit() -> None:
    async with SiteServer(pages=60, latency=0.01) as site:
        await crawl(Pages, settings(concurrency_per_host=3), arguments={"start_urls": [site.url]})
        events = sorted((moment, step) for visit in site.log for moment, step in ((visit.start, 1), (visit.end, -1)))
        flying = peak = 0
        for _, step in events:
            flying += step
            peak = max(peak, flying)
        assert 1 < peak <= 3


async def test_what_robots_txt_disallows_is_dead_with_that_reason() -> None:
    async with SiteServer(pages=20, robots="User-agent: *\nDisallow: /p/1\n") as site:
        done = await crawl(Pages, settings(), arguments={"start_urls": [site.url]})
        assert not any(path.startswith("/p/1") for path in site.hits)
    assert done.summary is not None
    assert done.summary.dead_kinds.get("robots", 0) > 0
    assert done.summary.stats.balanced


async def test_stop_finishes_what_is_in_flight_and_gives_the_rest_back() -> None:
    async with SiteServer(pages=500, latency=0.05) as site:
        made = Crawl(Pages(start_urls=[site.url]), settings())
        running = asyncio.ensure_future(made._run_to_end())
        while len(site.hits) < 10:
            await asyncio.sleep(0.01)
        made.stop()
        done = await asyncio.wait_for(running, 5)
    assert done.summary is not None
    assert done.summary.state == "stopped"
    assert done.summary.stats.leased == 0
    assert done.summary.stats.balanced
    assert len(done.items) == done.summary.stats.done


async def test_a_full_queue_makes_the_seeder_wait_and_loses_nothing() -> None:
    class Many(Spider):
        url = ""

        def start(self) -> Any:
            return [Request(f"{self.url}/p/{number}") for number in range(100)]

        def parse(self, response: Response) -> Any:
            yield {"url": response.url}

    async with SiteServer(pages=100) as site:
        done = await crawl(Many, settings(queue={"max_size": 10}), arguments={"url": site.url})
    assert len(done.items) == 100


async def test_priorities_decide_the_order() -> None:
    class Ordered(Spider):
        url = ""

        def start(self) -> Any:
            for number in range(10):
                yield Request(f"{self.url}/p/{number}", priority=number % 3)

        def parse(self, response: Response) -> Any:
            yield {"n": int(response.url.rpartition("/")[2])}

    async with SiteServer(pages=10) as site:
        done = await crawl(Ordered, settings(concurrency=1), arguments={"url": site.url})
    order = [item["n"] for item in done.items]
    assert order == sorted(range(10), key=lambda number: (-(number % 3), number))


async def test_spilling_to_disk_loses_nothing() -> None:
    async with SiteServer(pages=400, links=40) as site:
        done = await crawl(Pages, settings(queue={"in_memory": 5}), arguments={"start_urls": [site.url]})
    assert len({item["url"] for item in done.items}) == 401


async def test_yield_from_follow_all_is_the_same() -> None:
    class Habit(Spider):
        def parse(self, response: Response) -> Any:
            yield {"url": response.url}
            yield from response.follow_all("a", callback=self.parse)

    async with SiteServer(pages=20) as site:
        done = await crawl(Habit, settings(), arguments={"start_urls": [site.url]})
    assert len(done.items) == 21
    assert done.summary is not None
    assert done.summary.counters.item_errors == 0


async def test_what_a_slow_start_gave_is_crawled_while_it_waits() -> None:
    seen = asyncio.Event()

    class Slow(Spider):
        url = ""

        async def start(self) -> Any:  # type: ignore[override]
            yield f"{self.url}/p/1"
            yield f"{self.url}/p/2"
            await asyncio.wait_for(seen.wait(), 10)
            yield f"{self.url}/p/3"

        def parse(self, response: Response) -> Any:
            if response.url.endswith("/2"):
                seen.set()
            yield {"url": response.url}

    async with SiteServer(pages=5) as site:
        done = await crawl(Slow, settings(), arguments={"url": site.url})
    assert len(done.items) == 3


async def test_a_start_without_end_does_not_keep_its_pages_waiting() -> None:
    class Endless(Spider):
        url = ""

        def start(self) -> Any:
            number = 0
            while True:
                yield Request(f"{self.url}/leaf/{number}")
                number += 1

        def parse(self, response: Response) -> Any:
            yield {"url": response.url}

    async with MisbehavingServer() as server:
        made = Crawl(Endless(url=server.url), settings(scope={"max_pages": 10}))
        done = await asyncio.wait_for(made._run_to_end(), 30)
    assert len(done.items) == 10


async def test_what_fails_does_not_count_for_the_page_limit() -> None:
    class Mixed(Spider):
        url = ""

        def start(self) -> Any:
            for number in range(10):
                yield Request(f"{self.url}/status/404?{number}", priority=1)
                yield Request(f"{self.url}/leaf/{number}")

        def parse(self, response: Response) -> Any:
            yield {"url": response.url}

    async with MisbehavingServer() as server:
        done = await crawl(Mixed, settings(scope={"max_pages": 5}), arguments={"url": server.url})
    assert len(done.items) == 5


async def test_a_stream_ends_with_the_error_that_ended_the_crawl() -> None:
    class Broken(Spider):
        def start(self) -> Any:
            raise LookupError("nothing to start with")

    with pytest.raises(SpiderError, match="nothing to start with"):
        async for _ in crawl(Broken, settings()):
            pass


async def test_the_cache_answers_the_second_time(tmp_path: Path) -> None:
    cached = settings(cache={"enabled": True, "folder": str(tmp_path / "cache")}, robots={"obey": False})
    async with SiteServer(pages=20) as site:
        for _ in range(2):
            done = await crawl(Pages, cached, arguments={"start_urls": [site.url]})
            assert len(done.items) == 21
        assert max(site.hits.values()) == 1
    assert done.summary is not None
    assert done.summary.counters.from_cache == 21


async def test_retry_after_blocks_the_host_for_so_long() -> None:
    class Limited(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            if len(self.requests) == 2:
                return b"HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
            return super()._answer(name, request)

    class Two(Spider):
        def parse(self, response: Response) -> Any:
            yield {"url": response.url}

    async with Limited() as server:
        urls = [f"{server.url}/leaf/{number}" for number in range(2)]
        done = await crawl(Two, settings(concurrency=1), arguments={"start_urls": urls})
        moments = [visit.start for visit in server.requests if "leaf" in visit.path]
        refused = next(visit for visit in server.requests if "leaf" in visit.path)
    assert len(done.items) == 2
    assert refused.end is not None
    assert all(moment - refused.end >= 1 for moment in moments[1:])


async def test_robots_txt_holds_for_the_target_of_a_redirect() -> None:
    class Redirecting(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            if name == "robots.txt":
                text = b"User-agent: *\nDisallow: /leaf/"
                return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
            return super()._answer(name, request)

    async with Redirecting(robots="/robots.txt") as server:
        start = f"{server.url}/redirect-out?to=/leaf/1"
        done = await crawl(Pages, settings(), arguments={"start_urls": [start]})
        assert not any(visit.path.startswith("/leaf") for visit in server.requests)
    assert done.summary is not None
    assert done.summary.dead_kinds == {"robots": 1}


async def test_an_output_given_twice_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "a.jsonl")
    with pytest.raises(SinkError, match="given twice"):
        await crawl(Pages, settings(), outputs=[out, f"{tmp_path}/./a.jsonl"])
    with pytest.raises(SinkError, match="file of the frontier"):
        await crawl(Pages, settings(frontier=f"sqlite:///{tmp_path}/x.db"), outputs=[f"{tmp_path}/x.db"])


async def test_a_parquet_file_is_whole_when_a_crawl_in_memory_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    async with SiteServer(pages=500, latency=0.05) as site:
        made = Crawl(Pages(start_urls=[site.url]), settings(), outputs=[str(out)])
        running = asyncio.ensure_future(made._run_to_end())
        while len(site.hits) < 20:
            await asyncio.sleep(0.01)
        made.stop()
        done = await asyncio.wait_for(running, 10)
    assert done.summary is not None
    assert pyarrow.parquet.read_table(out).num_rows == done.summary.stats.items > 0


async def test_items_of_a_resumed_crawl_are_there_from_the_first_on(tmp_path: Path) -> None:
    stored = settings(frontier=f"sqlite:///{tmp_path}/x.db")
    async with SiteServer(pages=20) as site:
        for _ in range(2):
            done = await crawl(Pages, stored, arguments={"start_urls": [site.url]})
            assert len(done.items) == 21


@pytest.mark.parametrize(
    ("start_urls", "words"), [([], "no start requests"), (["http://elsewhere.example/"], "is in scope")]
)
async def test_nothing_to_crawl_is_said(start_urls: list[str], words: str, caplog: pytest.LogCaptureFixture) -> None:
    scope = {"allowed_domains": ["127.0.0.1"]}
    done = await crawl(Pages, settings(scope=scope), arguments={"start_urls": start_urls})
    assert done.summary is not None
    assert done.summary.state == "finished"
    assert words in caplog.text


async def test_stopping_without_grace_gives_back_also_what_has_not_begun() -> None:
    class Stopping(Pages):
        made: Crawl

        def start(self) -> Any:
            for number in range(20):
                yield Request(f"{self.url}/p/{number}")
            asyncio.get_running_loop().call_soon(self.made.stop)

        url = ""

    async with SiteServer(pages=20, latency=0.5) as site:
        spider = Stopping(url=site.url)
        spider.made = Crawl(spider, settings(shutdown_grace=0, robots={"obey": False}))
        done = await asyncio.wait_for(spider.made._run_to_end(), 5)
    assert done.summary is not None
    assert done.summary.state == "stopped"
    assert done.summary.stats.leased == 0
    assert done.summary.stats.balanced


async def test_a_middleware_of_the_users_own() -> None:
    async def signed(request: Request, fetch: Any) -> Response:
        response: Response = await fetch(request.replace(headers={"X-Signed": "yes"}))
        return response

    class Signed(Spider):
        middlewares = [signed]

        def parse(self, response: Response) -> Any:
            yield {"headers": dict(response.json()["headers"])}

    async with MisbehavingServer() as server:
        done = await crawl(Signed, settings(), arguments={"start_urls": [server.url + "/echo"]})
    assert {name.lower(): value for name, value in done.items[0]["headers"].items()}["x-signed"] == "yes"
