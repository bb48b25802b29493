"""`shoal autoscale`: as many workers as a run's queue needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shoal.cli.help import Commands, argument, option
from shoal.cli.options import FrontierUrl, OneRun, Quiet, resolve, settings_of
from shoal.cli.run_store import choose_run, find_spider, make_spider, opened_store
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.runs.autoscale import Pool


app = Commands()


@app.add(
    examples="""
    shoal autoscale books_1 --spider books.py --frontier redis://host --max 20
    shoal autoscale books_1 --frontier redis://host -- --batch-size 100
    shoal autoscale books_1 --via kubernetes:shoal/shoal-worker
    """
)
def autoscale(
    run: OneRun,
    worker_options: Annotated[
        list[str], argument("WORKER_OPTION", "After --: options of each local `shoal worker`.")
    ] = [],
    spider: Annotated[
        str | None,
        option(
            "--spider, --scraper SPIDER",
            "FILE.py, FILE.py:Class, or a name from shoal.toml (default: the run's spider, if listed there).",
        ),
    ] = None,
    per_worker: Annotated[
        int, option("--per-worker N", "Queued requests for each worker (default 1000).", min=1)
    ] = 1000,
    fewest: Annotated[int, option("--min N", "Run at least N workers (default 1).", min=1)] = 1,
    most: Annotated[int, option("--max N", "Run at most N workers (default 50).", min=1)] = 50,
    every: Annotated[float, option("--every SECONDS", "Check the queue this often (default 5).", min=0.05)] = 5.0,
    cool_down: Annotated[
        float, option("--cool-down SECONDS", "Stop workers only after this long with less work (default 60).", min=0.0)
    ] = 60.0,
    via: Annotated[
        str,
        option(
            "--via HOW",
            "Where workers run: local (default), compose:FILE[:SERVICE] or kubernetes:[NAMESPACE/]DEPLOYMENT.",
        ),
    ] = "local",
    logs: Annotated[Path | None, option("--logs FOLDER", "Write the logs of local workers to this folder.")] = None,
    frontier: FrontierUrl = None,
    quiet: Quiet = False,
) -> None:
    """Start and stop workers to match a run's queue.

    Workers start at once. They stop after the cool-down, and release their leases first. Local workers are processes of
    this machine that end with this command; for Compose and Kubernetes it runs `docker compose` and `kubectl`. The
    command ends when the run is finished.
    """
    from shoal.cli import progress
    from shoal.runs.autoscale import Autoscaler, PoolLimits
    from shoal.runs.crawl import run_blocking
    from shoal.runs.orchestrator import check_fleet

    if fewest > most:
        raise ConfigError(f"--min {fewest} is more than --max {most}")
    config = resolve(None, settings_of(frontier=frontier)).config
    check_fleet(config)
    if via == "local":
        pool = _local_pool(config, run, spider, frontier, worker_options, logs)
    elif spider is not None or worker_options or logs is not None:
        raise ConfigError(f"--spider, --logs and worker options need --via local, not --via {via}")
    else:
        pool = _remote_pool(via)
    progress.set_up_logging(progress.console(), "WARNING" if quiet else config.log_level)
    limits = PoolLimits(per_worker=per_worker, min=fewest, max=most, cool_down=cool_down)
    run_blocking(Autoscaler(config.frontier, run, pool, limits, every=every))


def _local_pool(
    config: Config, run_id: str, spider: str | None, frontier: str | None, options: list[str], logs: Path | None
) -> Pool:
    from shoal.runs.autoscale import LocalPool

    name = asyncio.run(_checked_spider(config.frontier, run_id, spider, options))
    flags = [] if frontier is None else ["--frontier", frontier]
    arguments = [name, "--run-id", run_id, *flags, *options]
    if logs is None:
        return LocalPool([*arguments, "--quiet"])
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--logs {logs}: {exc.strerror}") from exc
    return LocalPool(arguments, logs)


async def _checked_spider(frontier: str, run_id: str, spider: str | None, options: list[str]) -> str:
    """The name of the run's spider. Checks that a worker can work on the run, before many workers fail to."""
    from shoal.runs.orchestrator import Registry
    from shoal.runs.start import RunSettings, find_run

    async with opened_store(frontier, readonly=True) as store:
        run = await choose_run(store, run_id)
        arguments = RunSettings.of(run).arguments
        name = spider or Registry.load().name_of(run.spider, arguments)
        if name is None:
            raise ConfigError(
                f"shoal.toml does not list {run.spider!r}, the spider of run {run.run_id}: pass --spider FILE.py"
            )
        reference, entry = find_spider(name)
        instance = make_spider(reference, {**(entry.arguments if entry else {}), **arguments})
        project = resolve(instance, {}, []).config.project_name
        await find_run(store, run_id, instance, project, allow_changed="--allow-changed" in options)
    return name


def _remote_pool(via: str) -> Pool:
    from shoal.runs.autoscale import compose_pool, kubernetes_pool

    match via.split(":"):
        case ["compose", file] if file:
            return compose_pool(file)
        case ["compose", file, service] if file and service:
            return compose_pool(file, service)
        case ["kubernetes", place] if place:
            namespace, _, deployment = place.rpartition("/")
            return kubernetes_pool(deployment, namespace)
    raise ConfigError(f"--via {via!r}: write local, compose:FILE[:SERVICE] or kubernetes:[NAMESPACE/]DEPLOYMENT")
