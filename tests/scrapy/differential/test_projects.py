"""The same projects under Scrapy and under Shoal, against the same shop: equal items, requests and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.scrapy.differential.runs import SCRAPY, Outcome, Project, run_all
from tests.scrapy.shop import shop

RULES = Project("rules.py")
DETAILS = Project("details.py", arguments=("pages=2",))
LOGIN = Project("login.py")
SITEMAP = Project("sitemap.py")
NODES = Project("xml_feed.py")
WHOLE_XML = Project("xml_feed.py", arguments=("iterator=xml",))
ROWS = Project("csv_feed.py")
STARTS = Project("starts.py")
ODD_DOMAINS = Project("domains.py", arguments=("domains=http://127.0.0.1/x,localhost,,127.0.0.1/path",))
PLAIN_DOMAIN = Project("domains.py", arguments=("domains=127.0.0.1",))
SHOP = Project("shop", "products", settings=("SHOP_PROXY=SHOP",))
PROJECTS = (RULES, DETAILS, LOGIN, SITEMAP, NODES, WHOLE_XML, ROWS, STARTS, ODD_DOMAINS, PLAIN_DOMAIN, SHOP)

Both = tuple[Outcome, Outcome]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Project, Both]]:
    assert SCRAPY.exists(), "the real Scrapy is missing: scripts/test installs it into .venv-scrapy"
    with shop() as opened:
        yield run_all(PROJECTS, opened, tmp_path_factory.mktemp("projects"))


def name_of(project: Project) -> str:
    return "-".join([project.place.removesuffix(".py"), *(each.partition("=")[2][:12] for each in project.arguments)])


@pytest.mark.parametrize("project", PROJECTS, ids=name_of)
def test_the_items_are_the_same(runs: dict[Project, Both], project: Project) -> None:
    scrapy, shoal = runs[project]
    assert [scrapy.problem, shoal.problem] == ["", ""]
    assert scrapy.items, scrapy.log
    assert shoal.item_texts == scrapy.item_texts, shoal.log


@pytest.mark.parametrize("project", PROJECTS, ids=name_of)
def test_the_site_sees_the_same_requests_as_often(runs: dict[Project, Both], project: Project) -> None:
    scrapy, shoal = runs[project]
    assert sum(scrapy.requests.values()) > 0
    assert shoal.requests == scrapy.requests


def test_start_requests_come_in_their_order_and_others_by_priority(runs: dict[Project, Both]) -> None:
    scrapy, shoal = runs[STARTS]
    first = ["/item/1", "/item/2", "/item/3", "/category/1"]
    assert scrapy.visitor.lines == [f"GET {each}" for each in (*first, "/item/13", "/item/11", "/item/10", "/item/12")]
    assert shoal.visitor.lines == scrapy.visitor.lines


def test_headers_are_the_same(runs: dict[Project, Both]) -> None:
    for project, target in ((DETAILS, "/echo"), (DETAILS, "/echo?post"), (SHOP, "/item/7"), (LOGIN, "/account/orders")):
        for name in ("user-agent", "x-project", "cookie", "referer", "accept", "content-type"):
            scrapy, shoal = (
                [
                    each.replace(run.visitor.url, "SHOP") if (each := value) else value
                    for value in run.visitor.headers(target, name)
                ]
                for run in runs[project]
            )
            assert scrapy, target
            assert shoal == scrapy, (target, name)


def test_pipelines_write_and_drop_the_same(runs: dict[Project, Both]) -> None:
    scrapy, shoal = runs[SHOP]
    assert len(scrapy.lines("written.jsonl")) == len(scrapy.items)
    assert shoal.lines("written.jsonl") == scrapy.lines("written.jsonl")
    assert scrapy.lines("closed.txt") == ["finished 3"]
    assert shoal.lines("closed.txt") == scrapy.lines("closed.txt")


def test_a_request_that_a_middleware_returns_is_asked_again_once(runs: dict[Project, Both]) -> None:
    for run in runs[SHOP]:
        assert Counter(run.visitor.lines)["GET /item/7"] == 2
