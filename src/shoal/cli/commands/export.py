"""`shoal export`: write the items of a run."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shoal.cli.help import Commands
from shoal.cli.options import FrontierUrl, NewestRun, Output, Replace, is_replaceable, outputs_of, shown_output
from shoal.cli.run_store import opened_run
from shoal.cli.terminal import raw_stderr
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.ports import Frontier

app = Commands()


@app.add(
    examples="""
    shoal export --frontier sqlite:///books.db -o books.csv
    shoal export books_1 --frontier redis://host -o books.parquet
    shoal export books_1 --frontier redis://host --missing -o mysql://user@db/shop
    """
)
def export(
    output: Output = [],
    replace: Replace = [],
    run_id: NewestRun = None,
    frontier: FrontierUrl = None,
    missing: Annotated[
        bool, typer.Option("--missing", help="Write only the items that a database or object storage lacks.")
    ] = False,
) -> None:
    """Write all items of a run to files or databases.

    -o does not replace a file that another run or program wrote; -O does. With --missing, existing rows stay as they
    are, including those of later runs.
    """
    from shoal.sinks import open_sink, sink_id
    from shoal.sinks.drainer import export as drain
    from shoal.sinks.drainer import first_after
    from shoal.sinks.storage import owner_of, taken
    from shoal.sinks.tablesink import TableSink

    outputs = outputs_of(output, replace)
    if not outputs:
        raise ConfigError("name a file or a database: -o items.csv")

    async def work() -> None:
        async with opened_run(frontier, run_id, readonly=True) as (run, store):
            first, before, is_short = await first_after(store, 0), await store.stats(), False
            for spec in outputs:
                path = spec.partition("?")[0]
                if first > 1 and is_replaceable(spec) and os.path.exists(path):
                    raise ConfigError(
                        f"items 1 to {first - 1} are no longer in the log (items.keep is false), and {path} may have "
                        "them. Choose another file"
                    )
                owner = owner_of(path)
                if spec in output and is_replaceable(spec) and owner != run.run_id and _has_content(path):
                    raise taken(path, owner)
                rejects: list[int] = []
                mode: Literal["all", "missing"] = "missing" if missing else "all"
                sink = open_sink(spec, run_id=run.run_id, on_reject=rejects.append, export=mode)
                if isinstance(sink, TableSink):
                    for state in await _saved_states(store, sink_id(spec)):
                        sink.check_key(state)
                count = await drain(store, sink, on_progress=_progress)
                written = getattr(sink, "added", 0) if missing else count - sum(rejects)
                print(f"wrote {written}{' missing' if missing else ''} items to {shown_output(spec)}", file=sys.stderr)
                if rejects:
                    print(f"could not write {sum(rejects)} items to {shown_output(spec)}", file=sys.stderr)
                after = await store.stats()
                if after.trimmed:
                    print(
                        f"the run had {after.items} items: the first {after.trimmed} are deleted, because "
                        "items.keep is false",
                        file=sys.stderr,
                    )
                is_short = is_short or (count < before.items - before.trimmed and after.trimmed == before.trimmed)
            if is_short:
                raise RunError(
                    f"items are missing in the log of run {run.run_id}: all others are written. "
                    f"`shoal audit {run.run_id}` counts what is missing"
                )

    asyncio.run(work())


async def _saved_states(frontier: Frontier, output: str) -> list[bytes]:
    """The states of this output that the run itself has saved."""
    from shoal.sinks.drainer import PREFIX, read_cursor, split_role

    roles = [role for role in await frontier.roles() if role.role.startswith(PREFIX)]
    return [read_cursor(role.cursor).state for role in roles if split_role(role.role)[0] == output]


def _has_content(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) > 0


def _progress(count: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{count} items", end="\r", file=raw_stderr(), flush=True)
