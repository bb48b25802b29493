"""`shoal autoscale`: as many workers as the queue asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.fleet import find_spider
from shoal.cli.inspecting import choose_run, quietly
from shoal.cli.managing import OneRun
from shoal.cli.running import FrontierUrl, Quiet, given, make_spider, resolve
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.ports import Run
    from shoal.runs.worker_pools import Pool


def register(app: typer.Typer) -> None:
    app.command()(autoscale)


def autoscale(
    run: OneRun,
    worker_options: Annotated[
        list[str], typer.Argument(metavar="WORKER_OPTION", help="Behind --: what each `shoal worker` is told.")
    ] = [],
    spider: Annotated[
        str | None,
        typer.Option(
            "--spider", metavar="SPIDER",
            help="The spider's file, FILE:Class, or its name in shoal.toml (default: the one there that is named so).",
        ),
    ] = None,
    per_worker: Annotated[
        int, typer.Option("--per-worker", metavar="N", help="Requests that one worker is enough for.", min=1)
    ] = 1000,
    fewest: Annotated[int, typer.Option("--min", metavar="N", help="Never fewer workers.", min=1)] = 1,
    most: Annotated[int, typer.Option("--max", metavar="N", help="Never more workers.", min=1)] = 50,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="Between two looks.", min=0.05)] = 5.0,
    cool_down: Annotated[
        float,
        typer.Option(
            "--cool-down", metavar="SECONDS", help="For how long fewer must be enough before some leave.", min=0.0
        ),
    ] = 60.0,
    via: Annotated[
        str,
        typer.Option(
            "--via", metavar="HOW", help="local, compose:FILE[:SERVICE] or kubernetes:[NAMESPACE/]DEPLOYMENT."
        ),
    ] = "local",
    logs: Annotated[
        Path | None,
        typer.Option("--logs", metavar="FOLDER", help="Where local workers write what they have to say."),
    ] = None,
    frontier: FrontierUrl = None,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Keep as many workers as the depth of a run's queue asks for, until the run is finished.

    Workers come at once, and leave in good order when fewer were enough for a while. Local ones are processes of this
    machine that leave when this command does; Compose and Kubernetes are asked by their own commands.
    """
    from shoal.cli import progress
    from shoal.runs.autoscale import Autoscaler, Limits
    from shoal.runs.crawl import run_blocking
    from shoal.runs.orchestrator import check_fleet

    if fewest > most:
        raise ConfigError(f"--min {fewest} is more than --max {most}")
    config = resolve(None, given({"frontier": frontier}), []).config
    check_fleet(config)
    if via == "local":
        words = asyncio.run(_worker_words(config.frontier, run, spider, worker_options))
        flags = [] if frontier is None else ["--frontier", frontier]
        pool = _local_pool([*words, *flags, *worker_options], logs)
    else:
        if spider is not None or worker_options or logs is not None:
            raise ConfigError(
                "--spider, --logs and options of workers are for local ones; others are started elsewhere"
            )
        pool = _pool_elsewhere(via)
    progress.set_up_logging(progress.console(), "WARNING" if quiet else config.log_level)
    limits = Limits(per_worker=per_worker, min=fewest, max=most, cool_down=cool_down)
    run_blocking(Autoscaler(config.frontier, run, pool, limits, every=every))


async def _worker_words(frontier: str, run_id: str, spider: str | None, options: list[str]) -> list[str]:
    """What `shoal worker` is told of the run. That it could work on it is seen here, before many try."""
    from shoal.frontier import open_store
    from shoal.runs.start import RunSettings, find_run

    with quietly():
        store = await open_store(frontier, readonly=True)
    try:
        run = await choose_run(store, run_id)
        name = spider or _registered(run)
        reference, entry = find_spider(name)
        made = make_spider(reference, {**(entry.arguments if entry else {}), **RunSettings.of(run).arguments})
        await find_run(store, run_id, made, allow_changed="--allow-changed" in options)
    finally:
        await store.close()
    return [name, "--run-id", run_id]


def _registered(run: Run) -> str:
    from shoal.runs.registry import Registry

    if run.spider not in Registry.load():
        raise ConfigError(f"where is the spider {run.spider!r} of run {run.run_id}? Say it with --spider FILE")
    return run.spider


def _local_pool(arguments: list[str], logs: Path | None) -> Pool:
    from shoal.runs.worker_pools import LocalPool

    if logs is None:
        return LocalPool([*arguments, "--quiet"])
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--logs {logs}: {exc.strerror}") from exc
    return LocalPool(arguments, logs)


def _pool_elsewhere(via: str) -> Pool:
    from shoal.runs.worker_pools import compose_pool, kubernetes_pool

    match via.split(":"):
        case ["compose", file] if file:
            return compose_pool(file)
        case ["compose", file, service] if file and service:
            return compose_pool(file, service)
        case ["kubernetes", place] if place:
            namespace, _, deployment = place.rpartition("/")
            return kubernetes_pool(deployment, namespace)
    raise ConfigError(f"--via {via!r}: write local, compose:FILE[:SERVICE] or kubernetes:[NAMESPACE/]DEPLOYMENT")
