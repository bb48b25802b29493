"""Rules: what they follow, whom they call, and the methods that projects override."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest

from shoal.http import Duplicates
from shoal.scrapy.http import HtmlResponse, Request, Response, TextResponse
from shoal.scrapy.linkextractors import Link, LinkExtractor
from shoal.scrapy.spiders import CrawlSpider, Rule

PAGE = (
    b'<a href="/item/1">One</a> <a href="/item/2#x">Two</a> <a href="/list?page=2">More</a> <a href="/item/1">Again</a>'
)
URL = "http://example.com/list"


def page(meta: dict[str, Any] | None = None) -> HtmlResponse:
    return HtmlResponse(URL, body=PAGE, encoding="utf-8", request=Request(URL, meta=meta))


class Spider(CrawlSpider):
    name = "spider"
    allowed: list[str] = []

    def found(self, response: Response, **options: Any) -> Any:
        return {"found": response.url, **options}


def outputs(spider: CrawlSpider, response: Response, callback: str = "_parse") -> list[Any]:
    return list(getattr(spider, callback)(response))


def urls(found: Iterable[Any]) -> list[str]:
    return [each.url.removeprefix("http://example.com") for each in found if isinstance(each, Request)]


def test_start_pages_are_followed_and_parsed() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(allow="item"), callback="found")]

        def parse_start_url(self, response: Response, **options: Any) -> Any:
            return [{"start": response.url}]

    found = outputs(Own(), page())
    assert found[0] == {"start": URL}
    assert urls(found) == ["/item/1", "/item/2#x"]
    assert [request.meta for request in found[1:]] == [
        {"rule": 0, "link_text": "One"}, {"rule": 0, "link_text": "Two"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "follows"),
    [
        ({}, True),
        ({"callback": "found"}, False),
        ({"callback": "found", "follow": True}, True),
        ({"follow": False}, False),
    ],
)
def test_a_rule_with_a_callback_does_not_follow_by_default(options: dict[str, Any], follows: bool) -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(), **options)]

    found = outputs(Own(), page({"rule": 0}), "_callback")
    assert bool(urls(found)) is follows
    assert ({"found": URL} in found) is ("callback" in options)


def test_callbacks_are_names_or_functions() -> None:
    class Own(Spider):
        rules = [
            Rule(LinkExtractor(), callback="found", cb_kwargs={"by": "name"}),
            Rule(LinkExtractor(), callback=lambda response, **options: {"lambda": response.url}),
        ]

    assert outputs(Own(), page({"rule": 0}), "_callback") == [{"found": URL, "by": "name"}]
    assert outputs(Own(), page({"rule": 1}), "_response_downloaded") == [{"lambda": URL}]


def test_the_callback_of_a_request_adds_to_the_arguments_of_its_rule() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(), callback="found", cb_kwargs={"a": 1, "b": 2})]

    assert list(Own()._callback(page({"rule": 0}), b=3)) == [{"found": URL, "a": 1, "b": 3}]


def test_a_callback_that_is_missing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(), callback="fuond")]

    with caplog.at_level(logging.WARNING):
        spider = Own()
    assert "callback 'fuond', but the spider has no such method" in caplog.text
    assert outputs(spider, page({"rule": 0}), "_callback") == []


def test_process_links_changes_urls() -> None:
    class Own(Spider):
        rules = [
            Rule(LinkExtractor(allow="item"), process_links="cut"),
            Rule(LinkExtractor(allow="item"), process_links=lambda links: [*links, Link("http://example.com/new")]),
        ]

        def cut(self, links: list[Link]) -> list[Link]:
            for link in links:
                link.url = link.url.partition("#")[0]
            return links

    # The second rule gets the link that the first one changed: it has another URL.
    assert urls(outputs(Own(), page())) == ["/item/1", "/item/2", "/item/2#x", "/new"]


def test_the_first_rule_that_finds_a_link_takes_it() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(allow="item/1")), Rule(LinkExtractor())]

    found = outputs(Own(), page())
    assert [(request.meta["rule"], request.meta["link_text"]) for request in found] == [
        (0, "One"),
        (1, "Two"),
        (1, "More"),
    ]


def test_process_request_takes_one_or_two_arguments() -> None:
    class Own(Spider):
        rules = [
            Rule(LinkExtractor(allow="item/1"), process_request="with_one"),
            Rule(LinkExtractor(allow="item/2"), process_request="with_two"),
            Rule(LinkExtractor(), process_request=lambda request, response: None),
        ]

        def with_one(self, request: Request) -> Request:
            return request.replace(priority=5)

        def with_two(self, request: Request, response: Response) -> Request:
            request.meta["from"] = response.url
            return request

    first, second = outputs(Own(), page())
    assert first.priority == 5
    assert second.meta["from"] == URL


def test_process_results_sees_what_callbacks_return() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(), callback="several")]

        def several(self, response: Response) -> Iterator[Any]:
            yield {"a": 1}
            yield {"a": 2}

        def process_results(self, response: Response, results: Iterable[Any]) -> Iterable[Any]:
            return [{**result, "url": response.url} for result in results]

    assert outputs(Own(), page({"rule": 0}), "_callback") == [{"a": 1, "url": URL}, {"a": 2, "url": URL}]


def test_async_callbacks() -> None:
    class Own(Spider):
        rules = [
            Rule(LinkExtractor(), callback="generator", follow=True),
            Rule(LinkExtractor(allow="x"), callback="coroutine"),
        ]

        async def generator(self, response: Response) -> AsyncIterator[Any]:
            yield {"a": 1}

        async def coroutine(self, response: Response) -> Any:
            return [{"b": 2}]

    async def collect(rule: int) -> list[Any]:
        return [each async for each in Own()._callback(page({"rule": rule}))]

    first, *links = asyncio.run(collect(0))
    assert first == {"a": 1}
    assert urls(links) == ["/item/1", "/item/2#x", "/list?page=2"]
    assert asyncio.run(collect(1)) == [{"b": 2}]


def test_outputs_can_be_awaited_too() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(allow="item/1"))]

    async def collect() -> list[Any]:
        return [each async for each in Own().parse_with_rules(page(), None, {})]

    assert urls(asyncio.run(collect())) == ["/item/1"]


def test_errbacks_of_rules() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor(), errback="failed"), Rule(LinkExtractor())]

        def failed(self, failure: Any) -> Any:
            return {"failed": failure.request.url}

    class Failure:
        def __init__(self, rule: int) -> None:
            self.request = Request(URL, meta={"rule": rule})

    assert list(Own()._errback(Failure(0))) == [{"failed": URL}]
    assert list(Own()._errback(Failure(1))) == []


def test_only_html_is_followed() -> None:
    class Own(Spider):
        rules = [Rule(LinkExtractor())]

    assert outputs(Own(), TextResponse(URL, body=PAGE, encoding="utf-8", request=Request(URL))) == []


def test_rules_of_an_instance() -> None:
    class Own(Spider):
        def __init__(self, word: str, **options: Any) -> None:
            self.rules = [Rule(LinkExtractor(allow=word))]
            super().__init__(**options)

    class Later(Own):
        def __init__(self, word: str) -> None:
            super().__init__("nothing")
            self.rules = [Rule(LinkExtractor(allow=word))]
            self._compile_rules()

    assert urls(outputs(Own("page"), page())) == urls(outputs(Later("page"), page())) == ["/list?page=2"]


def test_methods_that_older_projects_override() -> None:
    class Own(Spider):
        rules = {Rule(LinkExtractor(allow="item"), callback="found")}  # some projects have a set

        def _build_request(self, rule: int, link: Link) -> Request:
            request = Request(link.url, callback=self._response_downloaded, headers={"A": "1"})
            request.meta.update(rule=rule, link_text=link.text)
            return request

        def _requests_to_follow(self, response: Response) -> Any:
            if response.meta.get("stop"):
                return None
            seen: set[Link] = set()
            made = []
            for number, rule in enumerate(self._rules):
                links: Any = [each for each in rule.link_extractor.extract_links(response) if each not in seen]
                if links and rule.process_links:
                    links = rule.process_links(links)  # type: ignore[operator]
                for link in links:
                    seen.add(link)
                    made.append(rule.process_request(self._build_request(number, link)))  # type: ignore[operator]
            return made

    found = outputs(Own(), page(), "parse")
    assert urls(found) == ["/item/1", "/item/2#x"]
    assert found[0].headers["A"] == b"1"
    assert found[0].callback.__name__ == "_response_downloaded"
    assert outputs(Own(), page({"stop": True})) == []


def test_no_requests_are_made_for_known_pages() -> None:
    class Own(Spider):
        rules = [
            Rule(LinkExtractor(allow="item/1")),
            Rule(LinkExtractor(allow="page"), process_request=lambda request, response: request),
        ]

    class Looking(Own):
        def _build_request(self, rule: int, link: Link) -> Request:
            return super()._build_request(rule, link)

    asked: list[str] = []

    def is_known(url: str) -> bool:
        asked.append(url)
        return True

    plain, looking = Own(), Looking()
    for spider in (plain, looking):
        spider._skip_known(is_known)
    request, known = outputs(plain, page())
    assert known == Duplicates(1)
    assert urls([request]) == ["/list?page=2"]  # a function of the project may change it
    assert asked == ["http://example.com/item/1"]
    assert urls(outputs(looking, page())) == ["/item/1", "/list?page=2"]
