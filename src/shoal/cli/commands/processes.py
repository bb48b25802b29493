"""`--processes`: a crawl on several processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.messages import pip_install

if TYPE_CHECKING:
    from typing import Protocol

    from shoal.cli.progress import Watched
    from shoal.config import Resolved
    from shoal.crawling.stats import Summary
    from shoal.operations.metrics_server import Observed
    from shoal.runs.crawl import Stoppable
    from shoal.runs.process_crawl import ProcessCrawl
    from shoal.runs.process_fork import ForkedProcesses
    from shoal.spider import Spider

    class RunningCrawl(Stoppable, Watched, Observed, Protocol):
        """A crawl, a worker or a node."""

        @property
        def summary(self) -> Summary | None: ...

        @property
        def address(self) -> str: ...


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
        spider,
        resolved,
        forked,
        words,
        outputs=outputs,
        new_run=new_run,
        on_line=_show_line if relays else None,
    )


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
    from shoal.runs.process_fork import end_process, inherited

    process = inherited()
    if process is None:
        return
    from shoal.cli import progress
    from shoal.messages import LogFormatter
    from shoal.runs.loop_thread import collect_rarely
    from shoal.runs.process_crawl import ProcessPart, run_part

    part = ProcessPart.decode(process.line)
    collect_rarely()
    progress.set_up_logging(progress.console(), "WARNING" if quiet else resolved.config.log_level)
    if part.relayed:
        for handler in logging.getLogger("shoal").handlers:
            handler.setFormatter(LogFormatter(_RELAYED))
    end_process(run_part(part, process.connection, spider, resolved))


def without_processes(arguments: list[str]) -> list[str]:
    """A command line without the option ``--processes``."""
    words, skip = [], False
    for word in arguments:
        if skip or word.startswith("--processes="):
            skip = False
        elif word == "--processes":
            skip = True
        else:
            words.append(word)
    return words


# `--ui`: the dashboard of a crawl, in a process of its own that ends with the crawl.


_PORT = 8000
_NEEDED = ("fastapi", "uvicorn", "jinja2")
_POLL = 0.1  # seconds
_STOP_TIMEOUT = 5.0


def check_installed() -> None:
    """ConfigError if the libraries of the dashboard are missing."""
    for name in _NEEDED:
        if find_spec(name) is None:
            raise ConfigError(f"--ui needs {name}; install it with: {pip_install('api')}")


async def show_dashboard(crawl: RunningCrawl) -> None:
    """Start the dashboard when the crawl has opened its store, and stop it when this task is cancelled."""
    from shoal.runs.supervisor import command

    while crawl.vitals().frontier is None:
        await asyncio.sleep(_POLL)
    port = _free_port()
    words, environ = command(["ui", "--frontier", crawl.address, "--port", str(port)], tethered=True)
    child = await asyncio.create_subprocess_exec(
        *words, env={**environ, "SHOAL_LOG_LEVEL": "WARNING"}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    print(f"dashboard: http://127.0.0.1:{port}/", file=sys.stderr)
    try:
        await child.wait()
    finally:
        with suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await child.wait()
        except TimeoutError:
            child.kill()


def _free_port() -> int:
    """The usual port, or another one that is free."""
    for port in (_PORT, 0):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as listener:
            return int(listener.getsockname()[1])
    raise ConfigError("--ui: there is no free port")
