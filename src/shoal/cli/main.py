"""The `shoal` command: its commands by group, and the entry point."""

from __future__ import annotations

import gc
import os
import sys

import typer

from shoal import __version__
from shoal.cli.help import (
    CommandEntry,
    Commands,
    OutputClosed,
    RootGroup,
    UsageError,
    flush_output,
    guard_terminal,
    usage_message,
)
from shoal.errors import ConfigError, ShoalError, StoreAwayError

COMMANDS = {
    "Crawl": {
        "crawl": CommandEntry("crawl", "Crawl a site without writing code."),
        "run": CommandEntry("crawl", "Run a spider on this machine."),
        "map": CommandEntry("map", "List the URLs of a site."),
    },
    "Fleet": {
        "start": CommandEntry("start", "Start a run for a fleet and print its worker command."),
        "worker": CommandEntry("worker", "Work on a run together with other workers."),
        "autoscale": CommandEntry("autoscale", "Start and stop workers to match a run's queue."),
        "pause": CommandEntry("runs", "Pause a run; its workers wait."),
        "resume": CommandEntry("runs", "Resume a paused or cancelled run."),
        "cancel": CommandEntry("runs", "Stop a run before it is finished."),
        "rm": CommandEntry("runs", "Delete a run, its URLs and its item log."),
        "hosts": CommandEntry("hosts", "Show or change delays, concurrency and blocks of hosts."),
        "identities": CommandEntry("hosts", "List the proxies of a run's workers, and where they rest."),
    },
    "Cluster": {
        "node": CommandEntry("cluster", "Join a cluster as a Runner or Backup Runner."),
        "cluster": CommandEntry("cluster", "Show a cluster, or change how many nodes it has."),
    },
    "Server": {
        "serve": CommandEntry("serve", "Serve the HTTP API and the dashboard."),
        "ui": CommandEntry("serve", "Show the dashboard of any frontier."),
        "batch": CommandEntry("batches", "Try a URL, and see and cancel batches of the HTTP API."),
        "notify": CommandEntry("notify", "List reported problems and channels, or test a channel."),
        "schedule": CommandEntry("schedules", "Run spiders at set times."),
        "celery-worker": CommandEntry("worker", "Work on the batches that the API sends to Celery."),
    },
    "Inspect": {
        "runs": CommandEntry("runs", "List the runs of a frontier, newest first."),
        "stats": CommandEntry("runs", "Count the ready, done and failed requests of a run."),
        "history": CommandEntry("history", "Show the counts and the speed of a run over time."),
        "workers": CommandEntry("history", "List the processes that work on runs."),
        "compare": CommandEntry("history", "Compare two runs: pages, items, failures, fields."),
        "audit": CommandEntry("audit", "Check that no request and no item of a run is lost."),
        "why": CommandEntry("audit", "Show what happened to a URL."),
        "retry-failed": CommandEntry("audit", "Queue the failed requests of a run again."),
        "actions": CommandEntry("notify", "List what users did: who paused, changed or deleted what."),
        "session": CommandEntry("session", "Show the cookies and logins of a run, without values."),
        "outputs": CommandEntry("outputs", "List the outputs of a run, and count their items."),
        "export": CommandEntry("outputs", "Write all items of a run to files or databases."),
        "archive": CommandEntry("archive", "List, check and prune an archive."),
    },
    "Develop": {
        "new": CommandEntry("spiders", "Create a spider from a template."),
        "list": CommandEntry("spiders", "List the spiders of shoal.toml and of a file or folder."),
        "shell": CommandEntry("map", "Fetch a page and try selectors on it."),
        "config": CommandEntry("spiders", "Show every setting and where its value comes from."),
        "doctor": CommandEntry("doctor", "Check libraries, settings, servers, the browser and Tor."),
        "completion": CommandEntry("spiders", "Print the completion script for a shell."),
    },
}


class _Root(RootGroup):
    groups = COMMANDS


app = Commands(
    cls=_Root,
    name="shoal",
    help=(
        "Crawl the web: politely, fast, and without losing a page.\n\n"
        "`shoal COMMAND --help` explains a command and has examples. `shoal completion --help` explains Tab completion."
    ),
    epilog=(
        "shoal crawl https://example.com -o pages.jsonl\n"
        "shoal new books && shoal run books.py -o books.jsonl\n"
        "shoal run books.py -o books.jsonl --frontier sqlite:///books.db\n"
        "shoal start books.py --frontier redis://host"
    ),
    no_args_is_help=True,
)

_START_THRESHOLD = 10_000


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line. An error that Shoal raises on purpose is one line on standard error, with exit code 2. A
    command whose output nobody reads any more ends quietly."""
    gc.set_threshold(_START_THRESHOLD)  # modules and settings stay: there is nothing to collect
    guard_terminal()
    if "_SHOAL_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        code = app(prog_name="shoal", standalone_mode=False)
    except OutputClosed:
        sys.exit(0)
    except UsageError as error:
        print(f"shoal: {usage_message(error)}", file=sys.stderr)
        sys.exit(2)
    except ShoalError as error:
        print(f"shoal: {error}{_origin(error)}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        print("shoal: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        flush_output()
    sys.exit(code if isinstance(code, int) else 0)


def _origin(error: ShoalError) -> str:
    """Where the address of a frontier that does not respond comes from, if the command does not name it."""
    if not isinstance(error, StoreAwayError):
        return ""
    from shoal.cli.options import resolve
    from shoal.config import mask

    try:
        settings = resolve()
    except ConfigError:
        return ""
    source = settings.sources.get("frontier", "default")
    address = mask(settings.config.frontier).partition("?")[0]
    return "" if source == "default" or address not in str(error) else f" The address comes from {source}."


if __name__ == "__main__":
    main()
