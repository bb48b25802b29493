"""Where a crawl begins: start_urls, start_requests, start, arguments, allowed_domains, and colliding names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal import scrapy
from shoal.scrapy.http import Request
from tests.scrapy.crawling import SITE, crawl

PAGES = {"/": "home", "/a": "a", "/b": "b", "/c": "c"}


class Found(scrapy.Spider):
    name = "found"

    def parse(self, response: Any, **named: Any) -> Any:
        yield {"path": response.url.removeprefix(SITE)}


def paths(done: Any) -> list[str]:
    return sorted(each["path"] for each in done.items)


async def test_start_requests() -> None:
    class Own(Found):
        def start_requests(self) -> Any:
            for name in "ab":
                yield Request(f"{SITE}/{name}")

    assert paths(await crawl(Own, PAGES)) == ["/a", "/b"]


async def test_start_requests_may_return_a_list() -> None:
    class Own(Found):
        def start_requests(self) -> Any:
            return [Request(f"{SITE}/a"), *super().start_requests()]

        start_urls = [f"{SITE}/b"]

    assert paths(await crawl(Own, PAGES)) == ["/a", "/b"]


async def test_an_async_start() -> None:
    class Own(Found):
        async def start(self) -> Any:
            yield Request(f"{SITE}/c")
            async for each in super().start():
                yield each

        start_urls = [f"{SITE}/a"]

    assert paths(await crawl(Own, PAGES)) == ["/a", "/c"]


async def test_the_most_derived_class_decides_how_to_start() -> None:
    class Base(Found):
        def start_requests(self) -> Any:
            yield Request(f"{SITE}/a")

    class Own(Base):
        async def start(self) -> Any:
            yield Request(f"{SITE}/b")

    assert paths(await crawl(Own, PAGES)) == ["/b"]


async def test_arguments_of_the_spider() -> None:
    class Own(Found):
        def __init__(self, category: str = "", *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.start_urls = [f"{SITE}/{category}"]

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"path": response.url.removeprefix(SITE), "other": self.other}  # type: ignore[attr-defined]

    done = await crawl(Own, PAGES, arguments={"category": "c", "other": "x"})
    assert done.items == [{"path": "/c", "other": "x"}]


async def test_from_crawler_may_create_the_spider() -> None:
    class Own(Found):
        @classmethod
        def from_crawler(cls, crawler: Any, *args: Any, **kwargs: Any) -> Any:
            made = cls(*args, **kwargs)  # without super: the crawler is set all the same
            made.start_urls = [crawler.settings["FIRST"]]
            return made

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"path": response.url.removeprefix(SITE), "bot": self.settings.get("BOT_NAME")}

    done = await crawl(Own, PAGES, settings={"FIRST": f"{SITE}/a", "BOT_NAME": "b"})
    assert done.items == [{"path": "/a", "bot": "b"}]


async def test_names_that_shoal_uses_too() -> None:
    class Own(Found):
        start = 0  # type: ignore[assignment]
        outputs = ["mine"]
        pipelines = None
        stats = "x"
        start_urls = [f"{SITE}/"]

        def callback(self, response: Any) -> Any:
            yield {"path": "callback", "stats": self.stats, "outputs": self.outputs}

        def opened(self, response: Any) -> None:
            raise AssertionError("Shoal's hook, not Scrapy's")

        def parse(self, response: Any, **named: Any) -> Any:
            self.log("seen")
            yield Request(f"{SITE}/a", callback=self.callback)

    done = await crawl(Own, PAGES)
    assert done.items == [{"path": "callback", "stats": "x", "outputs": ["mine"]}]


async def test_start_urls_are_not_filtered_and_dont_filter_leaves_the_domains() -> None:
    class Own(Found):
        allowed_domains = ["site.test"]
        start_urls = ["http://elsewhere.test/start"]

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"path": response.url}
            yield Request(f"{SITE}/a", self.leaf)
            yield Request("http://sub.site.test/b", self.leaf)
            yield Request("http://elsewhere.test/no", self.leaf)
            yield Request("http://elsewhere.test/yes", self.leaf, dont_filter=True)
            yield Request("http://elsewhere.test/also", self.leaf, meta={"allow_offsite": True})

        def leaf(self, response: Any) -> Any:
            yield {"path": response.url}

    pages = dict.fromkeys(("/a", "/b", "/start", "/no", "/yes", "/also"), "")
    done = await crawl(Own, pages)
    assert sorted(each["path"] for each in done.items) == [
        "http://elsewhere.test/also", "http://elsewhere.test/start", "http://elsewhere.test/yes",
        "http://site.test/a", "http://sub.site.test/b",
    ]  # fmt: skip
    assert done.stats["offsite/filtered"] == 1


async def test_a_redirect_does_not_leave_the_domains() -> None:
    from tests.scrapy.crawling import Answer

    class Own(Found):
        allowed_domains = ["site.test"]
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any, **named: Any) -> Any:
            yield Request(f"{SITE}/moved", self.leaf, errback=self.failed)

        def leaf(self, response: Any) -> Any:
            yield {"path": response.url}

        def failed(self, failure: Any) -> Any:
            yield {"path": type(failure.value).__name__}

    moved = Answer("", 302, [("Location", "http://elsewhere.test/target")])
    done = await crawl(Own, {"/": "", "/moved": moved, "/target": ""})
    assert [each["path"] for each in done.items] == ["IgnoreRequest"]
    assert done.web.paths == ["/", "/moved"]


@pytest.mark.parametrize(
    ("domain", "followed"),
    [
        ("site.test", True),
        ("localhost", False),
        ("http://site.test/", False),
        ("site.test/shop", False),
        ("test", True),
    ],
)
async def test_allowed_domains_with_a_scheme_a_path_or_no_dot(
    domain: str, followed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Found):
        allowed_domains = [domain]
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"path": response.url.removeprefix(SITE)}
            if response.meta["depth"] == 0:
                yield Request(f"{SITE}/a")

    with caplog.at_level(logging.WARNING):
        done = await crawl(Own, PAGES)
    assert paths(done) == (["/", "/a"] if followed else ["/"]), "the same as in Scrapy"
    assert ("matches no host" in caplog.text and "write 'site.test'" in caplog.text) == ("/" in domain)


async def test_an_item_in_start_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Found):
        def start_requests(self) -> Any:
            yield {"an": "item"}
            yield Request(f"{SITE}/a")

    done = await crawl(Own, PAGES)
    assert paths(done) == ["/a"]
    assert "start() yielded a dict, which is not a request" in caplog.text
