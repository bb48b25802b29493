"""`shoal start` and `shoal worker`: a run for a fleet, and one of those who work on it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol

import typer

from shoal.cli.running import (
    Argument,
    Concurrency,
    Delay,
    FrontierUrl,
    MetricsPort,
    Output,
    Quiet,
    Setting,
    beside,
    execute,
    given,
    make_spider,
    pairs,
    resolve,
)
from shoal.cli.terminal import raw_stderr
from shoal.crawling.garbage import collect_rarely
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import Config, Resolved
    from shoal.crawling.stats import Snapshot, Summary, Vitals
    from shoal.runs.registry import Entry
    from shoal.spider import Spider

_OF_THE_RUN = {"download_delay", "concurrency_per_host", "retry.max_attempts", "queue.max_size", "items.keep"}

SpiderName = Annotated[
    str, typer.Argument(metavar="SPIDER", help="The spider's file, FILE:Class, or its name in shoal.toml.")
]


def register(app: typer.Typer) -> None:
    app.command()(start)
    app.command()(worker)


def start(
    spider: SpiderName,
    urls_file: Annotated[
        str | None,
        typer.Option("--urls-file", metavar="FILE", help="A URL a line, instead of the spider's own start requests."),
    ] = None,
    frontier: FrontierUrl = None,
    output: Annotated[
        list[str],
        typer.Option("-o", "--output", metavar="URL", help="A database that any worker writes to. Repeatable."),
    ] = [],
    argument: Argument = [],
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="The name of the run (default: the time).")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="MODE", help="single or distributed, whatever shoal.toml says.")
    ] = None,
    delay: Delay = None,
    setting: Setting = [],
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Also when an earlier start did not come to its end.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Begin a run for a fleet: push its start requests, and print as JSON how to start its workers.

    The same command again goes on where an earlier one died. A spider that shoal.toml has as single runs right here.
    """
    reference, entry = find_spider(spider)
    made = make_spider(reference, {**(entry.arguments if entry else {}), **pairs(argument, "-a")})
    resolved = resolve(made, given({"frontier": frontier, "download_delay": delay}), setting)
    outputs = [*(entry.outputs if entry else ()), *output]
    if _mode(mode, entry) == "single":
        execute(made, resolved, outputs, new_run=new_run, quiet=quiet, command=spider, urls=_urls_of(urls_file))
    asyncio.run(
        _start(made, resolved, spider, urls_file, outputs, run_id, new_run=new_run, quiet=quiet, frontier=frontier)
    )


def _mode(mode: str | None, entry: Entry | None) -> str:
    if mode not in (None, "single", "distributed"):
        raise ConfigError(f'--mode must be single or distributed, not "{mode}"')
    return mode or (entry.execution_mode if entry is not None else "distributed")


def _urls_of(file: str | None) -> list[str] | None:
    """In one process the URLs of a file may as well be in memory."""
    if file is None:
        return None
    try:
        with open(file, encoding="utf-8-sig", errors="replace") as lines:
            return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    except OSError as exc:
        raise ConfigError(f"can't read {file}: {exc.strerror}") from exc


async def _start(
    spider: Spider, resolved: Resolved, name: str, urls_file: str | None, outputs: list[str], run_id: str | None,
    *, new_run: bool, quiet: bool, frontier: str | None,
) -> None:  # fmt: skip
    from shoal.frontier import open_store
    from shoal.runs.orchestrator import check_fleet, worker_command
    from shoal.runs.start import start_run

    check_fleet(resolved.config)
    store = await open_store(resolved.config.frontier)
    try:
        started = await start_run(
            store, spider, resolved.config, urls_file=urls_file, outputs=outputs, run_id=run_id, new_run=new_run,
            on_progress=_Progress(quiet=quiet),
        )  # fmt: skip
    finally:
        await store.close()
    flags = [] if frontier is None else ["--frontier", frontier]
    answer: dict[str, Any] = {
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
        print("nothing was pushed: the run was seeded already, or there is nothing to start with", file=sys.stderr)
    print(json.dumps(answer, indent=2))


class _Progress:
    """How many start requests are in the frontier by now, on a line of its own or now and then."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._told = self._started = time.monotonic()

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if self._quiet or now - self._told < (0.2 if terminal else 5.0):
            return
        self._told = now
        rate = count / (now - self._started)
        print(f"{count} URLs read, {rate:.0f}/s", end="\r" if terminal else "\n", file=raw_stderr(), flush=True)


def worker(
    spider: SpiderName,
    run_id: Annotated[str, typer.Option("--run-id", metavar="ID", help="The run, as `shoal start` printed it.")],
    frontier: FrontierUrl = None,
    output: Output = [],
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Requests leased at a time (default 50).")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", help="So many workers; one that is killed is replaced.", min=1)
    ] = 1,
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="Stay when the run is finished.")] = False,
    concurrency: Concurrency = None,
    setting: Setting = [],
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Also when the spider's file is not the one the run began with.")
    ] = False,
    metrics_port: MetricsPort = None,
    quiet: Quiet = False,
) -> None:
    """Work on a run, beside any number of others, until it is finished.

    SIGTERM gives what is leased back within a second, without using up an attempt. A worker that is killed is
    succeeded by the others when its leases run out.
    """
    if processes > 1:
        from shoal.runs.supervisor import worker_processes

        if metrics_port is not None:
            from shoal.metrics.serving import parse_address

            parse_address(metrics_port).check_room(processes)
        sys.exit(worker_processes(_without_processes(sys.argv[2:]), processes))
    options = given({"frontier": frontier, "concurrency": concurrency, "lease.batch": batch_size})
    reference, entry = find_spider(spider)
    _work(
        reference, entry, options, setting, run_id, output, keep_alive, allow_changed, quiet=quiet,
        metrics_port=metrics_port,
    )  # fmt: skip


def _work(
    reference: str, entry: Entry | None, options: Mapping[str, Any], setting: list[str], run_id: str,
    output: list[str], keep_alive: bool, allow_changed: bool, *, quiet: bool, metrics_port: str | None,
) -> None:  # fmt: skip
    from shoal.runs.orchestrator import check_fleet
    from shoal.runs.worker import Worker, WorkerOptions

    check_fleet(resolve(None, options, setting).config)
    spider, resolved = prepare(reference, entry, options, setting, run_id)
    how = WorkerOptions(keep_alive=keep_alive, allow_changed=allow_changed, grace=grace_of(resolved))
    made = Worker(spider, resolved.config, run_id, outputs=output, options=how)
    work_to_the_end(made, resolved, quiet=quiet, metrics_port=metrics_port)


class Working(Protocol):
    """A worker or a node."""

    summary: Summary | None

    def stop(self) -> None: ...

    async def snapshot(self) -> Snapshot | None: ...

    def vitals(self) -> Vitals: ...

    def __await__(self) -> Generator[Any, None, Any]: ...


def prepare(
    reference: str, entry: Entry | None, options: Mapping[str, Any], setting: list[str], run_id: str | None,
    given: Mapping[str, Any] | None = None,
) -> tuple[Spider, Resolved]:  # fmt: skip
    """The spider as it was when the run began, or with the arguments given if there is none yet; and the configuration
    of who works on it."""
    plain = resolve(None, options, setting)
    arguments = dict(given or {}) if run_id is None else asyncio.run(_run_arguments(plain.config, run_id))
    spider = make_spider(reference, {**(entry.arguments if entry else {}), **arguments})
    return spider, resolve(spider, options, setting)


def grace_of(resolved: Resolved) -> float:
    """A worker of a fleet gives back sooner than a crawl that is alone, unless it was told."""
    from shoal.runs.lifecycle import GRACE

    return GRACE if resolved.sources["shutdown_grace"] == "default" else resolved.config.shutdown_grace


def work_to_the_end(made: Working, resolved: Resolved, *, quiet: bool, metrics_port: str | None) -> NoReturn:
    """Run it, show how it goes on, and exit."""
    from shoal.cli import progress, summary
    from shoal.runs.crawl import run_blocking

    config = resolved.config
    collect_rarely()
    console = progress.console()
    progress.set_up_logging(console, "WARNING" if quiet else config.log_level)
    for key in sorted(key for key, source in resolved.sources.items() if source.startswith("--") and _is_the_runs(key)):
        console.print(f"{key} is the run's, as `shoal start` was given it; a worker's own is not used", style="yellow")
    run_blocking(made, beside(None if quiet else progress.show(console), metrics_port))
    assert made.summary is not None
    summary.show(console, made.summary, config)
    sys.exit(1 if made.summary.state == "failed" else 0)


def _is_the_runs(key: str) -> bool:
    """Whether all workers take this setting from the run."""
    return key.startswith("scope.") or key in _OF_THE_RUN


async def _run_arguments(config: Config, run_id: str) -> dict[str, Any]:
    """The spider is made as it was when the run began."""
    from shoal.frontier import open_store
    from shoal.runs.start import RunSettings

    store = await open_store(config.frontier, readonly=True)
    try:
        run = await store.get_run(run_id)
        return {} if run is None else RunSettings.of(run).arguments
    finally:
        await store.close()


def find_spider(name: str) -> tuple[str, Entry | None]:
    """The reference of a spider, and its entry if the registry has it."""
    from shoal.runs.registry import Registry

    registry = Registry.load()
    if name in registry:
        return registry.reference(name), registry[name]
    if ".py" not in name:
        registry[name]  # the error says which ones there are
    return name, None


def _without_processes(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for word in arguments:
        if skip or word.startswith("--processes="):
            skip = False
        elif word == "--processes":
            skip = True
        else:
            kept.append(word)
    return kept
