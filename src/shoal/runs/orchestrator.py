"""Starts the spiders of a registry, in this process or on a fleet."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from shoal.config import Config, Resolved, find_config_file, load_config
from shoal.crawling.stats import counts
from shoal.errors import ConfigError, RunError, ShoalError, SpiderError
from shoal.frontier import open_store
from shoal.runs.crawl import Crawl
from shoal.runs.registry import ExecutionMode, Registry
from shoal.runs.start import Started, start_run
from shoal.spider import Spider, create_spider, load_spider

T = TypeVar("T")


class Chosen(Struct, frozen=True, kw_only=True):
    """A spider of the registry, created and configured, with its execution mode."""

    name: str
    spider: Spider
    resolved: Resolved
    outputs: tuple[str, ...]
    mode: ExecutionMode

    @property
    def config(self) -> Config:
        return self.resolved.config


class Orchestrator:
    """Starts spiders according to ``execution_mode``. ``astart`` and ``aget_stats`` are for use in an event loop."""

    def __init__(
        self,
        file: str | os.PathLike[str] | None = None,
        *,
        frontier: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """``file`` is the ``shoal.toml`` with the registry. Default: the one in the working directory or above it.
        ``frontier`` and ``settings`` override the file, the spider and the environment."""
        self._file = Path(file) if file is not None else find_config_file(os.environ)
        self._flags = [] if frontier is None else ["--frontier", frontier]
        if file is not None:
            self._flags += ["--config", os.path.abspath(file)]
        self._settings = {**(settings or {}), **({} if frontier is None else {"frontier": frontier})}
        self.registry = Registry.load(self._file)

    def start(
        self,
        name: str,
        urls: Sequence[str] | None = None,
        *,
        arguments: Mapping[str, object] | None = None,
        mode: ExecutionMode | None = None,
        new_run: bool = False,
    ) -> dict[str, object]:
        """Start a spider of the registry, with these URLs or its own start requests.

        In distributed mode the run is queued; the result has ``run_id``, ``enqueued`` and the ``worker_command`` to run
        on each node. In single mode the spider runs here until it ends. ``mode`` overrides the registry.
        """
        return _blocking(self.astart(name, urls, arguments=arguments, mode=mode, new_run=new_run))

    start_scraper = start

    def get_stats(self, name: str, run_id: str) -> dict[str, int]:
        """pending, claimed, completed, failed and remaining of a run."""
        return _blocking(self.aget_stats(name, run_id))

    def choose(
        self,
        name: str,
        arguments: Mapping[str, object] | None = None,
        mode: ExecutionMode | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Chosen:
        """Create and configure a spider. ``settings`` override those of the file, the spider and the environment.
        SpiderError if it does not exist or does not accept these arguments; ConfigError if its settings are wrong, or a
        fleet cannot share the frontier."""
        entry = self.registry[name]
        spider = _make(load_spider(self.registry.reference(name)), {**entry.arguments, **(arguments or {})})
        spider._arguments_of_others = tuple(arguments or ())
        resolved = self._resolve(spider, settings)
        mode = mode or entry.execution_mode
        if mode == "distributed":
            check_fleet(resolved.config)
        return Chosen(name=name, spider=spider, resolved=resolved, outputs=entry.outputs, mode=mode)

    async def astart(
        self,
        name: str,
        urls: Sequence[str] | None = None,
        *,
        arguments: Mapping[str, object] | None = None,
        mode: ExecutionMode | None = None,
        new_run: bool = False,
    ) -> dict[str, object]:
        chosen = self.choose(name, arguments, mode)
        if chosen.mode == "single":
            return await self._run_here(chosen, urls, new_run=new_run)
        return await self._queue(chosen, urls, new_run=new_run)

    async def _run_here(self, chosen: Chosen, urls: Sequence[str] | None, *, new_run: bool) -> dict[str, object]:
        crawl = Crawl(chosen.spider, chosen.resolved, outputs=chosen.outputs, new_run=new_run, collect=False, urls=urls)
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

    async def _queue(self, chosen: Chosen, urls: Sequence[str] | None, *, new_run: bool) -> dict[str, object]:
        store = await open_store(chosen.config.frontier)
        try:
            started = await start_run(
                store, chosen.spider, chosen.config, urls=urls, outputs=chosen.outputs, new_run=new_run
            )
        finally:
            await store.close()
        return queued(started, chosen, self._flags)

    async def aget_stats(self, name: str, run_id: str) -> dict[str, int]:
        spider = load_spider(self.registry.reference(name))
        config = self._resolve(spider).config
        store = await open_store(config.frontier, readonly=True)
        try:
            run = await store.get_run(run_id)
            if run is None or (run.spider, run.project) != (spider.spider_name(), config.project_name):
                raise RunError(f"{name} has no run {run_id}")
            return counts(await (await store.frontier(run_id)).stats())
        finally:
            await store.close()

    def _resolve(self, spider: Spider | type[Spider], settings: Mapping[str, object] | None = None) -> Resolved:
        kind = spider if isinstance(spider, type) else type(spider)
        return load_config(
            file=self._file, environ=os.environ, spider=spider.settings, spider_name=kind.__name__,
            code={**(settings or {}), **self._settings},
        )  # fmt: skip


def _make(kind: type[Spider], arguments: Mapping[str, object]) -> Spider:
    try:
        return create_spider(kind, arguments)
    except ShoalError:
        raise
    except Exception as exc:  # the user's __init__ may raise anything
        raise SpiderError(f"{kind.__name__} cannot be created: {type(exc).__name__}: {exc}") from exc


def check_fleet(config: Config) -> None:
    """ConfigError if a fleet cannot share the frontier."""
    kind = config.frontier.partition(":")[0]
    if kind in ("memory", "sqlite"):
        raise ConfigError(
            f'a fleet cannot share the frontier "{config.frontier}". Use a server: pass --frontier redis://host or '
            "postgresql://host/database, or set it in shoal.toml or SHOAL_FRONTIER"
        )


def queued(started: Started, chosen: Chosen, flags: Sequence[str] = ()) -> dict[str, object]:
    """Describe a queued run, with the command for its workers. ``flags``: the options that the command needs."""
    run = started.run
    return {
        "status": run.state,
        "run_id": run.run_id,
        "spider": run.spider,
        "enqueued": started.enqueued,
        "duplicates": started.duplicates,
        "out_of_scope": started.out_of_scope,
        "unreadable": started.unreadable,
        "worker_command": worker_command(chosen.name, run.run_id, flags, chosen.config.lease.batch),
    }


def worker_command(reference: str, run_id: str, flags: Sequence[str] = (), batch: int = 50) -> str:
    """The command to run on each node."""
    return shlex.join(["shoal", "worker", reference, *flags, "--run-id", run_id, "--batch-size", str(batch)])


def _blocking(work: Coroutine[object, None, T]) -> T:
    if not _in_event_loop():  # outside of the handler below, whose exception is none of the caller's business
        return asyncio.run(work)
    work.close()
    raise RuntimeError("an event loop is running: use await orchestrator.astart(...) or aget_stats(...)")


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
