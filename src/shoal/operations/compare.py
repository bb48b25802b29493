"""Compares two runs: pages, items, failures, field coverage, duration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from msgspec import Struct

from shoal.crawling.outcome import Verdict
from shoal.crawling.stats import LimitReached
from shoal.ports import Run, RunState, Stats, Store
from shoal.runs.reports import FieldCoverage, field_coverage, read_processes
from shoal.runs.run_end import limit_of, read_outcome
from shoal.system import clock

Unit: TypeAlias = Literal["count", "seconds", "per second", "share"]


class RunFigures(Struct, frozen=True, kw_only=True):
    """What a run achieved, so far or in the end."""

    run_id: str
    spider: str
    state: RunState
    created_at: float
    seconds: float
    """From its creation to its end, or to now."""
    stats: Stats
    failed_kinds: dict[str, int] = {}
    coverage: list[FieldCoverage] = []
    limit: LimitReached | None = None
    outcome: Verdict | None = None
    """None unless it is finished."""

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        remaining = self.stats.remaining if self.state == "finished" else 0
        state = f"finished with {remaining} left" if remaining else self.state
        ending = state if self.limit is None else str(self.limit)
        return ending if self.outcome in (None, "good") else f"{ending}, {self.outcome}"


class Difference(Struct, frozen=True):
    """A figure of two runs. None: the run does not have it."""

    name: str
    unit: Unit
    a: float | None
    b: float | None

    @property
    def change(self) -> float | None:
        """How much larger ``b`` is than ``a``, as a share of ``a``. None if that is undefined."""
        if self.a is None or self.b is None or (not self.a and self.b):
            return None
        return (self.b - self.a) / self.a if self.a else 0.0


class Comparison(Struct, frozen=True, kw_only=True):
    """Two runs, and their figures side by side."""

    a: RunFigures
    b: RunFigures
    differences: list[Difference]


async def read_figures(store: Store, run: Run) -> RunFigures:
    """The figures of a run. RunError if it was deleted meanwhile."""
    frontier = await store.frontier(run.run_id)
    until = clock.time() if run.ended_at is None else run.ended_at
    stats, outcome = await frontier.stats(), await read_outcome(store, run, frontier)
    return RunFigures(
        run_id=run.run_id, spider=run.spider, state=run.state, created_at=run.created_at,
        seconds=max(0.0, until - run.created_at), stats=stats,
        failed_kinds=await frontier.dead_kinds() if stats.dead else {},
        coverage=field_coverage(await read_processes(store, run.run_id)), limit=await limit_of(store, run),
        outcome=None if outcome is None else outcome.verdict,
    )  # fmt: skip


async def compare_runs(store: Store, a: Run, b: Run) -> Comparison:
    """Compare two runs, usually of one spider; ``a`` is the older one."""
    return compare(await read_figures(store, a), await read_figures(store, b))


def compare(a: RunFigures, b: RunFigures) -> Comparison:
    """The figures of two runs side by side."""
    differences = [
        Difference("pages", "count", a.stats.done, b.stats.done),
        Difference("items", "count", a.stats.items, b.stats.items),
        Difference("failed", "count", a.stats.dead, b.stats.dead),
        *(
            Difference(f"failed: {kind}", "count", a.failed_kinds.get(kind, 0), b.failed_kinds.get(kind, 0))
            for kind in sorted({*a.failed_kinds, *b.failed_kinds})
        ),
        Difference("left", "count", a.stats.remaining, b.stats.remaining),
        Difference("duration", "seconds", a.seconds, b.seconds),
        Difference("speed", "per second", _speed(a), _speed(b)),
    ]
    shares, others = _shares(a.coverage), _shares(b.coverage)
    differences += [
        Difference(f"field {name}", "share", shares.get(name), others.get(name)) for name in sorted({*shares, *others})
    ]
    return Comparison(a=a, b=b, differences=differences)


def _speed(figures: RunFigures) -> float:
    return round(figures.stats.done / figures.seconds, 3) if figures.seconds else 0.0


def _shares(coverage: Iterable[FieldCoverage]) -> dict[str, float]:
    return {field.name: round(field.share, 4) for field in coverage}
