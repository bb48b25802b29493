"""The `shoal` command."""

from __future__ import annotations

import sys

import typer

from shoal import __version__
from shoal.cli import autoscale, celery_worker, cluster, developing, fleet, inspecting, managing, running, serve
from shoal.cli.terminal import guard_terminal
from shoal.errors import ShoalError

app = typer.Typer(
    name="shoal",
    help=(
        "Crawl the web: politely, fast, and without losing a page.\n\n"
        "Start with `shoal crawl URL -o pages.jsonl`, or write a spider with `shoal new NAME` and run it with "
        "`shoal run FILE -o items.jsonl`. Add `--frontier sqlite:///crawl.db` and the crawl survives a crash: the same "
        "command goes on where it was. For a fleet: `shoal start FILE --frontier redis://host`, and on each machine "
        "the worker command that it prints."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


running.register(app)
fleet.register(app)
autoscale.register(app)
cluster.register(app)
managing.register(app)
inspecting.register(app)
serve.register(app)
celery_worker.register(app)
developing.register(app)


def main() -> None:
    """The entry point. What Shoal raises on purpose is one line on standard error, and exit code 2."""
    guard_terminal()
    try:
        app()
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("shoal: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
