"""Queries that never match are found; the others cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.http import Response
from shoal.selector.selectors import QueryUsage, begin_page, current

PAGE = b"<div class=a><p>1</p></div><div class=a><p>2</p></div><a href=/x>x</a>"


@pytest.fixture
def usage() -> Iterator[QueryUsage]:
    made = QueryUsage()
    token = current.set(made)
    yield made
    current.reset(token)


def page() -> Response:
    begin_page()
    return Response("http://ex.com/", body=PAGE)


def test_only_queries_that_never_matched_are_reported(usage: QueryUsage) -> None:
    for number in range(5):
        response = page()
        response.css("p::text").get()
        response.xpath("//h7").get()
        for each in response.css("div.a"):
            each.css("p.prise").get()
            each.css("b" if number else "p").get()
        response.css("div.b").css("i")  # nothing was queried for the second one
        response.follow_all("li.next a")
        response.follow_all()
        response.jmespath("no.such")
    assert usage.unmatched() == {"//h7": 5, "p.prise": 5, "div.b": 5, "li.next a": 5, "no.such": 5, "b": 4}


def test_a_query_that_matches_late_is_not_reported(usage: QueryUsage) -> None:
    for _ in range(3):
        page().css("b")
    begin_page()
    Response("http://ex.com/", body=b"<b>x</b>").css("b")
    page().css("b")
    assert usage.unmatched() == {}


def test_without_a_crawl_nothing_is_counted() -> None:
    assert page().css("nothing").getall() == []
    assert current.get() is None


def test_queries_without_end_are_bounded(usage: QueryUsage) -> None:
    response = page()
    for number in range(3000):
        response.css(f"p.c{number}")
    assert len(usage.unmatched()) == 1000
    response.css("p" + ":not(.x)" * 100 + ".y")
    for number in range(3000):
        response.xpath(f"//p[{number} < 5000]")
    assert len(usage.matched) <= 1001
    begin_page()
    response.css("q")  # it might have matched before: it is not known any more
    assert "q" not in usage.unmatched()
