"""`--processes`: a crawl on several processes of this machine."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from shoal.cli.commands.worker import without_processes

if TYPE_CHECKING:
    from shoal.config import Resolved
    from shoal.runs.process_crawl import ProcessCrawl
    from shoal.spider import Spider

_RELAYED = "%(levelname)s %(message)s"
_log = logging.getLogger("shoal.worker")


def process_crawl(
    spider: Spider, resolved: Resolved, processes: int, outputs: list[str], *, new_run: bool
) -> ProcessCrawl:
    """The crawl of this command line on several processes. On a terminal, the lines of the workers appear above the
    panel."""
    from shoal.cli import progress
    from shoal.runs.process_crawl import ProcessCrawl

    words = [sys.argv[1], *without_processes(sys.argv[2:])]
    return ProcessCrawl(
        spider, resolved.config, words, processes, outputs=outputs, new_run=new_run,
        on_line=_show_line if progress.console().is_terminal else None,
    )  # fmt: skip


def _show_line(line: str) -> None:
    """Log a line of a worker: a log line of its own, or whatever else it printed."""
    level, _, message = line.partition(" ")
    number = logging.getLevelNamesMapping().get(level)
    if number is None:
        _log.warning("%s", line)
    else:
        _log.log(number, "%s", message)


def work_as_part(spider: Spider, resolved: Resolved, *, quiet: bool) -> None:
    """If this process was started by a crawl with ``--processes``, work for it and exit. Otherwise do nothing."""
    from shoal.runs.process_part import Part, run_part

    part = Part.of_this_process()
    if part is None:
        return
    from shoal.cli import progress
    from shoal.crawling.garbage import collect_rarely
    from shoal.printable import LogFormatter

    collect_rarely()
    progress.set_up_logging(progress.console(), "WARNING" if quiet else resolved.config.log_level)
    if part.relayed:
        for handler in logging.getLogger("shoal").handlers:
            handler.setFormatter(LogFormatter(_RELAYED))
    sys.exit(run_part(part, spider, resolved.config))
