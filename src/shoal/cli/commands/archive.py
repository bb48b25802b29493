"""`shoal archive`: list, check and prune the WARC files of a folder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.help import Commands, print_json
from shoal.cli.options import AsJson, resolve
from shoal.cli.progress import size
from shoal.errors import ConfigError
from shoal.messages import printable

if TYPE_CHECKING:
    from shoal.sinks.archive import RunFiles

app = Commands()
archive_app = Commands(
    help="List, check and prune an archive: the folder of WARC files that `--warc FOLDER` writes.\n\n"
    "Each WARC file has an index, which finds a page without reading the file. The folder can be read by programs for "
    "WARC files, and by a later crawl.",
    epilog=(
        "shoal run books.py --warc archive\n"
        "shoal archive list archive\n"
        "shoal archive check archive --repair\n"
        "shoal archive prune archive --keep-runs 3"
    ),
    no_args_is_help=True,
)
app.add_typer(archive_app, name="archive")

Folder = Annotated[
    str | None,
    typer.Argument(metavar="FOLDER", help="The folder of `--warc`. Default: the setting warc.folder."),
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


def _moment(digits: str) -> str:
    """A time in 14 digits, to read. It is in UTC, as in the file."""
    if len(digits) != 14:
        return "-"
    return f"{digits[:4]}-{digits[4:6]}-{digits[6:8]} {digits[8:10]}:{digits[10:12]}:{digits[12:]}"
