"""nofollow and noindex: in links, meta tags and headers, for all crawlers or for this one."""

from __future__ import annotations

import time
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.crawling.page import ParsedPage, read_directives
from shoal.http import Request, Response
from shoal.spider import Spider
from tests.crawling.test_page import Site, parsed
from tests.support.fakes import SITE

NOFOLLOW = {"robots.nofollow": True}
NOINDEX = {"robots.noindex": True}
BOTH = NOFOLLOW | NOINDEX
LINKS = """<a href="/a">a</a> <a rel="NoFollow noopener" href="/b">b</a> <a rel=ugc href="/c">c</a>
<area rel=sponsored href="d"> <a rel="noopener" href="/e">e</a>
<a rel=nofollow href="/both">1</a> <a href="both">2</a>"""
NOW = datetime(2026, 6, 1, tzinfo=UTC)


def paths(done: ParsedPage) -> list[str]:
    return [request.url.removeprefix(SITE) for request in done.completion.children]


def page(body: str = LINKS, *tags: str, kind: str = "text/html") -> Response:
    headers = [("Content-Type", kind), *(("X-Robots-Tag", tag) for tag in tags)]
    return Response(SITE + "page", headers=headers, body=body.encode())


async def handled(
    response: Response, settings: dict[str, Any], spider: Spider | None = None
) -> tuple[Site, ParsedPage]:
    site = Site(response, spider, settings)
    return site, await parsed(site)


async def test_everything_is_followed_and_stored_by_default() -> None:
    _, done = await handled(page(LINKS, "none"), {})
    assert paths(done) == ["a", "b", "c", "e", "both"]
    assert len(done.completion.items) == 1
    assert done.completion.note == ""


async def test_marked_links_are_not_followed() -> None:
    """Unless another link to the same page is not marked."""
    site, done = await handled(page(), NOFOLLOW)
    assert paths(done) == ["a", "e", "both"]
    assert done.completion.note == "2 links were not followed: rel says nofollow (robots.nofollow)"
    assert site.counters.not_followed == 2
    assert len(done.completion.items) == 1


async def test_however_the_spider_makes_the_request() -> None:
    class Own(Spider):
        def parse(self, response: Response) -> Any:
            yield response.follow("/b")
            yield Request(SITE + "c")
            yield response.follow_all([SITE + "b", "./c", "x"])
            yield response.follow_all("a", allow="/(a|b)$")
            yield response.follow_all("area")

    site, done = await handled(page(), NOFOLLOW, Own())
    assert paths(done) == ["x", "a"]
    assert site.counters.not_followed == 6


async def test_a_link_that_was_not_followed_is_not_known() -> None:
    """Another page may link to it without nofollow."""
    _, done = await handled(page(), NOFOLLOW)
    assert done.admitted.hrefs == [(SITE + "page", ["/a", "/e", "/both", "both"])]


async def test_a_long_base_and_many_marked_links_are_not_multiplied() -> None:
    """Links beyond the limits are not followed, whether they are marked or not."""
    links = "".join(f"<a href={number} rel=nofollow>x</a>" for number in range(20_000))
    body = f"<base href='{SITE}{'b' * 60_000}/'>{links}<a href=last>x</a><a href=/last>x</a>"
    tracemalloc.start()
    began = time.process_time()
    _, done = await handled(page(body), NOFOLLOW)
    assert time.process_time() - began < 4
    assert tracemalloc.get_traced_memory()[1] < 256 << 20
    tracemalloc.stop()
    assert paths(done) == ["last"]


@pytest.mark.parametrize(
    ("meta", "tags"),
    [
        ('<meta name="robots" content="noindex, nofollow">', []),
        ('<META NAME=" ROBOTS " CONTENT="NONE">', []),
        ('<meta name="shoal" content="none">', []),
        ('<meta name="robots" content="nofollow"><meta name="shoal" content="noindex">', []),
        ("", ["noindex, nofollow"]),
        ("", ["noindex", "nofollow"]),
        ("", ["googlebot: all, shoal: none"]),
        ("", ["other: index", "max-snippet: 5, none"]),
        ('<meta name="robots" content="noindex">', ["nofollow"]),
    ],
)
async def test_a_page_that_forbids_both(meta: str, tags: list[str]) -> None:
    site, done = await handled(page(meta + LINKS, *tags), BOTH)
    assert paths(done) == []
    assert done.completion.items == []
    assert site.counters.dropped == 1
    assert "1 items were dropped: " in done.completion.note
    assert "links were not followed: " in done.completion.note
    _, done = await handled(page(meta + LINKS, *tags), NOFOLLOW)
    assert (paths(done), len(done.completion.items)) == ([], 1)
    _, done = await handled(page(meta + LINKS, *tags), NOINDEX)
    assert (len(paths(done)), done.completion.items) == (5, [])


@pytest.mark.parametrize(
    ("meta", "tags"),
    [
        ('<meta name="googlebot" content="none">', []),
        ('<meta name="description" content="none">', []),
        ('<meta name="robots" content="all">', []),
        ("<meta name=robots>", []),
        ("", ["googlebot: noindex, nofollow"]),
        ("", ["all", "nosnippet, noarchive"]),
        ("", ["unavailable_after: 31 Dec 2999 15:00:00 GMT"]),
    ],
)
async def test_what_is_meant_for_others(meta: str, tags: list[str]) -> None:
    _, done = await handled(page(meta + '<a href="/a">a</a>', *tags), BOTH)
    assert (paths(done), len(done.completion.items)) == (["a"], 1)


async def test_the_header_of_a_page_that_is_not_html() -> None:
    class Api(Spider):
        def parse(self, response: Response) -> Any:
            yield {"n": 1}
            yield Request(SITE + "next")

    body = '{"meta": "<meta name=robots content=none>"}'
    _, done = await handled(page(body, kind="application/json"), BOTH, Api())
    assert (paths(done), len(done.completion.items)) == (["next"], 1)
    _, done = await handled(page(body, "none", kind="application/json"), BOTH, Api())
    assert (paths(done), len(done.completion.items)) == ([], 0)


async def test_the_name_of_the_user_agent() -> None:
    agent = "Mozilla/5.0 (compatible; ShelfBot/2.1; +http://ex.com/bot)"
    for name, followed in (("shelfbot", []), ("ShelfBot", []), ("mozilla", ["a"]), ("shelf", ["a"])):
        _, done = await handled(page('<a href="/a">', f"{name}: nofollow"), {**NOFOLLOW, "user_agent": agent})
        assert paths(done) == followed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unavailable_after: 25 Jun 2010 15:00:00 PST", {"noindex"}),
        ("unavailable_after: Friday, 25-Jun-10 15:00:00 GMT, nofollow", {"noindex", "nofollow"}),
        ("unavailable_after: 2026-05-31", {"noindex"}),
        ("unavailable_after: 2026-06-02T00:00:00Z", set()),
        ("unavailable_after: soon", set()),
        ("shoal: unavailable_after: 2010-01-01", {"noindex"}),
        ("other: unavailable_after: 2010-01-01", set()),
        ("other: none, shoal: nofollow", {"nofollow"}),
        ("*: nofollow", {"nofollow"}),
        (" NoFollow ,,", {"nofollow"}),
        ("", set()),
        (":::,:", set()),
        ("a:" * 100_000 + "none", set()),
        ("," * 100_000, set()),
    ],
)
def test_directives(text: str, expected: set[str]) -> None:
    assert read_directives([text], frozenset({"shoal"}), NOW) == expected


@given(st.lists(st.text(max_size=60) | st.text("a:, ;*unavible_ftr0123456789-", max_size=60), max_size=3))
def test_any_text_may_be_a_directive(texts: list[str]) -> None:
    assert read_directives(texts, frozenset({"a"}), NOW) <= {"nofollow", "noindex"}


async def test_a_hostile_page_has_limits() -> None:
    """Thousands of links that need quoting, each marked."""
    many = "".join(f'<a rel=nofollow href="/ü {n}">x</a>' for n in range(30_000))
    _, done = await handled(page(many + '<a href="/a">a</a>'), NOFOLLOW)
    assert paths(done) == ["a"]
