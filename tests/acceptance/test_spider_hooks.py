"""What a spider may declare beside its callbacks: hooks, pipelines, counters, outputs, fields, arguments."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shoal import Crawl, DropItem, Request, Response, Spider, crawl
from shoal.errors import SpiderError
from shoal.spider import check_declared
from tests.support import forking
from tests.support.forking import SHOAL
from tests.support.servers import SiteServer

FAST: dict[str, Any] = {"download_delay": 0, "retry": {"base_delay": 0.01}}


class Recorder:
    """A pipeline that records its life in the spider's list."""

    def open(self, spider: Spider) -> None:
        spider.happened.append("pipeline open")  # type: ignore[attr-defined]

    async def __call__(self, item: Any, spider: Spider) -> Any:
        return item

    async def close(self, spider: Spider) -> None:
        spider.happened.append("pipeline close")  # type: ignore[attr-defined]


class Pages(Spider):
    name = "pages"
    pipelines: ClassVar[Any] = [Recorder]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.happened: list[str] = []

    async def opened(self) -> None:
        self.happened.append("opened")

    def closed(self, reason: str) -> None:
        self.happened.append(f"closed {reason} after {self.stats['fetched']} pages")

    def parse(self, response: Response) -> Any:
        if not self.happened[-1].startswith("page"):
            self.happened.append("page")
        self.stats.inc("titles", len(response.css("h1")))
        yield {"url": response.url}
        yield response.follow_all("a")


async def test_hooks_are_called_once_in_order() -> None:
    async with SiteServer(pages=20) as site:
        done = await crawl(Pages(start_urls=[site.url]), FAST)
    assert done.spider.happened == [  # type: ignore[attr-defined]
        "pipeline open", "opened", "page", "closed finished after 21 pages", "pipeline close",
    ]  # fmt: skip
    assert done.summary is not None
    assert done.summary.own_counters == {"titles": 21}
    assert {"fetched", "items", "bytes", "errors", "titles"} <= set(done.spider.stats)


@pytest.mark.parametrize("reason", ["limit", "stopped", "failed"])
async def test_the_reason_of_the_end(reason: str, tmp_path: Path) -> None:
    class Ending(Pages):
        def start(self) -> Any:
            yield from self.start_urls
            if reason == "failed":
                raise ValueError("no more")

        def parse(self, response: Response) -> Any:
            if reason == "stopped":
                made.stop()
            return super().parse(response)

    async with SiteServer(pages=50) as site:
        limit = {"scope": {"max_pages": 5}} if reason == "limit" else {}
        made = Crawl(Ending(start_urls=[site.url]), {**FAST, **limit})
        await made
    assert made.spider.happened[-2].startswith(f"closed {reason} after ")  # type: ignore[attr-defined]
    assert made.spider.happened[-1] == "pipeline close"  # type: ignore[attr-defined]


async def test_a_hook_that_fails_fails_the_crawl() -> None:
    class Unopened(Pages):
        def opened(self) -> Any:
            raise ValueError("no licence")

    class Unclosed(Pages):
        def closed(self, reason: str) -> None:
            raise ValueError("disk full")

    async with SiteServer(pages=3) as site:
        done = await crawl(Unopened(start_urls=[site.url]), FAST)
        assert site.hits == {}
    assert done.summary is not None
    assert done.summary.state == "failed"
    assert re.search(r"opened\(\) failed: ValueError: no licence \(.*test_spider_hooks.py, line \d+\)", str(done.error))
    assert done.spider.happened == ["pipeline open", "pipeline close"]  # type: ignore[attr-defined]
    async with SiteServer(pages=3) as site:
        done = await crawl(Unclosed(start_urls=[site.url]), FAST)
    assert len(done.items) == 4
    assert done.summary is not None
    assert done.summary.state == "failed"
    assert "closed() failed: ValueError: disk full" in done.summary.error


async def test_cb_kwargs_reach_the_callback_and_only_it(tmp_path: Path) -> None:
    class Numbered(Spider):
        def start(self) -> Any:
            yield Request(self.start_urls[0], self.page, cb_kwargs={"name": "first", "request": 1}, errback=self.failed)
            yield Request("http://127.0.0.1:9/", self.page, cb_kwargs={"name": "x"}, errback=self.failed)

        def page(self, response: Response, name: str, request: int = 0) -> Any:
            yield {"name": name, "request": request}

        def failed(self, request: Request, error: Exception) -> Any:
            yield {"name": "failed " + request.cb_kwargs["name"]}

    async with SiteServer(pages=1) as site:
        done = await crawl(
            Numbered(start_urls=[site.url]),
            {**FAST, "retry": {"max_attempts": 1}, "frontier": f"sqlite:///{tmp_path}/q.db"},
        )
    assert sorted(item["name"] for item in done.items) == ["failed x", "first"]


async def test_outputs_and_fields_of_the_spider(tmp_path: Path) -> None:
    class Declared(Spider):
        outputs: ClassVar[Any] = [f"{tmp_path}/a.jsonl"]
        fields: ClassVar[Any] = ["title", "missing", "url"]

        def parse(self, response: Response) -> Any:
            yield {"extra": 1, "url": response.url, "title": response.css("h1::text").get()}

    async with SiteServer(pages=1) as site:
        done = await crawl(Declared(start_urls=[site.url]), FAST, outputs=[f"{tmp_path}/b.csv"])
    assert list(json.loads((tmp_path / "a.jsonl").read_text())) == ["title", "missing", "url", "extra"]
    assert (tmp_path / "b.csv").read_text().splitlines()[0] == "title,missing,url,extra"
    assert done.summary is not None
    assert done.summary.outputs == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.csv")


SPIDER = """
from shoal import DropItem, Spider

def cheap(item, spider):
    raise DropItem("too cheap")

class Shop(Spider):
    name = "shop"
    pipelines = [cheap]

    def __init__(self, category="all", **arguments):
        super().__init__(**arguments)
        self.category = category

    def parse(self, response):
        self.stats.inc("seen")
        yield {"url": response.url}
"""


def shoal(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forking.run([*SHOAL, *words], cwd=folder, capture_output=True, timeout=60)


async def test_reasons_of_dropped_items_are_in_the_summary_and_in_why(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SPIDER)
    async with SiteServer(pages=1) as site:
        url = site.url + "/"
        ran = await asyncio.to_thread(
            shoal, tmp_path, "run", "shop.py", "-a", f"start_urls={url}", "-a", "category=x", "--frontier",
            "sqlite:///q.db",
        )  # fmt: skip
        assert re.search(r"items dropped +1 \(too cheap\)", ran.stderr), ran.stderr
        assert re.search(r"seen +1 *\n", ran.stderr)
        why = await asyncio.to_thread(shoal, tmp_path, "why", url, "--frontier", "sqlite:///q.db")
        assert "items dropped: 1 (too cheap)" in why.stdout, why
        typo = await asyncio.to_thread(shoal, tmp_path, "run", "shop.py", "-a", "categry=x")
        assert typo.returncode == 2
        assert "Shop has no argument 'categry'; did you mean category?" in typo.stderr


def test_arguments_that_a_spider_does_not_declare() -> None:
    class Strict(Spider):
        def __init__(self, category: str = "all", *, size: int = 1) -> None:
            super().__init__()

    class Open(Spider):
        shelf = "a"

        def __init__(self, category: str = "all", **arguments: Any) -> None:
            super().__init__(**arguments)

    class Any_(Spider):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)

    check_declared(Strict, ["category", "size"])
    check_declared(Open, ["category", "shelf", "start_urls"])
    check_declared(Any_, ["whatever"])
    check_declared(Spider, ["whatever"])
    for kind in (Strict, Open):
        with pytest.raises(SpiderError, match="has no argument 'categories'; did you mean category"):
            crawl(kind, FAST, arguments={"categories": "x"})


def test_a_page_can_not_make_counters_without_end() -> None:
    spider = Spider()
    for number in range(5000):
        spider.stats.inc(f"name {number}")
    assert len(spider.stats.own) == 1001
    assert spider.stats["(other)"] == 4000


async def test_reasons_decided_by_pages_are_bounded() -> None:
    class Dropping(Spider):
        pipelines: ClassVar[Any] = [lambda item, spider: _drop(item)]

        def parse(self, response: Response) -> Any:
            yield from ({"n": n} for n in range(500))

    async with SiteServer(pages=1) as site:
        done = await crawl(Dropping(start_urls=[site.url]), FAST)
    assert done.summary is not None
    assert done.summary.counters.dropped == 500
    assert len(done.summary.counters.drop_reasons) == 101


def _drop(item: Any) -> Any:
    raise DropItem(f"number {item['n']}")
