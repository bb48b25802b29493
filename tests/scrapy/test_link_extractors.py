"""Link extractors: what the comparison with Scrapy does not show. For the rest see `differential/parts.py`."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest

from shoal.errors import SelectorError, TooComplexError
from shoal.scrapy.http import HtmlResponse
from shoal.scrapy.linkextractors import IGNORED_EXTENSIONS, Link, LinkExtractor


def page(text: str, url: str = "http://example.com/dir/page", **options: str) -> HtmlResponse:
    encoding = options.get("encoding", "utf-8")
    return HtmlResponse(url, body=text.encode(encoding), encoding=encoding)


def urls(extractor: LinkExtractor, response: HtmlResponse) -> list[str]:
    return [link.url for link in extractor.extract_links(response)]


def test_a_decision_is_remembered_for_pages_where_it_means_the_same() -> None:
    extractor = LinkExtractor()
    text = '<a href="/top">1</a><a href="near">2</a><a href="?q">3</a><a href="#f">4</a><a href="">5</a>'
    for url in ("http://a.example/x/1?z", "http://a.example/x/2", "http://a.example/y/1", "http://b.example/x/1"):
        origin, folder, path = url[:16], url[: url.rindex("/") + 1], url.partition("?")[0]
        expected = [f"{origin}/top", f"{folder}near", f"{path}?q", f"{url}#f", url]
        assert urls(extractor, page(text, url)) == expected


def test_patterns_are_searched_once_for_a_link_that_is_on_many_pages() -> None:
    searched: list[str] = []

    class Counting(LinkExtractor):
        def _matches_patterns(self, url: str) -> bool:
            searched.append(url)
            return super()._matches_patterns(url)

    extractor = Counting(allow="/a")
    for number in range(5):
        assert urls(extractor, page('<a href="/a">x</a><a href="/b">y</a>', f"http://example.com/{number}")) == [
            "http://example.com/a"
        ]
    assert searched == ["http://example.com/a", "http://example.com/b"]


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.scrapy.linkextractors._MAX_REMEMBERED", 10)
    extractor = LinkExtractor()
    for number in range(50):
        response = page(f'<a href="/{number}">x</a><a href="/{number}b">y</a>', f"http://h{number}.example/")
        assert len(urls(extractor, response)) == 2
        assert sum(map(len, extractor._decided.values())) + len(extractor._decided) <= 14


def test_a_region_must_be_an_element() -> None:
    with pytest.raises(SelectorError, match=r"must be an element, but '//a/@href' finds /x"):
        urls(LinkExtractor(restrict_xpaths="//a/@href"), page('<a href="/x">x</a>'))


def test_text_and_nofollow_can_be_set() -> None:
    link = LinkExtractor().extract_links(page('<a href="/x" rel="Nofollow">a <b>b</b></a>'))[0]
    assert (link.text, link.nofollow) == ("a b", True)
    link.text, link.nofollow = "other", False
    assert link == Link("http://example.com/x", "other")
    with pytest.raises(TypeError, match="must be a str, not bytes"):
        Link(b"http://example.com")  # type: ignore[arg-type]


def test_links_can_be_copied_and_stored() -> None:
    link = LinkExtractor().extract_links(page('<a href="/x">text</a>'))[0]
    assert copy.deepcopy(link) == pickle.loads(pickle.dumps(link)) == link


def test_the_list_of_extensions() -> None:
    assert len(IGNORED_EXTENSIONS) == len(set(IGNORED_EXTENSIONS)) == 91
    assert {"tar.gz", "pdf", "jpg", "css", "webm", "docx"} <= set(IGNORED_EXTENSIONS)


def test_links_of_many_tags_keep_the_order_of_the_page() -> None:
    text = '<img src="/1"><a href="/2"></a><a data-u="/3" href="/4"></a><p><img src="/5"></p>'
    extractor = LinkExtractor(tags=("a", "img"), attrs=("src", "href", "data-u"), deny_extensions=())
    assert [url[-1] for url in urls(extractor, page(text))] == ["1", "2", "3", "4", "5"]


def test_names_with_special_characters() -> None:
    text = '<svg><a xlink:href="/1">x</a></svg><my-link ng:href="/2">y</my-link><a @go="/3">z</a>'
    extractor = LinkExtractor(tags=("a", "my-link"), attrs=("xlink:href", "ng:href", "@go"))
    assert urls(extractor, page(text)) == [f"http://example.com/{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("options", [{}, {"process_value": str}, {"attrs": "*"}])
def test_links_that_a_long_base_would_multiply_are_refused(options: dict[str, Any]) -> None:
    links = "".join(f"<a href={number}>x</a>" for number in range(2000))
    response = page(f"<base href='http://example.com/{'b' * 60_000}/'>{links}")
    with pytest.raises(TooComplexError):
        LinkExtractor(**options).extract_links(response)
    response = page(f"<base href='http://example.com/{'b' * 60_000}/'>{links}")
    with pytest.raises(TooComplexError):
        [response.follow(each) for each in response.css("a")]


def test_long_links_of_many_pages_are_not_remembered_without_limit() -> None:
    extractor = LinkExtractor()
    for number in range(100):
        text = "".join(f"<a href={number}/{each}/{'x' * 60_000}>x</a>" for each in range(20))
        assert len(urls(extractor, page(text))) == 20
    assert sum(len(href) + len(url or "") for kept in extractor._decided.values() for href, url in kept.items()) < 64e6


def test_many_attributes_take_linear_time() -> None:
    body = f"<a {' '.join(f'{number:x}' for number in range(200_000))} href=/x>"
    began = time.process_time()
    assert "http://example.com/x" in urls(LinkExtractor(attrs="*"), page(body))
    assert time.process_time() - began < 2
