"""`shoal audit`, `why`, `retry-failed`, `export`: what became of a run."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.running import FrontierUrl, Output, given, resolve
from shoal.cli.terminal import raw_stderr
from shoal.errors import RunError, StoreError
from shoal.printable import printable

if TYPE_CHECKING:
    from shoal.ports import Frontier, History, Rewind, Run, Stats, Store

RunId = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Which run (default: the newest).")]
RunName = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Which run (default: the newest).", show_default=False)
]


def register(app: typer.Typer) -> None:
    app.command()(audit)
    app.command()(why)
    app.command("retry-failed")(retry_failed)
    app.command()(export)


@contextmanager
def quietly() -> Iterator[None]:
    """Warnings of how a server is set up are for those who work on it, not for each look."""
    logger = logging.getLogger("shoal.frontier")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@asynccontextmanager
async def opened(url: str | None, run_id: str | None, *, readonly: bool) -> AsyncIterator[tuple[Run, Frontier]]:
    """The run that a command speaks of, and its frontier."""
    from shoal.frontier import open_store
    from shoal.runs.queries import run_options

    config = resolve(None, given({"frontier": url}), []).config
    if config.frontier.startswith("memory"):
        raise StoreError("a memory frontier is gone with its process; say which one: --frontier sqlite:///file.db")
    with quietly():
        store = await open_store(config.frontier, readonly=readonly)
    try:
        run = await choose_run(store, run_id)
        yield run, await store.frontier(run.run_id, run_options(run, config))
    finally:
        await store.close()


async def choose_run(store: Store, run_id: str | None) -> Run:
    """This run, or the newest. RunError says which ones there are."""
    run = await store.get_run(run_id) if run_id is not None else None
    if run is not None:
        return run
    runs = await store.list_runs()
    if run_id is None and runs:
        return runs[0]
    known = ", ".join(run.run_id for run in runs[:5]) or "none"
    raise RunError(f"there is no run {run_id or 'at all'}; the newest ones are: {known}")


def audit(run_id: RunName = None, frontier: FrontierUrl = None) -> None:
    """Show the ledger of a run, counted anew from its requests. Exit code 1 if it does not balance."""

    async def work() -> tuple[Stats, bool, list[Rewind]]:
        async with opened(frontier, run_id, readonly=True) as (run, store):
            counted, kept = await store.audit(), await store.stats()
            _print_ledger(run, counted, await store.dead_kinds())
            if counted != kept:
                print(f"\nthe counters say something else: {kept}")
            return counted, counted.balanced and counted == kept, await store.rewinds()

    counted, balanced, rewinds = asyncio.run(work())
    print()
    for line in _verdict(counted, balanced, rewinds):
        print(line)
    if not balanced:
        sys.exit(1)


def _verdict(stats: Stats, balanced: bool, rewinds: Sequence[Rewind]) -> list[str]:
    """What the ledger means. Only a run that is over, on a store that never went back, has lost nothing for sure."""
    if not balanced:
        return ["NOT BALANCED: this is a bug in Shoal, or someone else wrote to the store"]
    lines = []
    if stats.seeding:
        lines.append("balanced, but seeding is not finished: start requests may be missing")
    elif stats.remaining:
        lines.append(f"balanced: {stats.remaining} requests remain to be done")
    elif not rewinds:
        lines.append("balanced: nothing lost")
    else:
        lines.append("balanced: everything that the store knows is done")
    if rewinds:
        lines.append(f"THE STORE WENT BACK IN TIME {_times(len(rewinds))}:")
        for rewind in rewinds:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rewind.at))
            lost = "by an unknown time" if rewind.lost_seconds is None else f"by up to {rewind.lost_seconds:.1f} s"
            lines.append(f"  noticed {moment}, {lost}")
        lines.append(
            "Pages of the lost time were crawled again, and outputs were set back. What other programs pushed or\n"
            "changed in that time (work queues, retry-failed, host settings) is missing: repeat it."
        )
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _print_ledger(run: Run, stats: Stats, dead: dict[str, int]) -> None:
    print(f"run {run.run_id} of {run.spider}: {run.state}{', still being seeded' if stats.seeding else ''}\n")
    print(f"  pushed     {stats.pushed:>10}")
    for name in ("ready", "waiting", "leased", "done", "dead"):
        print(f"  {'=' if name == 'ready' else '+'} {name:<8} {getattr(stats, name):>10}")
    for kind, count in sorted(dead.items(), key=lambda pair: -pair[1]):
        print(f"      {kind:<22} {count:>10}")
    if stats.incoming:
        print(f"\n  incoming   {stats.incoming:>10}  links of completed pages on their way into the queue")
    print(f"\n  items      {stats.items:>10}\n  duplicates {stats.duplicates:>10}")


def why(
    url: Annotated[str, typer.Argument(metavar="URL", help="The URL as it was found, or as the summary shows it.")],
    frontier: FrontierUrl = None,
    run_id: RunId = None,
) -> None:
    """What became of a URL: where it was found, its attempts and waits, robots' word, its items."""

    async def work() -> bool:
        from shoal.http import Request

        async with opened(frontier, run_id, readonly=True) as (run, store):
            history = await store.find(Request(url))
            if history is None:
                print(f"run {run.run_id} has not seen {Request(url).url}: no fetched page links to it, or not in scope")
                return False
            _print_history(history)
            return True

    if not asyncio.run(work()):
        sys.exit(1)


def _print_history(history: History) -> None:
    status = f", HTTP {history.status}" if history.status else ""
    print(f"{history.url}\n  state     {history.state}{status}")
    if history.reason:
        print(f"  reason    {printable(history.reason)}")
    print(f"  found on  {history.parent or 'given at the start'}")
    print(f"  robots    {_robots_word(history)}")
    print(f"  depth     {history.depth}\n  priority  {history.priority:g}")
    print(f"  attempts  {history.attempts}\n  items     {history.items}\n  history")
    for event in history.events:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
        print(f"    {moment}  {event.what}{': ' + printable(event.detail) if event.detail else ''}")


def _robots_word(history: History) -> str:
    if history.reason.startswith("robots.txt"):
        return "disallowed it, or could not be had"
    return "did not forbid it" if history.status else "not asked, or did not forbid it"


def retry_failed(
    run_id: RunName = None,
    frontier: FrontierUrl = None,
    kind: Annotated[
        list[str], typer.Option("--kind", metavar="KIND", help='Only these, as `audit` names them, e.g. "http 500".')
    ] = [],
) -> None:
    """Make the dead requests of a run ready again, with all their attempts. What robots.txt forbade stays dead."""

    async def work() -> None:
        async with opened(frontier, run_id, readonly=False) as (run, store):
            count = await store.retry_dead(kind or None)
        print(f"{count} requests of run {run.run_id} are ready again; the same command as before fetches them")

    asyncio.run(work())


def export(output: Output, run_id: RunName = None, frontier: FrontierUrl = None) -> None:
    """Write all items of a run to a file, in any of the formats."""
    from shoal.config import mask
    from shoal.sinks import open_sink
    from shoal.sinks.drainer import export as drain

    async def work() -> None:
        async with opened(frontier, run_id, readonly=True) as (run, store):
            for spec in output:
                rejects: list[int] = []
                sink = open_sink(spec, run_id=run.run_id, on_reject=rejects.append)
                count = await drain(store, sink, on_progress=_progress)
                print(f"{count - sum(rejects)} items to {mask(spec)}", file=sys.stderr)
                if rejects:
                    print(f"{sum(rejects)} items could not be written to {mask(spec)}", file=sys.stderr)
                if count < (logged := (await store.stats()).items):
                    print(f"the log had {logged}: the others were forgotten, as items.keep is false", file=sys.stderr)

    asyncio.run(work())


def _progress(count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{count} items", end="\r", file=raw_stderr(), flush=True)
