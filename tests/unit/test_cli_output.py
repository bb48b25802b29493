"""What the panel, the plain lines and the summary say."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shoal.cli import summary
from shoal.cli.progress import Speed, _Lines, _Panel, duration, time_left
from shoal.config import Config
from shoal.events import Counters, Snapshot, Summary
from shoal.ports import HostState, Stats


def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def text_of(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def snapshot() -> Snapshot:
    counters = Counters()
    counters.fetched = 40
    counters.errors["http 503"] = 2
    host = HostState(
        host="shop.example", delay=2.0, why="robots.txt Crawl-delay", concurrency=1, in_flight=1, ready=7,
        blocked_for=0.0, block_reason="",
    )  # fmt: skip
    blocked = HostState(
        host="busy.example", delay=0.0, why="no delay", concurrency=8, in_flight=0, ready=3, blocked_for=30.0,
        block_reason="answered 429 with Retry-After",
    )  # fmt: skip
    stats = Stats(pushed=60, ready=10, waiting=3, leased=1, done=46, items=39)
    return Snapshot(stats=stats, hosts=[host, blocked], in_flight=1, counters=counters)


def ended(**changes: object) -> Summary:
    values: dict[str, object] = {
        "run_id": "20260215_120000_3fa9", "spider": "books", "state": "finished", "error": "",
        "stats": Stats(pushed=10, done=7, dead=3, items=6, duplicates=4), "dead_kinds": {"robots": 1, "http 404": 2},
        "counters": Counters(), "elapsed": 2.0, "outputs": ("books.jsonl",), **changes,
    }  # fmt: skip
    return Summary(**values)  # type: ignore[arg-type]


def test_the_panel_shows_each_host_with_its_delay_and_why() -> None:
    where = console()
    where.print(_Panel(where).render(snapshot()))
    text = text_of(where)
    for part in (
        "40 pages", "39 items", "10 ready", "3 waiting", "1 in flight", "2 errors", "shop.example", "2 s",
        "robots.txt Crawl-delay", "answered 429 with Retry-After: blocked for 30 s", "http 503: 2",
    ):  # fmt: skip
        assert part in text, part


def test_the_plain_line_has_the_same_numbers() -> None:
    line = _Lines(console()).line(snapshot())
    assert "pages=40" in line
    assert "ready=10 waiting=3 in_flight=1 errors=2" in line


def test_the_summary_accounts_for_everything() -> None:
    where = console()
    summary.show(where, ended(), Config(frontier="sqlite:///b.db"), "books.py")
    text = text_of(where)
    assert "books: finished" in text
    assert "blocked by robots" in text
    assert "2 (http 404: 2)" in text
    assert "lost" in text
    for step in ("retry-failed", "audit", "why URL", "export", "--new-run"):
        assert f"{step}" in text


def test_a_failed_crawl_says_why_and_how_to_go_on() -> None:
    where = console()
    summary.show(where, ended(state="failed", error="out.jsonl: no space left"), Config(frontier="sqlite:///b.db"))
    assert "no space left" in text_of(where)
    assert "the same command again" in text_of(where)


def test_the_next_step_after_a_page_limit_is_a_higher_one() -> None:
    steps = summary.next_steps(
        ended(state="limit", dead_kinds={"robots": 3}), Config(frontier="sqlite:///b.db"), "x.py"
    )
    assert "higher --max-pages" in steps[0]
    assert not any("retry-failed" in step for step in steps)


def test_a_lost_request_would_show() -> None:
    assert ended(stats=Stats(pushed=10, done=9)).lost == 1


def test_speed_is_that_of_the_last_seconds() -> None:
    speed = Speed(0.0)
    assert speed.measure(100, 1.0) == pytest.approx(100)
    for second in range(2, 40):
        rate = speed.measure(100 + second * 10, float(second))
    assert rate == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.24, "1.2 s"), (45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left_is_unknown_at_a_standstill() -> None:
    assert time_left(10, 0) == "?"
    assert time_left(100, 10) == "10 s"
