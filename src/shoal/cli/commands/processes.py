"""`--processes`: a crawl on several processes of this machine."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.config import Resolved
    from shoal.runs.process_crawl import ProcessCrawl
    from shoal.runs.process_fork import ForkedProcesses
    from shoal.spider import Spider

_RELAYED = "%(levelname)s %(message)s"
_log = logging.getLogger("shoal.worker")


def fork_ahead(count: int) -> ForkedProcesses | None:
    """Fork the processes of a crawl with ``--processes``. None without it, and in the worker processes."""
    if count == 1:
        return None
    from shoal.cli import progress
    from shoal.runs.process_crawl import ProcessCrawl  # noqa: F401 - imported once, before the processes are forked
    from shoal.runs.process_fork import fork_processes

    return fork_processes(count, relays=progress.console().is_terminal)


def process_crawl(
    spider: Spider, resolved: Resolved, forked: ForkedProcesses, outputs: list[str], *, new_run: bool
) -> ProcessCrawl:
    """The crawl of this command line on several processes. On a terminal, the lines of the workers appear above the
    panel."""
    from shoal.runs.process_crawl import ProcessCrawl

    words = [sys.argv[1], *without_processes(sys.argv[2:])]
    relays = forked.workers[0].output is not None
    return ProcessCrawl(
        spider, resolved, forked, words, outputs=outputs, new_run=new_run,
        on_line=_show_line if relays else None,
    )  # fmt: skip


def _show_line(line: str) -> None:
    """Log a line of a worker: a log line of its own, or whatever else it printed."""
    level, _, message = line.partition(" ")
    number = logging.getLevelNamesMapping().get(level)
    if number is None:
        _log.warning("%s", line)
    else:
        _log.log(number, "%s", message)


def run_if_worker_process(spider: Spider, resolved: Resolved, *, quiet: bool) -> None:
    """If this process was started by a crawl with ``--processes``, work for it and exit. Otherwise do nothing."""
    from shoal.runs.process_part import ProcessPart, run_part

    found = ProcessPart.of_this_process()
    if found is None:
        return
    part, connection = found
    from shoal.cli import progress
    from shoal.crawling.garbage import collect_rarely
    from shoal.printable import LogFormatter
    from shoal.runs.process_fork import end_process

    collect_rarely()
    progress.set_up_logging(progress.console(), "WARNING" if quiet else resolved.config.log_level)
    if part.relayed:
        for handler in logging.getLogger("shoal").handlers:
            handler.setFormatter(LogFormatter(_RELAYED))
    end_process(run_part(part, connection, spider, resolved))


def without_processes(arguments: list[str]) -> list[str]:
    """A command line without the option ``--processes``."""
    kept, skip = [], False
    for word in arguments:
        if skip or word.startswith("--processes="):
            skip = False
        elif word == "--processes":
            skip = True
        else:
            kept.append(word)
    return kept
