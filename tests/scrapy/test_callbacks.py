"""Callbacks of every kind: what they are, what they return, and how they fail."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, crawl

PAGES = {"/": "home", "/a": "a", "/b": "b"}


class One(scrapy.Spider):
    name = "one"
    start_urls = [f"{SITE}/"]


@pytest.mark.parametrize("kind", ["list", "single", "item", "none", "tuple", "iterator"])
async def test_what_a_callback_returns(kind: str) -> None:
    outputs: dict[str, Any] = {
        "list": [{"n": 1}, {"n": 2}],
        "tuple": ({"n": 1},),
        "single": Request(f"{SITE}/a", lambda response: {"n": 3}),
        "item": {"n": 4},
        "none": None,
        "iterator": iter([{"n": 5}, None]),
    }

    class Own(One):
        def parse(self, response: Any) -> Any:
            return outputs[kind]

    expected = {"list": [1, 2], "single": [3], "item": [4], "none": [], "tuple": [1], "iterator": [5]}
    assert [each["n"] for each in (await crawl(Own, PAGES)).items] == expected[kind]


async def test_async_callbacks_and_generators() -> None:
    class Own(One):
        async def parse(self, response: Any) -> Any:
            await asyncio.sleep(0)
            yield {"n": 1}
            yield Request(f"{SITE}/a", self.second)

        async def second(self, response: Any) -> Any:
            await asyncio.sleep(0)
            return [{"n": 2}]

    assert [each["n"] for each in (await crawl(Own, PAGES)).items] == [1, 2]


class Helper:
    def handle(self, response: Any) -> Any:
        yield {"n": "helper"}


async def test_callbacks_that_are_no_methods_of_the_spider() -> None:
    def function(response: Any, extra: str = "") -> Any:
        yield {"n": f"function{extra}"}

    class Own(One):
        def parse(self, response: Any) -> Any:
            number = 7
            yield Request(f"{SITE}/a?1", lambda response: self.named(response, number))
            yield Request(f"{SITE}/a?2", partial(self.named, number="partial"))
            yield Request(f"{SITE}/a?3", Helper().handle)
            yield Request(f"{SITE}/a?4", function)
            yield Request(f"{SITE}/a?5", "named", cb_kwargs={"number": "text"})
            yield Request(f"{SITE}/a?6", self.__private)
            yield Request(f"{SITE}/a?7", self.of_the_class)

        def named(self, response: Any, number: object) -> Any:
            yield {"n": number}

        def __private(self, response: Any) -> Any:
            yield {"n": "private"}

        @classmethod
        def of_the_class(cls, response: Any) -> Any:
            yield {"n": cls.name}

    pages = {f"/a?{number}": "" for number in range(1, 8)} | {"/": ""}
    done = await crawl(Own, pages)
    assert {each["n"] for each in done.items} == {7, "partial", "helper", "function", "text", "private", "one"}


async def test_a_callback_that_is_changed_later_is_the_one_that_is_called() -> None:
    class Own(One):
        def parse(self, response: Any) -> Any:
            self.after = self.first
            yield Request(f"{SITE}/a", self.after)
            self.after = self.second

        def first(self, response: Any) -> Any:
            yield {"n": "first"}

        def second(self, response: Any) -> Any:
            yield {"n": "second"}

    assert [each["n"] for each in (await crawl(Own, PAGES)).items] == ["first"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_generator_that_raises_keeps_what_it_has_yielded(is_async: bool) -> None:
    class Own(One):
        if is_async:

            async def parse(self, response: Any) -> Any:
                yield {"n": 1}
                yield Request(f"{SITE}/a", self.leaf)
                raise KeyError("price")
        else:

            def parse(self, response: Any) -> Any:
                yield {"n": 1}
                yield Request(f"{SITE}/a", self.leaf)
                raise KeyError("price")

        def leaf(self, response: Any) -> Any:
            yield {"n": 2}

    done = await crawl(Own, PAGES)
    assert sorted(each["n"] for each in done.items) == [1, 2]
    assert done.stats["spider_exceptions/KeyError"] == 1
    summary = done.crawl.summary
    assert summary is not None
    assert (summary.stats.dead, summary.dead_kinds) == (1, {"callback": 1}), "the page counts as failed"
    error = summary.counters.last_callback_error
    assert error is not None
    assert "KeyError in parse: 'price'" in error.reason
    assert "test_callbacks.py, line" in error.reason


async def test_a_spider_without_parse_says_so() -> None:
    class Own(One):
        pass

    done = await crawl(Own, PAGES)
    assert done.crawl.summary is not None
    assert "Own.parse callback is not defined" in str(done.crawl.summary.counters.last_callback_error)


async def test_a_string_that_names_no_method_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Own(One):
        def parse(self, response: Any) -> Any:
            yield Request(f"{SITE}/a", "missing")
            yield {"n": 1}

    assert len((await crawl(Own, PAGES)).items) == 1
    assert "has no method 'missing'" in caplog.text
    assert "test_callbacks.py, line" in caplog.text
