"""The judge finds each kind of problem, and none in a crawl that lost and repeated nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nemesis.judge import Item, expectation, judge_audit, judge_gaps, judge_outputs, judge_visits
from tests.nemesis.site import Plan, Site, Visit, graph_links, record_count

PLAN = Plan(pages=9, starts=3, slow_hosts=1, slow_pages=3, crawl_delay=1.0)
DONE = "run x of y: finished\n"


@pytest.fixture
def site() -> Site:
    return Site(["http://127.0.0.1:1", "http://127.0.0.1:2"], PLAN, Path("unused"))


def visits_of(site: Site) -> list[Visit]:
    """Of a flawless crawl: a request each 2 s."""
    pages = [tuple(page.split("/", 1)) for page in sorted(site.pages())]
    return [Visit(2.0 * n, 2.0 * n + 0.1, host, f"/{path}", "agent") for n, (host, path) in enumerate(pages)]


def items_of(site: Site, visit: int = 1) -> list[Item]:
    return [
        Item(page, record, visit)
        for page in sorted(site.pages())
        for record in range(record_count(int(page.rpartition("/")[2]), visit))
    ]


def verdict(site: Site, lines: list[Item], rows: list[Item]) -> str:
    return "\n".join(judge_outputs(site, {"the file": lines, "the table": rows}))


def test_a_flawless_crawl(site: Site) -> None:
    visits = visits_of(site)
    assert not judge_visits(site, visits, once=True)
    assert not judge_gaps(site, visits)
    assert not verdict(site, items_of(site), items_of(site)[::-1])
    assert not verdict(site, items_of(site, 2), items_of(site, 2))
    assert not judge_audit(f"{DONE}balanced: nothing lost", "never")
    assert not judge_audit(f"{DONE}the store went back twice; balanced", "went back")


def test_pages_that_were_never_fetched(site: Site) -> None:
    visits = [visit for visit in visits_of(site) if visit.path not in ("/n/1", "/s/2")]
    starts, linked = judge_visits(site, visits)
    assert starts.startswith("1 of 3 start URLs")
    assert linked.startswith("2 of 12 linked pages")


def test_a_page_that_was_fetched_twice(site: Site) -> None:
    visits = visits_of(site)
    again = [*visits, visits[3]]
    assert not judge_visits(site, again)
    assert "1 pages were fetched more than once" in judge_visits(site, again, once=True)[0]


def test_items(site: Site) -> None:
    whole = items_of(site)
    several = next(page for page in sorted(site.pages()) if record_count(int(page.rpartition("/")[2]), 1) > 1)
    assert "1 items are repeated in the file" in verdict(site, [*whole, whole[0]], whole)
    assert "1 of 15 pages have no item in the table" in verdict(
        site, whole, [item for item in whole if item.page != several]
    )
    assert "1 pages have only some items of a visit in the file" in verdict(
        site, [item for item in whole if item != Item(several, 0, 1)], whole
    )
    assert "1 pages have items of several visits in the table" in verdict(site, whole, [*whole, Item(several, 2, 2)])
    assert "items are in only one of the file and the table" in verdict(site, whole, items_of(site, 2))
    assert "1 pages in the file do not exist" in verdict(site, [*whole, Item("127.0.0.1:1/n/99", 0, 1)], whole)


def test_a_delay_that_was_not_kept(site: Site) -> None:
    visits = [Visit(at, at + 0.1, "127.0.0.1:2", f"/n/{n}", "agent") for n, at in enumerate((5.0, 6.1, 7.15))]
    assert "1 times a host was asked sooner" in judge_gaps(site, visits)[0]
    assert not judge_gaps(site, visits, unjudged=[(7.0, 8.0)])
    assert judge_gaps(site, visits, unjudged=[(5.0, 6.5)])


def test_a_delay_that_the_store_forgot(site: Site) -> None:
    robots = [Visit(at, at + 0.1, "127.0.0.1:2", "/robots.txt", "agent") for at in (5.0, 5.5)]
    assert judge_gaps(site, robots)
    assert judge_gaps(site, robots, lost=[(6.0, 7.0)])
    assert not judge_gaps(site, robots, lost=[(4.9, 5.4)])


def test_what_audit_says() -> None:
    assert 'claims "nothing lost"' in judge_audit(f"{DONE}balanced: nothing lost", "went back")[0]
    assert judge_audit(DONE, "went back")
    assert judge_audit(f"{DONE}the store went back", "never")
    assert judge_audit(f"{DONE}NOT BALANCED: the store went back", "went back")
    assert not judge_audit(f"{DONE}balanced: nothing lost", "maybe")
    assert judge_audit("run x of y: queued\nthe store went back", "went back")


def test_what_audit_has_to_say(site: Site) -> None:
    visits = visits_of(site)  # that end at 0.1, 2.1, 4.1 ... s
    assert expectation(visits, []) == "never"
    assert expectation(visits, [(3.0, 3.9)]) == "maybe"
    assert expectation(visits, [(3.0, 5.0)]) == "maybe"
    assert expectation(visits, [(0.2, 0.3), (3.0, 5.2)]) == "went back"


def test_every_page_has_a_way_to_it() -> None:
    """Over the redirects of the tree, too."""
    found, ahead = {0}, [0]
    while ahead:
        links = {int(link.rpartition("/")[2]) for link in graph_links(ahead.pop(), 900)}
        ahead += links - found
        found |= links
    assert found == set(range(900))
