"""The rules of runs that share a host, and their bookkeeping in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.frontier.host_policy import (
    MAX_SHARING,
    RivalDelay,
    effective_delay,
    is_asking,
    is_live,
    pause_for,
    turns_left,
)
from shoal.frontier.politeness import Turns
from shoal.ports import FrontierOptions

NOW = 1000.0


class Run:
    """A run that shares a host, or seems to."""

    def __init__(self, weight: float = 1.0, delay: float = 0.0, *, called: float = NOW, asked: float = NOW) -> None:
        self.options = FrontierOptions(delay=delay, weight=weight)
        self.run_id = f"run-{weight}-{delay}"
        self.called = called
        self.asked = asked
        self.is_resting = False
        self.is_wanting = True

    def wants(self, host: str) -> bool:
        return self.is_wanting


def shared(runs: Sequence[Run], now: float = NOW) -> Turns:
    turns = Turns("a.example", runs[0], 0, now)
    for run in runs:
        turns.join(run, now)
    return turns


def take(turns: Turns, runs: Sequence[Run], rounds: int, concurrency: int = 1) -> Counter[int]:
    """All runs ask in each round, the first ones first; one request ends in each round."""
    counts: Counter[int] = Counter()
    for _ in range(rounds):
        for number, run in enumerate(runs):
            turns.join(run, NOW)
            if turns.take(run, concurrency, 0.0, NOW):
                counts[number] += 1
                break
    return counts


# -- the delay


@pytest.mark.parametrize(
    ("delays", "rival", "delay", "why"),
    [
        ((None, None, 1.0, None, None), None, 1.0, "download_delay"),
        ((None, None, 1.0, None, None), RivalDelay(0.5, "nightly"), 1.0, "download_delay"),
        ((None, None, 1.0, None, None), RivalDelay(1.0, "nightly"), 1.0, "download_delay"),
        ((None, None, 1.0, None, None), RivalDelay(2.0, "nightly"), 2.0, "download_delay of run nightly"),
        ((None, None, 0.0, None, None), RivalDelay(2.0, "nightly"), 2.0, "download_delay of run nightly"),
        ((0.0, None, 1.0, None, None), RivalDelay(2.0, "nightly"), 0.0, "no delay"),
        ((None, 0.5, 1.0, None, None), RivalDelay(2.0, "nightly"), 0.5, "set for all hosts"),
        ((None, None, 1.0, 3.0, None), RivalDelay(2.0, "nightly"), 3.0, "robots.txt Crawl-delay"),
        ((None, None, 1.0, None, 1.5), RivalDelay(2.0, "nightly"), 2.0, "download_delay of run nightly"),
    ],
)
def test_the_longest_delay_of_the_runs_counts(
    delays: tuple[float | None, float | None, float, float | None, float | None],
    rival: RivalDelay | None,
    delay: float,
    why: str,
) -> None:
    assert effective_delay(*delays, rival) == (delay, why)


# -- the rules


def test_a_run_is_live_for_ten_seconds_or_three_delays() -> None:
    assert is_live(NOW, 0.0, NOW + 9.9)
    assert not is_live(NOW, 0.0, NOW + 10)
    assert is_live(NOW, 20.0, NOW + 59)
    assert not is_live(NOW, 20.0, NOW + 60)


def test_a_host_waits_a_second_for_a_run_that_asked() -> None:
    assert is_asking(NOW, 0.0, NOW + 0.9)
    assert not is_asking(NOW, 0.0, NOW + 1)
    assert is_asking(NOW, NOW + 30, NOW + 30.9)
    assert not is_asking(NOW, NOW + 30, NOW + 31)
    assert not is_asking(0.0, NOW, NOW)


def test_turns_that_are_left() -> None:
    assert turns_left(1, 1.0, 5.0, 5.0) == 1
    assert turns_left(1, 1.0, 6.0, 5.0) == 0
    assert turns_left(1, 2.0, 5.5, 5.0) == 0
    assert turns_left(8, 1.0, 5.0, 5.0) == 8
    assert turns_left(8, 1.0, 13.0, 5.0) == 0
    assert turns_left(1, 0.1, 10.0, 10.0 - 1e-12) == 1  # sums of fractions are not exact


@given(st.floats(0, 1e6))
def test_a_run_asks_again_soon(delay: float) -> None:
    assert 0.05 <= pause_for(delay) <= 0.25


# -- the turns of a host


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 2), (3, 1), (0.5, 1), (1, 1, 1, 7)])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_turns_are_shared_by_weight(weights: Sequence[float], concurrency: int) -> None:
    runs = [Run(weight) for weight in weights]
    counts = take(shared(runs), runs, 1000, concurrency)
    assert counts.total() == 1000
    for number, weight in enumerate(weights):
        assert counts[number] == pytest.approx(1000 * weight / sum(weights), abs=2 * concurrency)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.booleans(), st.booleans()), min_size=2, max_size=5),
    st.lists(st.integers(0, 4), max_size=60),
)
def test_somebody_may_always_take_a_turn(runs_of: list[tuple[float, bool, bool]], order: list[int]) -> None:
    """Whoever asks, wants or took before: of those that ask, one is not refused."""
    runs = [Run(weight, asked=NOW if asks else 0.0) for weight, asks, _ in runs_of]
    for run, (_, _, wants) in zip(runs, runs_of, strict=True):
        run.is_wanting = wants
    turns = shared(runs)
    for number in order:
        turns.take(runs[number % len(runs)], 1, 0.0, NOW)
    assert any(turns.take(run, 1, 0.0, NOW) for run in runs)


def test_a_run_that_comes_later_has_no_credit() -> None:
    first, second = Run(), Run()
    turns = Turns("a.example", first, 0, NOW)
    for _ in range(100):
        turns.join(first, NOW)
        assert turns.take(first, 1, 0.0, NOW)
    counts = take(turns, [second, first], 10)
    assert counts[0] - counts[1] in (0, 2)


def test_a_run_that_missed_its_turn_is_not_waited_for() -> None:
    here, gone = Run(), Run()
    turns = shared([here, gone])
    assert not turns.take(here, 1, 0.0, NOW)
    assert turns.take(here, 1, 0.0, NOW + 1)
    assert gone.asked == 0
    assert turns.take(here, 1, NOW + 30, NOW + 30)


def test_the_turns_of_a_run_that_was_alone_count_while_they_are_in_flight() -> None:
    first, second = Run(), Run()
    turns = Turns("a.example", first, 8, NOW)
    turns.join(second, NOW)
    assert not turns.take(first, 8, 0.0, NOW)
    assert turns.take(second, 8, 0.0, NOW)


@pytest.mark.parametrize("gone", ["silent", "resting", "without requests"])
def test_runs_that_are_gone_are_dropped(gone: str) -> None:
    here, other = Run(), Run(delay=7)
    turns = shared([here, other])
    assert turns.rival_delay(here, NOW) == RivalDelay(7, other.run_id)
    later = NOW + 21
    other.called = here.called = later
    match gone:
        case "silent":
            other.called = NOW
        case "resting":
            other.is_resting = True
        case _:
            other.is_wanting = False
    assert turns.rival_delay(here, later) is None
    assert not turns.drop_gone(here, later)


def test_of_too_many_runs_the_longest_delays_stay() -> None:
    runs = [Run(delay=delay) for delay in range(2 * MAX_SHARING, 0, -1)]
    turns = shared(runs)
    me = Run()
    turns.join(me, NOW)
    rival = turns.rival_delay(me, NOW)
    assert rival is not None
    assert rival.delay == 2 * MAX_SHARING
    assert len(turns._uses) == MAX_SHARING
    assert turns.take(me, 1, 0.0, NOW + inf)
