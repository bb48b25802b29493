"""Scrapy spiders on a frontier that survives a crash: what was done is not done again, and nothing is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy.adapter import adapt
from shoal.scrapy.http import Request
from shoal.scrapy.settings import Settings
from tests.scrapy.crawling import SITE, crawl, crawl_adapter

PAGES = {f"/{number}": f"<h1>{number}</h1>" for number in range(12)}


class Numbers(scrapy.Spider):
    name = "numbers"
    start_urls = [f"{SITE}/0"]

    def parse(self, response: Any, **named: Any) -> Any:
        number = int(response.css("h1::text").get())
        yield {"n": number, "from": response.meta.get("from")}
        if number < 11:
            yield Request(f"{SITE}/{number + 1}", meta={"from": (number, "page")}, errback=self.failed)

    def failed(self, failure: Any) -> None:
        raise AssertionError(failure)


async def test_a_run_is_resumed_where_it_was_stopped(tmp_path: Path) -> None:
    config = {"frontier": f"sqlite:///{tmp_path / 'run.db'}"}
    output = tmp_path / "items.jsonl"
    settings = {"FEEDS": {str(output): {"format": "jsonlines"}}}
    first = await crawl(Numbers, PAGES, settings={**settings, "CLOSESPIDER_ITEMCOUNT": 5}, config=config)
    assert first.stats["finish_reason"] == "closespider_itemcount"
    done = output.read_text().count("\n")
    assert 5 <= done < 12
    second = await crawl(Numbers, PAGES, settings=settings, config=config)
    assert len(second.web.requests) == 12 - done
    import json

    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["n"] for each in found] == list(range(12)), "every item once"
    assert found[-1]["from"] == [10, "page"]


async def test_jobdir_makes_a_run_durable(tmp_path: Path) -> None:
    settings = {"JOBDIR": str(tmp_path / "job"), "CLOSESPIDER_PAGECOUNT": 3}
    adapter = adapt(Numbers, Settings(settings))()
    done = await crawl_adapter(adapter, PAGES)
    assert len(done.items) == 3
    assert (tmp_path / "job" / "shoal.db").exists()
    assert done.crawl.config.frontier.startswith("sqlite:///")


class Callbacks(scrapy.Spider):
    name = "callbacks"
    start_urls = [f"{SITE}/0"]

    def parse(self, response: Any, **named: Any) -> Any:
        yield Request(f"{SITE}/1", partial(self.part, label="named"))
        yield Request(f"{SITE}/2", partial(self.part, "positional"))
        yield Request(f"{SITE}/3", "part", cb_kwargs={"label": "text"})

    def part(self, response: Any, label: str = "") -> Any:
        yield {"label": label}


async def test_a_partial_of_a_method_is_stored_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = await crawl(Callbacks, PAGES, config={"frontier": f"sqlite:///{tmp_path / 'run.db'}"})
    assert sorted(each["label"] for each in done.items) == ["named", "text"]
    assert "callback is a partial, which this frontier cannot store" in caplog.text
    assert done.crawl.summary is not None
    assert done.crawl.summary.own_counters == {"requests left out": 1}, "the summary says that something is missing"


async def test_live_objects_of_requests_that_are_not_fetched_are_not_kept() -> None:
    class Deep(scrapy.Spider):
        name = "deep"
        start_urls = [f"{SITE}/0"]
        custom_settings = {"DEPTH_LIMIT": 1}

        def parse(self, response: Any, **named: Any) -> Any:
            for number in range(1, 12):
                yield Request(f"{SITE}/{number}", meta={"live": [number]}, dont_filter=True)

    done = await crawl(Deep, PAGES)
    assert done.crawl.summary is not None
    assert done.crawl.summary.counters.too_deep == 121
    assert len(done.adapter.conversion.live) == 11, "those that were fetched; they are dropped later"


async def test_live_objects_of_requests_that_are_refused_are_not_kept() -> None:
    class Refused(scrapy.Spider):
        name = "refused"
        start_urls = [f"{SITE}/0"]

        def parse(self, response: Any, **named: Any) -> Any:
            yield Request(f"{SITE}/1", self.part, meta={"live": [1]}, dont_filter=True)
            yield Request(f"{SITE}/2", self.part, meta={"live": [2]}, dont_filter=True, headers={"a b": "invalid"})
            yield Request(f"{SITE}/private", self.part, meta={"live": [3]}, dont_filter=True)

        def part(self, response: Any) -> Any:
            yield {"live": response.meta["live"]}

    done = await crawl(Refused, PAGES, config={"scope.deny": ["private"]})
    assert done.items == [{"live": [1]}]
    assert len(done.adapter.conversion.live) == 1
    assert done.crawl.summary is not None
    assert done.crawl.summary.counters.out_of_scope == 1
