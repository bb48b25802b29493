"""docs/outcomes.md lists every verdict of the code, and no other."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from shoal.cli.commands.audit import _verdict
from shoal.cli.commands.outputs import _line
from shoal.crawling.outcome import Verdict
from shoal.operations.outputs import OutputReport
from shoal.operations.problem import ProblemKind
from shoal.operations.processes import ProcessState
from shoal.ports import Fault, OutputCount, RequestState, Rewind, RunState, Stats

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "outcomes.md").read_text()
WORDS = {
    "The outcome of a run": get_args(Verdict),
    "The state of a run": get_args(RunState),
    "The state of a request": get_args(RequestState),
    "A process": get_args(ProcessState),
}


def rows(heading: str) -> list[str]:
    """The first column of the table below a heading. Each row has a condition."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    pairs = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert all(len(condition) > 10 for _, condition in pairs)
    return [word for word, _ in pairs]


@pytest.mark.parametrize("heading", WORDS)
def test_the_page_lists_every_state(heading: str) -> None:
    assert rows(heading) == list(WORDS[heading])


def test_the_page_lists_every_verdict_of_an_audit() -> None:
    fault = Fault(kind="ready", count=1, what="a ready request is in no queue")
    ledgers = [
        Stats(pushed=2, done=1), Stats(pushed=2, done=2, faults=(fault,)), Stats(pushed=2, done=2),
        Stats(pushed=2, done=1, ready=1), Stats(pushed=9, done=4, waiting=5), Stats(pushed=2, done=2, seeding=True),
    ]  # fmt: skip
    rewound = [Rewind(at=0.0)]
    lines = {_verdict(*facts)[0] for facts in product(ledgers, ([], rewound), (True, False))}
    verdicts = {re.sub(r"\d+ requests?", "N requests", re.split(r": (?=this|start|see)", line)[0]) for line in lines}
    assert verdicts == set(rows("An audit"))


def test_the_page_lists_every_verdict_of_an_output() -> None:
    counts = [None, *(OutputCount(items=items) for items in (3, 5, 7))]
    reports = [
        OutputReport(
            name="a", role="sink:a", position=position, logged=5, is_complete=is_complete, is_open=is_open, count=count,
            machine=machine,
        )
        for count, position, is_complete, is_open, machine in product(
            counts, (3, 5), (True, False), (True, False), ("", "web2")
        )
    ]  # fmt: skip
    lines = [re.sub(r"[\d,]+ ", "", line) for line in map(_line, reports)]
    words = {
        match[0] for line in lines if (match := re.search(r"abandoned|not counted|not written yet|[A-Z ]+$", line))
    }
    assert {word.strip() for word in words} == set(rows("An output"))


def test_an_output_with_all_items_lacks_none_even_if_its_writer_died_before_it_saved_its_position() -> None:
    killed = OutputReport(
        name="a", role="sink:a", position=20, logged=30, is_complete=False, count=OutputCount(items=30)
    )  # fmt: skip
    assert _line(killed) == "30 of 30 items"


def test_every_problem_has_a_condition() -> None:
    guide = (DOCS / "notifications.md").read_text()
    for kind in get_args(ProblemKind):
        assert re.search(rf"^\| `{kind}` \| .{{10,}} \|", guide, re.MULTILINE), kind
