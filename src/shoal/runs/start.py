"""Creates runs for a fleet and pushes their start requests. A start that was interrupted can be repeated."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from shoal.config import Config, Count, Seconds, Weight
from shoal.config.checks import check_regexes, linear, unmarked
from shoal.config.layers import read_settings
from shoal.crawling.leases import Persistence
from shoal.crawling.run_queue import frontier_options, make_run_queue
from shoal.crawling.seeder import Seeder, Source, start_requests, url_requests
from shoal.crawling.stats import Counters
from shoal.errors import ConfigError, RequestError, RunError, SinkError, StoreRewoundError
from shoal.http import Request
from shoal.ports import FrontierOptions, Overflow, Run, Store
from shoal.runs.run_choice import new_run_id
from shoal.runs.trust import check_arguments, check_networks
from shoal.sinks import is_shared, sink_id
from shoal.spider import Spider
from shoal.system import clock

if TYPE_CHECKING:
    from shoal.fetch.sessions.stored import SessionImport

log = logging.getLogger("shoal.runs")

_MAX_LINE = 64 * 1024

Seeds: TypeAlias = Literal["spider", "urls", "file"]
"""Where the start requests of a run come from. Every worker can push those of the spider."""


class StartedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and counts of the start requests that were pushed now."""

    run: Run
    enqueued: int
    duplicates: int
    out_of_scope: int
    unreadable: int


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all workers of a run share. They are stored with the run.

    `RunSettings.of` validates them, because others may be able to write to the store. See `shoal.runs.trust`."""

    seeds: Seeds = "spider"
    urls_file: str = ""
    arguments: dict[str, object] = {}
    outputs: tuple[str, ...] = ()
    code: str = ""
    """A hash of the file of the spider."""
    max_attempts: Count = 4
    delay: Seconds = 0.0
    concurrency_per_host: Count = 8
    weight: Weight = 1.0
    max_queue_size: Count | None = None
    overflow: Overflow = "accept"
    keep_items: bool = True
    scope: dict[str, object] = {}
    """The section ``scope`` of the configuration."""
    networks: tuple[str, ...] | None = None
    """For a run that a stranger may have started: the only private networks that workers may contact. None: no
    limit."""
    schedule: str = ""
    """The schedule that created the run."""

    @classmethod
    def of(cls, run: Run) -> RunSettings:
        """Read and check the settings of a run. RunError if it was not created by ``start``, or they are not
        allowed."""
        if "seeds" not in run.settings and "schedule" in run.settings:
            raise RunError(f"run {run.run_id} belongs to a schedule: servers (`shoal serve`) work on it")
        if "seeds" not in run.settings:
            raise RunError(f"run {run.run_id} was created by `shoal run`: repeat that command to resume it")
        try:
            settings = msgspec.convert(dict(run.settings), cls)
        except msgspec.ValidationError as exc:
            raise RunError(f"run {run.run_id} has invalid settings: {exc}") from exc
        check_arguments(run.run_id, settings.arguments)
        check_networks(run.run_id, settings.networks or ())
        return settings

    def shared_settings(self) -> dict[str, object]:
        """Settings that override the configuration of each worker."""
        return {
            "retry.max_attempts": self.max_attempts,
            **{f"scope.{name}": value for name, value in self.scope.items()},
        }

    @property
    def options(self) -> FrontierOptions:
        """The options of the frontier of this run."""
        return msgspec.convert(msgspec.structs.asdict(self), FrontierOptions)


def code_hash(spider: Spider) -> str:
    """A hash of the file that defines the spider, without its imports. Empty if there is no file."""
    with suppress(OSError, TypeError):
        return hashlib.blake2b(Path(inspect.getfile(type(spider))).read_bytes(), digest_size=8).hexdigest()
    return ""


def default_run_id(spider: Spider, config: Config) -> str:
    """The name of a run that many processes share without agreeing on it: that of the spider, with its project unless
    that is the default."""
    name, project = spider.spider_name(), config.project_name
    return name if project == Config().project_name else f"{project}.{name}"


async def start_run(
    store: Store,
    spider: Spider,
    config: Config,
    *,
    urls: Sequence[str] | None = None,
    urls_file: str | None = None,
    outputs: Sequence[str] = (),
    run_id: str | None = None,
    new_run: bool = False,
    resume: bool = False,
    networks: Sequence[str] | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    imported: SessionImport | None = None,
) -> StartedRun:
    """Create a run and push its start requests: those of the spider, of a list, or of a file with one URL per line.

    If an earlier call with the same arguments was interrupted, it resumes that run, unless ``new_run``. ``resume``: it
    also resumes a run that workers have not finished. ``run_id`` names the run to resume or to create. The file is read
    as a stream, and invalid lines are skipped and counted. ``networks``: see `RunSettings`. ``imported``: cookies that
    the run has before its first page."""
    _check_outputs(outputs)
    outputs = _with_spider_outputs(spider, outputs)
    source = _source(spider, urls, urls_file)
    seeds: Seeds = "urls" if urls is not None else "file" if urls_file is not None else "spider"
    settings = _settings(spider, config, seeds, urls, urls_file, outputs)
    if networks is not None:
        settings = msgspec.structs.replace(settings, networks=tuple(networks))
    check_arguments(run_id or "(new)", settings.arguments)
    _warn_of_patterns(spider, config)
    persist = Persistence(shared=store.shared)
    project = config.project_name
    is_wanted = _never if new_run else _is_unfinished if resume else _is_the_same_start
    fresh_id = new_run_id()  # made here, so that a retry after a lost answer finds the run that it created
    run = await persist(lambda: _choose_run(store, spider, project, settings, run_id, fresh_id, is_wanted))
    frontier = await persist(lambda: store.frontier(run.run_id, RunSettings.of(run).options))
    if imported is not None:
        from shoal.fetch.sessions.stored import import_session  # few runs need it

        await import_session(store, frontier, run.run_id, imported)
    queue = make_run_queue(spider, config, frontier, shared=store.shared)
    counters = Counters()
    seeder = Seeder(source, queue, config, counters, persist, lambda: on_progress(seeder.position), shared=store.shared)
    while True:
        try:
            await seeder.run()
            break
        except StoreRewoundError as error:
            log.error("%s; seeding resumes from what the store has", error)
            await persist(frontier.recover)
            await seeder.start_over()
    if seeder.failure is not None:
        if run.run_id == fresh_id and not seeder.position:
            with suppress(RunError):
                await persist(lambda: store.delete_run(run.run_id))
        raise seeder.failure
    return StartedRun(
        run=run,
        enqueued=seeder.added,
        duplicates=seeder.duplicates,
        out_of_scope=seeder.out_of_scope,
        unreadable=counters.errors["bad url"],
    )


def _warn_of_patterns(spider: Spider, config: Config) -> None:
    """Workers have the spider, but perhaps neither this command line nor this file."""
    own, _ = read_settings(Config, spider.settings)
    with suppress(ConfigError):  # without RE2 nobody knows
        for key, patterns in (("scope.allow", config.scope.allow), ("scope.deny", config.scope.deny)):
            if patterns != own.get(key) and (problem := check_regexes(linear(patterns))) is not None:
                log.warning(
                    'only workers whose own shoal.toml or SHOAL_%s has the same expressions accept the run: "%s" %s',
                    key.upper().replace(".", "__"), key, problem,
                )  # fmt: skip


def _settings(
    spider: Spider, config: Config, seeds: Seeds, urls: Sequence[str] | None, urls_file: str | None,
    outputs: Sequence[str],
) -> RunSettings:  # fmt: skip
    options = msgspec.structs.asdict(frontier_options(config))
    del options["in_memory"]  # each worker has its own
    return RunSettings(
        seeds=seeds,
        urls_file=_name_of(urls, urls_file),
        arguments=dict(spider.arguments),
        outputs=tuple(outputs),
        code=code_hash(spider),
        **options,
        keep_items=config.items.keep,
        scope=msgspec.to_builtins(msgspec.structs.asdict(config.scope))
        | {"allow": unmarked(config.scope.allow), "deny": unmarked(config.scope.deny)},
    )


def queued_run(
    spider: Spider, config: Config, run_id: str, *, outputs: Sequence[str], networks: Sequence[str], schedule: str
) -> Run:
    """The run of a schedule for a fleet, not yet stored. Its first worker pushes the start requests."""
    _check_outputs(outputs)
    settings = msgspec.structs.replace(
        _settings(spider, config, "spider", None, None, _with_spider_outputs(spider, outputs)),
        networks=tuple(networks), schedule=schedule,
    )  # fmt: skip
    check_arguments(run_id, settings.arguments)
    return Run(
        run_id=run_id, spider=spider.spider_name(), state="queued", created_at=clock.time(), settings=_stored(settings),
        project=config.project_name,
    )  # fmt: skip


async def _choose_run(
    store: Store, spider: Spider, project: str, settings: RunSettings, run_id: str | None, fresh_id: str,
    is_wanted: Callable[[Store, Run, RunSettings], Awaitable[bool]],
) -> Run:  # fmt: skip
    """Find the run to resume, or create one named ``run_id`` or ``fresh_id``."""
    name = spider.spider_name()
    if run_id is not None:
        run = await store.get_run(run_id)
        if run is not None:
            check_owner(run, spider, project)
            return run
    else:
        for run in await store.list_runs(name, project):
            if await is_wanted(store, run, settings):
                return run
    run = Run(
        run_id=run_id or fresh_id, spider=name, state="queued", created_at=clock.time(),
        settings=_stored(settings), project=project,
    )  # fmt: skip
    try:
        return await store.create_run(run)
    except RunError:
        existing = await store.get_run(run.run_id)
        if existing is None or existing.settings != run.settings:
            raise
        return existing  # the answer of an earlier attempt was lost, or another process was first


async def _is_the_same_start(store: Store, run: Run, settings: RunSettings) -> bool:
    """Whether the run was started with the same arguments, and its seeding is not complete."""
    if run.state in ("queued", "running"):
        with suppress(RunError):
            stored = RunSettings.of(run)
            if _start_key(stored) == _start_key(settings):
                return (await (await store.frontier(run.run_id)).stats()).seeding
    return False


async def _is_unfinished(store: Store, run: Run, settings: RunSettings) -> bool:
    """Whether the run was started with the same arguments, by this or an earlier version of the spider's file, and is
    not finished."""
    if run.state in ("queued", "running", "paused"):
        with suppress(RunError):
            return _start_key(RunSettings.of(run))[1:] == _start_key(settings)[1:]
    return False


async def _never(store: Store, run: Run, settings: RunSettings) -> bool:
    return False


def _start_key(settings: RunSettings) -> tuple[object, ...]:
    return settings.code, settings.seeds, settings.urls_file, settings.arguments


def _name_of(urls: Sequence[str] | None, urls_file: str | None) -> str:
    """Identifies the URLs, so that a repeated start finds its run."""
    if urls is not None:
        return hashlib.blake2b("\n".join(map(str, urls)).encode(errors="replace"), digest_size=8).hexdigest()
    return "" if urls_file is None else os.path.realpath(urls_file)


def _stored(settings: RunSettings) -> Mapping[str, object]:
    try:
        plain: Mapping[str, object] = msgspec.to_builtins(settings)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(f"the arguments of the spider cannot be stored with the run: {exc}") from exc
    return plain


async def find_run(
    store: Store, run_id: str, spider: Spider, project: str, *, allow_changed: bool
) -> tuple[Run, RunSettings]:
    """Find a run for a worker. RunError if it does not exist, or the worker may not work on it."""
    run = await store.get_run(run_id)
    if run is None:
        newest = ", ".join(other.run_id for other in (await store.list_runs(project=project))[:5]) or "none"
        raise RunError(f"there is no run {run_id}; the newest ones are: {newest}")
    if run.state == "cancelled":
        raise RunError(f"run {run.run_id} was cancelled; `shoal resume {run.run_id}` resumes it")
    check_owner(run, spider, project)
    settings = RunSettings.of(run)
    if settings.code and settings.code != code_hash(spider) and not allow_changed:
        raise RunError(
            f"the file of {run.spider!r} has changed since run {run.run_id} began; start a new run, "
            "or pass --allow-changed to continue with the changed file"
        )
    return run, settings


async def ensure_run(store: Store, spider: Spider, config: Config, run_id: str, outputs: Sequence[str] = ()) -> Run:
    """Return the run with this name. Create it if it does not exist; its first worker pushes the start requests."""
    _check_outputs(outputs)
    settings = _settings(spider, config, "spider", None, None, outputs)
    try:
        return await _choose_run(store, spider, config.project_name, settings, run_id, run_id, _never)
    except RunError:
        if (run := await store.get_run(run_id)) is not None:  # another process was first
            check_owner(run, spider, config.project_name)
            return run
        raise


def check_owner(run: Run, spider: Spider, project: str) -> None:
    """RunError if the run belongs to another spider or another project."""
    if run.project != project:
        raise RunError(
            f'run {run.run_id} belongs to the project {run.project!r}, not to {project!r}; see "project_name" in the '
            "settings"
        )
    if run.spider != spider.spider_name():
        raise RunError(f"run {run.run_id} belongs to the spider {run.spider!r}, not to {spider.spider_name()!r}")


def _check_outputs(outputs: Sequence[str]) -> None:
    for spec in outputs:
        sink_id(spec)
        if not is_shared(spec):
            file = spec.partition("?")[0]
            raise SinkError(
                f"{file} is a file on one machine, which a fleet cannot share. Pass it to one worker with -o, "
                "write it at the end with `shoal export RUN -o FILE`, or use a database on a server"
            )


def _with_spider_outputs(spider: Spider, outputs: Sequence[str]) -> Sequence[str]:
    """The outputs with those of the spider that a fleet can share."""
    for spec in spider.outputs:
        if not is_shared(spec):
            log.warning("%s is not written by the fleet: use `shoal export RUN -o %s` at the end", spec, spec)
    return [*(spec for spec in spider.outputs if is_shared(spec) and spec not in outputs), *outputs]


def _source(spider: Spider, urls: Sequence[str] | None, urls_file: str | None) -> Source:
    if urls is not None:
        return lambda: url_requests(urls)
    if urls_file is not None:
        if not os.path.isfile(urls_file):
            raise ConfigError(f"URL file {urls_file} does not exist")
        return lambda: file_requests(urls_file)
    return lambda: start_requests(spider)


async def file_requests(path: str) -> AsyncIterator[Request | RequestError]:
    """The start requests of a file with one URL per line. Empty lines and lines that begin with # are skipped."""
    for request in _read_urls(path):
        yield request


def _read_urls(path: str) -> Iterator[Request | RequestError]:
    with open(path, "rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE), b""), 1):
            text = line.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip()
            if not text or text.startswith("#"):
                continue
            try:
                yield Request(text)
            except RequestError as error:
                yield RequestError(f"{path}, line {number}: {error}")
