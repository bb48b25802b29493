"""Starts the spiders of a registry, in this process or on a fleet."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from shoal.config import Config, Resolved, find_config_file, load_config, read_toml
from shoal.crawling.stats import counts
from shoal.errors import ConfigError, RunError, ShoalError, SpiderError
from shoal.frontier import open_store
from shoal.messages import did_you_mean
from shoal.runs.crawl import Crawl
from shoal.runs.start import StartedRun, start_run
from shoal.spider import SCRAPY, Spider, create_spider, load_spider

# The spiders of a project by name: the file of each one, and whether it runs here or on a fleet.
#
# ::
#
# [spiders.India] # in shoal.toml file = "spiders/india.py" # relative to shoal.toml; or "spiders/many.py:India",
# "scrapy:FOLDER:name" execution_mode = "distributed" # or "single", the default arguments = { state = "Goa" }
# outputs = ["postgresql://db.example/crawl"]


ExecutionMode: TypeAlias = Literal["single", "distributed"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One spider of the registry."""

    file: str
    execution_mode: ExecutionMode = "single"
    arguments: dict[str, object] = {}
    outputs: tuple[str, ...] = ()


class Registry(Mapping[str, Entry]):
    """The ``[spiders]`` table of a ``shoal.toml``. Empty if there is none."""

    def __init__(self, entries: Mapping[str, Entry], file: Path | None = None) -> None:
        self._entries = dict(entries)
        self._file = file

    @classmethod
    def load(cls, file: Path | None = None) -> Registry:
        """Read the registry from this file, or from the ``shoal.toml`` in use. ConfigError says what is wrong in it."""
        file = file or find_config_file(os.environ)
        if file is None:
            return cls({})
        table = read_toml(file).get("spiders", {})
        if not isinstance(table, dict):
            raise ConfigError(f'{file}: "spiders" must be a table of spiders, such as [spiders.India]')
        return cls({name: _entry(file, name, value) for name, value in table.items()}, file)

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise SpiderError(self._unknown(name))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def reference(self, name: str) -> str:
        """The ``file.py`` or ``file.py:Class`` of a spider, relative to the working directory."""
        entry, folder = self[name], self._file.parent if self._file is not None else Path()
        scrapy = SCRAPY if entry.file.startswith(SCRAPY) else ""
        return scrapy + os.path.relpath(folder / entry.file.removeprefix(SCRAPY))

    def get_execution_mode(self, name: str) -> ExecutionMode:
        """``single`` or ``distributed``. SpiderError if there is no such spider."""
        return self[name].execution_mode

    def name_of(self, spider: str, arguments: Mapping[str, object]) -> str | None:
        """The name under which a run was started, from its spider's own name and its arguments; None if no entry fits.

        Several entries may have the same spider: the one that fixes the most of these arguments is meant."""
        fitting = {
            name: len(entry.arguments)
            for name, entry in self.items()
            if entry.arguments.items() <= arguments.items() and spider in (name, self._spider_name(name))
        }
        return max(fitting, key=lambda name: (fitting[name], name == spider), default=None)

    def _spider_name(self, name: str) -> str | None:
        try:
            return load_spider(self.reference(name)).spider_name()
        except SpiderError:  # it cannot be the one that works
            return None

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self._entries, 1)
        hint = f"did you mean {near[0]}?" if near else f"its spiders are: {', '.join(self._entries) or 'none'}"
        return f"no spider {name!r} in {self._file or 'a shoal.toml'}; {hint}"


def _entry(file: Path, name: str, value: object) -> Entry:
    fields = Entry.__struct_fields__
    if isinstance(value, dict) and (unknown := [key for key in value if key not in fields]):
        hint = did_you_mean(unknown[0], fields) or f"; a spider has: {', '.join(fields)}"
        raise ConfigError(f'{file}: [spiders.{name}]: unknown key "{unknown[0]}"{hint}')
    try:
        return msgspec.convert(value, Entry)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{file}: [spiders.{name}]: {exc}") from exc


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


def queued(started: StartedRun, chosen: Chosen, flags: Sequence[str] = ()) -> dict[str, object]:
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
