"""SitemapSpider: which requests it makes of a sitemap, and how indexes end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

import pytest

from shoal import SitemapSpider
from shoal.config import Config, HttpSettings, ScopeSettings, config_for
from shoal.crawling.callbacks import CallbackOutput, Callbacks
from shoal.crawling.files import FileChains
from shoal.crawling.stats import Counters
from shoal.errors import SitemapError, SpiderError
from shoal.http import Request, Response
from shoal.http.sitemaps import SitemapEntry
from shoal.urls.normalize import Scope

SITE = "http://ex.com"
MAP = SITE + "/map.xml"


def urlset(*paths: str, lastmod: str = "") -> bytes:
    date = f"<lastmod>{lastmod}</lastmod>" if lastmod else ""
    return f"<urlset>{''.join(f'<url><loc>{SITE}{path}</loc>{date}</url>' for path in paths)}</urlset>".encode()


def index(*paths: str, lastmod: str = "") -> bytes:
    date = f"<lastmod>{lastmod}</lastmod>" if lastmod else ""
    sitemaps = "".join(f"<sitemap><loc>{SITE}{path}</loc>{date}</sitemap>" for path in paths)
    return f"<sitemapindex>{sitemaps}</sitemapindex>".encode()


class Pages(SitemapSpider):
    sitemap_urls = [MAP]

    def parse(self, response: Response) -> None: ...

    def parse_book(self, response: Response) -> None: ...


async def found(spider: SitemapSpider, body: bytes, url: str = MAP, status: int = 200, **options: Any) -> list[Request]:
    request = Request(url, "parse_sitemap", cb_kwargs=options)
    response = Response(url, body=body, status=status, request=request)
    files = FileChains(Config(), Scope(ScopeSettings()), spider.stats)
    got: CallbackOutput = await Callbacks(spider, Counters(), files).call("parse_sitemap", request, response, **options)
    assert all(isinstance(link, Request) for link in got.links)
    return [link for link in got.links if isinstance(link, Request)]


async def paths(spider: SitemapSpider, body: bytes, **options: Any) -> list[str]:
    return [request.url.removeprefix(SITE) for request in await found(spider, body, **options)]


async def test_the_first_rule_that_matches_decides() -> None:
    class Books(Pages):
        rules = [(re.compile("/book/"), "parse_book"), ("/(shop|about)", Pages.parse)]

    requests = await found(Books(), urlset("/book/1", "/shop/book/2", "/about", "/other"))
    assert [(request.url, request.callback) for request in requests] == [
        (SITE + "/book/1", "parse_book"),
        (SITE + "/shop/book/2", "parse_book"),
        (SITE + "/about", "parse"),
    ]


async def test_relative_and_invalid_urls() -> None:
    spider = Pages()
    body = b"<urlset><url><loc>a b</loc></url><url><loc>mailto:x</loc></url><url><loc>http://</loc></url></urlset>"
    assert await paths(spider, body) == ["/a%20b"]
    assert dict(spider.stats.own) == {"sitemaps": 1, "sitemap entries": 3, "sitemap entries skipped": 2}


async def test_the_sitemaps_of_robots_txt_and_of_an_index() -> None:
    spider = Pages(follow="news|books")
    robots = b"User-agent: *\nDisallow: /\nSitemap: /books.xml\nSitemap: http://cdn.ex.com/news.xml\nSitemap: /x"
    requests = await found(spider, robots, SITE + "/robots.txt")
    assert [request.url for request in requests] == [SITE + "/books.xml", "http://cdn.ex.com/news.xml"]
    assert {request.callback for request in requests} == {"parse_sitemap"}
    assert await paths(spider, index("/books-1.xml.gz", "/other.xml")) == ["/books-1.xml.gz"]


@pytest.mark.parametrize("since", ["2026-05-01", date(2026, 5, 1)])
async def test_since(since: object) -> None:
    spider = Pages(since=since)
    assert await paths(spider, urlset("/old", lastmod="2026-04-30")) == []
    assert await paths(spider, urlset("/new", lastmod="2026-05-01")) == ["/new"]
    assert await paths(spider, urlset("/unknown")) == ["/unknown"]
    assert await paths(spider, index("/old.xml", lastmod="2026-04-30T23:59:59Z")) == []
    assert await paths(spider, index("/new.xml", lastmod="2026-05-02")) == ["/new.xml"]


async def test_alternate_links() -> None:
    body = b"""<urlset><url><loc>/a</loc><link rel="alternate" hreflang="de" href="/de/a"/></url></urlset>"""
    assert await paths(Pages(), body) == ["/a"]
    assert await paths(Pages(alternate_links=True), body) == ["/a", "/de/a"]


async def test_the_hooks() -> None:
    class Important(Pages):
        def sitemap_filter(self, entries: Iterable[SitemapEntry]) -> Iterator[SitemapEntry]:
            return (entry for entry in entries if float(entry.fields.get("priority", 0)) > 0.5)

        def page_request(self, url: str, entry: SitemapEntry) -> Request:
            return Request(url, self.parse, priority=float(entry.fields["priority"]))

    one = "<url><loc>/{}</loc><priority>{}</priority></url>"
    body = f"<urlset>{one.format('a', 0.4)}{one.format('b', 0.9)}</urlset>".encode()
    (request,) = await found(Important(), body)
    assert (request.url, request.priority) == (SITE + "/b", 0.9)


async def test_a_large_sitemap_is_read_in_portions() -> None:
    spider = Pages(links_per_page=4)
    body, all_paths = urlset(*(f"/{n}" for n in range(10))), []
    requests = await found(spider, body)
    while requests[-1].callback == "parse_sitemap":
        rest = requests.pop()
        assert (rest.url, rest.dont_filter, len(requests)) == (MAP, True, 3)
        all_paths += [request.url.removeprefix(SITE) for request in requests]
        requests = await found(spider, body, **rest.cb_kwargs)
    all_paths += [request.url.removeprefix(SITE) for request in requests]
    assert all_paths == [f"/{n}" for n in range(10)]
    assert dict(spider.stats.own) == {"sitemaps": 1, "sitemap entries": 10}


async def test_alternates_count_for_the_portion() -> None:
    links = "".join(f'<link rel="alternate" href="/{n}"/>' for n in range(5))
    body = f"<urlset>{f'<url><loc>/a</loc>{links}</url>' * 3}</urlset>".encode()
    requests = await found(Pages(links_per_page=8, alternate_links=True), body)
    assert len(requests) == 13
    assert requests[-1].cb_kwargs["skip"] == 2


async def test_endless_indexes_end() -> None:
    """An index that always lists three new indexes. The tree of them has exactly as many as are allowed at most."""
    spider = Pages(max_sitemaps=50)
    queue, seen = await found(spider, index("/1.xml", "/2.xml", "/3.xml")), 0
    while queue:
        request = queue.pop()
        seen += 1
        queue += await found(spider, index(*(f"/{seen}-{n}.xml" for n in range(3))), request.url, **request.cb_kwargs)
    assert 12 <= seen <= 50
    assert spider.stats["sitemaps not read"] > 0


async def test_indexes_are_nested_five_levels_deep_at_most() -> None:
    spider, level, requests = Pages(), 0, await found(Pages(), index("/0.xml"))
    while requests:
        level += 1
        (request,) = requests
        requests = await found(spider, index(f"/{level}.xml"), request.url, **request.cb_kwargs)
    assert level == 5


async def test_a_budget_holds_across_portions() -> None:
    spider = Pages(links_per_page=4, max_sitemaps=5)
    body = index(*(f"/{n}.xml" for n in range(20)))
    requests, sitemaps = await found(spider, body), []
    while requests and requests[-1].dont_filter:
        rest = requests.pop()
        sitemaps += requests
        requests = await found(spider, body, **rest.cb_kwargs)
    sitemaps += requests
    assert len(sitemaps) == 5


async def test_what_is_no_sitemap_fails_its_page() -> None:
    with pytest.raises(SitemapError, match="first element is <html>"):
        await found(Pages(), b"<html>Not found</html>")
    with pytest.raises(SitemapError, match="answered 404"):
        await found(Pages(), b"<html>Not found</html>", status=404)


async def test_the_begin_of_a_damaged_sitemap_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    import gzip

    body = gzip.compress(urlset("/a", "/b") + b" " * 100_000)
    spider = Pages()
    assert await paths(spider, body[:-50]) == ["/a", "/b"]
    assert "sitemap read in part url=http://ex.com/map.xml: the sitemap is not valid gzip" in caplog.text
    assert spider.stats["sitemaps read in part"] == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rules": [("(", "parse")]}, "invalid rules: .*; write pairs of a regular expression and a callback"),
        ({"rules": [("", "nothing")]}, "no method 'nothing'"),
        ({"rules": [("", 5)]}, "5 is not a callback"),
        ({"rules": ["/book/"]}, "invalid rules: .*are not pairs"),
        ({"follow": "["}, "invalid follow: .*; write regular expressions"),
        ({"since": "soon"}, "'soon' is not a date"),
        ({"sitemap_urls": ()}, "has no sitemap_urls"),
        ({"max_sitemaps": "many"}, "invalid literal for int"),
    ],
)
def test_mistakes_are_reported_before_the_first_fetch(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SpiderError, match=says):
        list(Pages(**options).start())


async def test_attributes_of_the_command_line_are_text() -> None:
    spider = Pages(links_per_page="3", max_sitemaps="7", alternate_links="false", since="2026-05-01")
    requests = await found(spider, urlset("/a", "/b", "/c"))
    assert [request.cb_kwargs for request in requests] == [{}, {}, {"level": 0, "budget": 7, "skip": 2}]
    assert Pages(alternate_links="true")._choice.alternates


def test_the_start() -> None:
    spider = Pages(sitemap_urls=MAP, start_urls=SITE)
    first, second = spider.start()
    assert isinstance(first, Request)
    assert (first.url, first.callback, first.render) == (MAP, "parse_sitemap", False)
    assert second == SITE


def test_the_size_of_sitemaps() -> None:
    class Own(Pages):
        settings = {"concurrency": 3}

    class Dotted(Pages):
        settings = {"http.max_body_bytes": 5}

    class Nested(Pages):
        settings = {"http": {"max_body_bytes": 6}}

    class Section(Pages):
        settings = {"http": HttpSettings(max_body_bytes=7)}

    class Other(Pages):
        settings = {"http": {"max_redirects": 6}}

    limits = [
        config_for(None, kind.settings, "x").http.max_body_bytes
        for kind in (Pages, Own, Dotted, Nested, Section, Other)
    ]
    assert limits == [50 << 20, 50 << 20, 5, 6, 7, 50 << 20]
    assert config_for(None, Own.settings, "x").concurrency == 3
