"""The sites of the benchmarks, and the checks that compare a crawl with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.http import Response
from shoal.urls.normalize import normalize_url

BENCH = Path(__file__).parents[2] / "bench"
PAGES = 80


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "crawl"]:
        del sys.modules[name]


def file_of(root: Path, key: str) -> Path:
    """What nginx serves for a page of site c."""
    host, _, path = key.partition("/")
    if path.startswith("shop/item?id="):
        path = f"shop/item-{path.removeprefix('shop/item?id=').partition('&')[0]}.html"
    return root / host / (path + "index.html" if path.endswith("/") or not path else path)


def test_every_page_of_site_c_is_reachable_and_has_the_listed_facts(bench: None, tmp_path: Path) -> None:
    from crawl import web

    content = web.generate(PAGES, tmp_path)
    start = f"https://{content.hosts[0]}:{web.PORT}/"
    todo, seen, found = [start], {content.key_of(start)}, {}
    while todo:
        key = content.key_of(url := todo.pop())
        if key in content.errors:
            continue
        if key in content.redirects:
            host, _, path = content.redirects[key].partition("/")
            url = normalize_url(f"https://{host}:{web.PORT}/{path}")
            key = content.key_of(url)
        folder = key.split("/")[1]
        kind = f"text/html; charset={web.HEADERS[folder]}" if folder in web.HEADERS else "text/html"
        body = file_of(content.root, key).read_bytes()
        page = Response(url, headers={"Content-Type": kind}, body=body)
        title, h1 = (" ".join((page.css(f"{name}::text").get() or "").split()) for name in ("title", "h1"))
        assert key not in found
        found[key] = (title, h1, len(page.css("a[href]")))
        for link in page.links():
            if (target := content.key_of(link)) not in seen:
                seen.add(target)
                todo.append(link)
    assert found == {key: (facts.title, facts.h1, facts.links) for key, facts in content.pages.items()}
    assert content.errors <= seen
    assert content.redirects.keys() <= seen


def test_a_crawl_that_missed_repeated_or_changed_something_is_marked(bench: None, tmp_path: Path) -> None:
    from crawl import checks
    from crawl.content import Content, Facts
    from crawl.server import Serving

    content = Content(tmp_path, {f"/{name}": Facts(name, "h", 2) for name in "abcd"})
    good = {"title": "a", "h1": "h", "links": 2}
    items = [
        {**good, "url": "http://127.0.0.1:1/a"},
        {**good, "url": "http://127.0.0.1:1/a"},
        {**good, "url": "http://127.0.0.1:1/b", "title": "�"},
        {**good, "url": "http://127.0.0.1:1/c", "title": "c", "links": 1},
        {**good, "url": "http://127.0.0.1:1/other"},
    ]
    output = tmp_path / "pages.jsonl"
    output.write_text("".join(json.dumps(item) + "\n" for item in items))
    serving = Serving("http://127.0.0.1:1/", 0)
    serving.pages.update({"/a": 2, "/b": 1, "/c": 1})
    serving.refused["/other"] += 1
    found = checks.read_output(output, content)
    assert checks.check_pages(found, 4, content, serving, log=True) == [
        "1 of 4 pages not in the output",
        "1 items with a wrong title or h1",
        "1 items with a wrong number of links",
        "1 items of pages that the site does not have",
        "1 pages more than once in the output",
        "1 of 4 pages never requested",
        "1 pages fetched again",
        "1 requests answered with an error",
    ]


def test_a_complete_crawl_is_not_marked(bench: None, tmp_path: Path) -> None:
    from crawl import checks
    from crawl.content import Content, Facts
    from crawl.server import Serving

    content = Content(tmp_path, {"h/a b": Facts("t")}, {"h/old": "h/a b"}, frozenset({"h/gone"}), ("h",))
    output = tmp_path / "pages.jsonl"
    output.write_text(json.dumps({"url": "https://h:1/a%20b#x", "title": " t\n"}) + "\n")
    serving = Serving("https://h:1/", 0)
    serving.pages["h/a b"] += 1
    serving.refused.update(["h/old", "h/gone"])
    found = checks.read_output(output, content)
    assert checks.check_pages(found, 1, content, serving, log=True) == []
    serving.refused["h/gone"] += 1
    assert checks.check_pages(found, 1, content, serving, log=True) == ["1 pages fetched again"]
