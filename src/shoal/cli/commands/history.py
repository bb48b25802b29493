"""`shoal history`, `workers` and `compare`: the progress of runs, their processes, and differences."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import asdict

from shoal.cli.help import Commands, argument, local_time, option, print_json
from shoal.cli.options import AsJson, FrontierUrl, NewestRun, resolve, settings_of
from shoal.cli.run_store import choose_run, opened_run, opened_store
from shoal.messages import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.operations.compare import Comparison, Difference
    from shoal.operations.processes import RunProcess
    from shoal.runs.samples import RunSample, Speed

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=oO0#"
_WIDTH = 60
"""Characters of a sparkline."""
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))

app = Commands()


@app.add(
    examples="""
    shoal history --frontier sqlite:///books.db
    shoal history books_1 --frontier redis://host --points 50
    """
)
async def history(
    run: NewestRun = None,
    frontier: FrontierUrl = None,
    points: Annotated[int, option("--points N", "Print about N lines (default 12).", min=2)] = 12,
    as_json: AsJson = False,
) -> None:
    """Show the counts and the speed of a run over time.

    A run is sampled every 5 seconds while a process works on it. Older samples are thinned out: one per minute for a
    day, one per quarter of an hour for a week, then one per hour.
    """
    from shoal.runs.samples import read_history, speeds, spread

    async with opened_store(frontier, readonly=True) as store:
        run_id = (await choose_run(store, run)).run_id
        samples = await read_history(store, run_id)
    chosen = spread(samples, points)
    if as_json:
        _print_samples_as_json(run_id, chosen, speeds(chosen))
    elif not samples:
        print(f"run {run_id} has no history yet: no process has worked on it")
    else:
        wide = [speed.pages for speed in speeds(spread(samples, _WIDTH)) if speed is not None]
        if wide:
            print(f"pages/s  {sparkline(wide)}  at most {max(wide):.3g}\n")
        _print_samples(chosen, speeds(chosen))


def sparkline(values: Sequence[float]) -> str:
    """A line of bars, as high as the values."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    bars = _BARS if encoding.lower().replace("-", "") == "utf8" else _ASCII_BARS
    highest = max(values, default=0.0) or 1.0
    return "".join(bars[min(len(bars) - 1, int(value / highest * len(bars)))] for value in values)


def _print_samples(samples: Sequence[RunSample], speeds: Sequence[Speed | None]) -> None:
    print(f"{'time':<19}", *(f"{name:>9}" for name in ("done", "left", "failed", "items", "pages/s")))
    for sample, speed in zip(samples, speeds, strict=True):
        numbers = (sample.done, sample.stats.remaining, sample.dead, sample.items)
        pace = "" if speed is None else f"{speed.pages:.3g}"
        print(local_time(sample.at), *(f"{number:>9}" for number in numbers), f"{pace:>9}")


def _print_samples_as_json(run_id: str, samples: Sequence[RunSample], speeds: Sequence[Speed | None]) -> None:
    from shoal.crawling.stats import ledger

    for sample, speed in zip(samples, speeds, strict=True):
        counts = {name: value for name, value in ledger(sample.stats).items() if name not in ("seeding", "rewinds")}
        pace = None if speed is None else speed.pages
        print(json.dumps({"run_id": run_id, "at": sample.at, **counts, "pages_per_second": pace}))


# -- processes


@app.add(
    examples="""
    shoal workers --frontier redis://host
    shoal workers books_1 --frontier redis://host --all
    shoal workers --active --frontier redis://host
    """
)
async def workers(
    run: NewestRun = None,
    frontier: FrontierUrl = None,
    everyone: Annotated[bool, option("--all", "Also list processes that have ended.")] = False,
    active: Annotated[bool, option("--active", "List the processes of all active runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the processes that work on runs.

    They report every 5 seconds. A lost process stopped reporting: it was killed, or cannot reach the store.
    """
    from shoal.operations.processes import read_run_processes
    from shoal.operations.snapshot import SnapshotTaker, read_fleet

    processes: Sequence[RunProcess]
    if active:
        config = resolve(None, settings_of(frontier=frontier)).config
        async with opened_store(frontier, readonly=True) as store:
            processes = await read_fleet(store, await SnapshotTaker(store, config).take())
        run_id = "that is active"
    else:
        async with opened_run(frontier, run, readonly=True) as (store, chosen, queue):
            processes = await read_run_processes(store, queue, chosen.run_id)
        run_id = chosen.run_id
    shown = [process for process in processes if everyone or process.state != "ended"]
    if as_json:
        print_json(shown)
    elif not shown:
        ended = f"; {len(processes)} have ended, see --all" if processes else ""
        print(f"no process works on run {run_id}{ended}")
    else:
        _print_processes(shown)


def _print_processes(processes: Sequence[RunProcess]) -> None:
    width = max(4, *(len(printable(process.name)) for process in processes))
    print(
        f"{'name':<{width}} {'state':<8} {'role':<7} {'seen':>8} {'leases':>6} {'pages':>9} {'items':>9} {'failed':>7} "
        f"{'pages/s':>8} {'memory':>8}"
    )
    for process in processes:
        memory = f"{process.memory / 2**20:.0f} MB" if process.memory else ""
        more = [f"slot {process.slot}, epoch {process.epoch}"] if process.slot not in ("", process.name) else []
        more += [f"browser: {process.browser}"] if process.browser else []
        more += [f"Tor: {process.tor}"] if process.tor else []
        last_seen, speed = _duration(process.last_seen), f"{process.pages_per_second:.3g}"
        line = (
            f"{printable(process.name):<{width}} {process.state:<8} {process.role:<7} {last_seen:>8} "
            f"{process.leases:>6} {process.pages:>9} {process.items:>9} {process.failed:>7} {speed:>8} "
            f"{memory:>8}  {printable('; '.join(more))}"
        )
        print(line.rstrip())


def _duration(seconds: float) -> str:
    """A time with its largest unit."""
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


# -- comparing


@app.add(examples="shoal compare books_1 books_2 --frontier redis://host")
async def compare(
    first: Annotated[str, argument("A", "The ID of the older run, from `shoal runs`.")],
    second: Annotated[str, argument("B", "The ID of the newer run.")],
    frontier: FrontierUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: pages, items, failures, fields.

    For each field, it shows the share of items that have a value. Name the older run first.
    """
    from shoal.operations.compare import compare_runs

    async with opened_store(frontier, readonly=True) as store:
        comparison = await compare_runs(store, await choose_run(store, first), await choose_run(store, second))
    if as_json:
        print_json({**asdict(difference), "change": difference.change} for difference in comparison.differences)
    else:
        _print_comparison(comparison)


def _print_comparison(comparison: Comparison) -> None:
    a, b = comparison.a, comparison.b
    width = max(16, *(len(printable(difference.name)) for difference in comparison.differences))
    columns = [max(12, len(run.run_id), len(run.ending)) for run in (a, b)]
    rows = [("", a.run_id, b.run_id, ""), ("ended", a.ending, b.ending, "")]
    for difference in comparison.differences:
        percent = f"{difference.change:+.1%}" if difference.change else ""
        figures = _figure(difference, difference.a), _figure(difference, difference.b)
        rows.append((printable(difference.name), *figures, percent))
    for name, first, second, percent in rows:
        print(f"{name:<{width}}  {first:>{columns[0]}}  {second:>{columns[1]}}  {percent:>9}".rstrip())


def _figure(difference: Difference, value: float | None) -> str:
    if value is None:
        return "-"
    match difference.unit:
        case "count":
            return f"{value:.0f}"
        case "seconds":
            return _duration(value)
        case "share":
            return f"{value:.1%}"
        case _:
            return f"{value:.3g}/s"
