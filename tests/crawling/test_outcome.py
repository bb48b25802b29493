"""The outcome of a run, from facts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.crawling.outcome import BROKEN_LINK, NOT_COUNTED, Outcome, RunFacts, Verdict, decide
from shoal.ports import Stats


def outcome_of(max_failed: float = 0.1, **facts: Any) -> Outcome:
    return decide(RunFacts(**facts), max_failed)


NONE_DONE = {"stats": Stats(pushed=3, dead=3)}
ALL_DONE = {"stats": Stats(pushed=9, done=9, items=9)}


@pytest.mark.parametrize(
    ("facts", "verdict", "reason"),
    [
        (ALL_DONE, "good", "^$"),
        ({**ALL_DONE, "expects_items": True}, "good", "^$"),
        ({**NONE_DONE, "dead_kinds": {"connect": 2, "dns": 1}}, "failed", "all 3 requests failed .connect: 2"),
        ({**NONE_DONE, "dead_kinds": {"robots": 3}}, "failed", "robots.txt forbids all 3"),
        ({**NONE_DONE, "dead_kinds": {"callback": 3}}, "failed", "every callback failed, on 3 pages"),
        ({"stats": Stats()}, "failed", "no start requests"),
        (
            {"stats": Stats(pushed=2, done=1, dead=1, redirects=1), "dead_kinds": {"dns": 1}},
            "failed", r"the only request failed \(dns\)",
        ),
        ({"stats": Stats(pushed=9, done=9), "expects_items": True}, "failed", "nothing was yielded on 9 pages"),
        ({"stats": Stats(pushed=9, done=9, item_errors=4), "expects_items": True}, "failed", "none of the 4 could be"),
        ({"stats": Stats(pushed=9, done=9), "expects_items": True, "dropped": 4}, "failed", "dropped all 4"),
        ({"stats": Stats(pushed=9, done=9)}, "good", "^$"),
        ({**ALL_DONE, "rule": "only 9 items"}, "failed", "^only 9 items$"),
        ({"stats": Stats(pushed=9, done=9, items=8, item_errors=1)}, "degraded", "1 item could not be stored"),
        (
            {"stats": Stats(pushed=9, done=4, dead=5, items=4), "dead_kinds": {"queue full": 5}},
            "degraded", "the queue was full .* for 5 links: `shoal retry-failed` queues them",
        ),
        ({**ALL_DONE, "rejected": 2}, "degraded", "an output could not take 2 items"),
        ({"stats": Stats(pushed=9, done=9, items=9, rewinds=1)}, "degraded", "went back in time once"),
        (
            {"stats": Stats(pushed=100, done=99, dead=1), "dead_kinds": {"callback": 1},
             "causes": {"ValueError in parse": 1}},
            "degraded", r"^1 of 100 pages failed \(ValueError in parse: 1\)$",
        ),
        ({"stats": Stats(pushed=100, done=90, dead=10), "dead_kinds": {"timeout": 10}}, "degraded", "10 of 100 pages"),
        (
            {"stats": Stats(pushed=100, done=89, dead=11), "dead_kinds": {"timeout": 11}},
            "failed", r"11 of 100 pages failed \(timeout: 11\); the limit is 10 % \(outcome.max_failed\)",
        ),
    ],
)  # fmt: skip
def test_the_verdict_is_never_better_than_the_facts(facts: dict[str, Any], verdict: Verdict, reason: str) -> None:
    outcome = outcome_of(**facts)
    assert outcome.verdict == verdict
    assert re.search(reason, "; ".join(outcome.reasons)), outcome.reasons


@pytest.mark.parametrize("kind", ["robots", "scope", BROKEN_LINK, "ignored"])
def test_pages_that_nobody_could_fetch_do_not_count(kind: str) -> None:
    outcome = outcome_of(stats=Stats(pushed=10, done=4, dead=6), dead_kinds={kind: 6})
    assert outcome.verdict == "good"
    assert outcome.accounted == f"10 pages accounted for: 4 done, 6 {NOT_COUNTED[kind]}"


def test_redirects_are_no_pages() -> None:
    """Redirects must not hide failed pages."""
    stats = Stats(pushed=200, done=189, redirects=100, dead=11)
    assert outcome_of(stats=stats, dead_kinds={"timeout": 11}).verdict == "failed"


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.0, "failed"), (0.04, "failed"), (0.05, "degraded"), (1.0, "degraded")]
)
def test_the_limit_is_a_setting(share: float, verdict: Verdict) -> None:
    assert outcome_of(share, stats=Stats(pushed=100, done=95, dead=5), dead_kinds={"dns": 5}).verdict == verdict


def test_only_a_good_run_says_that_every_page_is_accounted_for() -> None:
    causes = {"ValueError in parse": 36}
    failed = outcome_of(stats=Stats(pushed=41, done=5, dead=36), dead_kinds={"callback": 36}, causes=causes)
    accounted = "41 pages accounted for: 5 done, 36 failed (ValueError in parse: 36)"
    assert failed.headline() == f"finished, failed: {accounted}"
    good = outcome_of(**ALL_DONE)
    assert good.headline() == "finished: every page found is accounted for"
    assert good.headline("page limit reached") == "page limit reached"


def test_causes_that_are_not_complete_have_no_numbers() -> None:
    facts = {"stats": Stats(pushed=5000, done=1, dead=4999), "dead_kinds": {"callback": 4998, "dns": 1}}
    accounted = outcome_of(**facts, causes={"KeyError in parse": 998, "ValueError in parse": 2}).accounted
    assert accounted.endswith("4,999 failed (callback: 4,998, dns: 1, mostly KeyError in parse)")


def test_many_kinds_are_shortened() -> None:
    kinds = {f"http {status}": 1 for status in range(500, 509)}
    accounted = outcome_of(stats=Stats(pushed=10, done=1, dead=9), dead_kinds=kinds).accounted
    assert accounted.endswith("http 504: 1, 4 more kinds)")


def test_one_broken_link_is_one() -> None:
    outcome = outcome_of(stats=Stats(pushed=5, done=4, dead=1), dead_kinds={BROKEN_LINK: 1})
    assert outcome.accounted.endswith("4 done, 1 broken link")
