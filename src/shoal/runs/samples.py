"""The history of a run: samples of its counters, thinned with age.

Three documents keep it, each with a resolution of its own: every few seconds for a quarter of an hour, every minute for
a day, and every quarter of an hour for a week; beyond that, every hour or less. A new sample enters the first one, and
each of the others if it is the first of its minute, or of its quarter of an hour. So nothing moves between documents,
and the document that changes every few seconds is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from shoal.ports import Documents, Stats
from shoal.ports.documents import StoredValue

YOUNG = 8.0
"""Seconds. While the last sample of a run is younger, no other process takes one. A process that takes the samples does
so every 5 seconds."""
SKEW = 60.0
"""Seconds by which the clocks of two processes may differ. A sample that is further in the future is wrong."""
_QUARTER = 900.0
_HOUR = 3600.0
_DAY = 24 * _HOUR
_MAX_SECONDS = 300
_MAX_HOURS = 6000
"""How many samples the last document holds. When there are more, every second one of the older half is dropped."""


class RunSample(Struct, frozen=True, array_like=True):
    """The counters of a run at one moment. See `Stats`."""

    at: float
    """By the clock of the process that took it."""
    pushed: int
    ready: int
    waiting: int
    leased: int
    done: int
    dead: int
    items: int
    incoming: int
    duplicates: int

    @classmethod
    def of(cls, stats: Stats, at: float) -> RunSample:
        return cls(round(at, 3), *(getattr(stats, name) for name in cls.__struct_fields__ if name != "at"))

    @property
    def stats(self) -> Stats:
        return Stats(**{name: getattr(self, name) for name in self.__struct_fields__ if name != "at"})


class RecentSamples(Struct, frozen=True, array_like=True):
    """The document with the newest samples, and the process that took the last one."""

    taker: str
    samples: list[RunSample]


def adds(samples: Sequence[RunSample], taker: str, last_taker: str, now: float) -> bool:
    """Whether this process takes the next sample: it took the last one, or no process did for a while."""
    if not samples or taker == last_taker:
        return True
    age = now - samples[-1].at
    return age >= YOUNG or age < -SKEW


# -- thinning


def add_second(samples: Sequence[RunSample], new: RunSample) -> list[RunSample]:
    """The newest samples with this one: all of the last quarter of an hour."""
    kept = [sample for sample in _before(samples, new) if sample.at >= new.at - _QUARTER]
    return [*kept, new][-_MAX_SECONDS:]


def add_minute(samples: Sequence[RunSample] | None, new: RunSample) -> list[RunSample]:
    """One sample per minute of the last day, the first one of each."""
    return [sample for sample in _added(samples, new, 60.0) if sample.at >= new.at - _DAY]


def add_quarter(samples: Sequence[RunSample] | None, new: RunSample) -> list[RunSample]:
    """One sample per quarter of an hour of the last week, and one per hour before that, until there are too many."""
    thinned: list[RunSample] = []
    for sample in _added(samples, new, _QUARTER):
        if sample.at >= new.at - 7 * _DAY or not thinned or sample.at // _HOUR != thinned[-1].at // _HOUR:
            thinned.append(sample)
    if len(thinned) > _MAX_HOURS:
        half = len(thinned) // 2
        thinned = thinned[:half:2] + thinned[half:]
    return thinned


def _before(samples: Sequence[RunSample], new: RunSample) -> list[RunSample]:
    """The samples without those in the future, which a process with a wrong clock took."""
    return [sample for sample in samples if sample.at < new.at]


def _added(samples: Sequence[RunSample] | None, new: RunSample, seconds: float) -> list[RunSample]:
    before = _before(samples or (), new)
    if before and before[-1].at // seconds == new.at // seconds:
        return before
    return [*before, new]


class _Level(NamedTuple):
    """A document of older samples."""

    name: str
    seconds: float
    add: Callable[..., list[RunSample]]


_OLDER = (_Level("hours", _QUARTER, add_quarter), _Level("minutes", 60.0, add_minute))


# -- reading


def spread(samples: Sequence[RunSample], points: int) -> list[RunSample]:
    """Thin out samples to about this many: the last one of each interval, and the first one of all."""
    if len(samples) <= points:
        return list(samples)
    begin, width = samples[0].at, (samples[-1].at - samples[0].at) / max(1, points - 1)
    chosen = {(sample.at - begin) // width: sample for sample in samples}
    return list(dict.fromkeys([samples[0], *chosen.values()]))


class Speed(NamedTuple):
    """Pages and items per second before a sample."""

    pages: float
    items: float


def speeds(samples: Sequence[RunSample]) -> list[Speed | None]:
    """The speed between each sample and the one before it. None for the first one."""
    speeds_between: list[Speed | None] = [None] if samples else []
    for before, after in zip(samples, samples[1:], strict=False):
        seconds = after.at - before.at
        pages = max(0, after.done + after.dead - before.done - before.dead) / seconds
        speeds_between.append(Speed(round(pages, 3), round(max(0, after.items - before.items) / seconds, 3)))
    return speeds_between


# -- the documents of a run


class SampleHistory:
    """The samples of one run. Many processes may call ``add``."""

    def __init__(self, documents: Documents, run_id: str) -> None:
        prefix = f"run/{run_id}/history/"
        self._newest = StoredValue(documents, prefix + "seconds", RecentSamples)
        self._older = [(level, StoredValue(documents, prefix + level.name, list[RunSample])) for level in _OLDER]

    async def add(self, sample: RunSample, taker: str, *, final: bool = False) -> bool:
        """Add a sample. Return False, and add nothing, if another process takes the samples of this run now. Every
        process may add the final sample of a finished run, unless it contains nothing new."""
        choose = partial(_with_newest, sample=sample, taker=taker, final=final)
        before = await self._newest.read()
        if before is not None and choose(before) is before:
            return False
        last = before.samples[-1] if before is not None and before.samples else None
        # The older ones first: if this process dies in between, the next one finds the same work to do.
        for level, stored in self._older:
            if last is None or last.at // level.seconds != sample.at // level.seconds:
                await stored.change(partial(level.add, new=sample))
        changed = await self._newest.change(choose)
        return changed is not None and changed.taker == taker

    async def read(self, without: int = 0) -> list[RunSample]:
        """All samples, oldest first. ``without``: leave out so many of the documents with the oldest ones."""
        by_time = {sample.at: sample for sample in await self.read_newest()}
        for _, stored in self._older[without:]:
            by_time.update((sample.at, sample) for sample in await stored.read() or ())
        return [by_time[at] for at in sorted(by_time)]

    async def read_newest(self) -> list[RunSample]:
        """The samples of the last quarter of an hour, oldest first."""
        newest = await self._newest.read()
        return [] if newest is None else list(newest.samples)

    async def read_day(self) -> list[RunSample]:
        """The samples of the last day, oldest first."""
        return await self.read(without=1)


def _with_newest(recent: RecentSamples | None, sample: RunSample, taker: str, *, final: bool) -> RecentSamples:
    """The document with a new sample, or the same object."""
    if recent is None or not recent.samples:
        return RecentSamples(taker, [sample])
    newest = recent.samples[-1]
    repeats = final and replace(newest, at=sample.at) == sample
    if repeats or not (final or adds(recent.samples, taker, recent.taker, sample.at)):
        return recent
    return RecentSamples(taker, add_second(recent.samples, sample))


async def read_history(documents: Documents, run_id: str) -> list[RunSample]:
    """The samples of a run, oldest first: recent ones every few seconds, older ones less often. There are none for
    times when no process worked on the run."""
    return await SampleHistory(documents, run_id).read()
