"""`shoal start`: begin a run that a fleet of workers shares."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

from shoal.cli.commands.crawl import execute
from shoal.cli.commands.session import read_session
from shoal.cli.help import Commands, option, raw_stderr
from shoal.cli.options import (
    Argument,
    Delay,
    Display,
    FrontierUrl,
    InProject,
    NewRun,
    Outputs,
    Quiet,
    Replace,
    Scrapy,
    SessionFile,
    Setting,
    SpiderName,
    pairs,
    resolve,
    settings_of,
    starts_anew,
)
from shoal.cli.run_store import find_spider, make_spider, record_action
from shoal.errors import ConfigError
from shoal.messages import did_you_mean
from shoal.system import clock

if TYPE_CHECKING:
    from shoal.config import Config, Resolved
    from shoal.fetch.sessions.stored import SessionImport
    from shoal.ports import Frontier, Run
    from shoal.runs.orchestrator import Entry
    from shoal.spider import Spider

_MAX_HOSTS = 20
"""Hosts whose settings are compared with those of the run."""

app = Commands()


@app.add(
    examples="""
    shoal start books.py --frontier redis://host
    shoal start books.py --urls-file urls.txt --frontier postgresql://host/db
    shoal start books.py --frontier redis://host -o postgresql://host/db
    """
)
def start(
    spider: SpiderName,
    in_project: InProject = None,
    scrapy: Scrapy = Scrapy(),
    urls_file: Annotated[
        str | None, option("--urls-file FILE", "Start from these URLs, one per line, instead of the spider's own.")
    ] = None,
    frontier: FrontierUrl = None,
    output: Annotated[
        list[str], option("-o, --output URL", "A database that every worker can write to. Repeatable.")
    ] = [],
    replace: Replace = [],
    argument: Argument = [],
    run_id: Annotated[str | None, option("--run-id ID", "The ID of the new run (default: made from the time).")] = None,
    mode: Annotated[
        str | None, option("--mode MODE", "distributed (default), or single or standalone: crawl in this process.")
    ] = None,
    delay: Delay = None,
    session: SessionFile = None,
    setting: Setting = [],
    new_run: NewRun = False,
    resume: Annotated[
        bool, option("--resume", "Resume the newest unfinished run (default: only if its start was interrupted).")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Start a run for a fleet and print its worker command.

    This pushes the start requests to the frontier and prints JSON with the run's ID and the command that starts a
    worker. If it is interrupted, run the same command again to resume it. A spider whose mode in shoal.toml is "single"
    runs in this process instead.
    """
    new_run = starts_anew(new_run, resume)
    reference, entry = find_spider(spider, in_project, scrapy)
    name = reference if scrapy else spider
    instance = make_spider(reference, {**(entry.arguments if entry else {}), **pairs(argument, "-a")})
    execution = _mode(mode, entry)
    options = settings_of(frontier=frontier, delay=delay, mode=None if mode == "single" else mode)
    resolved = resolve(instance, options, setting)
    outputs = Outputs(output=output, replace=replace).with_registered(entry)
    if execution == "single":
        urls, display = _urls_of(urls_file), Display(quiet=quiet)
        execute(instance, resolved, outputs, new_run=new_run, display=display, urls=urls, session=session)
    imported = None if session is None else read_session(session, instance, resolved.config)
    work = _start(
        instance, resolved, name, urls_file, outputs, run_id, new_run=new_run, resume=resume, quiet=quiet,
        frontier=frontier, imported=imported,
    )  # fmt: skip
    asyncio.run(work)


def _mode(mode: str | None, entry: Entry | None) -> str:
    modes = ("single", "standalone", "distributed")
    if mode is not None and mode not in modes:
        raise ConfigError(f'--mode must be single, standalone or distributed, not "{mode}"{did_you_mean(mode, modes)}')
    if mode == "standalone":
        return "single"
    return mode or (entry.execution_mode if entry is not None else "distributed")


def _urls_of(file: str | None) -> list[str] | None:
    """The URLs of a file. A run in one process keeps them in memory."""
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8-sig", errors="replace") as lines:
            return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc


async def _start(
    spider: Spider, resolved: Resolved, name: str, urls_file: str | None, outputs: list[str], run_id: str | None,
    *, new_run: bool, resume: bool, quiet: bool, frontier: str | None, imported: SessionImport | None,
) -> None:  # fmt: skip
    from shoal.frontier import open_store
    from shoal.runs.orchestrator import check_fleet, worker_command
    from shoal.runs.start import start_run

    check_fleet(resolved.config)
    store = await open_store(resolved.config.frontier)
    try:
        started = await start_run(
            store, spider, resolved.config, urls_file=urls_file, outputs=outputs, run_id=run_id, new_run=new_run,
            resume=resume, on_progress=_SeedProgress(quiet=quiet), imported=imported,
        )  # fmt: skip
        await record_action(store, "start", started.run.run_id, f"{name}, distributed", started.run.project)
        frontier_of_run = await store.frontier(started.run.run_id)
        await _report_host_settings(frontier_of_run, resolved.config)
        pushed = (await frontier_of_run.stats()).pushed
    finally:
        await store.close()
    flags = [] if frontier is None else ["--frontier", frontier]
    if file := os.environ.get("SHOAL_CONFIG"):
        flags += ["--config", file]
    answer: dict[str, object] = {
        "status": started.run.state,
        "run_id": started.run.run_id,
        "spider": started.run.spider,
        "enqueued": started.enqueued,
        "duplicates": started.duplicates,
        "out_of_scope": started.out_of_scope,
        "unreadable": started.unreadable,
        "worker_command": worker_command(name, started.run.run_id, flags, resolved.config.lease.batch),
    }
    if not (started.enqueued or started.duplicates or started.out_of_scope or started.unreadable):
        print(_nothing_pushed(started.run, pushed), file=sys.stderr)
    print(json.dumps(answer, indent=2))


def _nothing_pushed(run: Run, pushed: int) -> str:
    """Why a start added no request, and what to do. ``pushed``: the requests that the run has had."""
    if not pushed:
        return f"run {run.run_id} has no start requests: set start_urls, write start(), or pass --urls-file"
    instead = "start its workers with the command below, or pass --new-run to crawl again"
    if run.state == "finished":
        instead = "it is finished; pass --new-run to crawl again"
    requests = "1 request" if pushed == 1 else f"{pushed} requests"
    return f"run {run.run_id} exists and has {requests}, nothing was added: {instead}"


async def _report_host_settings(frontier: Frontier, config: Config) -> None:
    """Say which hosts are not fetched as this command says, because somebody has set them for all runs."""
    from shoal.frontier.host_policy import SET_FOR_ALL, SET_FOR_HOST

    for state in await frontier.host_states(_MAX_HOSTS):
        delay, limit = config.download_delay, config.concurrency_per_host
        is_set = state.why in (SET_FOR_HOST, SET_FOR_ALL) or not state.delay
        if state.blocked_for > 0:
            message = f"{state.host} is blocked for {state.blocked_for:.0f} s ({state.block_reason})"
            command = f"unblock {state.host}"
        elif is_set and state.delay != delay:
            name = "all hosts" if state.why == SET_FOR_ALL else state.host
            message = f"the delay of {state.delay:g} s that was set for {name} counts, not download_delay={delay:g}"
            command = f"set {repr('*') if state.why == SET_FOR_ALL else state.host} --reset"
        elif not state.delay and state.concurrency != limit:
            message = f"{state.concurrency} pages at the same time are set for {state.host}, not {limit}"
            command = f"set {state.host} --reset"
        else:
            continue
        print(f"note: {message}; `shoal hosts {command}` ends that", file=sys.stderr)


class _SeedProgress:
    """Print how many start URLs were read: on one line of a terminal, or as a new line every few seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._printed_at = self._started = clock.monotonic()

    def __call__(self, count: int) -> None:
        now = clock.monotonic()
        is_terminal = sys.stderr.isatty()
        if self._quiet or now - self._printed_at < (0.2 if is_terminal else 5.0):
            return
        self._printed_at = now
        rate = count / (now - self._started)
        print(f"{count} URLs read, {rate:.0f}/s", end="\r" if is_terminal else "\n", file=raw_stderr(), flush=True)
