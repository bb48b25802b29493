"""docs/outcomes.md lists every verdict of the code, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from shoal.crawling.outcome import Verdict
from shoal.ports import RequestState, RunState

PAGE = (Path(__file__).parents[2] / "docs" / "outcomes.md").read_text()
WORDS = {
    "The outcome of a run": get_args(Verdict),
    "The state of a run": get_args(RunState),
    "The state of a request": get_args(RequestState),
}


def section(heading: str) -> str:
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("heading", WORDS)
def test_the_page_lists_every_verdict_with_its_condition(heading: str) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section(heading), re.MULTILINE)
    assert [word for word, _ in rows] == list(WORDS[heading])
    assert all(len(condition) > 10 for _, condition in rows)
