"""The text of the panel, the plain lines and the summary."""

from __future__ import annotations

import io
import logging
import re
import sys
import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.cli import summary
from shoal.cli.progress import Speed, _Lines, _Panel, duration, set_up_logging, time_left
from shoal.cli.terminal import guard_terminal, raw_stderr
from shoal.config import Config
from shoal.crawling.stats import Counters, Snapshot, Summary
from shoal.ports import HostState, Stats
from shoal.printable import printable


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
    assert "run the same command again" in text_of(where)


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


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj.exe [bold red]x[/] \r\nforged"


def assert_is_safe(text: str) -> None:
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "forged" not in text.splitlines()
    assert "[bold red]x[/]" in text  # shown, and not obeyed


def test_what_pages_say_can_not_control_the_terminal_in_the_summary() -> None:
    where = Console(file=io.StringIO(), width=400)  # with markup
    changes = {"state": "failed", "error": EVIL, "spider": EVIL, "dead_kinds": {EVIL: 3}}
    summary.show(where, ended(**changes), Config())
    assert_is_safe(text_of(where))
    assert text_of(where).count("[bold red]x[/]") == 3


def test_what_pages_say_can_not_control_the_terminal_in_the_panel() -> None:
    where = Console(file=io.StringIO(), width=600)
    shown = snapshot()
    changes: list[dict[str, Any]] = [{"host": EVIL}, {"block_reason": EVIL}]
    shown.hosts[:] = [
        msgspec.structs.replace(host, **change) for host, change in zip(shown.hosts, changes, strict=True)
    ]
    shown.counters.errors[EVIL] = 1
    where.print(_Panel(where).render(shown))
    assert_is_safe(text_of(where))
    assert text_of(where).count("[bold red]x[/]") == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_what_pages_say_can_not_control_the_log(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    where = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=600, legacy_windows=False)
    logger = logging.getLogger("shoal")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        set_up_logging(where, "INFO")
        logging.getLogger("shoal.engine").warning("gave up url=%s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logging.getLogger("shoal.engine").exception("internal error")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    text = text_of(where) if terminal else capsys.readouterr().err
    assert "gave up" in text
    assert "Traceback" in text
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    first = next(line for line in text.splitlines() if "gave up" in line)
    assert first.rstrip().endswith("forged")


def test_nothing_that_is_printed_controls_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    output, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    guard_terminal()
    guard_terminal()  # once is enough, and twice does no harm
    print(EVIL)
    print("one\ttwo\nthree", EVIL, file=sys.stderr)
    assert_is_safe(output.getvalue().replace("\\x0d\n", "\\x0d "))
    assert "one\ttwo\nthree" in errors.getvalue()
    assert "\x1b" not in errors.getvalue()
    assert raw_stderr() is errors
    assert sys.stdout.isatty() is False


@given(st.text())
def test_printable_text_stays_as_it_is_and_other_text_becomes_printable(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert not any(unicodedata.category(char) in ("Cc", "Cs") for char in shown)
    assert "\n" not in shown
    if text.isprintable():
        assert shown == text
