"""`--processes`: a crawl on several processes of this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shoal.cli.commands.worker import without_processes

if TYPE_CHECKING:
    from shoal.config import Resolved
    from shoal.runs.process_crawl import ProcessCrawl
    from shoal.spider import Spider


def process_crawl(spider: Spider, resolved: Resolved, processes: int, **options: Any) -> ProcessCrawl:
    """The crawl of this command line on several processes. On a terminal, the lines of the workers appear above the
    panel."""
    from rich.text import Text

    from shoal.cli import progress
    from shoal.printable import printable
    from shoal.runs.process_crawl import ProcessCrawl

    console = progress.console()

    def show_line(line: str) -> None:
        console.print(Text(printable(line)), soft_wrap=True)

    words = [sys.argv[1], *without_processes(sys.argv[2:])]
    on_output = show_line if console.is_terminal else None
    return ProcessCrawl(spider, resolved.config, words, processes, on_output=on_output, **options)


def work_as_part(spider: Spider, resolved: Resolved, *, quiet: bool) -> None:
    """If this process was started by a crawl with ``--processes``, work for it and exit. Otherwise do nothing."""
    from shoal.runs.process_part import Part, run_part

    part = Part.of_this_process()
    if part is None:
        return
    from shoal.cli import progress
    from shoal.crawling.garbage import collect_rarely

    collect_rarely()
    progress.set_up_logging(progress.console(), "WARNING" if quiet else resolved.config.log_level)
    sys.exit(run_part(part, spider, resolved.config))
