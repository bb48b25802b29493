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
from shoal.cli.commands.start import _nothing_pushed
from shoal.cli.help import guard_terminal, raw_stderr
from shoal.cli.progress import SpeedMeter, _Lines, _Panel, duration, set_up_logging, time_left
from shoal.cli.summary import next_steps
from shoal.config import Config
from shoal.crawling.outcome import RunFacts, decide
from shoal.crawling.stats import Counters, CrawlSnapshot, Summary
from shoal.messages import printable
from shoal.ports import HostState, Run, RunState, Stats


def console() -> Console:
    return Console(file=io.StringIO(), width=160)


def text_of(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def snapshot() -> CrawlSnapshot:
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
    return CrawlSnapshot(stats=stats, hosts=[host, blocked], in_flight=1, counters=counters)


def ended(**changes: object) -> Summary:
    values: dict[str, object] = {
        "run_id": "20260215_120000_3fa9", "spider": "books", "state": "finished", "error": "",
        "stats": Stats(pushed=10, done=7, dead=3, items=6, duplicates=4), "dead_kinds": {"robots": 1, "http 404": 2},
        "counters": Counters(), "elapsed": 2.0, "outputs": ("books.jsonl",), **changes,
    }  # fmt: skip
    if values["state"] in ("finished", "limit"):
        facts = RunFacts(stats=values["stats"], dead_kinds=values["dead_kinds"])  # type: ignore[arg-type]
        values.setdefault("outcome", decide(facts, 0.3))
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


def test_the_panel_shows_why_a_crawl_waits() -> None:
    where = console()
    where.print(_Panel(where).render(snapshot()))
    assert "waiting:" not in text_of(where)
    where.print(_Panel(where).render(msgspec.structs.replace(snapshot(), waiting="shop.example is busy with run A")))
    assert "waiting: shop.example is busy with run A" in text_of(where)


def test_the_plain_line_has_the_same_numbers() -> None:
    line = _Lines(console()).line(snapshot())
    assert "pages=40" in line
    assert "ready=10 waiting=3 in_flight=1 errors=2" in line


COMMAND = ["run", "books.py", "-o", "a b.jsonl", "--frontier", "sqlite:///b.db"]


def test_the_summary_accounts_for_everything() -> None:
    where = console()
    counters = Counters()
    counters.fetched, counters.retried = 7, 2
    counters.out_of_scope, counters.too_deep, counters.redirected = 5, 3, 1
    counters.drop("sold out")
    shown = ended(counters=counters, own_counters={"bargains": 3}, unmatched={"p.prise": 60, "li.nxt a": 1})
    summary.show(where, shown, Config(frontier="sqlite:///b.db"), COMMAND)
    text = text_of(where)
    own, of_the_run = text.split("run 20260215_120000_3fa9\n")
    assert "books: finished" in own
    for row in (
        r"fetched +7 pages, 0 B \(1 redirect\)", r"retried +2", r"out of scope +5 \(3 beyond scope.max_depth\)",
        r"items dropped +1 \(sold out\)", r"bargains +3",
    ):  # fmt: skip
        assert re.search(row, own), row
    for row in (r"done +7", r"items +6", r"failed +2 \(http 404: 2\)", r"blocked by robots +1", r"duplicates +4"):
        assert re.search(row, of_the_run), row
    assert "`p.prise` matched nothing on 60 pages" in text
    assert "`li.nxt a` matched nothing on 1 page\n" in text


def test_rows_that_are_zero_are_hidden() -> None:
    where = console()
    summary.show(where, ended(stats=Stats(pushed=1, done=1), dead_kinds={}), Config())
    for name in ("retried", "out of scope", "failed", "blocked", "duplicates", "left", "lost", "dropped", "matched"):
        assert name not in text_of(where)
    assert re.search(r"items +0", text_of(where))
    where = console()
    summary.show(where, ended(stats=Stats(pushed=10, done=9)), Config())
    assert re.search(r"lost +1", text_of(where))


def test_the_next_commands_can_be_pasted() -> None:
    steps = next_steps(ended(failed_url="http://ex.com/a?b&c"), Config(frontier="sqlite:///b.db"), COMMAND)
    assert steps == [
        "next:",
        "  shoal retry-failed 20260215_120000_3fa9 --frontier sqlite:///b.db",
        "  shoal why 'http://ex.com/a?b&c' --run-id 20260215_120000_3fa9 --frontier sqlite:///b.db",
        "  shoal audit 20260215_120000_3fa9 --frontier sqlite:///b.db",
        "  shoal export 20260215_120000_3fa9 --frontier sqlite:///b.db -o 20260215_120000_3fa9.csv",
        "  shoal run books.py -O 'a b.jsonl' --frontier sqlite:///b.db --new-run",
    ]


def test_the_command_for_a_new_run_replaces_files_but_no_databases() -> None:
    command = ["run", "b.py", "-o", "a.csv", "-o", "a.db", "--output", "sqlite:///c.db?table=t", "--new-run"]
    steps = next_steps(ended(), Config(frontier="sqlite:///b.db"), command)
    assert steps[-1] == "  shoal run b.py -O a.csv -o a.db --output 'sqlite:///c.db?table=t' --new-run"


def test_a_crawl_that_ended_early_is_resumed_by_its_own_command() -> None:
    at = Config(frontier="sqlite:///b.db")
    left = Stats(pushed=10, done=7, ready=3)
    same = "  shoal run books.py -o 'a b.jsonl' --frontier sqlite:///b.db"
    assert next_steps(ended(state="stopped", stats=left), at, COMMAND)[1] == same
    assert next_steps(ended(state="stopped", stats=left), at, [*COMMAND, "--new-run"])[1] == same
    assert next_steps(ended(state="failed", error="disk full"), at, COMMAND)[1] == same
    limit = ended(state="limit", stats=left, dead_kinds={"robots": 3})
    steps = next_steps(limit, at, [*COMMAND, "--max-pages", "7"])
    assert steps[1] == f"{same} --max-pages 14"
    assert next_steps(limit, at, [*COMMAND, "--max-pages=7"])[1] == steps[1]
    assert not any("retry-failed" in step for step in steps)
    assert "sqlite:///crawl.db" in next_steps(limit, Config(), COMMAND)[0]


def test_the_next_commands_of_a_fleet_have_no_secrets() -> None:
    run = "20260215_120000_3fa9"
    steps = next_steps(ended(), Config(frontier="redis://h:6379/0"))
    assert f"  shoal stats {run} --frontier redis://h:6379/0" in steps
    steps = next_steps(ended(), Config(frontier="redis://:secret@h:6379/0"), ["run", "b.py", "-o", "mysql://u:pw@h/d"])
    assert steps[:2] == ["next, with the same --frontier:", f"  shoal retry-failed {run}"]
    assert "pw" not in "".join(steps)
    assert "secret" not in "".join(steps)


def test_a_failed_crawl_says_why() -> None:
    where = console()
    summary.show(where, ended(state="failed", error="out.jsonl: no space left"), Config(frontier="sqlite:///b.db"))
    assert "books: failed: out.jsonl: no space left\n" in text_of(where)


def test_a_lost_request_would_show() -> None:
    assert ended(stats=Stats(pushed=10, done=9)).lost == 1


def test_speed_is_that_of_the_last_seconds() -> None:
    speed = SpeedMeter(0.0)
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


@pytest.mark.parametrize(
    ("state", "pushed", "words"),
    [
        ("running", 3, "run r1 exists and has 3 requests, nothing was added: start its workers"),
        ("running", 1, "run r1 exists and has 1 request, nothing"),
        ("finished", 3, "nothing was added: it is finished; pass --new-run to crawl again"),
        ("running", 0, "run r1 has no start requests: set start_urls"),
    ],
)
def test_a_start_without_new_requests_says_why(state: RunState, pushed: int, words: str) -> None:
    assert words in _nothing_pushed(Run(run_id="r1", spider="books", state=state, created_at=0.0), pushed)
