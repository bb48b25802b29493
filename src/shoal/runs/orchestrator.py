"""Starts the spiders of a registry where they belong: here, or on a fleet."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.config import Config, find_config_file, load_config
from shoal.crawler import Crawl
from shoal.errors import ConfigError, RunError
from shoal.events import counts
from shoal.frontier import open_store
from shoal.runs.registry import Entry, ExecutionMode, Registry
from shoal.runs.starting import RunSettings, start_run
from shoal.spider import Spider, load_spider

T = TypeVar("T")


class Orchestrator:
    """Routes by ``execution_mode``. Each method has an async form, with an ``a`` before its name, for use in a loop."""

    def __init__(self, file: str | os.PathLike[str] | None = None, *, frontier: str | None = None) -> None:
        """``file`` is the ``shoal.toml`` with the registry; by default the one of the working directory or above it.
        ``frontier`` is stronger than what the file and the environment say."""
        self._file = Path(file) if file is not None else find_config_file(os.environ)
        self._frontier = frontier
        self.registry = Registry.load(self._file)

    def start(
        self,
        name: str,
        urls: Sequence[str] | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        mode: ExecutionMode | None = None,
        new_run: bool = False,
    ) -> dict[str, Any]:
        """Start a spider of the registry, with these URLs or its own start requests.

        A distributed one is queued: the answer has ``run_id``, ``enqueued`` and the ``worker_command`` for each node. A
        single one runs here, to its end. ``mode`` overrides the registry's.
        """
        return _blocking(self.astart(name, urls, arguments=arguments, mode=mode, new_run=new_run))

    def get_stats(self, name: str, run_id: str) -> dict[str, int]:
        """pending, claimed, completed, failed and remaining of a run."""
        return _blocking(self.aget_stats(name, run_id))

    async def astart(
        self,
        name: str,
        urls: Sequence[str] | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        mode: ExecutionMode | None = None,
        new_run: bool = False,
    ) -> dict[str, Any]:
        entry = self.registry[name]
        spider = load_spider(self.registry.reference(name))(**{**entry.arguments, **(arguments or {})})
        if (mode or entry.execution_mode) == "single":
            return await self._run_here(spider, entry, urls, new_run=new_run)
        return await self._queue(name, spider, entry, urls, new_run=new_run)

    async def _run_here(
        self, spider: Spider, entry: Entry, urls: Sequence[str] | None, *, new_run: bool
    ) -> dict[str, Any]:
        config = self._config(spider)
        crawl = Crawl(spider, config, outputs=entry.outputs, new_run=new_run, collect=False, urls=urls)
        await crawl
        assert crawl.summary is not None
        summary = crawl.summary
        return {
            "status": summary.state,
            "run_id": summary.run_id,
            "spider": summary.spider,
            "stats": counts(summary.stats),
            "error": summary.error,
        }

    async def _queue(
        self, name: str, spider: Spider, entry: Entry, urls: Sequence[str] | None, *, new_run: bool
    ) -> dict[str, Any]:
        config = self._config(spider, fleet=True)
        store = await open_store(config.frontier)
        try:
            started = await start_run(store, spider, config, urls=urls, outputs=entry.outputs, new_run=new_run)
        finally:
            await store.close()
        flags = [] if self._frontier is None else ["--frontier", self._frontier]
        return {
            "status": started.run.state,
            "run_id": started.run.run_id,
            "spider": started.run.spider,
            "enqueued": started.enqueued,
            "duplicates": started.duplicates,
            "out_of_scope": started.out_of_scope,
            "unreadable": started.unreadable,
            "worker_command": worker_command(name, started.run.run_id, flags),
        }

    async def aget_stats(self, name: str, run_id: str) -> dict[str, int]:
        spider = load_spider(self.registry.reference(name))
        config = self._config(spider)
        store = await open_store(config.frontier, readonly=True)
        try:
            run = await store.get_run(run_id)
            if run is None or run.spider != spider.spider_name():
                raise RunError(f"{name} has no run {run_id}")
            return counts(await (await store.frontier(run_id, RunSettings.of(run).options)).stats())
        finally:
            await store.close()

    def _config(self, spider: Spider | type[Spider], *, fleet: bool = False) -> Config:
        kind = spider if isinstance(spider, type) else type(spider)
        code = {} if self._frontier is None else {"frontier": self._frontier}
        config = load_config(
            file=self._file, environ=os.environ, spider=spider.settings, spider_name=kind.__name__, code=code
        ).config
        if fleet:
            check_fleet(config)
        return config


def check_fleet(config: Config) -> None:
    """ConfigError when the frontier is one that a fleet can't share."""
    kind = config.frontier.partition(":")[0]
    if kind in ("memory", "sqlite"):
        raise ConfigError(
            f'a fleet can\'t share the frontier "{config.frontier}"; name a server with --frontier redis://host or '
            "postgresql://host/database, in shoal.toml, or as SHOAL_FRONTIER"
        )


def worker_command(reference: str, run_id: str, flags: Sequence[str] = (), batch: int = 50) -> str:
    """What to type on each node."""
    return shlex.join(["shoal", "worker", reference, *flags, "--run-id", run_id, "--batch-size", str(batch)])


def _blocking(work: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise RuntimeError("inside an event loop use the async forms: await orchestrator.astart(...)")
