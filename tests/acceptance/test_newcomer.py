"""The first hours with Shoal: what goes wrong is said, with what to write instead."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.acceptance.test_cli import lines, shoal

__all__ = ["shoal"]

SPIDER = '''
from shoal import Spider


class Books(Spider):
    """The books of the demo shop."""

    name = "books"
    start_urls = ["{shop}"]
    settings = {{"download_delay": 0, "scope.deny": ["/calendar/", "/slow", "/flaky"]}}

    def parse(self, response):
        for book in response.css("article.product"):
            yield {{"title": book.css("h3 a::attr(title)").get()}}
        yield response.follow_all("li.next a")
'''


@pytest.fixture
def books(shop: str, tmp_path: Path) -> Path:
    """A spider that yields the 60 books of the shop."""
    (tmp_path / "books.py").write_text(SPIDER.format(shop=shop))
    return tmp_path / "books.py"


def commands(text: str) -> list[list[str]]:
    """The commands that a summary proposes, without `shoal`."""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    shoal ")]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_items_that_go_nowhere_are_reported_with_the_command_that_keeps_them(
    shoal, books: Path, processes: str
) -> None:
    done = shoal("run", "books.py", "--processes", processes)
    assert "the 60 items were not written anywhere and are lost; to keep them:" in done.stderr
    (command,) = commands(done.stderr)
    assert "lost" not in shoal(*command).stderr
    assert len(lines(books.parent / "books.jsonl")) == 60


def test_items_that_a_pipeline_or_the_item_log_has_are_not_reported(shoal, books: Path) -> None:
    assert "not written anywhere" not in shoal("run", "books.py", "--frontier", "sqlite:///books.db").stderr
    text = books.read_text().replace("    name =", "    pipelines = [lambda item, spider: item]\n    name =")
    books.write_text(text)
    assert "not written anywhere" not in shoal("run", "books.py").stderr
