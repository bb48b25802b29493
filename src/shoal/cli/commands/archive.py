"""`shoal archive`: list, check and prune the WARC files of a folder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from shoal.cli.help import Commands, argument, option, print_json
from shoal.cli.options import AsJson, resolve
from shoal.cli.progress import size
from shoal.errors import ConfigError
from shoal.messages import printable
from shoal.operations.problem import counted

if TYPE_CHECKING:
    from shoal.sinks.archive import RunFiles

app = Commands()
archive_app = Commands(
    help="List, check and prune an archive.\n\n"
    "It is the folder of WARC files that `--warc FOLDER` writes. Each WARC file has an index, which finds a page "
    "without reading the file. The folder can be read by programs for WARC files, and by a later crawl.",
    epilog=(
        "shoal archive list archive\nshoal archive check archive --repair\nshoal archive prune archive --keep-runs 3"
    ),
    no_args_is_help=True,
)
app.add_typer(archive_app, name="archive")

Folder = Annotated[
    str | None,
    argument("FOLDER", "The folder of `--warc`. Default: the setting warc.folder."),
]


def _chosen(folder: str | None) -> str:
    """The folder of the command, or of the settings."""
    chosen = folder or resolve(None, {}, []).config.warc.folder
    if chosen is None:
        raise ConfigError('name the folder of the archive, such as "archive"; the setting warc.folder has none')
    return chosen


@archive_app.add(
    "list",
    examples="""
    shoal archive list archive
    shoal archive list archive --json
    """,
)
def list_runs(folder: Folder = None, as_json: AsJson = False) -> None:
    """List the runs of an archive with their pages, bytes, files and dates, newest first.

    A revisit is a page whose body is stored once, with another page. Files without a run have bodies that were kept
    when their runs were pruned, or were written by another program. Times are in UTC.
    """
    from shoal.sinks.archive import ArchiveFolder

    chosen = _chosen(folder)
    with ArchiveFolder(chosen) as archive:
        runs, faults = archive.runs(), archive.faults
    if as_json:
        print_json(runs)
    elif runs:
        print(
            f"{'run':<26} {'pages':>9} {'revisits':>9} {'bytes':>9} {'files':>6}  {'first page':<19} {'last page':<19}"
        )
        for run in runs:
            print(_run_line(run))
    else:
        print(f"{chosen} has no WARC files")
    for fault in faults:
        print(fault, file=sys.stderr)


def _run_line(run: RunFiles) -> str:
    files = len(run.files) + len(run.open_files)
    line = (
        f"{printable(run.run) or '(no run)':<26} {run.pages:>9,} {run.revisits:>9,} {size(run.bytes):>9} {files:>6}  "
        f"{_moment(run.first):<19} {_moment(run.last):<19}"
    )
    return line.rstrip() + (f"  {len(run.open_files)} not finished" if run.open_files else "")


@archive_app.add(
    "check",
    examples="""
    shoal archive check archive
    shoal archive check archive --repair
    """,
)
def check_archive(
    folder: Folder = None,
    repair: Annotated[
        bool, option("--repair", "Make missing and wrong indexes again; remove what belongs to no file.")
    ] = False,
) -> int:
    """Compare each WARC file with its index, and read each page with its body.

    There is one sentence for each fault, and exit code 1 if there are any. --repair makes indexes again, from the WARC
    files: these are never changed. It may run while crawls write to the folder.
    """
    from shoal.sinks.archive_upkeep import check

    chosen, faults, repaired = _chosen(folder), 0, 0
    for fault in check(chosen, repair=repair):
        print(f"{'repaired: ' if fault.repaired else ''}{printable(fault.text)}")
        faults += not fault.repaired
        repaired += fault.repaired
    if not faults:
        print(f"{chosen} is whole" + (f" now: {counted(repaired, 'fault')} repaired" if repaired else ""))
    return 1 if faults else 0


@archive_app.add(
    "prune",
    examples="""
    shoal archive prune archive --keep-runs 3 --dry-run
    shoal archive prune archive --keep-runs 3
    shoal archive prune archive --run books_1 --run books_2
    """,
)
def prune_archive(
    folder: Folder = None,
    keep_runs: Annotated[int | None, option("--keep-runs N", "Keep the newest N runs of the folder.", min=1)] = None,
    run: Annotated[list[str], option("--run RUN", "Remove the files of this run. Repeatable.")] = [],
    dry_run: Annotated[bool, option("--dry-run", "Only say what would be removed.")] = False,
) -> None:
    """Remove the WARC files of old runs.

    Bodies that the pages of other runs refer to are copied into a file of their own first, so every page of the other
    runs can be read as before. A command that was interrupted can be repeated. The runs of all spiders in a folder
    count together: give each spider a folder if they run at different times.
    """
    from shoal.sinks.archive_upkeep import prune

    if (keep_runs is None) == (not run):
        raise ConfigError("say what to remove: --keep-runs N keeps the newest runs, --run RUN removes one")
    chosen = _chosen(folder)
    pruned = prune(chosen, keep=keep_runs, runs=run, dry_run=dry_run)
    if not pruned.runs:
        print(f"nothing to remove: {chosen} has no older runs")
        return
    removed, kept = ("would remove", "would keep") if dry_run else ("removed", "kept")
    for old in pruned.runs:
        files = counted(len(old.files) + len(old.open_files), "file")
        print(f"{removed} {printable(old.run)}: {files}, {counted(old.pages, 'page')}")
    if pruned.kept:
        where = f" in {pruned.into}" if pruned.into else ""
        print(f"{kept} the bodies of {counted(pruned.kept, 'page')}{where}: other runs need them")
    if not dry_run:
        print(f"freed {size(max(0, pruned.bytes))}")


def _moment(digits: str) -> str:
    """A time in 14 digits, to read. It is in UTC, as in the file."""
    if len(digits) != 14:
        return "-"
    return f"{digits[:4]}-{digits[4:6]}-{digits[6:8]} {digits[8:10]}:{digits[10:12]}:{digits[12:]}"
