"""Charts of the history of runs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from shoal.crawling.stats import STATE_NAMES
from shoal.operations.snapshot import ACTIVE, OVER
from shoal.ports import Run, Store
from shoal.runs.samples import RunSample, SampleHistory

STATES = ("done", "dead", "leased", "waiting", "ready")
"""The states of requests, in the order in which charts and bars show them. They are also the colours."""
MAX_POINTS = 240
_MIN_STEP = 10.0
"""Seconds between two points of a speed: samples are 5 seconds apart."""
_MAX_RUNS = 100


class Series(Struct, frozen=True):
    """One line of a chart."""

    label: str
    colour: str
    """A colour of the dashboard: ``done``, ``dead``, ``leased``, ``waiting``..."""
    values: list[float]


class Chart(Struct, frozen=True):
    """Lines over time. Empty if nothing is known yet."""

    times: list[float]
    """Unix times, in seconds."""
    series: list[Series]


def state_chart(samples: Sequence[RunSample]) -> Chart:
    """How many requests of a run were in each state."""
    shown = _thinned(samples)
    series = [
        Series(STATE_NAMES.get(state, state), state, [float(getattr(sample, state)) for sample in shown])
        for state in STATES
    ]
    return Chart([sample.at for sample in shown], series)


def speed_chart(histories: Iterable[Sequence[RunSample]], start: float, end: float) -> Chart:
    """Pages and items per second of some runs together, between two times. It begins with the first sample."""
    sampled = [samples for samples in histories if samples]
    start = max(start, min((samples[0].at for samples in sampled), default=end))
    newest = max((samples[-1].at for samples in sampled), default=end)
    if 0 < end - newest < 2 * _MIN_STEP:  # what happened since is not known yet
        end = newest
    if end <= start:
        return Chart([], [])
    points = int(max(2, min(MAX_POINTS, (end - start) / _MIN_STEP)))
    edges = [start + (end - start) * number / points for number in range(points + 1)]
    return Chart(
        edges[1:],
        [
            Series("pages/s", "accent", _speeds(sampled, edges, lambda sample: sample.done + sample.dead)),
            Series("items/s", "done", _speeds(sampled, edges, lambda sample: sample.items)),
        ],
    )


def _speeds(
    histories: Sequence[Sequence[RunSample]], edges: Sequence[float], value: Callable[[RunSample], int]
) -> list[float]:
    total = [0.0] * (len(edges) - 1)
    for samples in histories:
        times = [sample.at for sample in samples]
        counts = [value_at(times, samples, edge, value) for edge in edges]
        for number, (before, after) in enumerate(zip(counts, counts[1:], strict=False)):
            total[number] += max(0.0, after - before) / (edges[number + 1] - edges[number])
    return [round(speed, 3) for speed in total]


def value_at(
    times: Sequence[float], samples: Sequence[RunSample], at: float, value: Callable[[RunSample], int]
) -> float:
    """The value of a counter at a time. It grows evenly between two samples, and is constant before the first and after
    the last one."""
    after = bisect_left(times, at)
    if after == 0:
        return value(samples[0])
    if after == len(samples):
        return value(samples[-1])
    share = (at - times[after - 1]) / (times[after] - times[after - 1])
    return value(samples[after - 1]) * (1 - share) + value(samples[after]) * share


def _thinned(samples: Sequence[RunSample]) -> list[RunSample]:
    """The last sample of each interval, and the first sample of all."""
    if len(samples) <= MAX_POINTS:
        return list(samples)
    start, step = samples[0].at, (samples[-1].at - samples[0].at) / (MAX_POINTS - 1)
    chosen = {int((sample.at - start) / step): sample for sample in samples}
    return [samples[0], *(sample for sample in chosen.values() if sample is not samples[0])]


class SpeedHistory:
    """Reads the speed of all runs of a store. Histories of runs that have ended are read once."""

    def __init__(self, store: Store, project: str, *, without: Sequence[str] = ()) -> None:
        """``without``: names of spiders whose runs are left out."""
        self._store = store
        self._project = project
        self._without = without
        self._ended: dict[tuple[str, float], list[RunSample]] = {}

    async def read(self, start: float, end: float) -> Chart:
        """The speed of all runs together, at most of the last day."""
        active = await self._store.list_runs(project=self._project, states=ACTIVE, limit=_MAX_RUNS)
        over = await self._store.list_runs(project=self._project, states=OVER, limit=_MAX_RUNS)
        histories = [await self._read(run) for run in active if run.spider not in self._without]
        ended = {
            (run.run_id, run.ended_at): run
            for run in over
            if run.ended_at is not None and run.ended_at >= start and run.spider not in self._without
        }
        self._ended = {key: self._ended.get(key) or await self._read(run) for key, run in ended.items()}
        return speed_chart([*histories, *self._ended.values()], start, end)

    async def _read(self, run: Run) -> list[RunSample]:
        return await SampleHistory(self._store, run.run_id).read_day()
