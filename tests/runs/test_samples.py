"""The history of a run: how samples are thinned, who takes them, and how much room they need."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.frontier.memory import MemoryStore
from shoal.ports import Stats
from shoal.runs.samples import (
    SKEW,
    YOUNG,
    RunSample,
    SampleHistory,
    add_minute,
    add_quarter,
    add_second,
    adds,
    read_history,
    speeds,
    spread,
)

HOUR = 3600
DAY = 24 * HOUR
START = 1_700_000_000.0
BIG = Stats(pushed=10**10, ready=10**10, waiting=10**9, leased=10**6, done=10**10, dead=10**9, items=10**10)


def sample(at: float, done: int = 0) -> RunSample:
    return RunSample.of(Stats(done=done), at)


def gaps(samples: Sequence[RunSample]) -> list[float]:
    return [later.at - earlier.at for earlier, later in zip(samples, samples[1:], strict=False)]


async def written(store: MemoryStore) -> int:
    return sum(len(each.value) for each in await store.list_documents("run/r/history/"))


# -- thinning


def test_each_document_keeps_its_resolution() -> None:
    seconds: list[RunSample] = []
    minutes: list[RunSample] = []
    quarters: list[RunSample] = []
    for number in range(0, 2 * DAY, 5):
        new = sample(START + number, number)
        seconds = add_second(seconds, new)
        if number % 60 == 0:
            minutes, quarters = add_minute(minutes, new), add_quarter(quarters, new)
    assert (len(seconds), set(gaps(seconds))) == (181, {5.0})
    assert len(minutes) == 24 * 60 + 1
    assert set(gaps(minutes)) == {60.0}
    assert len(quarters) == 2 * 24 * 4 + 1
    assert min(gaps(quarters)[1:]) >= 900 - 60


def test_beyond_a_week_one_per_hour() -> None:
    quarters: list[RunSample] = []
    for number in range(0, 30 * DAY, 900):
        quarters = add_quarter(quarters, sample(START + number))
    old = [each for each in quarters if each.at < quarters[-1].at - 7 * DAY]
    assert len(old) == pytest.approx(23 * 24, abs=2)
    assert len(quarters) - len(old) == 7 * 96 + 1


@given(st.lists(st.floats(0.01, 900) | st.floats(0.01, 40 * DAY), min_size=1, max_size=300))
@settings(max_examples=60, deadline=None)
def test_no_sample_is_invented_and_the_newest_is_kept(steps: list[float]) -> None:
    at, seconds, minutes, quarters = START, list[RunSample](), list[RunSample](), list[RunSample]()
    every = set()
    for number, step in enumerate(steps):
        at = round(at + step, 3)
        new = sample(at, number)
        every.add(new)
        seconds, minutes, quarters = add_second(seconds, new), add_minute(minutes, new), add_quarter(quarters, new)
        assert seconds[-1] == new
    for kept, window in ((seconds, 900), (minutes, DAY), (quarters, None)):
        assert set(kept) <= every
        assert kept == sorted(kept, key=lambda each: each.at)
        assert window is None or at - kept[0].at <= window
    assert all(early.at // 60 != late.at // 60 for early, late in zip(minutes, minutes[1:], strict=False))
    assert all(early.at // 900 != late.at // 900 for early, late in zip(quarters, quarters[1:], strict=False))


def test_the_last_document_is_bounded() -> None:
    quarters = [sample(START + HOUR * number, number) for number in range(6000)]
    for number in range(6000, 6010):
        quarters = add_quarter(quarters, sample(START + HOUR * number, number))
    assert len(quarters) < 6000
    assert (quarters[0].done, quarters[-1].done) == (0, 6009)


async def test_a_run_of_a_week_takes_less_than_a_megabyte(thorough: bool) -> None:
    """Whatever its counters are."""
    store, at = MemoryStore(), START
    history = SampleHistory(store, "r")
    # Of minutes that are older than a day, the documents keep nothing but the first one of each quarter of an hour.
    for minute in range(7 * DAY // 60 + 20):
        if not thorough and minute % 15 and minute < 5 * DAY // 60:
            continue
        at = START + 60 * minute
        assert await history.add(RunSample.of(BIG, at), "a")
    for number in range(300):
        await history.add(RunSample.of(BIG, at + 5 * number), "a")
    assert await written(store) < 300_000
    largest = len(msgspec.msgpack.encode(RunSample.of(BIG, START)))
    assert largest * (300 + 1441 + 6000) < 1_000_000
    found = await read_history(store, "r")
    assert found == sorted(found, key=lambda each: each.at)
    assert len({each.at for each in found}) == len(found)
    assert found[0].at == START


async def test_a_new_sample_rewrites_only_the_small_document() -> None:
    store = MemoryStore()
    history = SampleHistory(store, "r")
    for number in range(DAY // 60):
        await history.add(sample(START + 60 * number), "a")
    before = {each.key: each.version for each in await store.list_documents("run/r/history/")}
    await history.add(sample(START + DAY - 60 + 5), "a")
    changed = [each for each in await store.list_documents("run/r/history/") if before[each.key] != each.version]
    assert [each.key for each in changed] == ["run/r/history/seconds"]
    assert len(changed[0].value) < 20_000


# -- reading


def test_fewer_points_cover_the_whole_time() -> None:
    samples = [sample(START + number, number) for number in range(1000)]
    few = spread(samples, 20)
    assert 18 <= len(few) <= 21
    assert (few[0], few[-1]) == (samples[0], samples[-1])
    assert max(gaps(few)) <= 60
    assert set(few) <= set(samples)
    assert spread(samples, 5000) == samples
    assert spread([], 5) == []


def test_the_speed_between_samples() -> None:
    found = speeds(
        [
            RunSample.of(Stats(done=10, dead=1, items=3), START),
            RunSample.of(Stats(done=18, dead=3, items=3), START + 5),
            RunSample.of(Stats(done=18, dead=0, items=13), START + 15),  # failed requests were retried
        ]
    )
    assert found == [None, (2.0, 0.0), (0.0, 1.0)]
    assert speeds([]) == []


# -- who takes them


@pytest.mark.parametrize(
    ("age", "taker", "expected"),
    [(0, "b", False), (YOUNG - 0.1, "b", False), (YOUNG, "b", True), (0, "a", True), (-30, "b", False),
     (-SKEW - 1, "b", True)],
)  # fmt: skip
def test_one_process_takes_the_samples(age: float, taker: str, expected: bool) -> None:
    assert adds([sample(START)], taker, "a", START + age) is expected


async def test_many_processes_at_once_add_one_sample() -> None:
    store = MemoryStore()

    async def add(number: int) -> bool:
        return await SampleHistory(store, "r").add(sample(START + number / 1000), f"worker {number}")

    assert sum(await asyncio.gather(*map(add, range(20)))) == 1
    assert len(await read_history(store, "r")) == 1


async def test_the_final_sample_is_added_once() -> None:
    store = MemoryStore()
    first, second = SampleHistory(store, "r"), SampleHistory(store, "r")
    await first.add(sample(START, 1), "a")
    assert not await second.add(sample(START + 1, 2), "b")
    assert await second.add(sample(START + 1, 2), "b", final=True)
    assert not await first.add(sample(START + 2, 2), "a", final=True)
    assert [each.done for each in await read_history(store, "r")] == [1, 2]


async def test_a_clock_that_was_wrong_hides_nothing_after_it_is_right() -> None:
    store = MemoryStore()
    history = SampleHistory(store, "r")
    await history.add(sample(START, 1), "a")
    await history.add(sample(START + 2 * HOUR, 2), "a")
    assert await SampleHistory(store, "r").add(sample(START + 10, 3), "b")
    assert [each.done for each in await read_history(store, "r")] == [1, 3]


async def test_a_run_without_samples_has_no_history() -> None:
    assert await read_history(MemoryStore(), "r") == []
