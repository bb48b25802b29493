"""`shoal outputs`: what the outputs of a run have, and how to complete them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from shoal.cli.help import Commands, argument, option, raw_stderr
from shoal.cli.options import FrontierUrl, NewestRun, Outputs, is_replaceable, resolve, shown_output
from shoal.cli.run_store import opened_run, record_action
from shoal.config import mask
from shoal.errors import ConfigError, RunError
from shoal.messages import did_you_mean
from shoal.sinks import is_of_plugin
from shoal.sinks.drainer import PREFIX, first_after, name_items, output_name, split_role

if TYPE_CHECKING:
    from shoal.operations.outputs import OutputReport
    from shoal.ports import Frontier, Run, Store

CountedOutput = Annotated[
    list[str], option("-o, --output URL", "Count in this database or object storage. Repeatable.")
]

app = Commands()


@app.add(
    examples="""
    shoal outputs --frontier sqlite:///books.db
    shoal outputs books_1 --frontier redis://host -o mysql://user:password@db/shop
    shoal outputs books_1 forget /out/x.csv#web1-8f3ad2c1 --frontier redis://host
    """
)
async def outputs(
    run_id: NewestRun = None,
    action: Annotated[
        str | None, argument("[forget", "Forget an output of a machine that is gone.", show_default=False)
    ] = None,
    name: Annotated[str | None, argument("OUTPUT]", "Its name, as this command lists it.", show_default=False)] = None,
    frontier: FrontierUrl = None,
    output: CountedOutput = [],
) -> None:
    """List the outputs of a run, and count their items.

    It shows who writes each output, and how far it is. Items are counted where they are: lines of the file, rows of the
    table. Outputs on servers need their URL, with -o, unless it is stored with the run. Forget an output whose machine
    is gone, so that the items of the run are no longer kept for it. The exit code is 1 if items are missing.
    """
    if (action, name) != (None, None) and (action != "forget" or name is None):
        raise ConfigError(f"unknown arguments: {action} {name or ''}; write `shoal outputs RUN forget OUTPUT`")

    async with opened_run(frontier, run_id, readonly=name is None) as (store, run, queue):
        if name is not None:
            await _forget(store, run, queue, name)
            return
        reports = await reports_of(run, queue, output)
    if not reports:
        print(f"no process of run {run.run_id} has opened an output")
    print_outputs(run.run_id, reports, frontier)
    if any(is_wrong(report) for report in reports):
        sys.exit(1)


def is_wrong(report: OutputReport) -> bool:
    """Whether an output does not have what it should have."""
    return bool(report.missing or report.surplus or report.is_open)


async def reports_of(run: Run, frontier: Frontier, specs: Sequence[str]) -> list[OutputReport]:
    from shoal.operations.outputs import report_outputs

    return await report_outputs(run, frontier, specs, resolve().config)


async def _forget(store: Store, run: Run, frontier: Frontier, name: str) -> None:
    roles = [role.role.removeprefix(PREFIX) for role in await frontier.roles() if role.role.startswith(PREFIX)]
    path = os.path.abspath(name)
    matching = [role for role in roles if name in (role, output_name(role), split_role(role)[0])]
    matching = matching or [role for role in roles if split_role(role)[0] == path]
    if len(matching) != 1:
        choices = ", ".join(matching or roles) or "none"
        what = f"{len(matching)} outputs named {name}: name one of them" if matching else f"no output {name}; it has"
        raise ConfigError(f"run {run.run_id} has {what}: {choices}{'' if matching else did_you_mean(name, roles)}")
    (name,) = matching
    if not await frontier.forget(PREFIX + name):
        raise ConfigError(f"a process is writing {name} now; stop it first")
    await record_action(store, "forget output", run.run_id, name, run.project)
    print(f"run {run.run_id} no longer keeps items for {name}")
    if (first := await first_after(frontier, 0)) > 1:
        print(
            f"items 1 to {first - 1} are no longer in the log (items.keep is false): if the run writes this output "
            f"again, it begins with item {first}. Move a file away first"
        )


def print_outputs(run_id: str, reports: Sequence[OutputReport], frontier: str | None) -> None:
    """One line per output, and the command that completes it."""
    where = f" --frontier {shlex.quote(mask(frontier))}" if frontier else ""
    for report in reports:
        print(f"  {_shown(report)}: {_line(report)}")
        if report.is_abandoned:
            print(f"      if that machine is gone: shoal outputs {run_id} forget {shlex.quote(report.role)}{where}")
        elif report.is_open:
            print("      repeat the command of the run: its last writer died before it completed this output")
        elif report.missing:
            for line in _repair(run_id, report):
                print(f"      {line}{where if line.startswith('shoal') else ''}")


def _shown(report: OutputReport) -> str:
    """The name of an output. A file of this machine is shown as a user writes it."""
    path = split_role(report.role)[0]
    if report.machine or not os.path.isabs(path):
        return report.name
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def _line(report: OutputReport) -> str:
    writer = f", written by {report.writer}" if report.writer else ""
    behind = f", {report.logged - report.position:,} not written yet" if report.position < report.logged else ""
    if report.is_abandoned:
        return f"abandoned at item {report.position:,} of {report.logged:,} on {report.machine}"
    if report.count is None:
        return f"written through item {report.position:,} of {report.logged:,}, not counted: {report.unknown}{writer}"
    count = report.count
    rejected = f", {count.rejected:,} could not be stored" if count.rejected else ""
    if count.items is None:
        return f"written through item {report.position:,} of {report.logged:,}{rejected}{writer}"
    what = "rows (one per key) from" if count.key else "of"
    verdict = behind if count.key or count.items < report.logged else ""  # it may have more than its writer saved
    if report.is_open:
        verdict = ": NOT COMPLETED"
    if report.missing:
        verdict = f": {report.missing:,} MISSING"
    if report.surplus:
        verdict = f": {report.surplus:,} TOO MANY"
    return f"{count.items:,} {what} {report.logged:,} items{rejected}{writer}{verdict}"


def _repair(run_id: str, report: OutputReport) -> Iterator[str]:
    """The command that writes the missing items, and which items no command can write."""
    trimmed = f"items 1 to {report.first_logged - 1} are no longer in the log (items.keep is false)"
    lost = f"the log of this run does not have {name_items(report.lost)}" if report.lost else ""
    if is_replaceable(report.spec):
        if report.replaced_by:
            name, ending = os.path.splitext(split_role(report.role)[0])
            other = shlex.quote(os.path.relpath(f"{name}-{run_id}{ending}"))
            yield f"run {report.replaced_by} has replaced the file, so write the items to another one:"
            yield f"shoal export {run_id} -o {other}"
        elif report.first_logged > 1:
            yield f"{trimmed}: restore the file"
        elif lost:  # perhaps the file has them
            yield f"{lost}: keep the file, and export what the log has to another one"
        else:
            if not os.path.exists(report.spec.partition("?")[0]):
                yield "there is no such file. If you moved it together with its .shoal file, pass its name with -o. Or:"
            yield f"shoal export {run_id} -O {shlex.quote(report.spec if '?' in report.spec else _shown(report))}"
        return
    gone = sum(last - first + 1 for first, last in report.lost)
    if report.missing > gone and report.expected - gone >= report.first_logged:
        if is_of_plugin(report.spec):
            yield "repeat the command of the run: it writes them again"
        else:
            yield f"shoal export {run_id} --missing -o {shlex.quote(mask(report.export))}"
    if report.first_logged > 1:
        yield f"{trimmed}: if some of them are missing, restore the output"
    if lost:
        yield f"{lost}: if some of them are missing, restore the output"


# `shoal export`: write the items of a run.


@app.add(
    examples="""
    shoal export --frontier sqlite:///books.db -o books.csv
    shoal export books_1 --frontier redis://host -o books.parquet
    shoal export books_1 --frontier redis://host --missing -o mysql://user@db/shop
    """
)
async def export(
    outputs: Outputs = Outputs(),
    run_id: NewestRun = None,
    frontier: FrontierUrl = None,
    missing: Annotated[
        bool, option("--missing", "Write only the items that a database or object storage lacks.")
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

    specs = outputs.specs()
    if not specs:
        raise ConfigError("name a file or a database: -o items.csv")

    async with opened_run(frontier, run_id, readonly=True) as (_, run, store):
        first, before, is_short = await first_after(store, 0), await store.stats(), False
        for spec in specs:
            path = spec.partition("?")[0]
            if first > 1 and is_replaceable(spec) and os.path.exists(path):
                raise ConfigError(
                    f"items 1 to {first - 1} are no longer in the log (items.keep is false), and {path} may have "
                    "them. Choose another file"
                )
            owner = owner_of(path)
            if spec in outputs.output and is_replaceable(spec) and owner != run.run_id and _has_content(path):
                raise taken(path, owner)
            rejects: list[int] = []
            mode: Literal["all", "missing"] = "missing" if missing else "all"
            sink = open_sink(spec, run_id=run.run_id, on_reject=rejects.append, export=mode)
            if isinstance(sink, TableSink):
                for state in await _saved_states(store, sink_id(spec)):
                    sink.check_key(state)
            count = await drain(store, sink, on_progress=_progress)
            item_count = getattr(sink, "added", 0) if missing else count - sum(rejects)
            print(f"wrote {item_count}{' missing' if missing else ''} items to {shown_output(spec)}", file=sys.stderr)
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
