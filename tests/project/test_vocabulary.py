"""One vocabulary for the states of a request: in commands, API, dashboard and programs."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.api.batch.session import Progress
from shoal.api.dashboard.pages import bar_parts
from shoal.api.resources.runs import RequestCounts
from shoal.crawling.stats import STATE_NAMES, counts, ledger
from shoal.operations.charts import state_chart
from shoal.operations.metrics import of_depth
from shoal.ports import Stats

ROOT = Path(__file__).parents[2]
WORDS = {"ready": 1, "waiting": 2, "in_flight": 4, "done": 8, "failed": 16}
STATS = Stats(pushed=31, ready=1, waiting=2, leased=4, done=8, dead=16)


def test_every_counter_has_the_same_names() -> None:
    told = ledger(STATS)
    assert {word: told[word] for word in WORDS} == WORDS
    assert {word: getattr(STATS, word) for word in WORDS} == WORDS
    assert told["left"] == STATS.left == 7
    spoken = {word.replace("_", " "): count for word, count in WORDS.items()}
    assert {part.label: part.number for part in bar_parts(STATS)} == spoken
    assert {series.label for series in state_chart([]).series} == spoken.keys()
    assert WORDS.keys() <= set(RequestCounts.__struct_fields__)
    assert WORDS.keys() <= set(Progress.__struct_fields__)
    assert {sample.labels["state"]: sample.value for sample in of_depth(STATS, {})[0].samples} == WORDS
    assert {STATE_NAMES.get(state, state) for state in ("ready", "waiting", "leased", "done", "dead")} == spoken.keys()


def test_a_work_queue_has_the_names_of_work_queues() -> None:
    assert counts(STATS) == {"pending": 3, "claimed": 4, "completed": 8, "failed": 16, "remaining": 7}


def test_no_page_of_the_dashboard_counts_under_another_name() -> None:
    other = re.compile(r">(Queued|Leased|Dead|Pending|Claimed)<|\}\} (queued|leased|dead|claimed)<")
    for template in (ROOT / "src/shoal/api/dashboard/templates").glob("*.html"):
        shown = other.findall(template.read_text())
        assert not shown, (template.name, shown)
