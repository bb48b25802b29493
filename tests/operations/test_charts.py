"""Charts of the history of runs."""

from __future__ import annotations

import pytest

from shoal.frontier.memory.store import MemoryDocuments
from shoal.operations.charts import MAX_POINTS, speed_chart, state_chart
from shoal.runs.samples import RunSample, SampleHistory


def sample(at: float, done: int, items: int = 0, dead: int = 0) -> RunSample:
    return RunSample(at, done + dead + 10, 10, 0, 0, done, dead, items, 0, 0)


def test_speed_is_the_growth_between_two_times() -> None:
    """Failed pages count too. It grows evenly between two samples."""
    chart = speed_chart([[sample(1000, 0), sample(1100, 150, items=50, dead=50)]], 1000, 1100)
    pages, items = chart.series
    assert chart.times[0] == 1010
    assert chart.times[-1] == 1100
    assert pages.values == pytest.approx([2.0] * 10)
    assert items.values == pytest.approx([0.5] * 10)


def test_speeds_of_runs_are_added_and_pauses_are_zero() -> None:
    one = [sample(1000, 0), sample(1050, 50), sample(1100, 50)]  # nothing in the second half
    other = [sample(1050, 500), sample(1100, 600)]  # what it did before its first sample is not known
    pages = speed_chart([one, other, []], 1000, 1100).series[0].values
    assert pages == pytest.approx([1.0] * 5 + [2.0] * 5)


def test_a_store_that_went_back_has_no_negative_speed() -> None:
    assert min(speed_chart([[sample(0, 100), sample(100, 40)]], 0, 100).series[0].values) == 0


@pytest.mark.parametrize("histories", [[], [[]]])
def test_nothing_is_known(histories: list[list[RunSample]]) -> None:
    assert speed_chart(histories, 0, 100).times == []
    assert state_chart([]).times == []


def test_a_long_history_has_few_points() -> None:
    samples = [sample(5.0 * number, number) for number in range(10_000)]
    states = state_chart(samples)
    assert MAX_POINTS / 2 < len(states.times) <= MAX_POINTS + 1
    assert states.times == sorted(set(states.times))
    assert (states.times[0], states.times[-1]) == (samples[0].at, samples[-1].at)
    assert len(speed_chart([samples], samples[0].at, samples[-1].at).times) <= MAX_POINTS


async def test_a_day_is_read_without_older_samples() -> None:
    history = SampleHistory(MemoryDocuments({}), "run")
    for day in range(3):
        for minute in range(0, 1440, 30):
            await history.add(sample(86400.0 * day + 60 * minute, day * 1440 + minute), "taker")
    found = await history.read_day()
    assert len(await history.read()) > len(found) > 40
    assert found[-1].at - found[0].at <= 86400


def test_the_speed_begins_with_the_first_sample() -> None:
    """A run of two minutes fills the chart of an hour."""
    chart = speed_chart([[sample(9_880, 0), sample(10_000, 120)]], 6_400, 10_000)
    assert (chart.times[0], chart.times[-1]) == (9_890, 10_000)
    assert chart.series[0].values == pytest.approx([1.0] * 12)


def test_the_speed_ends_with_a_fresh_sample() -> None:
    """A run that works does not look slower because its next sample is not there yet. One that stopped does."""
    samples = [sample(1000, 0), sample(1100, 100)]
    assert speed_chart([samples], 1000, 1104).times[-1] == 1100
    chart = speed_chart([samples], 1000, 1200)
    assert (chart.times[-1], chart.series[0].values[-1]) == (1200, 0.0)
