"""`shoal worker`: work on a run of a fleet."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, NoReturn

from shoal.cli.commands.crawl import show_and_exit
from shoal.cli.commands.processes import without_processes
from shoal.cli.help import Commands, argument, option
from shoal.cli.options import (
    AllowChanged,
    BatchSize,
    Concurrency,
    Display,
    FrontierUrl,
    KeepAlive,
    Outputs,
    Proxy,
    Rendering,
    RunOrInProject,
    Scrapy,
    Setting,
    Tor,
    Warc,
    resolve,
    settings_of,
)
from shoal.cli.run_store import find_spider, make_spider
from shoal.errors import ConfigError
from shoal.messages import pip_install

if TYPE_CHECKING:
    from shoal.config import Config, Resolved
    from shoal.ports import Run
    from shoal.runs.worker import QueueWorker, Worker
    from shoal.spider import Spider

_SETTINGS_OF_THE_RUN = {
    "download_delay",
    "concurrency_per_host",
    "weight",
    "retry.max_attempts",
    "queue.max_size",
    "queue.overflow",
    "items.keep",
}

RunId = Annotated[
    str | None,
    option(
        "--run-id ID", "The ID of the run, from `shoal start` (with --keep-alive: all runs of the spider, one by one)."
    ),
]
Processes = Annotated[
    int, option("--processes N", "Run N worker processes (default 1), and restart those that die.", min=1)
]

app = Commands()


@app.add(
    examples="""
    shoal worker books.py --run-id books_1 --frontier redis://host
    shoal worker books.py --run-id books_1 --frontier redis://host --processes 4
    shoal worker Books --keep-alive --frontier redis://host
    shoal worker --scraper Books --run-id books_1
    """
)
def worker(
    spider: Annotated[
        str | None, argument("SPIDER", "FILE.py, FILE.py:Class, or a name from shoal.toml.", show_default=False)
    ] = None,
    in_project: RunOrInProject = None,
    scrapy: Scrapy = Scrapy(),
    scraper: Annotated[str | None, option("--scraper NAME", "Another way to write SPIDER.")] = None,
    run_id: RunId = None,
    frontier: FrontierUrl = None,
    outputs: Outputs = Outputs(),
    batch_size: BatchSize = None,
    processes: Processes = 1,
    keep_alive: KeepAlive = False,
    concurrency: Concurrency = None,
    tor: Tor = False,
    proxy: Proxy = [],
    warc: Warc = None,
    rendering: Rendering = Rendering(),
    setting: Setting = [],
    allow_changed: AllowChanged = False,
    display: Display = Display(),
) -> None:
    """Work on a run together with other workers.

    The worker exits when the run is finished. With --keep-alive and without --run-id, it takes the runs of the spider
    one after the other, as `shoal start`, schedules and the API queue them. SIGTERM or Ctrl-C releases its leases
    within a second and uses up no attempts. If a worker is killed, the others take over its requests when its leases
    expire.
    """
    spider = _one_name(spider, scraper)
    if run_id == "":
        raise ConfigError("--run-id is empty: pass the ID of a run (with Compose: WORKER_RUN_ID in .env)")
    if processes > 1:
        _run_processes(processes, display.metrics_port)
    if not scrapy and run_id is None:
        run_id, in_project = in_project, None
    if scrapy or scrapy.scrapy_settings or in_project is not None:
        spider, _ = find_spider(spider, in_project, scrapy)
    from shoal.cli.summary import resume_command
    from shoal.runs.orchestrator import check_fleet
    from shoal.runs.worker import Worker, WorkerOptions

    options = settings_of(
        frontier=frontier, concurrency=concurrency, batch_size=batch_size, tor=tor, proxy=proxy, warc=warc
    )
    check_fleet(resolve(None, options, setting).config)
    specs, stays = outputs.specs(), keep_alive and run_id is not None

    def make_worker(run_id: str, spider: Spider, resolved: Resolved) -> Worker:
        rendering.apply(spider)
        how = WorkerOptions(
            keep_alive=stays,
            allow_changed=allow_changed,
            grace=shutdown_grace(resolved),
            command=resume_command(sys.argv[1:]),
        )
        return Worker(spider, resolved.config, run_id, outputs=specs, options=how)

    if run_id is not None:
        instance, resolved = prepare(spider, options, setting, run_id)
        chosen: Worker | QueueWorker = make_worker(run_id, instance, resolved)
    elif keep_alive:
        chosen, resolved = _queue_worker(spider, options, setting, make_worker)
    else:
        raise ConfigError("no run given: pass --run-id ID, or --keep-alive to take all runs of the spider one by one")
    show_and_exit(chosen, resolved, display, notices=ignored_settings(resolved))


def _one_name(spider: str | None, scraper: str | None) -> str:
    if bool(spider) == bool(scraper):
        raise ConfigError(
            "name the spider once: shoal worker SPIDER, or shoal worker --scraper NAME (with Compose: WORKER_SPIDER in "
            ".env)"
        )
    return str(spider or scraper)


def _queue_worker(
    name: str,
    options: Mapping[str, object],
    setting: list[str],
    make_worker: Callable[[str, Spider, Resolved], Worker],
) -> tuple[QueueWorker, Resolved]:
    """A worker for all runs of a spider. The spider is created for each run, with the arguments of that run."""
    from shoal.runs.start import RunSettings
    from shoal.runs.worker import QueueWorker
    from shoal.spider import load_spider

    reference, entry = find_spider(name)
    kind = load_spider(reference)

    def make(run: Run) -> Worker:
        arguments = {**(entry.arguments if entry else {}), **RunSettings.of(run).arguments}
        spider = make_spider(reference, arguments)
        return make_worker(run.run_id, spider, resolve(spider, options, setting))

    resolved = resolve(kind, options, setting)
    return QueueWorker(resolved.config, kind.spider_name(), make), resolved


def _run_processes(count: int, metrics_port: str | None) -> NoReturn:
    """Run this command in several processes, and exit when they do."""
    from shoal.runs.supervisor import worker_processes

    if metrics_port is not None:
        from shoal.operations.metrics_server import parse_address

        parse_address(metrics_port).check_room(count)
    sys.exit(worker_processes(without_processes(sys.argv[2:]), count))


def prepare(
    name: str,
    options: Mapping[str, object],
    setting: list[str],
    run_id: str | None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[Spider, Resolved]:
    """The spider and the configuration of a worker.

    The spider has the arguments that the run started with, or the ones given here if there is no run yet.
    """
    reference, entry = find_spider(name)
    plain = resolve(None, options, setting)
    run_arguments = dict(arguments or {}) if run_id is None else asyncio.run(_run_arguments(plain.config, run_id))
    spider = make_spider(reference, {**(entry.arguments if entry else {}), **run_arguments})
    return spider, resolve(spider, options, setting)


async def _run_arguments(config: Config, run_id: str) -> dict[str, object]:
    """The arguments that the run's spider started with. RunError if there is no such run."""
    from shoal.cli.run_store import choose_run
    from shoal.frontier import join_store
    from shoal.runs.start import RunSettings

    store = await join_store(config.frontier, readonly=True)
    try:
        return RunSettings.of(await choose_run(store, run_id)).arguments
    finally:
        await store.close()


def shutdown_grace(resolved: Resolved) -> float:
    """How long a worker may finish its pages on SIGTERM: shorter than a crawl alone, unless it is configured."""
    from shoal.runs.lifecycle import GRACE

    return GRACE if resolved.sources["shutdown_grace"] == "default" else resolved.config.shutdown_grace


def ignored_settings(resolved: Resolved) -> list[str]:
    """A notice for each setting on this command line that all workers take from the run."""
    return [
        f"{key} is ignored: the run fixes this setting when `shoal start` creates it"
        for key, source in sorted(resolved.sources.items())
        if source.startswith("--") and (key.startswith("scope.") or key in _SETTINGS_OF_THE_RUN)
    ]


# `shoal celery-worker`: work on the batches that the API sends to Celery.


@app.add(
    "celery-worker",
    examples="""
    shoal celery-worker
    CELERY_BROKER_URL=redis://host/1 shoal celery-worker --concurrency 8
    """,
)
def celery_worker(
    concurrency: Annotated[
        int | None,
        option(
            "--concurrency N", "Fetch up to N pages at the same time (default: CELERY_WORKER_CONCURRENCY, or 2).", min=1
        ),
    ] = None,
    name: Annotated[
        str | None, option("--name NAME", "The worker's name in results (default: celery). @HOST is appended to it.")
    ] = None,
    log_level: Annotated[str | None, option("--log-level LEVEL", "DEBUG, INFO (default), WARNING or ERROR.")] = None,
) -> None:
    """Work on the batches that the API sends to Celery.

    SIGTERM or Ctrl-C stops the worker after it has finished its current pages. This is the same as `celery -A
    shoal.celery worker`. Set the broker and the limits in the environment: CELERY_BROKER_URL, CELERY_RESULT_BACKEND,
    CELERY_TASK_RATE_LIMIT, CELERY_TASK_MAX_RETRIES, CELERY_WORKER_CONCURRENCY.
    """
    level = None if log_level is None else log_level.upper()
    # Check the settings here: otherwise each child process fails on them and is restarted, without end.
    config = resolve(None, settings_of(log_level=level)).config
    config.refuse_tor("a Celery worker")
    try:
        from shoal.api.celery.app import app as celery
    except ModuleNotFoundError as exc:
        raise ConfigError(f"`shoal celery-worker` needs {exc.name}; install it with: {pip_install('celery')}") from exc
    words = ["worker", f"--loglevel={config.log_level}"]
    if concurrency is not None:
        words.append(f"--concurrency={concurrency}")
    if name is not None:
        words.append(f"--hostname={name if '@' in name else f'{name}@%h'}")
    celery.worker_main(words)
